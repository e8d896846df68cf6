"""A document's weight against the sampler is the product of its tokens' where their geometric mean was asked for."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.losses.terms import LossInputs, Term
from workbench.specs.losses import CorrectionSpec


def _broken(apply_correction: Callable[..., Term]) -> Callable[..., Term]:
    def correct_by_the_product(term: Term, inputs: LossInputs, spec: CorrectionSpec) -> Term:
        summed = spec.model_copy(update={"ratio": "document_sum"}) if spec.ratio == "document_mean" else spec
        return apply_correction(term, inputs, summed)

    return correct_by_the_product


FAULT = Fault(
    family="G",
    what="log(old / sampler) of a document is summed and not averaged: two numbers that are both called sequence-level",
    origin="NVIDIA-NeMo/RL#2269, huggingface/trl#5814",
    signature="a document's weight is the right one to the power of its length: long documents vanish or stand at the "
    "bound, those of one token are right; no constant factor",
    seam="workbench.losses.build:apply_correction",
    broken=_broken,
    shows_in={"loss": {"correction": {"kind": "sequence_tis_mean"}}},
    hidden_in={"loss": {"correction": {"kind": "tis"}}},
)
