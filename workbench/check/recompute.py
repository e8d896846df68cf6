"""Everything that a step's dump determines, recomputed in float64 from its inputs and the settings of its loss.

Each quantity is computed from what the step recorded before it: coefficients take the recorded advantages, also where
those are wrong, so that the first stage that differs is where the mistake is.

Letters: T tokens | N documents.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping

import torch
from torch import Tensor

from workbench.check.memo import Memo
from workbench.check.micro_batches import (
    inputs_with_leaves,
    micro_batches,
    sample_micro_batches,
    sampled_weights,
    training_rows,
)
from workbench.check.reading import Reading
from workbench.dumps.step import StepDump
from workbench.errors import SpecError
from workbench.losses.build import build_loss, prepare_inputs, surrogate_ratio
from workbench.losses.terms import Loss, LossInputs, Term
from workbench.metrics.policy import policy_metrics
from workbench.metrics.quantities import DocumentSlots
from workbench.metrics.values import Value
from workbench.reduction.evaluate import evaluate_loss
from workbench.reduction.weights import StepLayout, StepTotals, TokenWeights, step_weights
from workbench.rollouts.advantages.inputs import AdvantageInputs
from workbench.rollouts.advantages.registry import estimate_advantages
from workbench.rollouts.targets import TrainingRow
from workbench.specs.losses import LossSpec
from workbench.systems.metrics import as_named_by, settings_of

Quantities = Mapping[str, Tensor | float]
"""[T] values of tokens, and numbers under "losses/...", "counts/..." and "metrics/...", by name."""


def recompute_advantages(reading: Reading) -> Tensor | None:
    """Return [T] advantages from rewards and groups, 0 where nothing trains; None if rewards or estimator are unknown.

    Raises:
        SpecError: the estimator lacks an input, or does not know a setting.
    """
    dump, groups_N = reading.dump, reading.dump.documents.get("group_ids")
    if reading.estimator is None or not {"rewards", "group_ids"} & {*dump.documents} | {"token_rewards"} & {
        *dump.tokens
    }:
        return None
    groups_N = torch.arange(dump.num_documents) if groups_N is None else groups_N
    more = {"values_T": dump.tokens.get("values"), "old_logprobs_T": dump.tokens.get("old_logprobs")}
    if "rewards" in dump.documents:
        rewards_N = dump.documents["rewards"]
        inputs = AdvantageInputs(dump.document_ids_T, dump.loss_mask_T, rewards_N, groups_N, **more)
    elif "token_rewards" in dump.tokens:
        earned_T = dump.tokens["token_rewards"]
        inputs = AdvantageInputs.of_token_rewards(dump.document_ids_T, dump.loss_mask_T, earned_T, groups_N, **more)
    else:
        return None
    name, settings = reading.estimator
    advantages_T = estimate_advantages(name, inputs, **settings).advantages_T
    if reading.of_advantages is not None:
        advantages_T = reading.of_advantages(dump, advantages_T)
    return torch.where(dump.loss_mask_T, advantages_T, 0.0)


def can_evaluate(dump: StepDump) -> bool:
    """Return True if a step has what its loss is computed from."""
    return dump.advantages_T is not None and ("policy_logprobs" in dump.tokens or _live_is_old(dump))


def _live_is_old(dump: StepDump) -> bool:
    return dump.on_policy and "old_logprobs" in dump.tokens


def recompute_loss(
    reading: Reading,
    *,
    shift: float = 0.0,
    metrics: bool = True,
    sample_T: Tensor | None = None,
    by_term: bool = False,
    by_entropy: bool = False,
) -> dict[str, Tensor | float]:
    """Evaluate the loss of a step: weights, ratios, corrections, clip decisions, coefficients, losses, metrics.

    Args:
        reading: of the step.
        shift: nats, added to the policy's log-probabilities and subtracted from the sampler's: the effect of rounding.
        metrics: compute them, too.
        sample_T: [T] tokens of whole documents to evaluate, under the weights of the whole step; the values of other
            tokens are 0, and the numbers are those of the sample. None: all.
        by_term: also the coefficients of each term, as "parts/..."; of a loss with several.
        by_entropy: also the derivative by the token's entropy, as "entropy_coefficients".

    Raises:
        SpecError: the loss needs values that the step does not have.
    """
    dump, spec = reading.dump, reading.spec
    if not can_evaluate(dump):
        raise SpecError(
            f"the loss of {dump.origin}",
            found="no advantages" if dump.advantages_T is None else "no policy_logprobs",
            rule="a loss is computed from the policy's log-probabilities and advantages",
            fix="dump them, or state on_policy if the loss was computed on the old policy itself",
        )
    memo = Memo() if reading.memo is None else reading.memo
    groups = (dump.document_ids_T, dump.documents.get("rows"))
    indices = memo.get("rows", groups, None, lambda: micro_batches(dump))
    weights, totals = memo.get(*_weights_key(reading, shift), lambda: _weights(reading, indices, shift, memo))
    if (scale := reading.scale) is not None:
        weights = [scale.apply(by_name, index_T) for by_name, index_T in zip(weights, indices, strict=True)]
    if sample_T is not None:
        sampled = sample_micro_batches(indices, sample_T, memo)
        of_step = weights
        weights = memo.get(
            "sampled weights",
            (of_step, sampled),
            None,
            lambda: [sampled_weights(of_step[number], keep_T) for number, keep_T, _ in sampled.rows],
        )
        indices = sampled.indices
    rows = training_rows(reading, indices, shift, memo)
    loss, merged = _loss(reading, memo), _Merged(len(dump.document_ids_T))
    documents_before = 0
    all_inputs = inputs_with_leaves(reading, indices, rows, totals, shift, memo, by_entropy=by_entropy)
    for row, index_T, of_row, (inputs, detached) in zip(rows, indices, weights, all_inputs, strict=True):
        leaf_T, entropy_T, mask_T = inputs.policy_logprobs_T, inputs.entropy_T, row.loss_mask_T
        evaluated = evaluate_loss(loss, inputs, of_row, mask_T)
        gradient_T = _gradient(evaluated.scalars["total"].value, leaf_T, keep=by_term or by_entropy)
        if by_entropy and entropy_T is not None:
            of_entropy_T = _gradient(evaluated.scalars["total"].value, entropy_T, keep=by_term) * reading.factor
            merged.add_tokens(index_T, {"entropy_coefficients": of_entropy_T})
        if by_term and len(evaluated.terms) > 1:
            parts = {name: _gradient(evaluated.scalars[name].value, leaf_T, keep=True) for name in evaluated.terms}
            trained = {name: torch.where(mask_T, part_T * reading.factor, 0.0) for name, part_T in parts.items()}
            merged.add_tokens(index_T, {f"parts/{name}": part_T for name, part_T in trained.items()})
        ratios_T = memo.get("ratios", (detached, spec), None, functools.partial(surrogate_ratio, detached, spec))
        merged.add_tokens(index_T, _of_tokens(mask_T, ratios_T, evaluated.terms, of_row, gradient_T * reading.factor))
        for name, scalar in evaluated.scalars.items():
            merged.add_loss(name, float(scalar.value.detach()) * reading.factor)
        for name, term in evaluated.terms.items():
            if term.coefficient not in (0, 1):
                value = float(evaluated.scalars[name].value.detach()) / term.coefficient
                merged.add_loss(f"{name}_without_coefficient", value * reading.factor)
            values_T = torch.where(mask_T, term.values_T.detach(), 0.0)
            merged.add_magnitude(name, float((term.coefficient * of_row[term.weight].loss_T * values_T).abs().sum()))
        with_empty = spec.compat.documents_counted == "all"
        counts = memo.get("counts", (row,), with_empty, functools.partial(_counts, row, with_empty=with_empty))
        merged.counts["tokens"] += counts[0]
        merged.counts["documents"] += counts[1]
        if metrics and bool(row.loss_mask_T.any()):
            number = int(row.document_ids_T.max()) + 1
            slots = DocumentSlots(documents_before, dump.num_documents)
            merged.metrics.append(_metrics(dump, spec, detached, evaluated.terms, row, slots))
            documents_before += number
    merged.counts |= reading.counts
    return merged.quantities()


def _gradient(value: Tensor, leaf_T: Tensor, *, keep: bool) -> Tensor:
    if not value.requires_grad:
        return torch.zeros_like(leaf_T)
    (gradient_T,) = torch.autograd.grad(value, leaf_T, allow_unused=True, retain_graph=keep)
    return torch.zeros_like(leaf_T) if gradient_T is None else gradient_T


def _counts(row: TrainingRow, *, with_empty: bool) -> tuple[float, float]:
    """Tokens and documents of a row that count."""
    counted_T = row.document_ids_T[row.document_ids_T >= 0] if with_empty else row.document_ids_T[row.loss_mask_T]
    return float(row.loss_mask_T.sum()), float(counted_T.unique().numel())


def _loss(reading: Reading, memo: Memo) -> Loss:
    wrong, spec = reading.wrong, reading.spec
    right = memo.get("loss", (spec,), None, lambda: build_loss(spec))
    return right if wrong is None else lambda inputs: wrong(right, prepare_inputs(inputs, spec), spec)


def weights_of(reading: Reading, of: str = "policy") -> Tensor:
    """Return [T] factors of the policy term's values, or of the KL "penalty"'s, in the loss; 0 where nothing trains."""
    name = "policy" if of != "penalty" else reading.spec.compat.kl_denominator
    indices = micro_batches(reading.dump)
    weights, _ = _weights(reading, indices, 0.0, Memo() if reading.memo is None else reading.memo)
    whole_T = torch.zeros(len(reading.dump.document_ids_T), dtype=torch.float64)
    for by_name, index_T in zip(weights, indices, strict=True):
        whole_T[index_T] = by_name[name].loss_T[: len(index_T)]
    return whole_T


def _weights(
    reading: Reading, indices: list[Tensor], shift: float, memo: Memo
) -> tuple[list[dict[str, TokenWeights]], StepTotals]:
    rows = training_rows(reading, indices, shift, memo)
    return step_weights(rows, reading.spec, step_layout=StepLayout(reading.dump.size("dp"), reading.dump.size("cp")))


def _weights_key(reading: Reading, shift: float) -> tuple[str, tuple[Tensor | None, ...], Hashable]:
    """Values that the weights of a step depend on: mask, documents; all values if a correction counts or averages."""
    dump, spec = reading.dump, reading.spec
    of_documents = tuple(dump.documents.get(name) for name in ("rewards", "group_ids", "rows"))
    correction = spec.correction
    on_values = correction.denominator != "original" or correction.normalize or correction.m2_threshold is not None
    if not (correction.acts and on_values):
        settings = (spec.denominator, spec.denominator_constant, spec.truncated, spec.compat)
        return "weights", (dump.document_ids_T, dump.loss_mask_T, *of_documents), settings
    return "corrected weights", (dump.document_ids_T, *of_documents, *dump.tokens.values()), (repr(spec), shift)


def _of_tokens(
    mask_T: Tensor,
    ratios_T: Tensor,
    terms: Mapping[str, Term],
    weights: Mapping[str, TokenWeights],
    gradient_T: Tensor,
) -> dict[str, Tensor]:
    policy = terms.get("policy")
    values: dict[str, Tensor | None] = {
        "loss_weights": weights["policy"].loss_T,
        "ratios": ratios_T,
        "coefficients": gradient_T,
        "clipped": None if policy is None else policy.clipped_T,
        "correction_weights": None if policy is None else policy.extras.get("applied_weight"),
    }
    return {
        name: torch.where(mask_T, value_T.detach().double(), 0.0)
        for name, value_T in values.items()
        if value_T is not None
    }


def _metrics(
    dump: StepDump,
    spec: LossSpec,
    inputs: LossInputs,
    terms: Mapping[str, Term],
    row: TrainingRow,
    slots: DocumentSlots,
) -> dict[str, Value]:
    prepared = prepare_inputs(inputs, spec)
    if not dump.system:
        return policy_metrics(prepared, terms, row.loss_mask_T, "full", loss_spec=spec, slots=slots)
    settings = settings_of(spec, slots)
    return as_named_by(
        dump.system, prepared, row.loss_mask_T, terms=terms, loss_spec=spec, slots=slots, settings=settings
    )


class _Merged:
    """Quantities of the micro-batches, merged to those of the step."""

    def __init__(self, tokens: int) -> None:
        self._length = tokens
        self._tokens: dict[str, Tensor] = {}
        self._losses: dict[str, float] = {}
        self._magnitudes: dict[str, float] = {}
        self.counts = {"tokens": 0.0, "documents": 0.0}
        self.metrics: list[dict[str, Value]] = []

    def add_tokens(self, index_T: Tensor, values: Mapping[str, Tensor]) -> None:
        for name, value_T in values.items():
            if (whole_T := self._tokens.get(name)) is None:
                whole_T = self._tokens[name] = torch.zeros(self._length, dtype=torch.float64)
            if len(index_T):
                whole_T[index_T] = value_T

    def add_loss(self, name: str, value: float) -> None:
        self._losses[name] = self._losses.get(name, 0.0) + value

    def add_magnitude(self, name: str, value: float) -> None:
        for key in (name, "total"):
            self._magnitudes[key] = self._magnitudes.get(key, 0.0) + value

    def quantities(self) -> dict[str, Tensor | float]:
        of_step: dict[str, Tensor | float] = dict(self._tokens)
        of_step |= {f"losses/{name}": value for name, value in self._losses.items()}
        of_step |= {f"magnitudes/{name}": value for name, value in self._magnitudes.items()}
        of_step |= {f"counts/{name}": value for name, value in self.counts.items()}
        for name in self.metrics[0] if self.metrics else ():
            values = [metrics[name] for metrics in self.metrics]
            of_step[f"metrics/{name}"] = functools.reduce(Value.merge, values).finish()
            if len(values) > 1:
                of_step[f"means/{name}"] = sum(value.finish() for value in values) / len(values)
        return of_step
