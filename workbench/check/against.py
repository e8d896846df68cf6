"""Two systems on one batch: which recorded and which recomputed stage differs first, and which setting does it.

Three comparisons of each quantity:

    recorded      what one trainer recorded with what the other did
    recomputed    from the inputs and the settings of each
    settings      recomputed twice from the inputs of the other step: with its settings, and with those of this one

Letters: M tokens that both dumps have | N documents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.check.matching import Matched, match_documents
from workbench.check.numbers import Numbers
from workbench.check.reading import Reading
from workbench.check.recompute import Quantities, can_evaluate, recompute_advantages, recompute_loss
from workbench.check.stages import RELATIVE, ROUNDING, STAGES, stage_of
from workbench.columns import columns
from workbench.dumps.step import LOGPROBS, StepDump
from workbench.errors import WorkbenchError, listed

INPUTS: Mapping[str, tuple[str, ...]] = {
    "documents": ("documents",),
    "loss mask": ("loss_mask",),
    "rewards": ("rewards", "group_ids", "token_rewards", "values"),
    "log-probabilities": LOGPROBS[1:] + LOGPROBS[:1],
}
"""Stage before those of the loss -> its quantities."""
EXACT = 1e-9
"""Relative distance of two float64 evaluations of one formula, in any order of summation; a convention."""


@dataclass(frozen=True)
class Compared:
    """One quantity of two steps.

    Attributes:
        stage, quantity: its names.
        recorded, recomputed, settings: True where the two agree, False where they differ, None if not in both.
        left, right, tolerance: at the largest difference, of what was recorded if that differs.
        place: that document and token in both dumps; "" for a number.
        tokens, of: how many tokens differ, of those compared.
    """

    stage: str
    quantity: str
    recorded: bool | None
    recomputed: bool | None
    settings: bool | None
    left: float = math.nan
    right: float = math.nan
    tolerance: float = 0.0
    place: str = ""
    tokens: int = 0
    of: int = 0

    @property
    def agrees(self) -> bool:
        """True if nothing of it differs."""
        return False not in (self.recorded, self.recomputed, self.settings)


@dataclass(frozen=True)
class Setting:
    """A part of the loss that two steps have set differently.

    Attributes:
        name: of the field of a `LossSpec`, or "advantages".
        left, right: its values.
        acts: True if it changes the coefficients (or advantages) of this batch, None if that was not recomputed.
    """

    name: str
    left: Any
    right: Any
    acts: bool | None


@dataclass(frozen=True)
class StepsCompared:
    """Comparison of two steps of one batch.

    Attributes:
        left, right: origins of the dumps.
        verdict: "agree", "differ", or "vacuous": no result is in both.
        quantities: compared, in the order of the loss.
        settings: that differ.
        documents: how many were matched, and how.
        differences: documents that only one of them has.
        notes: what could not be compared.
    """

    left: str
    right: str
    verdict: Literal["agree", "differ", "vacuous"]
    quantities: tuple[Compared, ...]
    settings: tuple[Setting, ...]
    documents: str
    differences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if everything agrees that is in both, and there was something to compare."""
        return self.verdict == "agree"

    def first(self, column: Literal["recorded", "recomputed", "settings"]) -> Compared | None:
        """Return the first quantity that differs in one of the three comparisons."""
        return next((one for one in self.quantities if getattr(one, column) is False), None)

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as JSON data."""
        firsts = {name: self.first(name) for name in _COLUMNS}
        return {"first": {name: one and one.quantity for name, one in firsts.items()}, **asdict(self)}

    def __str__(self) -> str:
        rows = [
            (one.quantity, *(_TEXT[getattr(one, name)] for name in _COLUMNS), _detail(one)) for one in self.quantities
        ]
        lines = [f"{self.verdict}: {self.left} against {self.right}", f"  {self.documents}"]
        lines += [*(f"  {text}" for text in self.differences), ""]
        lines += columns(rows, ("quantity", *_COLUMNS, "left, right"), width=118)
        lines += ["", *_conclusion(self)]
        for setting in self.settings:
            effect = {True: "", False: " (no effect on this batch)", None: " (effect not recomputed)"}[setting.acts]
            lines.append(f"  {setting.name}: {setting.left} against {setting.right}{effect}")
        if self.notes:
            lines += ["", *(f"  - {note}" for note in self.notes)]
        return "\n".join(lines)


_COLUMNS: tuple[Literal["recorded", "recomputed", "settings"], ...] = ("recorded", "recomputed", "settings")
_TEXT = {True: "agrees", False: "differs", None: "-"}


def compare_steps(left: Numbers, right: Numbers) -> StepsCompared:
    """Compare two steps of one batch, each with its own settings.

    Raises:
        SpecError: the dumps are not of one batch.
    """
    dumps = (left.reading.dump, right.reading.dump)
    matched = match_documents(*dumps)
    own, crossed, notes = _crossed(left.reading, right.reading)
    quantities = [
        Compared("documents", "documents", not matched.differences, None, None),
        *_inputs(*dumps, matched),
        *_results(left, right, matched, own, crossed),
    ]
    results = [one for one in quantities if one.stage in STAGES]
    return StepsCompared(
        dumps[0].origin,
        dumps[1].origin,
        "differ" if not all(one.agrees for one in quantities) else "agree" if results else "vacuous",
        tuple(quantities),
        tuple(_settings(left.reading, right.reading, own)),
        f"{len(matched.pairs)} documents and {len(matched.left_M)} tokens of both, matched by {matched.by}",
        matched.differences,
        notes,
    )


# ---- quantities ----------------------------------------------------------------------------------------------------


def _inputs(left: StepDump, right: StepDump, matched: Matched) -> Iterator[Compared]:
    masks = left.loss_mask_T[matched.left_M], right.loss_mask_T[matched.right_M]
    where_M = masks[0] & masks[1]
    everywhere_M = torch.ones_like(where_M)
    at_N = torch.tensor(matched.pairs)
    for stage, names in INPUTS.items():
        for name in names:
            if name in left.tokens and name in right.tokens:
                values = left.tokens[name][matched.left_M].double(), right.tokens[name][matched.right_M].double()
                bound = ROUNDING[left.dtype] + ROUNDING[right.dtype] if name in LOGPROBS else 0.0
                bound_M = bound + torch.zeros_like(values[0])
                if name not in (*LOGPROBS, "loss_mask"):
                    bound_M = (RELATIVE[left.dtype] + RELATIVE[right.dtype]) * values[1].abs()
                where = everywhere_M if name == "loss_mask" else where_M
                worst = _worst(values, bound_M, where, matched, (left, right))
                yield Compared(stage, name, worst is None, None, None, **(worst or {}))
            elif name in left.documents and name in right.documents:
                pair = left.documents[name][at_N[:, 0]].double(), right.documents[name][at_N[:, 1]].double()
                if name == "group_ids":
                    pair = _partition(pair[0]), _partition(pair[1])
                apart_N = (pair[0] - pair[1]).abs()
                differ_N = apart_N > (RELATIVE[left.dtype] + RELATIVE[right.dtype]) * pair[1].abs()
                at = int(torch.where(differ_N, apart_N, -1.0).argmax())
                place = f"document {matched.pairs[at][0]} | {matched.pairs[at][1]}"
                more: dict[str, Any] = {"left": float(pair[0][at]), "right": float(pair[1][at]), "place": place}
                agrees = not bool(differ_N.any())
                yield Compared(stage, name, agrees, None, None, **(more if not agrees else {}))


def _partition(groups_N: Tensor) -> Tensor:
    """[N] first document of each document's group: the same for the same groups under other numbers."""
    numbers_N = groups_N.unique(return_inverse=True)[1]
    first_G = torch.full((len(groups_N),), len(groups_N)).scatter_reduce(
        0, numbers_N, torch.arange(len(groups_N)), "amin"
    )
    return first_G[numbers_N].double()


