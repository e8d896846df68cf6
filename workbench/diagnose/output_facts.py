"""Facts about what models gave and what flowed back into them, as recorders saw it (`workbench.records.outputs`).

From logits and their gradients a recorder knows, without a note, which predictions train, their targets, weights and
temperature, by row. Rows of two records are matched by their targets, so that another order is none; where those
differ, by their places in runs that call the model alike.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from workbench.diagnose.output_rows import Row, alike, differ, grouped, one_side_lost, ratio_of, scaled, spread
from workbench.diagnose.record import RecordedStep
from workbench.records.inputs import mixed

WEIGHT = 1e-3
"""Relative distance of weights of a row that are one, from sums of float32 gradients of logits."""
OF_NOISE = 5
"""Weights are right to a fifth of the tolerance of gradients: logits carry the rounding of one forward pass alone, and
a row's weight is a mean over its predictions."""
LIKELIHOODS = 0.9
"""Share of predictions with the gradient of a likelihood, above which targets and weights are those of tokens."""
SLOPE = 0.02
"""Relative distance of two temperatures: those in use differ by more; a bonus or penalty moves the slope by less."""
FEW = 0.2
"""Share of the rows whose targets may not be clear, as they are where weights are nearly 0."""
PLACES = 2**13
"""Places and vocabulary ids among which a single one that was lost is looked for."""
BONUS = 0.05
"""Relative distance of two coefficients of an entropy: least squares find them from gradients that bfloat16 rounds, and
those in use differ by more."""


