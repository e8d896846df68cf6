"""Denominators of a loss: every known way to divide it, tried on the per-token values, and names for factors.

A step's loss is a sum of per-token values over a count. If a record has the values and the place of each token, each
wrong count predicts a loss, and one that predicts the recorded loss to rounding is hardly an accident. A wrong count of
the whole step also shows as a factor of the gradient.

Letters: S tokens of the source batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.diagnose.record import RecordedStep, whole

PIECES = {
    "documents": "document",
    "ranks": "data-parallel rank",
    "rows": "micro-batch",
    "shards": "context-parallel rank",
    "row shards": "rank's part of a micro-batch",
}
"""Kinds of pieces that a step is divided into, with the singular."""
NEEDS = {
    "documents": frozenset({"documents"}),
    "rows": frozenset({"dp * micro_batches"}),
    "ranks": frozenset({"dp"}),
    "shards": frozenset({"cp"}),
    "row shards": frozenset({"cp"}),
}
"""Sizes that must exceed 1 for pieces of a kind to differ from the whole."""
MOST_DEALS = 40
"""Ways of dealing micro-batches to ranks: one of more of them would give a loss by chance, at a relative 2e-5."""
AXES = ("cp", "dp", "tp", "micro_batches", "accumulation")


class Way(NamedTuple):
    """One way to divide a loss.

    Attributes:
        kind: the pieces within which it counts; "" for a count of the whole step.
    """

    kind: str
    description: str
    loss: float


def ways(step: RecordedStep, context: Mapping[str, Any], *, exact: bool = False) -> list[Way]:
    """The loss of a step under each way of dividing its per-token values; [] if the record does not have them.

    See `Divisions`, for ``exact`` too.
    """
    tokens = whole(step.tokens)
    if not {"losses", "trained"} <= set(tokens):
        return []
    divisions = Divisions(step, context, exact=exact)
    losses = divisions.losses(tokens["losses"].double()[None])[0]
    return [divisions.way(at, loss) for at, loss in enumerate(losses.tolist())]


class Divisions:
    """Every way of dividing per-token values of a step, which are linear in the values.

    Formula: with s_p, n_p and a_p the sum, the count of trained and of all tokens of piece p of P: sum s / sum n;
             sum_p (s_p / n_p) and 1 / P of it; sum s over other counts. If exact, where losses are known so precisely
             that one of many ways does not match by chance: sum_p (s_p / n_p), sum_p (s_p / a_p) and sum_p s_p n_p
             over 1, P, P with empty pieces, sum n, documents, and each axis.

    Letters: F vectors of values, W ways.
    """

    def __init__(self, step: RecordedStep, context: Mapping[str, Any], *, exact: bool = False) -> None:
        tokens = whole(step.tokens)
        self._trained = tokens["trained"].bool()
        count = max(int(self._trained.sum()), 1)
        self._weights = [torch.ones(int(self._trained.sum()), dtype=torch.float64)]
        self._entries: list[tuple[str, str, int, float]] = [
            ("", "all trained tokens of the step", 0, float(count)),
            ("", "nothing", 0, 1.0),
        ]
        self._entries += [("", label, 0, other) for label, other in _other_counts(step.counts, count).items()]
        for kind, piece in pieces(tokens, context).items():
            self._add(kind, piece, _divisors(step.counts, context, kind, _number(piece[self._trained]), count), exact)
        for piece in deals(tokens, context):
            self._add("ranks", piece, {"averaged": float(context["dp"])}, exact=False)

    def _add(self, kind: str, piece: Tensor, divisors: Mapping[str, float], exact: bool) -> None:
        _, place = torch.unique(piece[self._trained], return_inverse=True)
        one, counts = PIECES[kind], torch.bincount(place).double()
        weights = {f"the mean over each {one}'s tokens": 1 / counts}
        if exact:
            kinds, everywhere = torch.unique(piece, return_counts=True)
            whole_counts = everywhere[torch.isin(kinds, piece[self._trained])].double()
            weights |= {
                f"each {one}'s sum over all its tokens, prompts too": 1 / whole_counts,
                f"each {one}'s sum times its tokens": counts,
            }
        else:
            divisors = {by: divisors[by] for by in ("averaged", "summed") if by in divisors}
        for label, of_piece in weights.items():
            self._weights.append(of_piece[place])
            at = len(self._weights) - 1
            self._entries += [(kind, f"{label}, {by}", at, other) for by, other in divisors.items()]

    @property
    def descriptions(self) -> list[str]:
        """The ways, each in a clause."""
        return [description for _, description, _, _ in self._entries]

    def losses(self, values: Tensor) -> Tensor:
        """[F, W] losses of values [F, S]."""
        sums = values.double()[:, self._trained] @ torch.stack(self._weights, 1)
        at = torch.tensor([place for _, _, place, _ in self._entries])
        return sums[:, at] / torch.tensor([divisor for _, _, _, divisor in self._entries], dtype=torch.float64)

    def way(self, at: int, loss: float) -> Way:
        """A way by its number, with its loss."""
        kind, description, _, _ = self._entries[at]
        return Way(kind, description, loss)


def _divisors(
    counts: Mapping[str, float], context: Mapping[str, Any], kind: str, pieces: int, trained: int
) -> dict[str, float]:
    """Possible divisors of a sum over pieces."""
    documents, masked = counts.get("documents", 0.0), counts.get("masked_documents", 0.0)
    axes = {name: float(context.get(name) or 1) for name in AXES}
    every = {
        "documents": documents + masked,
        "ranks": axes["dp"],
        "rows": axes["dp"] * axes["micro_batches"],
        "shards": axes["dp"] * axes["cp"],
        "row shards": axes["dp"] * axes["micro_batches"] * axes["cp"],
    }[kind]
    known = {
        "summed": 1.0,
        "averaged": float(pieces),
        "averaged, empty ones too": every,
        "over all trained tokens": float(trained),
        "over the documents": documents,
        "over all documents": documents + masked,
        "over the square of the trained tokens": float(trained) ** 2,
        **{f"over {name}": size for name, size in axes.items() if size > 1},
    }
    return {label: other for label, other in known.items() if other}


def _other_counts(counts: Mapping[str, float], trained: int) -> dict[str, float]:
    masked = counts.get("masked_documents", 0.0)
    known = {
        "all tokens, prompts too": counts.get("all_tokens"),
        "all tokens and padding": counts.get("padded_tokens"),
        "documents": counts.get("documents"),
        "all documents, also those that train nothing": counts.get("documents", 0.0) + masked if masked else None,
        "trained tokens, and one for each document that trains nothing": trained + masked if masked else None,
    }
    return {label: count for label, count in known.items() if count}


def pieces(tokens: Mapping[str, Tensor], context: Mapping[str, Any]) -> dict[str, Tensor]:
    """[S] piece number of each token, by kind; without kinds that have one piece or repeat those of another kind."""
    known = {"documents": tokens["documents"]} if "documents" in tokens else {}
    if "rows" in tokens:
        rows = tokens["rows"]
        known["ranks"] = rows.div(int(context.get("micro_batches") or 1), rounding_mode="floor")
        known["rows"] = rows
        if "shards" in tokens:
            cp = int(context.get("cp") or 1)
            known["shards"] = known["ranks"] * cp + tokens["shards"]
            known["row shards"] = rows * cp + tokens["shards"]
    trained = tokens["trained"].bool()
    distinct: dict[str, Tensor] = {}
    for kind in PIECES:
        if (
            kind in known
            and _number(known[kind][trained]) > 1
            and not any(_same_pieces(known[kind][trained], other[trained]) for other in distinct.values())
        ):
            distinct[kind] = known[kind]
    return distinct


def deals(tokens: Mapping[str, Tensor], context: Mapping[str, Any]) -> Iterator[Tensor]:
    """[S] rank of each token, in every way in which one process may deal its micro-batches to the ranks it stands for.

    Such a record numbers the micro-batches of all ranks one after another: each rank has some in a row, or takes turns.
    """
    dp, each = int(context.get("dp") or 1), int(context.get("micro_batches") or 1)
    rows = tokens.get("rows")
    number = 0 if rows is None or not len(rows) else int(rows.max()) + 1
    if rows is None or not 1 < dp < number or number > each or math.comb(number - 1, dp - 1) > MOST_DEALS:
        return
    for cuts in itertools.combinations(range(1, number), dp - 1):
        yield torch.bucketize(rows, torch.tensor(cuts), right=True)
    yield rows % dp


def _number(labels: Tensor) -> int:
    return torch.unique(labels).numel()


def _same_pieces(first: Tensor, second: Tensor) -> bool:
    both = torch.unique(torch.stack((first, second)), dim=1).shape[1]
    return _number(first) == _number(second) == both


def reproduced(candidates: list[Way], loss: float, margin: float) -> list[Way]:
    """The ways that give this loss within ``margin``."""
    return [way for way in candidates if abs(way.loss - loss) <= margin]


# ---- factors ---------------------------------------------------------------------------------------------


def sizes(context: Mapping[str, Any], counts: Mapping[str, float]) -> dict[str, tuple[float, frozenset[str]]]:
    """Numbers that a factor may equal, the likeliest first, and the sizes that must exceed 1 for each.

    Axes and micro-batches, products of two or three, documents, counts of tokens against those that train, temperature,
    kept mass.
    """
    axes = {name: float(context[name]) for name in AXES if (context.get(name) or 1) > 1}
    known: dict[str, tuple[float, frozenset[str]]] = {
        " * ".join(names): (math.prod(axes[name] for name in names), frozenset(names))
        for several in (1, 2, 3)
        for names in itertools.combinations(axes, several)
    }
    for first, second in itertools.permutations(axes, 2):
        if axes[first] > axes[second]:
            known[f"{first} / {second}"] = (axes[first] / axes[second], frozenset({first, second}))
    trained, documents = counts.get("trained_tokens"), counts.get("documents")
    masked = counts.get("masked_documents", 0.0)
    if documents:
        known["documents"] = (documents, frozenset({"documents"}))
        known["all documents / documents"] = ((documents + masked) / documents, frozenset({"masked_documents"}))
    if trained:
        known["trained tokens"] = (trained, frozenset())
        for name in ("all_tokens", "padded_tokens"):
            if counts.get(name):
                known[f"{name.replace('_', ' ')} / trained tokens"] = (counts[name] / trained, frozenset({name}))
        known["(trained tokens + masked documents) / trained tokens"] = (
            (trained + masked) / trained,
            frozenset({"masked_documents"}),
        )
        if documents:
            known["trained tokens / documents"] = (trained / documents, frozenset({"documents"}))
    if context.get("temperature"):
        known["temperature"] = (float(context["temperature"]), frozenset({"temperature"}))
    if counts.get("kept_mass"):
        known["kept mass"] = (counts["kept_mass"], frozenset({"kept_mass"}))
    return {name: (size, needs) for name, (size, needs) in known.items() if size > 0 and abs(size - 1) > 1e-6}


class Named(NamedTuple):
    """A size that a factor equals.

    Attributes:
        inverse: the factor is 1 over the size.
        off: relative distance from it.
        needs: sizes that must exceed 1.
    """

    name: str
    inverse: bool
    off: float
    needs: frozenset[str]

    @property
    def description(self) -> str:
        """Expression such as "1 / cp"."""
        return f"1 / ({self.name})" if self.inverse and " " in self.name else f"{'1 / ' * self.inverse}{self.name}"


def names_of(factor: float, known: Mapping[str, tuple[float, frozenset[str]]], bar: float) -> list[Named]:
    """The sizes that a factor equals, likeliest first.

    Example:
        >>> [named.description for named in names_of(0.5, {"cp": (2.0, frozenset({"cp"}))}, 1e-6)]
        ['1 / cp']
    """
    candidates = [
        Named(name, inverse, abs(factor / (1 / size if inverse else size) - 1), needs)
        for name, (size, needs) in known.items()
        for inverse in (False, True)
    ]
    return [named for named in candidates if named.off <= bar]
