"""The result: the gap, its causes and their parts, the rest against the floor, and what the record cannot decide.

Letters: T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.columns import columns
from workbench.mismatch.alarm import Alarm
from workbench.mismatch.floor import Floor

Verdict = Literal["at the floor", "explained", "unexplained", "unsound"]
SEEDED = "A floor on seeded weights does not transfer to a trained model: measure it on the weights that are in use."


@dataclass(frozen=True)
class Part:
    """Effect of one factor on the gap when it is switched alone.

    Attributes:
        factor: its name.
        description: of the switch, from the trainer's value to the sampler's.
        side: "trainer" or "sampler": whose record it was found in, or whose settings state it.
        stated: True if the settings say so; False if it was found.
        mean, mean_distance, largest: nats, over counted tokens.
        documents: in which it acts; None: all.
        rivals: descriptions of other switches that would do as well.
        record: what to record to decide between them.
    """

    factor: str
    description: str
    side: Literal["trainer", "sampler"]
    stated: bool
    mean: float
    mean_distance: float
    largest: float
    documents: int | None = None
    rivals: tuple[str, ...] = ()
    record: str = ""


@dataclass(frozen=True)
class Attribution:
    """Origin of the gap between trainer and sampler.

    Attributes:
        verdict: "at the floor": no cause, and no alarm. "explained": causes were found or are stated, and the rest is
            at the floor. "unexplained": an alarm is raised by the rest. "unsound": nothing could be compared.
        gap: statistics of the recorded gap, trainer minus sampler, in nats.
        parts: causes that were found first, the largest first; then differences that the settings state.
        interactions: mean distance of what the parts together do beyond the sum of each alone, nats.
        rest: statistics of what no part explains, nats.
        floor: figures of the floor, nats.
        alarms: statistic of the rest -> multiple of its threshold, of those that raised an alarm.
        undecided: what this record cannot decide, a sentence each.
        evidence: what was there to compare.
        columns: [T] tensors by name ("gap", "rest", "explained", one for each factor); no part of the JSON form.
    """

    verdict: Verdict
    gap: Mapping[str, float]
    parts: tuple[Part, ...]
    interactions: float
    rest: Mapping[str, float]
    floor: Mapping[str, Any]
    alarms: Mapping[str, float]
    undecided: tuple[str, ...]
    evidence: str
    columns: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)
    noise: Floor | None = field(default=None, repr=False, compare=False)
    alarm: Alarm | None = field(default=None, repr=False, compare=False)

    @property
    def causes(self) -> tuple[Part, ...]:
        """Parts that no setting states, the largest first."""
        return tuple(part for part in self.parts if not part.stated)

    @property
    def ok(self) -> bool:
        """True if no cause was found that the settings do not state, and the rest is at the floor."""
        return self.verdict in ("at the floor", "explained") and not self.causes

    @property
    def safe(self) -> Mapping[str, float]:
        """Largest statistics of a gap that rounding alone explains here: this model, precision and length; nats."""
        return {} if self.alarm is None else dict(self.alarm.thresholds)

    def as_json(self) -> dict[str, Any]:
        """Return the attribution as JSON data."""
        return {
            "verdict": self.verdict,
            "ok": self.ok,
            "gap": dict(self.gap),
            "parts": [dict(vars(part)) | {"rivals": list(part.rivals)} for part in self.parts],
            "interactions": self.interactions,
            "rest": dict(self.rest),
            "floor": dict(self.floor),
            "safe": dict(self.safe),
            "alarms": dict(self.alarms),
            "undecided": list(self.undecided),
            "evidence": self.evidence,
        }

    def __str__(self) -> str:
        lines = [f"{self.verdict}: gap of {self.gap['mean_distance']:.3g} nats a token", f"  {self.evidence}", ""]
        rows = [
            (
                part.factor,
                "stated" if part.stated else f"FOUND ({part.side})",
                f"{part.mean_distance:.3g}",
                f"{part.mean:+.3g}",
                part.description + ("" if part.documents is None else f", in {part.documents} documents"),
            )
            for part in self.parts
        ]
        rows.append(("interactions", "", f"{self.interactions:.3g}", "", "together, beyond the sum of each alone"))
        rows.append(("rest", "", f"{self.rest['mean_distance']:.3g}", f"{self.rest['mean']:+.3g}", self._rest()))
        lines += columns(rows, ("part", "", "mean |nats|", "mean", "switched alone"), width=118)
        for part in self.parts:
            if part.rivals:
                lines += ["", f"{part.factor}: cannot be told from {' or '.join(part.rivals)}; record {part.record}"]
        lines += [
            "",
            f"floor: {self.floor['mean']:.3g} nats a token in the mean, {self.floor['p99']:.3g} for 99 of 100",
        ]
        if self.safe:
            safe = ", ".join(f"{name} {value:.3g}" for name, value in self.safe.items())
            lines.append(f"  safe for this model, precision and length: {safe}")
        lines.append(f"  {SEEDED}")
        if self.undecided:
            lines += ["", "this record cannot decide:", *(f"  - {sentence}" for sentence in self.undecided)]
        return "\n".join(lines)

    def _rest(self) -> str:
        if self.alarms:
            most = max(self.alarms, key=lambda name: self.alarms[name])
            return f"{self.alarms[most]:.3g} times the threshold of {most!r}"
        return "at most the floor"


def summary(values_T: Tensor) -> dict[str, float]:
    """Mean, mean distance from 0, root mean square and largest distance of the values that are numbers."""
    own = values_T[values_T.isfinite()]
    if not len(own):
        return {"mean": 0.0, "mean_distance": 0.0, "rms": 0.0, "largest": 0.0, "tokens": 0}
    return {
        "mean": float(own.mean()),
        "mean_distance": float(own.abs().mean()),
        "rms": float(own.square().mean().sqrt()),
        "largest": float(own.abs().max()),
        "tokens": int(torch.tensor(len(own))),
    }
