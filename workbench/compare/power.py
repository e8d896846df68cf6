"""Two arms of runs that share their random numbers: a verdict on their curves, and the effect that it could have seen.

Runs of one seed in two arms draw the same problems and the same uniform numbers for every token, so what the draws do
to both cancels in the difference of their summaries. The test is by flips of signs: if nothing differs between the
arms, a difference is as likely to be d as -d, so no more than `level` of all pairs of arms are accused wrongly, for
any distribution of the differences (Fisher, The Design of Experiments, 1935, section 21). Its interval is exact too:
the means of all non-empty subsets of the differences part the line into pieces that are equally likely to have their
centre (Hartigan, Using subsample values as typical values, JASA 64, 1969).

Letters: S seeds | K steps | A subsets of the seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import torch
from torch import Tensor

from workbench.errors import SpecError

LEVEL, POWER = 0.01, 0.8
"""Share of false accusations under the null, and of true effects that are seen: 1 % as a wrong "different" stops a
project, 80 % as is usual (Cohen, Statistical Power Analysis, 1988)."""
EXACT = 14
"""Seeds up to which all 2**S subsets are taken, and above which 2**14 random ones are."""
SIMULATED, DRAWS = 12, 2000
"""Seeds up to which power is simulated, in so many draws of normal differences: the flips of fewer seeds are coarser
than the formula of t tests knows (1.92 deviations and not 1.58 with 8 seeds); with 12 the two are 2 % apart."""
EQUAL, DIFFERENT, VACUOUS, UNDECIDED = "equal", "different", "vacuous", "not told apart"

Summary = Callable[[Sequence[float]], float]


def last_quarter(curve: Sequence[float]) -> float:
    """Return the mean of the last quarter of a curve, at least of its last step.

    Example:
        >>> last_quarter([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 3.0])
        2.0
    """
    return statistics.fmean(curve[-max(1, len(curve) // 4) :])


@dataclass(frozen=True)
class ArmComparison:
    """The second arm of runs against the first, with what this number of seeds could have seen.

    Attributes:
        seeds: pairs of runs with one seed.
        difference: mean of second - first, in the unit of the summary; ``low`` to ``high`` is its interval, which
            misses the truth in `level` of all comparisons; infinite with fewer seeds than `least_seeds`.
        p_value: of a difference as large where the arms differ in nothing; flips of signs, two-sided.
        deviation: of a paired difference (n - 1), and ``unpaired_deviation`` of one between runs of unlike seeds.
        level: share of false accusations; ``power``: share of effects of the size of `smallest_effect` that are seen.
    """

    seeds: int
    difference: float
    low: float
    high: float
    p_value: float
    deviation: float
    unpaired_deviation: float
    level: float = LEVEL
    power: float = POWER

    @property
    def verdict(self) -> str:
        """Vacuous with too few seeds for any accusation; equal if no run differs; different; or not told apart."""
        if self.seeds < least_seeds(self.level):
            return VACUOUS
        if self.difference == self.deviation == 0:
            return EQUAL
        return DIFFERENT if self.p_value <= self.level else UNDECIDED

    @property
    def smallest_effect(self) -> float:
        """The smallest difference that this number of paired seeds sees with `power`; infinite if none."""
        return _times(self.deviation, smallest_effect(self.seeds, self.level, self.power))

    @property
    def smallest_effect_unpaired(self) -> float:
        """As `smallest_effect`, of two arms with as many runs of unlike seeds each."""
        return _times(self.unpaired_deviation, smallest_effect_unpaired(self.seeds, self.level, self.power))

    @property
    def fewer(self) -> float:
        """Variance of an unpaired difference over that of a paired one: many seeds are so many times fewer."""
        if self.deviation == 0:
            return math.inf if self.unpaired_deviation else math.nan
        return (self.unpaired_deviation / self.deviation) ** 2

    def seeds_for(self, effect: float, *, paired: bool = True) -> int:
        """Return the seeds of each arm with which an effect is seen with `power`.

        Args:
            effect: a difference of summaries, in their unit, not 0.
            paired: False for arms with unlike seeds.
        """
        deviation, needed = (
            (self.deviation, seeds_needed) if paired else (self.unpaired_deviation, seeds_needed_unpaired)
        )
        return needed(math.inf if deviation == 0 else abs(effect) / deviation, self.level, self.power)

    def __str__(self) -> str:
        """Return the verdict, with what it could have seen, as a sentence."""
        least, shared = least_seeds(self.level), f"{self.seeds} shared seed{'s' * (self.seeds != 1)}"
        if self.verdict == VACUOUS:
            return f"{VACUOUS}: {shared}; an accusation that is wrong in {self.level:.0%} of cases needs {least}"
        if self.verdict == EQUAL:
            return f"{EQUAL}: {shared}, and no pair of runs differs"
        saved = ""
        if math.isfinite(self.fewer):
            effect = self.smallest_effect
            saved = f"; without sharing, {self.seeds_for(effect, paired=False)} seeds an arm would be needed for that"
        return (
            f"{self.verdict}: {self.difference:+.3g} [{self.low:.3g}, {self.high:.3g}], p = {self.p_value:.2g}, "
            f"{shared}, which see {self.smallest_effect:.2g} with {self.power:.0%}{saved}"
        )


def compare_arms(
    first_SK: Sequence[Sequence[float]],
    second_SK: Sequence[Sequence[float]],
    *,
    summary: Summary = last_quarter,
    level: float = LEVEL,
    power: float = POWER,
) -> ArmComparison:
    """Compare the curves of two arms, of which equal rows share a seed.

    Args:
        first_SK: values of each run of the baseline by step.
        second_SK: those of the other arm.
        summary: of one run's curve, such as `last_quarter`.
        level: share of false accusations, between 0 and 1.
        power: share of effects that are to be seen.

    Raises:
        SpecError: arms of unlike or no seeds, a summary that is not finite, or a share outside 0 to 1.

    Example:
        >>> arms = compare_arms([[0.0], [1.0], [2.0]], [[0.5], [1.5], [2.4]])
        >>> arms.verdict, arms.difference
        ('vacuous', 0.4666666666666666)
    """
    if len(first_SK) != len(second_SK) or not len(first_SK):
        raise SpecError(
            "a comparison of two arms by seed",
            found=f"{len(first_SK)} and {len(second_SK)} runs",
            rule="each seed has one run in either arm",
            fix="give both arms the same seeds, in the same order",
        )
    for name, share in (("level", level), ("power", power)):
        if not 0 < share < 1:
            raise SpecError(f"{name} = {share!r}", rule="a share between 0 and 1", fix="0.01 is 1 %")
    ends = [[float(summary(curve)) for curve in arm] for arm in (first_SK, second_SK)]
    for arm, values in zip(("first", "second"), ends, strict=True):
        if lost := [number for number, value in enumerate(values) if not math.isfinite(value)]:
            raise SpecError(
                "a comparison of two arms by seed",
                found=f"runs {lost} of the {arm} arm have a summary that is not finite",
                rule="means exist of finite values only",
                fix="compare what all runs have, such as a summary of earlier steps, or the share of runs that diverge",
            )
    differences = [b - a for a, b in zip(*ends, strict=True)]
    low, high, p_value = sign_flips(differences, level)
    return ArmComparison(
        len(differences),
        statistics.fmean(differences),
        low,
        high,
        p_value,
        _deviation(differences),
        math.hypot(*map(_deviation, ends)),
        level,
        power,
    )


def sign_flips(differences: Sequence[float], level: float = LEVEL) -> tuple[float, float, float]:
    """Return the interval of the centre of differences, and the two-sided p-value of 0, by flips of signs.

    A flip of the subset A takes twice its sum from the whole: it gives no less than the whole if its mean is at most 0.
    So p counts subsets with a mean on the other side of 0, the identity among them, and the interval ends at the means
    of rank level / 2.
    """
    values_S = torch.tensor(list(differences), dtype=torch.float64)
    members_AS = _subsets(len(values_S))
    sums_A = members_AS @ values_S
    tie = 1e-12 * float(values_S.abs().sum())  # sums of few values are exact to 1e-15
    below, above = (1 + int((sign * sums_A <= tie).sum()) for sign in (1, -1))
    total = 1 + len(sums_A)
    means_A = (sums_A / members_AS.sum(1)).sort().values
    rank = math.floor(level / 2 * total + 1e-9)
    ends = (float(means_A[rank - 1]), float(means_A[-rank])) if rank else (-math.inf, math.inf)
    return *ends, min(1.0, 2 * min(below, above) / total)


def least_seeds(level: float = LEVEL) -> int:
    """Return the fewest pairs with which any accusation is possible: 2 / 2**S is the smallest p-value.

    Example:
        >>> least_seeds(0.01), least_seeds(0.05)
        (8, 6)
    """
    return math.ceil(math.log2(2 / level) - 1e-12)


@lru_cache(maxsize=256)
def smallest_effect(seeds: int, level: float = LEVEL, power: float = POWER) -> float:
    """Return the smallest mean of paired differences that is seen, in their deviations; infinite with too few seeds.

    Up to `SIMULATED` seeds it is the quantile, over draws of normal differences, of the shift that just brings their
    interval above 0; above, the formula of Guenther (Sample size formulas for normal theory t tests, The American
    Statistician 35, 1981), whose test has the same power then.
    """
    if seeds < least_seeds(level):
        return math.inf
    if seeds > SIMULATED:
        upper, reached = _quantiles(level, power)
        return (upper + reached) / math.sqrt(seeds - upper**2 / 2)
    generator = torch.Generator().manual_seed(seeds)
    draws_SD = torch.randn(seeds, DRAWS, generator=generator, dtype=torch.float64)
    members_AS = _subsets(seeds)
    rank = math.floor(level / 2 * (1 + len(members_AS)) + 1e-9)
    means = [members_AS @ part / members_AS.sum(1, keepdim=True) for part in draws_SD.split(500, dim=1)]
    needed_D = torch.cat([-part.kthvalue(rank, dim=0).values for part in means])
    return float(needed_D.quantile(power))


def smallest_effect_unpaired(seeds: int, level: float = LEVEL, power: float = POWER) -> float:
    """Return the smallest difference of two arms of unlike seeds that a t test sees, in deviations of a difference."""
    upper, reached = _quantiles(level, power)
    rest = seeds - upper**2 / 4
    return (upper + reached) / math.sqrt(rest) if rest > 0 else math.inf


def seeds_needed(effect: float, level: float = LEVEL, power: float = POWER) -> int:
    """Return the paired seeds that see an effect, which is in deviations of a paired difference.

    Example:
        >>> seeds_needed(1.0), seeds_needed(0.5)
        (15, 51)
    """
    _positive(effect)
    upper, reached = _quantiles(level, power)
    formula = max(least_seeds(level), _ceil(((upper + reached) / effect) ** 2 + upper**2 / 2))
    simulated = range(formula, SIMULATED + 1)  # flips of few seeds need as many as a t test, or more
    enough = (seeds for seeds in simulated if smallest_effect(seeds, level, power) <= effect)
    return next(enough, max(formula, SIMULATED + 1))


def seeds_needed_unpaired(effect: float, level: float = LEVEL, power: float = POWER) -> int:
    """Return the seeds of each arm that see an effect, which is in deviations of a difference of unlike seeds."""
    _positive(effect)
    upper, reached = _quantiles(level, power)
    return max(2, _ceil(((upper + reached) / effect) ** 2 + upper**2 / 4))


# ---- parts -----------------------------------------------------------------------------------------------


def _positive(effect: float) -> None:
    if not effect > 0:
        raise SpecError(
            f"seeds for an effect of {effect!r} deviations", rule="an effect above 0", fix="no number of seeds sees 0"
        )


def _quantiles(level: float, power: float) -> tuple[float, float]:
    """Quantiles of the normal distribution: of the two-sided level, and of the power."""
    return NormalDist().inv_cdf(1 - level / 2), NormalDist().inv_cdf(power)


def _ceil(value: float) -> int:
    return math.ceil(value - 1e-9)


def _times(deviation: float, effect: float) -> float:
    """A product in which no deviation times no visible effect stays invisible."""
    return math.inf if math.isinf(effect) else deviation * effect


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan


@lru_cache(maxsize=8)
def _subsets(seeds: int) -> Tensor:
    """Non-empty subsets of seeds, a row of 0 and 1 each: all of them up to `EXACT` seeds, else random ones."""
    if seeds <= EXACT:
        numbers_A = torch.arange(1, 2**seeds).unsqueeze(1)
        return ((numbers_A >> torch.arange(seeds)) & 1).double()
    generator = torch.Generator().manual_seed(seeds)
    members_AS = torch.randint(0, 2, (2**EXACT, seeds), generator=generator).double()
    return members_AS[members_AS.sum(1) > 0]
