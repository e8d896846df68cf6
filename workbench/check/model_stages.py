"""Stages that need the model: recorded log-probabilities and gradients against those of a checkpoint, with causes.

The tolerance is measured: the step is also computed in the trainer's own precision, and a recorded number may be
`FACTOR` times as far from float64 as that pass is.

Letters: T tokens of the dump.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.check.fitted import BAR, common_factor, fitted_rounding, in_words
from workbench.check.judging import AS_RECORDED, NEEDS_MODEL, named_set
from workbench.check.model import Head, ModelStep, Passed, Precision, check_gradients, model_step
from workbench.check.reading import Reading
from workbench.check.recompute import can_evaluate, recompute_loss
from workbench.check.stages import RELATIVE, ROUNDING, Mismatch
from workbench.check.verdict import Cause, OfModel, Stage, StepCheck
from workbench.dumps.step import LOGPROBS, StepDump
from workbench.errors import WorkbenchError, listed
from workbench.specs.groups import LayoutSpec

LOGPROBABILITIES, GRADIENT = "log-probabilities", "gradient"
FACTOR = 8.0
"""Multiple of the distance that a pass in the trainer's precision has from float64; kernels differ, a convention."""
TEMPERATURES = (0.05, 20.0)
"""Between which a temperature is searched, in a logarithmic scale."""
SAMPLE = 256
"""Tokens of a row on which a temperature is searched."""
NEAR = 1e-5
"""Relative distance below which a fitted temperature is the stated one: ten times what the search leaves open."""
MOST = 0.9
"""Share of tokens that differ, from which on the weights are others; below, something happened to some tokens."""


@dataclass(frozen=True)
class _Truth:
    """The step in float64, in the trainer's precision, and the derivatives that both took."""

    step: ModelStep
    exact: Passed
    rounded: Passed
    precision: Precision

    def bound_T(self) -> Tensor:
        """[T] nats by which a recorded log-probability may differ."""
        distance_T = (self.rounded.logprobs_T - self.exact.logprobs_T).abs()
        return torch.full_like(distance_T, max(ROUNDING[self.precision], FACTOR * float(distance_T.max())))


def with_model(
    result: StepCheck,
    reading: Reading,
    model: Path | str,
    layout: Mapping[str, Any] | None,
    precision: Precision | None,
) -> StepCheck:
    """Return the check of a step with the stages of its model: log-probabilities first, the gradient last.

    Args:
        result: the check of the dump alone.
        reading: of the step.
        model: checkpoint of the weights with which the step's loss was computed.
        layout: of `LayoutSpec`; its ranks are simulated.
        precision: of the trainer's model; None: that of the dump.

    Raises:
        SpecError: no such checkpoint, another vocabulary, gradients of other parameters, an impossible layout.
        RecordError: the dump has no token ids, or no prompts.
    """
    dump = reading.dump
    step = model_step(dump, model, layout)
    own: Precision = precision or dump.dtype  # type: ignore[assignment]  # one of the three names
    filled, missing = _filled(reading, step)
    derivatives: dict[str, Any] = {}
    if not missing:
        numbers = recompute_loss(filled, metrics=False, by_entropy=True)
        recorded_T = dump.tokens.get("coefficients")
        derivatives["coefficients_T"] = torch.as_tensor(numbers["coefficients"]) if recorded_T is None else recorded_T
        of_entropies = numbers.get("entropy_coefficients")
        derivatives["of_entropies_T"] = None if of_entropies is None else torch.as_tensor(of_entropies)
    exact = step.take(**derivatives)
    rounded = exact if own == "float64" else step.take(own, layout=LayoutSpec(), **derivatives)
    truth = _Truth(step, exact, rounded, own)
    first, causes, places = _logprobs_stage(dump, truth)
    last, more, where = _gradient_stage(dump, truth, missing)
    stages = (first, *result.stages, last)
    differs = any(stage.status == "differs" for stage in stages)
    compared = bool(first.compared) or (bool(last.compared) and exact.norm > 0)
    verdict = "differs" if differs else "agrees" if compared and result.verdict == "vacuous" else result.verdict
    return replace(
        result,
        verdict=verdict,
        stages=stages,
        causes=(*causes, *result.causes, *more),
        places=places if first.status == "differs" else result.places or where,
        undecided=(*_decided(result.undecided, first), *_undecided(dump, first, last)),
        of_model=OfModel(
            str(model), str(step.layout), own, exact.norm if derivatives else None, exact.logprobs_T, exact.gradients
        ),
    )


