"""Sines and cosines of rotary positions are kept in bfloat16."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from workbench.faults import Fault


def _broken(apply_rotary_pos_emb: Callable) -> Callable:
    def with_rounded_tables(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: object, **how: object) -> object:
        return apply_rotary_pos_emb(q, k, cos.bfloat16().to(cos.dtype), sin.bfloat16().to(sin.dtype), *more, **how)

    return with_rounded_tables


FAULT = Fault(
    family="J",
    what="the tables of rotary angles are cast to the dtype of a bfloat16 model, in a run that computes with more",
    origin="huggingface/transformers#29285, KellerJordan/modded-nanogpt#39, NVIDIA/Megatron-LM#744",
    signature="log-probabilities off by some 1e-3 nats to either side, but for the first token of a document, which "
    "sees itself alone; all gradients by some 1e-3 of themselves",
    seam="transformers.models.qwen3.modeling_qwen3:apply_rotary_pos_emb",
    broken=_broken,
    detected_by="tests/faults/test_unseen.py::test_rounded_rotary_tables_spare_the_first_step_of_a_document",
)
