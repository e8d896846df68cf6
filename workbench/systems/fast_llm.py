"""ServiceNow/Fast-LLM: losses on the logits of packed documents.

Letters: T packed tokens | V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from workbench.losses.distillation import divergence, z_loss
from workbench.losses.terms import Term
from workbench.policy.logprobs.reference import token_logprobs_from_logits
from workbench.reduction.denominators import GivenCounts
from workbench.reduction.weighted_sum import reduce_terms
from workbench.reduction.weights import step_weights
from workbench.specs.losses import LossSpec
from workbench.systems import metrics as aliases
from workbench.systems.back import checked_back, refuse
from workbench.systems.case import Case
from workbench.systems.contracts import CONTRACTS
from workbench.systems.metrics.alias import PeerSettings, settings_of
from workbench.systems.registry import Settings, System, Translation, parse_settings
from workbench.systems.replays import Replayed, evaluate_as

LABEL_FLOOR = 1e-10
"""What is added to one-hot labels before a logarithm is taken of them, in the KL divergences."""


class FastLLMSettings(Settings):
    """One policy-gradient loss of a head (`LanguageModelGRPOLossConfig`, `LanguageModelGSPOLossConfig`, 7d61a1ba)."""

    type: Literal["grpo", "gspo"] = "grpo"
    """Ratio of tokens, or of documents."""
    epsilon_low: float = Field(0.2, ge=0)
    """Length of the clip below 1."""
    epsilon_high: float = Field(0.2, ge=0)
    """Length of the clip above 1."""
    logits_scale_factor: float = Field(1.0, gt=0)
    """Multiplies logits: 1 / temperature, on top of the model's own."""
    weight: float = Field(1.0, ge=0)
    """Multiplies the loss and its gradient."""
    metrics: Literal["none", "basic", "auto"] = "auto"
    """Which metrics are logged; no number of the loss depends on it."""
    use_triton: bool | None = None
    """Which kernel computes it; no number depends on it but for rounding."""
    divisor: float | None = Field(None, gt=0)
    """Given: labels of the whole batch (grpo), or documents of the whole batch (gspo)."""
    num_documents_in_batch: float | None = Field(None, gt=0)
    """Given: documents of the whole batch, which metrics are divided by."""
    num_segments: int | None = Field(None, ge=0)
    """Given: documents of this data-parallel rank."""
    grad_output: float | None = None
    """Given: what the engine back-propagates in place of 1 (a loss scale)."""


class EntropySettings(Settings):
    """`torch_entropy_loss_forward_backward` (functional/entropy_loss.py, 7d61a1ba)."""

    target_format: Literal["labels", "logits", "probabilities"] = "labels"
    """What the target is."""
    entropy_loss_type: Literal["cross_entropy", "forward_kl", "reverse_kl"] = "cross_entropy"
    """Which divergence."""
    logits_scale_factor: float = Field(1.0, gt=0)
    """Multiplies logits, and target logits."""
    temperature: float = Field(1.0, gt=0)
    """Divides target logits."""
    grad_output: float | None = None
    """Given: what is back-propagated in place of 1."""


class DPOSettings(Settings):
    """`dpo_loss` (layers/language_model/loss/dpo.py, 7d61a1ba): one sigmoid of the whole batch."""

    beta: float = Field(1.0, gt=0)
    """Inverse temperature of the implied reward."""
    logits_scale_factor: float = Field(1.0, gt=0)
    """Multiplies the policy's logits, not those of the reference."""
    chosen_spans: list[list[tuple[int, int]]]
    """Given: [begin, end) of chosen answers, a list a row."""
    rejected_spans: list[list[tuple[int, int]]]
    """Given: [begin, end) of rejected answers, a list a row."""
    grad_output: float | None = None
    """Given: what is back-propagated in place of 1."""


class ZLossSettings(Settings):
    """`z_loss` (layers/language_model/loss/z_loss.py, 7d61a1ba)."""

    logits_scale_factor: float = Field(1.0, gt=0)
    """Multiplies logits."""
    grad_output: float | None = None
    """Given: what is back-propagated in place of 1."""