def _filled(reading: Reading, step: ModelStep) -> tuple[Reading, str]:
    """The step with the model's values where it recorded none; and why its loss cannot be computed, if so."""
    dump = reading.dump
    if dump.advantages_T is None:
        return reading, "no advantages"
    filled = reading if can_evaluate(dump) else reading.with_tokens(policy_logprobs=step.take().logprobs_T)
    try:
        recompute_loss(filled, metrics=False)
    except WorkbenchError as error:
        return filled, str(error).splitlines()[0]
    return filled, ""


# ---- log-probabilities ---------------------------------------------------------------------------------------------


def _compared(dump: StepDump) -> tuple[str, ...]:
    """Recorded columns of the weights that the loss is of: the policy's; without them, the old ones."""
    names = [name for name in ("policy_logprobs",) if name in dump.tokens]
    if "old_logprobs" in dump.tokens and (dump.on_policy or not names):
        names.append("old_logprobs")
    return tuple(names)


def _logprobs_stage(dump: StepDump, truth: _Truth) -> tuple[Stage, tuple[Cause, ...], tuple[str, ...]]:
    names = _compared(dump)
    if not names:
        return Stage(LOGPROBABILITIES, "not recorded"), (), ()
    mask_T, expected_T, bound_T = dump.loss_mask_T, truth.exact.logprobs_T, truth.bound_T()
    mismatches, causes, places = list[Mismatch](), list[Cause](), list[str]()
    for name in names:
        recorded_T = dump.tokens[name]
        distance_T = torch.where(mask_T, (recorded_T - expected_T).abs(), 0.0)
        differ_T = distance_T > bound_T
        if not bool(differ_T.any()):
            continue
        at, count = int(distance_T.argmax()), int(differ_T.sum())
        numbers = float(recorded_T[at]), float(expected_T[at]), float(bound_T[at])
        mismatches.append(Mismatch(name, *numbers, at, count, int(mask_T.sum())))
        if len(mismatches) == 1:
            explanations = _causes_of_logprobs(dump, truth, name, differ_T)
            causes = [Cause(kind, text, (LOGPROBABILITIES,), (), LOGPROBABILITIES) for kind, text in explanations]
        text = "recorded {:.9g}, the model {:.9g} (tolerance {:.2g})".format(*numbers)
        places.append(f"{name} at {dump.place(at)}: {text}")
        places.append(f"{count} of {int(mask_T.sum())} tokens differ{named_set(dump, differ_T)}")
    stage = Stage(LOGPROBABILITIES, "differs" if mismatches else "agrees", names, tuple(mismatches))
    return stage, tuple(causes), tuple(places)


def _causes_of_logprobs(dump: StepDump, truth: _Truth, name: str, differ_T: Tensor) -> Iterator[tuple[str, str]]:
    """Yield (kind, description) of what gives a recorded column; of other weights only if nothing else does."""
    mask_T, expected_T, bound_T = dump.loss_mask_T, truth.exact.logprobs_T, truth.bound_T()
    recorded_T = dump.tokens[name]

    def gives(column_T: Tensor, slack_T: Tensor = bound_T) -> bool:
        there_T = mask_T & column_T.isfinite()
        return bool(there_T.any()) and bool(((recorded_T - column_T).abs() <= slack_T)[there_T].all())

    known = False
    for text in fitted_rounding(name, recorded_T[mask_T], expected_T[mask_T], truth.precision):
        known = True
        yield "rounded", text
    for kind, text, column_T in _moved(dump, expected_T):
        if gives(column_T):
            known = True
            yield kind, f"{name} {text}"
    if (sentence := _temperature(dump, truth, recorded_T)) is not None:
        known = True
        yield "temperature", f"{name} {sentence}"
    others = [other for other in LOGPROBS if other != name and other in dump.tokens]
    for other in others:
        there_T = mask_T & dump.tokens[other].isfinite()
        if bool(((dump.tokens[other] - expected_T).abs() <= bound_T)[there_T].all()):
            known = True
            yield "stale", f"the checkpoint is the one of {other}: {name} are of other weights"
    share = int(differ_T.sum()) / int(mask_T.sum())
    if not known and share >= MOST:
        median = float((recorded_T - expected_T).abs()[mask_T].median())
        yield (
            "stale",
            f"{name} are of other weights than this checkpoint, such as those of an earlier or later step: "
            f"{median:.3g} nats in the median, and no temperature, shift or rounding gives them",
        )


