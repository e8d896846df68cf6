"""ServiceNow/Fast-LLM: losses on the logits of packed documents.

Letters: T packed tokens | V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workbench.losses.auxiliary import divergence, z_loss
from workbench.losses.terms import Term
from workbench.policy.logprobs.reference import token_logprobs_from_logits
from workbench.reduction.evaluate import reduce_terms
from workbench.reduction.weights import step_weights
from workbench.specs.losses import LossSpec
from workbench.systems.case import Case
from workbench.systems.fast_llm import metrics as named
from workbench.systems.fast_llm.settings import DPOSettings, EntropySettings, FastLLMSettings, ZLossSettings
from workbench.systems.fast_llm.translate import CONTRACTS, back, counts, divisor, translate
from workbench.systems.metrics import PeerSettings, settings_of
from workbench.systems.registry import System, Translation
from workbench.systems.replays import Replayed, back_propagate, evaluate_as, named_metrics

LABEL_FLOOR = 1e-10
"""Added to one-hot labels before their logarithm is taken, in the KL divergences."""


def case_settings(case: Case) -> dict[str, Any]:
    """Return the options; the function's name selects the loss."""
    return {"type": "gspo" if "gspo" in case.function.lower() else "grpo", **case.config}


def peer_settings(replayed: Replayed) -> PeerSettings:
    """Return the settings of metrics: sums over documents, not yet divided by their number."""
    return settings_of(replayed.translation.spec, replayed.slots)._replace(num_documents=1)


def registered(replayed: Replayed) -> dict[str, float]:
    """Return the same numbers as they are logged: means are divided by the documents of the batch."""
    documents = replayed.settings.num_documents_in_batch
    if documents is None:
        return {}
    values = named_metrics(replayed, peer_settings(replayed)._replace(num_documents=documents))
    return {f"registered.{name}": value for name, value in values.items()}


def entropy_loss(case: Case) -> dict[str, Any]:
    """Replay cross entropy and KL divergences: the mean over all tokens, masked ones as 0."""
    settings, leaf, target = case.options(EntropySettings), case.leaf("logits"), case["target"]
    kind, scale = settings.entropy_loss_type, settings.logits_scale_factor
    term = divergence(
        _flat(leaf),
        target.reshape(-1) if settings.target_format == "labels" else _flat(target),
        kind=kind,
        target_format=settings.target_format,
        loss_mask_T=_mask(case),
        logit_scale=scale,
        target_scale=scale / settings.temperature,
        label_floor=0.0 if kind == "cross_entropy" else LABEL_FLOOR,
    )
    return _mean_over_all(case, term, leaf)


def z_loss_case(case: Case) -> dict[str, Any]:
    """Replay the squared log normaliser: the mean over all tokens, masked ones as 0."""
    settings, leaf = case.options(ZLossSettings), case.leaf("logits")
    term = z_loss(_flat(leaf), loss_mask_T=_mask(case), logit_scale=settings.logits_scale_factor)
    return _mean_over_all(case, term, leaf)


def _flat(logits: Tensor) -> Tensor:
    return logits.reshape(-1, logits.shape[-1])


def _mask(case: Case) -> Tensor | None:
    mask = case.get("mask")
    return None if mask is None else mask.reshape(-1).bool()


def _mean_over_all(case: Case, term: Term, leaf: Tensor) -> dict[str, Any]:
    row = replace(case, inputs={"values": term.values_T}).row()
    (weights,), _ = step_weights([row], LossSpec(name="sft"))
    total = reduce_terms({"loss": term}, weights, row.loss_mask_T)["total"].value
    return back_propagate(total, {"grad_logits": leaf}, case)


def dpo_packed(case: Case) -> dict[str, Any]:
    """Replay DPO with one pair: all chosen spans of the batch are one document, all rejected spans the other."""
    settings, leaf, targets_T = case.options(DPOSettings), case.leaf("logits"), case.targets_T
    spans = [chosen + rejected for chosen, rejected in zip(settings.chosen_spans, settings.rejected_spans, strict=True)]
    chosen_T, rejected_T, either_T = (
        _inside(case["targets"], each) for each in (settings.chosen_spans, settings.rejected_spans, spans)
    )
    arrays = {
        "mask": either_T,
        "document_index": rejected_T,
        "rewards": chosen_T.double(),
        "group_ids": torch.zeros_like(targets_T),
        "ref_logprobs": token_logprobs_from_logits(_flat(case["ref_logits"]), targets_T).logprobs_T,
    }
    pair = Case.of(case.system, case.kind, case.function, case.config, arrays)
    output = token_logprobs_from_logits(_flat(leaf), targets_T, temperature=divisor(settings))
    replayed = evaluate_as(pair, output, settings, Translation(LossSpec(name="dpo", surrogate={"beta": settings.beta})))
    return back_propagate(replayed.total, {"grad_logits": leaf}, case)


def _inside(targets: Tensor, spans: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """[T] bool: the token lies in a span."""
    inside = torch.zeros(targets.shape, dtype=torch.bool)
    for row, of_row in enumerate(spans):
        for begin, end in of_row:
            inside[row, begin:end] = True
    return inside.reshape(-1)


SYSTEM = System(
    name="fast_llm",
    title="Fast-LLM",
    version="7d61a1ba",
    settings=FastLLMSettings,
    translate=translate,
    back=back,
    counts=counts,
    case_settings=case_settings,
    temperature=divisor,
    peer_settings=peer_settings,
    metrics=registered,
    scaling=CONTRACTS,
    replays={"cross_entropy_family": entropy_loss, "z_loss": z_loss_case, "dpo_packed": dpo_packed},
    arrays=("old_logprobs", "label_counts", "num_labels"),
    arrays_of={
        "cross_entropy_family": ("logits", "target", "mask", "grad_logits_in"),
        "z_loss": ("logits", "mask", "grad_logits_in"),
        "dpo_packed": ("logits", "ref_logits", "targets", "grad_logits_in"),
    },
    aliases=named.names,
)