def translate(settings: FastLLMSettings) -> Translation:
    """Its policy losses: clipped, without penalties, divided by counts of the whole batch."""
    clip = {"clip_low": settings.epsilon_low, "clip_high": settings.epsilon_high, "coefficient": settings.weight}
    given = ("divisor", "num_documents_in_batch", "num_segments", "grad_output")
    scaling = CONTRACTS["fast_llm"]["main"]
    if settings.type == "grpo":
        return Translation(
            LossSpec(name="grpo", surrogate={"kind": "ppo", **clip}, scaling=scaling),
            ("there is no KL term, entropy bonus, dual clip or sampler correction",),
            given,
        )
    spec = LossSpec(
        name="gspo",
        surrogate={"kind": "gspo", "advantage_level": "document", **clip},
        denominator="document_sum",
        documents_counted="all",
        scaling=scaling,
    )
    return Translation(
        spec,
        (
            "a document weighs by its length: its clipped term is counted once for each token",
            "advantages are averaged over the document",
        ),
        given,
    )


def back(spec: LossSpec) -> dict[str, Any]:
    """Options of its policy losses."""
    kind = spec.surrogate.kind
    if kind not in ("ppo", "gspo"):
        raise refuse("Fast-LLM", f"the surrogate {kind!r}", "its policy losses are grpo and gspo")
    return checked_back(
        "Fast-LLM",
        spec,
        FastLLMSettings,
        translate,
        {
            "type": "grpo" if kind == "ppo" else "gspo",
            "epsilon_low": spec.surrogate.clip_low,
            "epsilon_high": spec.surrogate.clip_high,
            "weight": spec.surrogate.coefficient,
        },
    )


def counts(settings: FastLLMSettings) -> GivenCounts | None:
    """The divisor, which is of tokens or of documents."""
    if settings.divisor is None:
        return None
    name = "tokens" if settings.type == "grpo" else "documents"
    return GivenCounts(**{name: settings.divisor})


def case_settings(case: Case) -> dict[str, Any]:
    """The loss is said by the function's name."""
    return {"type": "gspo" if "gspo" in case.function.lower() else "grpo", **case.config}


def peer_settings(replayed: Replayed) -> PeerSettings:
    """Sums over documents, not yet divided by their number."""
    return settings_of(replayed.translation.spec, replayed.slots)._replace(num_documents=1)


def registered(replayed: Replayed) -> dict[str, float]:
    """The same numbers as they are logged: divided by the documents of the batch where they are means."""
    documents = replayed.settings.num_documents_in_batch
    if documents is None:
        return {}
    values = aliases.as_named_by(
        "fast_llm",
        replayed.inputs,
        replayed.row.loss_mask_T,
        terms=replayed.evaluated.terms,
        loss_spec=replayed.translation.spec,
        slots=replayed.slots,
        settings=peer_settings(replayed)._replace(num_documents=documents),
    )
    return {f"registered.{name}": value.finish() for name, value in values.items()}


# ---- losses between distributions ------------------------------------------------------------------------------


def entropy_loss(case: Case) -> dict[str, Any]:
    """Cross entropy and KL divergences: the mean over all tokens, masked ones as 0."""
    settings = parse_settings(EntropySettings, case.config, where="fast_llm")
    kind = settings.entropy_loss_type
    leaf = case["logits"].clone().requires_grad_()
    mask, target = case.get("mask"), case["target"]
    scale = settings.logits_scale_factor
    term = divergence(
        _flat(leaf),
        target.reshape(-1) if settings.target_format == "labels" else _flat(target),
        kind=kind,
        target_format=settings.target_format,
        loss_mask_T=None if mask is None else mask.reshape(-1).bool(),
        logit_scale=scale,
        target_scale=scale / settings.temperature,
        label_floor=0.0 if kind == "cross_entropy" else LABEL_FLOOR,
    )
    return _mean_over_all(case, term, leaf, settings.grad_output)


