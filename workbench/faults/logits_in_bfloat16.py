"""Logits are rounded to bfloat16 before the softmax."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from workbench.faults import Fault


def _broken(product_: Callable[..., None]) -> Callable[..., None]:
    def product_and_round_(logits_CV: Tensor, hidden_CD: Tensor, weight_VD: Tensor) -> None:
        product_(logits_CV, hidden_CD, weight_VD)
        logits_CV.copy_(logits_CV.bfloat16())

    return product_and_round_


FAULT = Fault(
    family="J",
    what="a fused head keeps logits in bfloat16, and so log-probabilities and entropy come from eight bits",
    origin="verl-project/verl, its fused head (read, not run)",
    signature="log-probabilities of every token off by some 1e-3 nats to either side, the more the larger the logits, "
    "and all gradients by some 1e-3 of themselves; no factor",
    seam="workbench.policy.logprobs.chunked:_product_",
    broken=_broken,
    shows_in={"policy": {"logprobs": "chunked"}},
    hidden_in={"policy": {"logprobs": "reference"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_eight_bits_of_a_head_move_every_log_probability_by_thousandths",
)
