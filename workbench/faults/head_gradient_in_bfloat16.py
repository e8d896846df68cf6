"""The gradient of the head is added up over chunks in bfloat16."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from workbench.faults import Fault


def _broken(add_product_: Callable[..., None]) -> Callable[..., None]:
    def add_and_round_(weight_VD: Tensor, *more: Tensor, first: bool) -> None:
        add_product_(weight_VD, *more, first=first)
        weight_VD.copy_(weight_VD.bfloat16())

    return add_and_round_


FAULT = Fault(
    family="J",
    what="what the chunks want from the output head is summed in the dtype of a bfloat16 weight",
    origin="linkedin/Liger-Kernel#1324, #1391 and #1454, NVIDIA/Megatron-LM#2739",
    signature="gradient of the head (and of an embedding that is tied to it) off by some 1e-3 of itself, the more the "
    "more chunks; loss and all other gradients right",
    seam="workbench.policy.logprobs.chunked:add_product_",
    broken=_broken,
    shows_in={"model": {"tied": False}, "policy": {"logprobs": "chunked", "chunk_tokens": 4}},
    hidden_in={"policy": {"logprobs": "reference", "chunk_tokens": 4096}},
    changes_metrics=False,
)
