"""From a step to a verdict: recompute, compare, try every known mistake on the first stage that differs.

A mistake is a cause if every recorded quantity of that stage comes out under it. It is tried against the null: the
settings as they are do not give these numbers. Mistakes that would change the loss and leave all that was recorded as
it is are what the dump cannot decide.

Letters: T tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workbench.check.alternatives import Alternative, loss_alternatives
from workbench.check.estimators import advantage_alternatives
from workbench.check.fitted import (
    BAR,
    common_factor,
    fitted_bounds,
    fitted_count,
    fitted_divisor,
    fitted_mask,
    fitted_order,
    fitted_pieces,
    fitted_rounding,
    fitted_terms,
    in_words,
    named_sizes,
)
from workbench.check.memo import Memo
from workbench.check.numbers import Numbers, recompute_numbers
from workbench.check.reading import Reading
from workbench.check.recompute import Quantities, can_evaluate, recompute_advantages, recompute_loss
from workbench.check.screen import Screen
from workbench.check.stages import (
    RELATIVE,
    STAGES,
    Mismatch,
    compare,
    distances,
    stage_of,
    tolerances,
)
from workbench.check.verdict import Cause, Stage, StepCheck
from workbench.dumps.step import LOGPROBS, StepDump
from workbench.errors import WorkbenchError, listed

LAYOUT = ("dp", "cp", "micro_batches")
AS_RECORDED = "if log-probabilities are those of the model: they are taken as recorded, with their temperature"
NEEDS_MODEL = "gradient: recorded; it is recomputed with the checkpoint alone (model=, --model)"
SMALL = 64
"""A factor that is a whole number up to this, or 1 over one, is not read as another count of tokens; a convention."""
MOVED = ("advantages", "correction_weights", *LOGPROBS)
"""Values of tokens that enter a loss where tokens train, and nowhere else."""
MOST_CAUSES = 6
"""Causes of a stage that are listed; a convention."""


def judge(reading: Reading) -> StepCheck:
    """Check a step against one reading of its settings."""
    bare, reading = reading, replace(reading, memo=Memo())
    null = recompute_numbers(reading)
    stages = tuple(_stage(name, null) for name in STAGES)
    first = next((stage for stage in stages if stage.status == "differs"), None)
    compared = [stage for stage in stages if stage.compared]
    screen = Screen.of(reading, null) if can_evaluate(reading.dump) else None
    alternatives = list(_tried(reading, null, first, screen))
    causes: list[Cause] = []
    for stage in stages:
        if stage.status == "differs" and not any(stage.name in cause.explains for cause in causes):
            if screen is not None and stage.name != "advantages" and not screen.decides(stage.name):
                screen, alternatives = None, list(_tried(reading, null, first, None))
            causes += _causes(reading, null, stage, alternatives)[:MOST_CAUSES]
    vacuous = not compared or _nothing_to_see(reading.dump, compared)
    known = {name for name in null.recorded if name in null.expected}
    unknown = tuple(name[8:] for name in null.recorded if name.startswith("metrics/") and name not in known)
    return StepCheck(
        reading.dump.origin,
        "differs" if first else "vacuous" if vacuous else "agrees",
        stages,
        tuple(causes),
        () if first is None else tuple(_places(reading.dump, null, first)),
        tuple(_undecided(reading, null, stages, alternatives)),
        _evidence(reading.dump),
        unknown,
        replace(null, reading=bare),
    )


def _stage(name: str, null: Numbers) -> Stage:
    own = [quantity for quantity in null.recorded if stage_of(quantity) == name]
    compared = tuple(quantity for quantity in own if quantity in null.differing)
    different = tuple(mismatch for quantity in compared if (mismatch := null.differing[quantity]) is not None)
    if compared:
        return Stage(name, "differs" if different else "agrees", compared, different)
    if own or name in null.missing:
        return Stage(name, "not recomputed", missing=null.missing.get(name, "not part of this loss"))
    return Stage(name, "not recorded")


def _nothing_to_see(dump: StepDump, compared: list[Stage]) -> bool:
    """True if nothing trains, or every advantage is 0: no wrong loss could have shown."""
    if not bool(dump.loss_mask_T.any()):
        return True
    advantages_T = dump.advantages_T
    silent = advantages_T is not None and not bool(advantages_T[dump.loss_mask_T].any())
    return silent and {stage.name for stage in compared} <= {"advantages", "coefficients", "loss", "metrics"}


# ---- mistakes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tried:
    """A mistake: True if it changes what was not recorded; recorded quantities that differ, and how far others are."""

    alternative: Alternative
    acts: bool
    differing: Mapping[str, Mismatch | None]
    off: Mapping[str, float]


def _tried(reading: Reading, null: Numbers, first: Stage | None, screen: Screen | None) -> Iterable[_Tried]:
    """Try every mistake. Metrics, which cost most, are computed where they decide."""
    dump = reading.dump
    advantages = null.differing.get("advantages")
    if "advantages" in null.expected and ("advantages" not in null.differing or advantages is not None):
        for alternative in advantage_alternatives(reading):
            try:
                advantages_T = recompute_advantages(alternative.reading)
            except WorkbenchError:
                continue
            if advantages_T is not None:
                yield _with(alternative, {"advantages": advantages_T}, dump, null)
    loss_differs = any(mismatch is not None for name, mismatch in null.differing.items() if name != "advantages")
    if not can_evaluate(dump) or (first is not None and not loss_differs):
        return  # nothing that a wrong loss would explain
    fits = () if first is None else (fitted_terms, fitted_bounds)
    known: dict[str, _Tried | None] = {}
    for alternative in itertools.chain(loss_alternatives(reading), *(fit(reading, null) for fit in fits)):
        key = _values_key(alternative.reading, reading)
        if key not in known:
            one = _tried_loss(alternative, reading, null, first, screen)
            if key is None:
                if one is not None:
                    yield one
                continue
            known[key] = one
        if (one := known[key]) is not None:
            yield replace(one, alternative=alternative)


def _values_key(changed: Reading, reading: Reading) -> str | None:
    """Return a digest of a reading that differs by values of tokens alone; None for another.

    Values of two readings are often the same where tokens train: shifted ones differ at the ends of documents.
    """
    if replace(changed, dump=reading.dump) != reading or changed.dump.documents is not reading.dump.documents:
        return None
    own, mask_T = reading.dump.tokens, reading.dump.loss_mask_T
    moved = {name: value_T for name, value_T in changed.dump.tokens.items() if own.get(name) is not value_T}
    if not own.keys() <= changed.dump.tokens.keys() or not moved.keys() <= {*MOVED}:
        return None
    digest = hashlib.blake2b()
    for name in sorted(moved):
        digest.update(f"{name} {moved[name].dtype}".encode())
        digest.update(torch.where(mask_T, moved[name].detach().double(), 0.0).numpy().tobytes())
    return digest.hexdigest()


def _tried_loss(
    alternative: Alternative, reading: Reading, null: Numbers, first: Stage | None, screen: Screen | None
) -> _Tried | None:
    """Try a mistake in the loss; None if it is excluded, decides nothing or cannot be computed."""
    dump = reading.dump
    metrics = [name for name in null.differing if name.startswith("metrics/")]
    try:
        by_factors = first is not None and alternative.kind == "denominator"  # tried times an axis, too
        if screen is not None and not by_factors and screen.excludes(alternative.reading):
            return None
        expected = recompute_loss(alternative.reading, metrics=False)
        one = _with(alternative, expected, dump, null)
        if first is not None and alternative.kind == "denominator" and one.differing.get(_shown(first)):
            alternative = _by_an_axis(alternative, expected, null, _shown(first))
            if alternative.reading.factor != reading.factor:
                one = _with(alternative, recompute_loss(alternative.reading, metrics=False), dump, null)
        needed = one.differing if first is None else first.compared
        if first is None and not one.acts:
            return None  # metrics decide nothing: it would change no number that is missing
        if metrics and (set(metrics) & {*needed} or not any(map(one.differing.get, needed))):
            one = _with(alternative, recompute_loss(alternative.reading), dump, null)
    except (WorkbenchError, ArithmeticError):
        return None
    return one


def _shown(first: Stage) -> str:
    """The quantity of a stage in which a factor shows best."""
    return first.mismatches[0].quantity


def _by_an_axis(alternative: Alternative, expected: Quantities, null: Numbers, quantity: str) -> Alternative:
    """The same mistake, and in addition a factor that is an axis of the layout, if one shows: a mean that is a sum."""
    if quantity.startswith(("metrics/", "counts/")) or quantity == "clipped" or quantity not in expected:
        return alternative
    dump = alternative.reading.dump
    match = common_factor(dump, null.recorded[quantity], expected[quantity], null.bounds[quantity])
    if match is None:
        return alternative
    named = [one for one in named_sizes(dump, match[0], BAR[dump.dtype]) if one.needs <= {*LAYOUT}]
    if not named or not named[0].needs:
        return alternative
    reading = replace(alternative.reading, factor=alternative.reading.factor * match[0])
    return replace(alternative, description=f"{alternative.description}, times {named[0].description}", reading=reading)


def _with(alternative: Alternative, expected: Quantities, dump: StepDump, null: Numbers) -> _Tried:
    recorded = {name: value for name, value in null.recorded.items() if name in null.differing}
    bounds = tolerances(expected, (), dump.dtype, [name for name in recorded if name in expected])
    widened = {name: _larger(bound, null.bounds[name]) for name, bound in bounds.items()}
    differing = compare(dump, recorded, expected, widened)
    off = distances(recorded, expected, (name for name, mismatch in differing.items() if mismatch is None))
    return _Tried(alternative, not any(differing.values()) and _acts(expected, null), differing, off)


def _larger(bound: Tensor | float, other: Tensor | float) -> Tensor | float:
    """The larger of two bounds; NaN if one is."""
    if isinstance(bound, Tensor) or isinstance(other, Tensor):
        return torch.maximum(torch.as_tensor(bound), torch.as_tensor(other))
    return math.nan if math.isnan(bound) or math.isnan(other) else max(bound, other)


def _causes(reading: Reading, null: Numbers, first: Stage, tried: list[_Tried]) -> list[Cause]:
    """Mistakes that give every recorded quantity of the first stage that differs, the most explained first."""
    causes, off = list[Cause](), dict[Cause, float]()
    required = first.compared
    if not any(_reproduces(one, required) for one in tried):
        required = _without_counts(null, first)  # a trainer may count one thing and divide by another
    for one in tried:
        if not required or not _reproduces(one, required):
            continue
        by_stage = {
            stage: [one.differing[name] is None for name in one.differing if stage_of(name) == stage]
            for stage in STAGES
        }
        explains = tuple(stage for stage, agreeing in by_stage.items() if agreeing and all(agreeing))
        differs = tuple(stage for stage, agreeing in by_stage.items() if agreeing and not all(agreeing))
        cause = Cause(one.alternative.kind, one.alternative.description, explains, differs, first.name)
        causes.append(cause)
        off[cause] = max(one.off[name] for name in required)
    nearest = min(off.values(), default=0.0)
    near = {cause: off[cause] > 10 * nearest + RELATIVE[reading.dump.dtype] / 100 for cause in causes}
    causes.sort(key=lambda cause: (len(cause.differs), near[cause], -len(cause.explains)))
    causes += _factor(reading, null, first)
    causes.sort(key=lambda cause: len(cause.differs))
    return list(dict.fromkeys(causes)) or _fitted(reading, null, first)


def _reproduces(one: _Tried, names: Iterable[str]) -> bool:
    return all(name in one.differing and one.differing[name] is None for name in names)


def _without_counts(null: Numbers, first: Stage) -> tuple[str, ...]:
    """Differing quantities, without counts: of a stage whose counts no mistake gives."""
    if not any(name.startswith("counts/") for name in first.compared):
        return ()
    differing = [name for name, mismatch in null.differing.items() if mismatch is not None]
    return tuple(name for name in differing if not name.startswith(("counts/", "metrics/")) and name != "advantages")


def _factor(reading: Reading, null: Numbers, first: Stage) -> list[Cause]:
    """A common factor of the first quantity that differs, with a name if it is a size of the step."""
    mismatch, dump = first.mismatches[0], reading.dump
    if mismatch.quantity.startswith(("metrics/", "counts/")) or mismatch.quantity == "clipped":
        return []
    values = (numbers[mismatch.quantity] for numbers in (null.recorded, null.expected, null.bounds))
    if (match := common_factor(dump, *values)) is None:
        return []
    factor, shown = match
    text = in_words(dump, factor, BAR[dump.dtype])
    if not text and shown == 1:
        return []  # one number always has a factor
    causes = [Cause("factor", f"{mismatch.quantity} times {factor:.7g}{text}", (first.name,), (), first.name)]
    sizes = (factor, 1 / factor) if factor else (factor,)
    small = any(abs(value - round(value)) <= BAR[dump.dtype] and round(value) < SMALL for value in sizes)
    if not small and not any(
        one.needs and one.needs <= {*LAYOUT} for one in named_sizes(dump, factor, BAR[dump.dtype])
    ):
        texts = fitted_divisor(reading, factor) if mismatch.quantity in ("coefficients", "loss_weights") else ()
        causes = [Cause("denominator", one, (first.name,), (), first.name) for one in texts] + causes
    return causes


def _fitted(reading: Reading, null: Numbers, first: Stage) -> list[Cause]:
    """Causes that are read off the recorded values, where no known mistake gives them."""
    dump = reading.dump
    for mismatch in first.mismatches:
        name = mismatch.quantity
        if name.startswith("counts/"):
            found = [("denominator", text) for text in fitted_count(dump, name[7:], mismatch.recorded)]
        elif mismatch.token is None or name == "clipped":
            continue
        else:
            found = list(_of_tokens(reading, null, name))
        if found:
            return [Cause(kind, text, (first.name,), (), first.name) for kind, text in found]
    return []


def _of_tokens(reading: Reading, null: Numbers, name: str) -> Iterable[tuple[str, str]]:
    """Yield (kind, description) of what the recorded values of tokens show."""
    dump = reading.dump
    recorded_T, expected_T, bounds_T = (
        torch.as_tensor(numbers[name]) for numbers in (null.recorded, null.expected, null.bounds)
    )
    rounded = [("rounded", text) for text in fitted_rounding(name, recorded_T, expected_T, dump.dtype)]
    if rounded:
        yield from rounded
        return
    if name == "advantages" and (texts := list(fitted_order(reading, null, recorded_T, expected_T))):
        yield from (("order", text) for text in texts)
        return
    pieces = list(fitted_pieces(dump, recorded_T, expected_T, bounds_T))
    lost = fitted_mask(dump, recorded_T, expected_T, bounds_T) if name in ("coefficients", "loss_weights") else ()
    yield from pieces or (("mask", text) for text in lost)


# ---- places, and what is not decided -------------------------------------------------------------------------------


def _places(dump: StepDump, null: Numbers, first: Stage) -> Iterable[str]:
    for mismatch in first.mismatches[:3]:
        numbers = f"recorded {mismatch.recorded:.9g}, expected {mismatch.expected:.9g}"
        if mismatch.token is None:
            yield f"{mismatch.quantity}: {numbers} (tolerance {mismatch.tolerance:.2g})"
            continue
        yield f"{mismatch.quantity} at {dump.place(mismatch.token)}: {numbers} (tolerance {mismatch.tolerance:.2g})"
        value, other = null.recorded[mismatch.quantity], null.expected[mismatch.quantity]
        differ_T = (torch.as_tensor(value) - torch.as_tensor(other)).abs() > torch.as_tensor(
            null.bounds[mismatch.quantity]
        )
        yield f"{mismatch.tokens} of {mismatch.of} tokens differ{named_set(dump, differ_T)}"


def named_set(dump: StepDump, differ_T: Tensor) -> str:
    """Name the set of tokens that differ, if it is one that has a name."""
    mask_T, ids_T = dump.loss_mask_T, dump.document_ids_T
    differ_T = differ_T & mask_T if bool((differ_T & mask_T).any()) else differ_T
    documents = ids_T[differ_T].unique().tolist()
    if not bool((differ_T & mask_T).any()):
        return ": only tokens that do not train"
    if len(documents) < dump.num_documents:
        return f": only of document{'s' * (len(documents) > 1)} {listed(documents, 6)}"
    places_T = torch.arange(len(ids_T))
    last_N = torch.full((dump.num_documents,), -1).scatter_reduce(0, ids_T[mask_T], places_T[mask_T], "amax")
    first_N = torch.full((dump.num_documents,), len(ids_T)).scatter_reduce(0, ids_T[mask_T], places_T[mask_T], "amin")
    named = {"the last trained token of each document": last_N, "the first trained token of each document": first_N}
    for text, places_N in named.items():
        if bool((differ_T == (places_T == places_N[ids_T])).all()):
            return f": {text}"
    return ": all that train" if bool((differ_T == mask_T).all()) else ", of all documents"


def _undecided(reading: Reading, null: Numbers, stages: tuple[Stage, ...], tried: list[_Tried]) -> Iterable[str]:
    dump = reading.dump
    silent = [stage.name for stage in stages if stage.status == "not recorded"]
    if silent:
        yield f"{', '.join(silent)}: not recorded"
    for text in dict.fromkeys(stage.missing for stage in stages if stage.missing):
        yield f"{', '.join(stage.name for stage in stages if stage.missing == text)}: {text}"
    if dump.tokens.get("old_logprobs") is not None:
        yield AS_RECORDED
    if dump.gradients or dump.gradient_norm is not None:
        yield NEEDS_MODEL
    agree = not any(stage.status == "differs" for stage in stages)
    unseen = [one for one in tried if agree and not any(one.differing.values()) and one.acts]
    for kind in dict.fromkeys(one.alternative.kind for one in unseen):
        texts = [one.alternative.description for one in unseen if one.alternative.kind == kind]
        yield f"{kind}: the same numbers if {listed(dict.fromkeys(texts), 3, separator='; or if ')}"
    yield from dump.notes


def _acts(expected: Quantities, null: Numbers) -> bool:
    """True if a mistake changes a quantity that was not recorded, beyond tolerance."""
    for name, value in expected.items():
        if name in null.recorded or name not in null.expected or name.startswith(("means/", "magnitudes/", "metrics/")):
            continue
        distance = (torch.as_tensor(value) - torch.as_tensor(null.expected[name])).abs()
        if bool((distance > 2 * torch.as_tensor(null.bounds[name])).any()):
            return True
    return False


def _evidence(dump: StepDump) -> str:
    trained, documents = int(dump.loss_mask_T.sum()), int(dump.document_ids_T[dump.loss_mask_T].unique().numel())
    text = f"{trained} trained tokens of {documents} documents, of {dump.num_documents}"
    advantages_T = dump.advantages_T
    if advantages_T is not None:
        acting = int((advantages_T[dump.loss_mask_T] != 0).sum())
        text += f"; {acting} with an advantage that is not 0"
    return text