@dataclass(frozen=True)
class OutputFacts:
    """Outputs of one step of both records, which have them.

    Args:
        tolerance: relative, of gradients of the step.
        nats: of a log-probability.
    """

    trusted: Mapping[str, Any]
    suspect: Mapping[str, Any]
    tolerance: float
    nats: float

    @classmethod
    def of(cls, pair: tuple[RecordedStep, RecordedStep], tolerance: float, nats: float) -> OutputFacts | None:
        """Those of a step; None if one recorder has not seen any, or only a sample of other predictions."""
        one, other = (step.observed.get("outputs") for step in pair)
        if not one or not other or one["every"] != other["every"] or not any(one["rows"]) or not any(other["rows"]):
            return None
        return cls(one, other, tolerance, nats)

    @property
    def _both(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        return self.trusted, self.suspect

    @cached_property
    def rows(self) -> tuple[list[Row], list[Row]]:
        """The rows of each."""
        one, other = (
            [Row(at, *row) for at, call in enumerate(seen["rows"]) for row in call]
            for seen in (self.trusted, self.suspect)
        )
        return one, other

    @property
    def bar(self) -> float:
        """Relative distance of weights within which they are one."""
        return max(WEIGHT, self.tolerance / OF_NOISE)

    @property
    def of_tokens(self) -> bool:
        """True if both losses are of likelihoods of tokens, so that targets and weights are what they seem."""
        return all(seen["likelihoods"] >= LIKELIHOODS for seen in (self.trusted, self.suspect))

    @cached_property
    def trained(self) -> tuple[int, int]:
        """Predictions that train."""
        one, other = (sum(row.trained for row in rows) for rows in self.rows)
        return one, other

    @cached_property
    def _keys(self) -> tuple[Counter[tuple[int, str]], Counter[tuple[int, str]]]:
        one, other = (Counter((row.trained, row.targets) for row in rows) for rows in self.rows)
        return one, other

    @cached_property
    def same_targets(self) -> bool:
        """True if the same rows train, by the targets of each, or by places but for few whose targets are not clear.

        A weight of nearly 0 beside a bonus or penalty of the whole distribution leaves another element the largest.
        """
        if self._keys[0] == self._keys[1]:
            return True
        if not self.in_order or any(one.places != two.places for one, two in self.in_order):
            return False
        return self.other_targets <= FEW and any(differ(one, two) or one.unclear for one, two in self.in_order)

    @cached_property
    def same_rows(self) -> list[tuple[Row, Row]]:
        """Rows of both with the same targets, as many as there are."""
        waiting: dict[tuple[int, str], list[Row]] = defaultdict(list)
        for row in self.rows[1]:
            waiting[row.trained, row.targets].append(row)
        found = [(row, waiting[row.trained, row.targets]) for row in self.rows[0]]
        return [(row, others.pop(0)) for row, others in found if others]

    @cached_property
    def in_order(self) -> list[tuple[Row, Row]] | None:
        """Rows of both by their places, if the model is called alike; else None."""
        one, other = self.rows
        alike = [row.call for row in one] == [row.call for row in other]
        return list(zip(one, other, strict=True)) if alike else None

    @cached_property
    def pairs(self) -> list[tuple[Row, Row]] | None:
        """Rows of both; None if they cannot be matched."""
        return self.same_rows if self._keys[0] == self._keys[1] else self.in_order

    # ---- which predictions, and their targets --------------------------------------------------------------

    @property
    def rows_lost(self) -> tuple[int, int] | None:
        """Rows and calls of the trusted run of which nothing trains in the suspect, if all others are the same."""
        (one, other) = self._keys
        gone, new = one - other, other - one
        if new or not gone:
            return None
        calls = [{(row.trained, row.targets) for row in self.rows[0] if row.call == at} for at in self._calls(0)]
        return sum(gone.values()), sum(call <= set(gone) for call in calls)

    @property
    def one_side_lost(self) -> bool:
        """True if the rows that are lost are all those of one sign, of several of each."""
        return one_side_lost(*self.rows)

    @property
    def in_common(self) -> float:
        """Share of the trusted rows that train on the same targets in the suspect."""
        return len(self.same_rows) / len(self.rows[0])

    @property
    def rows_added(self) -> int:
        """Rows that train in the suspect alone, if all of the trusted run do."""
        one, other = self._keys
        return sum((other - one).values()) if not one - other else 0

    @property
    def other_targets(self) -> float:
        """Share of other targets among the rows that train at the same places; 0 if unknown, or of few of them."""
        same = [pair for pair in self.in_order or () if pair[0].places == pair[1].places]
        if not self.of_tokens or 2 * len(same) < len(self.in_order or ()) or not same:
            return 0.0
        return sum(differ(one, two) for one, two in same) / len(same)

    @property
    def moved(self) -> bool:
        """True if rows train as many predictions each as before, and most of them at other places."""
        pairs = self.in_order or []
        off = sum(one.places != two.places for one, two in pairs)
        return bool(pairs) and all(one.trained == two.trained for one, two in pairs) and 2 * off > len(pairs)

    @property
    def shifted(self) -> tuple[int, int] | None:
        """Tokens by which most targets lie behind their predictions, if that is known of both and differs."""
        far: list[int] = []
        for seen in (self.trusted, self.suspect):
            clear, *at = seen.get("after") or (0,)
            if not clear or 2 * max(at) <= clear:
                return None
            far.append(at.index(max(at)))
        return (far[0], far[1]) if far[0] != far[1] else None

    @property
    def next_ids(self) -> bool:
        """True if nearly all targets of the suspect are known to be the next ids, as those of the trusted run are."""
        both = [seen.get("after") or (0, 0, 0, 0) for seen in (self.trusted, self.suspect)]
        return all(clear and at[1] >= LIKELIHOODS * clear for clear, *at in both)

    @property
    def only_unclear(self) -> bool:
        """True if rows train other numbers of predictions, and as many in each whose targets are clear."""
        clear = [[(row.call, row.clear) for row in rows if row.clear] for rows in self.rows]
        return self.trained[0] != self.trained[1] and clear[0] == clear[1] and bool(clear[0])

    @cached_property
    def lost_one_each(self) -> bool:
        """True if every row, of several, lost one place, and its targets one target."""
        pairs = self.in_order or []
        if len(pairs) < 2 or any(one.trained - two.trained != 1 for one, two in pairs):
            return False
        single = frozenset(value % 2**64 for value in mixed(torch.arange(PLACES)).tolist())
        return all(
            (int(before, 16) - int(after, 16)) % 2**64 in single
            for one, two in pairs
            for before, after in ((one.places, two.places), (one.targets, two.targets))
        )

    # ---- forward ---------------------------------------------------------------------------------------------

    @cached_property
    def forward_apart(self) -> tuple[float, float] | None:
        """Mean and largest distance, over rows, of the mean log-probability and entropy of a row, in nats.

        None if the same targets are not known to train.
        """
        if not self.same_targets or not self.pairs:
            return None
        apart = [
            max(0.0 if one.targets != two.targets else abs(one.logprob - two.logprob), abs(one.entropy - two.entropy))
            / one.trained
            for one, two in self.pairs
        ]
        return sum(apart) / len(apart), max(apart)

    @property
    def forward_same(self) -> bool | None:
        """True if logits are the same within rounding; None if unknown."""
        return None if self.forward_apart is None else self.forward_apart[1] <= self.nats

    @property
    def scatters(self) -> bool:
        """True if entropies of rows move in both directions, as rounding moves them, not one way."""
        moved = [(two.entropy - one.entropy) / one.trained for one, two in self.pairs or ()]
        mean, size = sum(moved) / len(moved), math.sqrt(sum(each**2 for each in moved) / len(moved))
        return abs(mean) <= 2 * size / math.sqrt(len(moved))

    @property
    def temperatures(self) -> tuple[float, float] | None:
        """Temperatures of the two losses, over that of the logits; None if one is not known, or they agree."""
        slopes = (self.trusted["slope"], self.suspect["slope"])
        if not self.of_tokens or None in slopes or min(slopes) <= 0 or abs(slopes[1] / slopes[0] - 1) <= SLOPE:
            return None
        quartiles = [seen.get("slopes") or (slope, slope) for seen, slope in zip(self._both, slopes, strict=True)]
        turned = any(seen.get("bonus") for seen in self._both)
        if turned or abs(slopes[1] - slopes[0]) <= 2 * sum(high - low for low, high in quartiles):
            return None  # a term next to the likelihood turns the slopes of some predictions, and has no temperature
        return 1 / slopes[0], 1 / slopes[1]

    @property
    def beside(self) -> str:
        """Clause for a coefficient of a term next to the likelihood that differs; "" if none does, or none shows."""
        for name, term in (("bonus", "an entropy"), ("normaliser", "a squared normaliser")):
            one, other = (float(seen.get(name) or 0.0) for seen in self._both)
            if abs(other - one) > BONUS * max(abs(one), abs(other)):
                return f"{term} next to them {other:.4g}, not {one:.4g}"
        return ""

    # ---- weights ---------------------------------------------------------------------------------------------

    @cached_property
    def ratios(self) -> list[tuple[Row, Row, float]] | None:
        """Matched rows with the ratio of their sums of weights, with its sign; None if other targets train."""
        if self.pairs is None or not self.same_targets:
            return None
        if not self.of_tokens and not all(alike(one, two, self.bar) for one, two in self.pairs):
            return None  # gradients of whole distributions have no weights, but one factor shows in them, too
        return [(one, two, ratio_of(one, two)) for one, two in self.pairs if one.size > 0]

    @property
    def weights_same(self) -> bool | None:
        """True if the weights of all rows are the same, and those within them; None if unknown."""
        if self.ratios is None:
            return None
        return all(abs(ratio - 1) <= self.bar and alike(one, two, self.bar) for one, two, ratio in self.ratios)

    @property
    def within_rows(self) -> float:
        """Share of the rows whose weights differ by more than a factor of the row."""
        off = [not alike(one, two, self.bar) for one, two, _ in self.ratios or ()]
        return sum(off) / len(off) if off else 0.0

    @property
    def opposed(self) -> bool:
        """True if the trusted run's rows are pairs of one weight with opposite signs, as a preference's are."""
        rows = self.rows[0]
        sides = [
            sorted(row.size / row.trained for row in rows if row.uniform and sign == (row.weight > 0))
            for sign in (True, False)
        ]
        return len(rows) == 2 * len(sides[0]) == 2 * len(sides[1]) and all(
            abs(one - two) <= self.bar * one for one, two in zip(*sides, strict=True)
        )

    @property
    def turned(self) -> float:
        """Share of the trained predictions whose weights have another sign, at least; 0 if unknown."""
        if not self.ratios:
            return 0.0
        return sum(abs(one.positive - two.positive) for one, two, _ in self.ratios) / max(self.trained[0], 1)

    @property
    def common(self) -> float | None:
        """The factor of all rows; None if they have none."""
        ratios = [ratio for _, _, ratio in self.ratios or ()]
        if not ratios:
            return None
        middle = sorted(ratios)[len(ratios) // 2]
        return middle if middle and all(abs(ratio / middle - 1) <= self.bar for ratio in ratios) else None

    @property
    def factor_of_row(self) -> bool:
        """True if rows have factors of their own, and all weights of a row the same."""
        return bool(self.ratios) and self.within_rows == 0 and self.common is None

    def follows(self, kind: str, *, of_rows: bool = False) -> bool:
        """True if factors of rows are one over a count of the predictions, or rows, of each "row", "call", or "rank".

        Formula: r n is one number over pieces, r one number within each. Calls of a rank have one r in common. Of
        "length" r / n is one number in each call: sums in place of means.
        """
        if not self.factor_of_row or any(ratio <= 0 for _, _, ratio in self.ratios or ()):
            return False
        if of_rows and kind == "row":
            return False
        pieces: dict[Any, list[tuple[int, float]]] = defaultdict(list)
        for at, (one, _, ratio) in enumerate(self.ratios or ()):
            pieces[one.call if kind != "row" else at].append((one.trained, ratio))
        if kind == "length":
            several = [each for each in pieces.values() if len({n for n, _ in each}) > 1]
            return bool(several) and all(spread([ratio / n for n, ratio in each]) <= 4 * self.bar for each in several)
        if any(spread([ratio for _, ratio in each]) > 2 * self.bar for each in pieces.values()):
            return False
        sizes_and_ratios = [(len(each) if of_rows else sum(n for n, _ in each), each[0][1]) for each in pieces.values()]
        if kind == "rank":
            sizes_and_ratios = grouped(sizes_and_ratios, self.bar)
            if len(sizes_and_ratios) >= len(pieces):
                return False
        products = [n * ratio for n, ratio in sizes_and_ratios]
        return len({n for n, _ in sizes_and_ratios}) > 1 and spread(products) <= 4 * self.bar

    def sums_means(self, *, of_rows: bool) -> bool:
        """True if calls of n predictions, or rows, weigh N / n, with N those of the step: means that are added."""
        sizes: dict[int, int] = defaultdict(int)
        for one, _, _ in self.ratios or ():
            sizes[one.call] += 1 if of_rows else one.trained
        total = sum(sizes.values())
        return all(abs(ratio * sizes[one.call] / total - 1) <= 4 * self.bar for one, _, ratio in self.ratios or ())

    @property
    def roughly_per_length(self) -> bool:
        """True if factors of rows are about one over their lengths: they vary by half as much times these."""
        ratios = [(one.trained, ratio) for one, _, ratio in self.ratios or () if ratio > 0]
        return len(ratios) > 2 and spread([n * r for n, r in ratios]) < spread([r for _, r in ratios]) / 2

    @property
    def of_calls(self) -> bool:
        """True if calls have factors of their own, next to which those of the rows of a call are one."""
        if not self.ratios or self.common is not None:
            return False
        calls: dict[int, list[float]] = defaultdict(list)
        for one, _, ratio in self.ratios:
            calls[one.call].append(abs(ratio))
        several = [each for each in calls.values() if len(each) > 1]
        middles = [sum(each) / len(each) for each in calls.values()]
        return bool(several) and len(calls) > 1 and max(map(spread, several)) <= spread(middles) / 10

    @property
    def rows_shifted(self) -> float:
        """Share of the rows that differ, and have several predictions, to each of whose weights one number is added.

        Formula: sum (w + d)^2 = sum w^2 + 2 d sum w + n d^2, with d the mean difference of the row.
        """
        fits = []
        for one, two, _ in self.ratios or ():
            d = (two.weight - one.weight) / one.trained
            if one.trained < 2 or abs(two.square - one.square) <= self.bar * one.square:
                continue
            expected = one.square + 2 * d * one.weight + one.trained * d * d
            fits.append(abs(two.square - expected) <= 2 * self.bar * two.square)
        return sum(fits) / len(fits) if fits else 0.0

    @property
    def uniform(self) -> tuple[bool, bool]:
        """True, for each run, if all weights of every row are one."""
        one, other = (all(row.uniform for row in rows if row.size) for rows in self.rows)
        return one, other

    @property
    def values(self) -> tuple[bool, bool] | None:
        """True if the numbers of a critic, and their gradients, are the same; None if there is none."""
        one, other = (seen.get("values") for seen in (self.trusted, self.suspect))
        if not one or not other:
            return None
        same = [abs(a - b) <= self.bar * max(abs(a), abs(b), scale) for a, b, scale in scaled(one, other)]
        return all(same[:2]), all(same[2:])

    def _calls(self, side: int) -> Sequence[int]:
        return sorted({row.call for row in self.rows[side]})
