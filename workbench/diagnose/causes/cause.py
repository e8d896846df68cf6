"""A possible cause of a difference, as data: a name, a description, preconditions, and a score from the facts.

Each cause follows from mathematics, not from a list of observed bugs: the effect of such a mistake on the loss, on
every parameter's gradient, on each token and over time. A score is between 0 and 1: near 1, the facts leave little
else; 0.5, they fit, and fit others; below 0.1 it is not reported. Values that were not recorded make a cause neither
more nor less likely.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workbench.diagnose.facts import Facts

Judged = tuple[float, list[str]]
"""A score, and the reasons for it."""
Judge = Callable[[Facts], Judged]
NOT: Judged = (0.0, [])


@dataclass(frozen=True)
class Cause:
    """A possible cause of a difference.

    Attributes:
        name: one to three words, joined by underscores.
        judge: score of the cause, from the facts.
        needs: sizes that must exceed 1 (or values that must differ from the default) for it to act at all: axes,
            "micro_batches", "temperature", ...
        uses: parts of a record that it reads.
    """

    name: str
    description: str
    judge: Judge
    needs: frozenset[str]
    uses: tuple[str, ...]


class Family(list[Cause]):
    """Causes in the order of their declaration, in which equal scores are ranked.

    Args:
        uses: parts of a record that a cause reads if it states no other.
    """

    def __init__(self, *uses: str) -> None:
        super().__init__()
        self.uses = uses

    def add(self, name: str, description: str, judge: Judge, *needs: str, uses: tuple[str, ...] | None = None) -> None:
        """Declare a cause; see `Cause`."""
        self.append(Cause(name, description, judge, frozenset(needs), self.uses if uses is None else uses))

    def cause(self, description: str, *needs: str, uses: tuple[str, ...] | None = None) -> Callable[[Judge], Judge]:
        """Decorate the function that judges a cause and has its name, after an underscore; see `Cause`."""

        def declare(judge: Judge) -> Judge:
            self.add(judge.__name__.removeprefix("_"), description, judge, *needs, uses=uses)
            return judge

        return declare


def likeliest(*judged: Judged) -> Judged:
    """The first of the highest score."""
    return max(judged, key=lambda each: each[0])