def _results(
    left: Numbers, right: Numbers, matched: Matched, own: Quantities, crossed: Quantities
) -> Iterator[Compared]:
    dumps = left.reading.dump, right.reading.dump
    where_M = dumps[0].loss_mask_T[matched.left_M] & dumps[1].loss_mask_T[matched.right_M]
    names = [
        name for name in {**left.recorded, **left.expected} if not name.startswith(("means/", "magnitudes/", "parts/"))
    ]
    names = [name for name in names if name in right.recorded or name in right.expected]
    for name in list(names):
        if name.startswith("metrics/") and not (name in left.recorded and name in right.recorded):
            names.remove(name)  # recomputed alone they say no more than the stages before them
    for name in sorted(names, key=lambda name: [*STAGES].index(stage_of(name))):
        columns: dict[str, Any] = {}
        worst: dict[str, Any] = {}
        for column, values in {
            "recorded": (left.recorded.get(name), right.recorded.get(name)),
            "recomputed": (left.expected.get(name), right.expected.get(name)),
        }.items():
            if values[0] is None or values[1] is None:
                columns[column] = None
                continue
            bounds = (_bound(left, name, values[0]), _bound(right, name, values[1]))
            difference = _difference((values[0], values[1]), bounds, where_M, matched, dumps)
            columns[column], worst = difference is None, worst or difference or {}
        columns["settings"] = _same(own[name], crossed[name]) if name in own and name in crossed else None
        if set(columns.values()) != {None}:
            yield Compared(stage_of(name), name, **columns, **worst)