def z_loss_case(case: Case) -> dict[str, Any]:
    """The squared log normaliser: the mean over all tokens, masked ones as 0."""
    settings = parse_settings(ZLossSettings, case.config, where="fast_llm")
    leaf, mask = case["logits"].clone().requires_grad_(), case.get("mask")
    term = z_loss(
        _flat(leaf),
        loss_mask_T=None if mask is None else mask.reshape(-1).bool(),
        logit_scale=settings.logits_scale_factor,
    )
    return _mean_over_all(case, term, leaf, settings.grad_output)


def _flat(logits: Tensor) -> Tensor:
    return logits.reshape(-1, logits.shape[-1])


def _mean_over_all(case: Case, term: Term, leaf: Tensor, grad_output: float | None) -> dict[str, Any]:
    all_tokens = Case.of(case.system, case.kind, case.function, {}, {"values": term.values_T})
    row = all_tokens.row()
    (weights,), _ = step_weights([row], LossSpec(name="sft"))
    return _outputs(case, reduce_terms({"loss": term}, weights, row.loss_mask_T)["total"].value, leaf, grad_output)


def _outputs(case: Case, total: Tensor, leaf: Tensor, grad_output: float | None) -> dict[str, Any]:
    before = case.get("grad_logits_in")
    leaf.grad = torch.zeros_like(leaf) if before is None else before.clone()
    total.backward(torch.as_tensor(1.0 if grad_output is None else grad_output, dtype=total.dtype))
    return {"loss": total.detach(), "grad_logits": leaf.grad}


# ---- preferences -----------------------------------------------------------------------------------------------


def dpo_packed(case: Case) -> dict[str, Any]:
    """DPO with one pair: all chosen spans of the batch are one document, all rejected spans the other."""
    settings = parse_settings(DPOSettings, case.config, where="fast_llm")
    leaf = case["logits"].clone().requires_grad_()
    targets_T = case["targets"].reshape(-1).clamp_min(0)
    both = [chosen + rejected for chosen, rejected in zip(settings.chosen_spans, settings.rejected_spans, strict=True)]
    chosen_T, rejected_T, either_T = (
        _inside(case["targets"], spans) for spans in (settings.chosen_spans, settings.rejected_spans, both)
    )
    pair = Case.of(
        case.system,
        case.kind,
        case.function,
        case.config,
        {
            "mask": either_T,
            "document_index": rejected_T,
            "rewards": chosen_T.double(),
            "group_ids": torch.zeros_like(targets_T),
            "ref_logprobs": token_logprobs_from_logits(_flat(case["ref_logits"]), targets_T).logprobs_T,
        },
    )
    said = token_logprobs_from_logits(_flat(leaf), targets_T, temperature=_divisor(settings))
    replayed = evaluate_as(pair, said, settings, Translation(LossSpec(name="dpo", surrogate={"beta": settings.beta})))
    return _outputs(case, replayed.evaluated.scalars["total"].value, leaf, settings.grad_output)


def _inside(targets: Tensor, spans: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """[T] bool: the token lies in a span."""
    inside = torch.zeros(targets.shape, dtype=torch.bool)
    for row, of_row in enumerate(spans):
        for begin, end in of_row:
            inside[row, begin:end] = True
    return inside.reshape(-1)


def _divisor(settings: Any) -> float:
    return 1 / settings.logits_scale_factor


SYSTEM = System(
    name="fast_llm",
    title="Fast-LLM",
    version="7d61a1ba",
    settings=FastLLMSettings,
    translate=translate,
    back=back,
    counts=counts,
    case_settings=case_settings,
    temperature=_divisor,
    peer_settings=peer_settings,
    metrics=registered,
    scaling=CONTRACTS["fast_llm"],
    replays={"cross_entropy_family": entropy_loss, "z_loss": z_loss_case, "dpo_packed": dpo_packed},
)