def _moved(dump: StepDump, expected_T: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """Yield values that belong to the token before or after; NaN where a document ends."""
    ids_T, mask_T = dump.document_ids_T, dump.loss_mask_T
    known_T = torch.where(mask_T, expected_T, torch.nan)
    for by, text in ((1, "are those of the token before"), (-1, "are those of the token after")):
        same_T = ids_T.roll(by) == ids_T
        same_T[0 if by == 1 else -1] = False
        yield "shift", text, torch.where(same_T, known_T.roll(by), torch.nan)


def _temperature(dump: StepDump, truth: _Truth, recorded_T: Tensor) -> str | None:
    """Describe the temperature that gives the recorded values; None if none does."""
    mask_T, bound_T, own = dump.loss_mask_T, truth.bound_T(), dump.temperature
    head = truth.step.head()
    one_T = head.logprobs(1.0)
    for temperature, text in ((1.0, "at temperature 1"), (own, f"at temperature {own:g}")):
        divided_T = (one_T if temperature == 1 else head.logprobs(temperature)) / own
        if own != 1 and bool(((recorded_T - divided_T).abs() <= bound_T / min(own, 1.0))[mask_T].all()):
            return f"are log-probabilities {text}, divided by {own:g}: a temperature divides logits"
    fitted = _fit_temperature(head, recorded_T)
    for temperature in (1.0, float(f"{fitted:.3g}"), fitted):
        column_T = head.logprobs(temperature)
        # a fitted value is known to the root of float64's rounding
        slack_T = bound_T + (1e-6 * (1 + column_T.abs()) if temperature == fitted else 0.0)
        if abs(temperature / own - 1) > NEAR and bool(((recorded_T - column_T).abs() <= slack_T)[mask_T].all()):
            missing = ": the division of logits is missing" if temperature == 1 else ""
            return f"are at temperature {temperature:.6g}, not at the stated {own:g}{missing}"
    return None


def _fit_temperature(head: Head, recorded_T: Tensor) -> float:
    """Temperature whose values are nearest to the recorded ones on some tokens: a grid, then golden sections."""

    def off(log_temperature: float) -> float:
        column_T = head.logprobs(2.718281828459045**log_temperature, SAMPLE)
        return float((column_T - recorded_T).square()[column_T.isfinite()].sum())

    low, high = (float(torch.tensor(bound, dtype=torch.float64).log()) for bound in TEMPERATURES)
    grid = torch.linspace(low, high, 25, dtype=torch.float64).tolist()
    nearest = min(range(len(grid)), key=lambda number: off(grid[number]))
    low, high = grid[max(0, nearest - 1)], grid[min(len(grid) - 1, nearest + 1)]
    golden = (5**0.5 - 1) / 2
    inner = [high - golden * (high - low), low + golden * (high - low)]
    values = [off(at) for at in inner]
    for _ in range(40):
        if values[0] <= values[1]:
            high, inner[1], values[1] = inner[1], inner[0], values[0]
            inner[0] = high - golden * (high - low)
            values[0] = off(inner[0])
        else:
            low, inner[0], values[0] = inner[0], inner[1], values[1]
            inner[1] = low + golden * (high - low)
            values[1] = off(inner[1])
    return float(2.718281828459045 ** ((low + high) / 2))


# ---- gradient ------------------------------------------------------------------------------------------------------


def _gradient_stage(dump: StepDump, truth: _Truth, missing: str) -> tuple[Stage, tuple[Cause, ...], tuple[str, ...]]:
    if dump.gradient_norm is None and not dump.gradients:
        return Stage(GRADIENT, "not recorded"), (), ()
    if missing:
        return Stage(GRADIENT, "not recomputed", missing=missing), (), ()
    check_gradients(f"compare the gradient of {dump.origin}", dump.gradients, truth.exact.gradients)
    relative, norm = RELATIVE[truth.precision], truth.exact.norm
    mismatches, compared = list[Mismatch](), list[str]()
    differing = list[str]()
    for name, value in dump.gradients.items():
        expected, rounded = truth.exact.gradients[name], truth.rounded.gradients[name]
        bound = FACTOR * float((rounded - expected).norm()) + relative * (float(expected.norm()) + 1e-3 * norm)
        distance = float((value.double() - expected).norm())
        compared.append(f"gradient/{name}")
        if distance > bound:
            differing.append(name)
            mismatches.append(Mismatch(f"distance of gradient/{name}", distance, 0.0, bound))
    mismatches.sort(key=lambda mismatch: -mismatch.recorded)
    whole = sum(float((truth.rounded.gradients[n] - g).square().sum()) for n, g in truth.exact.gradients.items()) ** 0.5
    bound = FACTOR * whole + relative * norm
    if dump.gradient_norm is not None:
        compared.insert(0, "gradient norm")
        if abs(dump.gradient_norm - norm) > bound:
            mismatches.insert(0, Mismatch("gradient norm", dump.gradient_norm, norm, bound))
    places = [
        f"{m.quantity}: recorded {m.recorded:.9g}, expected {m.expected:.9g} (tolerance {m.tolerance:.2g})"
        for m in mismatches[:3]
    ]
    if differing:
        places.append(f"{len(differing)} of {len(dump.gradients)} parameters differ: {listed(differing, 4)}")
    causes = _causes_of_gradient(dump, truth, differing, bound) if mismatches else ()
    stage = Stage(GRADIENT, "differs" if mismatches else "agrees", tuple(compared), tuple(mismatches))
    return stage, tuple(Cause(kind, text, (GRADIENT,), (), GRADIENT) for kind, text in causes), tuple(places)


def _causes_of_gradient(dump: StepDump, truth: _Truth, differing: list[str], bound: float) -> Iterator[tuple[str, str]]:
    """Yield (kind, description): one factor of all that differ, or parameters without a gradient."""
    expected = truth.exact.gradients
    if differing:
        zero = [name for name in differing if not bool(dump.gradients[name].any())]
        if zero:
            yield "mask", f"no gradient reaches {listed(zero, 4)}"
        rest = [name for name in differing if name not in zero]
        if not rest:
            return
        recorded_P = torch.cat([dump.gradients[name].double().reshape(-1) for name in rest])
        expected_P = torch.cat([expected[name].reshape(-1) for name in rest])
        factor = float(recorded_P @ expected_P / (expected_P @ expected_P))
        slack = bound + BAR[truth.precision] * float(recorded_P.norm())
        if float((recorded_P - factor * expected_P).norm()) <= slack * max(1.0, abs(factor)):
            every = len(differing) == len(dump.gradients)
            of = "the gradient" if every else f"the gradient of {listed(rest, 4)}"
            yield "factor", f"{of} times {factor:.7g}{in_words(dump, factor, BAR[truth.precision])}"
        return
    if dump.gradient_norm is not None and (match := common_factor(dump, dump.gradient_norm, truth.exact.norm, bound)):
        text = in_words(dump, match[0], BAR[truth.precision])
        if text:
            yield "factor", f"the gradient norm times {match[0]:.7g}{text}"


# ---- what is not decided -------------------------------------------------------------------------------------------


def _decided(sentences: tuple[str, ...], first: Stage) -> tuple[str, ...]:
    """Sentences of the dump alone that the model has not decided."""
    return tuple(one for one in sentences if one != NEEDS_MODEL and not (first.compared and one == AS_RECORDED))


def _undecided(dump: StepDump, first: Stage, last: Stage) -> Iterator[str]:
    unseen = [name for name in LOGPROBS if name in dump.tokens and name not in first.compared]
    if unseen:
        yield f"{', '.join(unseen)}: of other weights, or of the engine; this checkpoint says nothing of them"
    if last.status == "not recorded":
        yield "gradient: not recorded; the norm is what this step gives"
    elif last.status == "not recomputed":
        yield f"gradient: {last.missing}"
    elif not dump.gradients:
        yield "gradient: the norm alone was recorded; a wrong direction of the same length does not show"