def _bound(numbers: Numbers, name: str, value: Tensor | float) -> Tensor | float:
    if name in numbers.bounds:
        return numbers.bounds[name]
    relative = RELATIVE[numbers.reading.dump.dtype]
    return relative * value.abs() if isinstance(value, Tensor) else relative * abs(value)


def _difference(
    values: tuple[Tensor | float, Tensor | float],
    bounds: tuple[Tensor | float, Tensor | float],
    where_M: Tensor,
    matched: Matched,
    dumps: tuple[StepDump, StepDump],
) -> dict[str, Any] | None:
    """Return the largest difference of two values of tokens, or of two numbers; None if they agree."""
    left, right = values
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        bound_M = torch.as_tensor(bounds[0])[matched.left_M] + torch.as_tensor(bounds[1])[matched.right_M]
        pair = left[matched.left_M].double(), right[matched.right_M].double()
        return _worst(pair, bound_M, where_M, matched, dumps)
    one, other, bound = float(left), float(right), float(bounds[0]) + float(bounds[1])
    if abs(one - other) <= bound or one == other or (math.isnan(one) and math.isnan(other)):
        return None
    return {"left": one, "right": other, "tolerance": bound}


def _worst(
    values: tuple[Tensor, Tensor],
    bound_M: Tensor,
    where_M: Tensor,
    matched: Matched,
    dumps: tuple[StepDump, StepDump],
) -> dict[str, Any] | None:
    apart_M = torch.where(where_M, (values[0] - values[1]).abs(), 0.0).nan_to_num(nan=math.inf)
    differ_M = apart_M > bound_M
    if not bool(differ_M.any()):
        return None
    at = int(torch.where(differ_M, apart_M, -1.0).argmax())
    places = dumps[0].place(int(matched.left_M[at])), dumps[1].place(int(matched.right_M[at]))
    return {
        "left": float(values[0][at]),
        "right": float(values[1][at]),
        "tolerance": float(bound_M[at]),
        "place": places[0] if places[0] == places[1] else " | ".join(places),
        "tokens": int(differ_M.sum()),
        "of": int(where_M.sum()),
    }


# ---- settings ------------------------------------------------------------------------------------------------------


def _crossed(left: Reading, right: Reading) -> tuple[Quantities, Quantities, tuple[str, ...]]:
    """Quantities of the right step under its own settings, and under those of the left one."""
    notes: list[str] = []
    results: list[Quantities] = []
    for reading in (right, replace(right, spec=left.spec, estimator=left.estimator)):
        try:
            results.append(_evaluated(reading))
        except WorkbenchError as error:
            notes.append(f"settings are not compared on one batch: {str(error).splitlines()[0]}")
            return {}, {}, tuple(notes)
    return results[0], results[1], tuple(notes)


def _evaluated(reading: Reading) -> Quantities:
    values = dict(recompute_loss(reading, metrics=False)) if can_evaluate(reading.dump) else {}
    advantages_T = recompute_advantages(reading)
    return values if advantages_T is None else {"advantages": advantages_T, **values}


def _same(one: Tensor | float, other: Tensor | float) -> bool:
    left, right = torch.as_tensor(one, dtype=torch.float64), torch.as_tensor(other, dtype=torch.float64)
    largest = float(torch.maximum(left.abs().max(), right.abs().max())) if left.numel() else 0.0
    return bool(torch.allclose(left, right, rtol=EXACT, atol=EXACT * largest, equal_nan=True))


def _settings(left: Reading, right: Reading, own: Quantities) -> Iterator[Setting]:
    before, after = left.spec.model_dump(mode="json"), right.spec.model_dump(mode="json")
    for name in (name for name in before if before[name] != after[name] and name != "name"):
        values = _changes(before[name], after[name])
        changed = replace(right, spec=right.spec.model_copy(update={name: getattr(left.spec, name)}))
        yield Setting(name, *values, _acts(changed, own, "coefficients"))
    if left.estimator != right.estimator:
        changed = replace(right, estimator=left.estimator)
        yield Setting("advantages", left.estimator, right.estimator, _acts(changed, own, "advantages"))


def _acts(changed: Reading, own: Quantities, quantity: str) -> bool | None:
    try:
        values = _evaluated(changed)
    except (WorkbenchError, ArithmeticError):
        return None
    return not _same(values[quantity], own[quantity]) if quantity in values and quantity in own else None


def _changes(left: Any, right: Any) -> tuple[Any, Any]:
    """Two values; of groups, the keys that differ."""
    if not (isinstance(left, dict) and isinstance(right, dict)):
        return left, right
    keys = [key for key in {**left, **right} if left.get(key) != right.get(key)]
    return {key: left.get(key) for key in keys}, {key: right.get(key) for key in keys}


def _conclusion(result: StepsCompared) -> Iterator[str]:
    recorded, recomputed, settings = (result.first(name) for name in _COLUMNS)
    if result.verdict == "vacuous":
        yield "no result is in both dumps"
    if recorded:
        where = f", {recorded.place}" if recorded.place else ""
        yield f"first recorded difference: {recorded.stage} ({recorded.quantity}{where})"
    if settings:
        yield f"the settings mean different losses on one batch, first in {settings.stage} ({settings.quantity})"
    elif recomputed:
        yield f"the settings agree on one batch, the inputs differ: first in {recomputed.stage} ({recomputed.quantity})"
    apart = next((one for one in result.quantities if {one.recorded, one.recomputed} == {True, False}), None)
    if apart:
        pair = ("recorded", "recomputed") if apart.recorded else ("recomputed", "recorded")
        yield f"{apart.quantity} agrees as {pair[0]} and differs as {pair[1]}: one of the two does not compute what its"
        yield "  settings say; check each alone"
    if result.ok:
        yield "no quantity that is in both differs"
    if result.settings:
        yield f"settings that differ: {listed([setting.name for setting in result.settings], 12)}"


def _detail(one: Compared) -> str:
    if one.agrees or math.isnan(one.left):
        return ""
    count = f", {one.tokens} of {one.of} tokens" if one.of else ""
    return f"{one.left:.7g}, {one.right:.7g}{count}"
