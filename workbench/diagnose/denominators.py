"""By what a loss was divided: every way that is known, tried on the per-token values, and named factors.

A step's loss is a sum of per-token values over a count. Where a record keeps the values and where each token lay, each
wrong count predicts a loss, and one that predicts the recorded loss to rounding is hardly an accident. A wrong count of
the whole step also shows as a factor of the gradient.

Letters: S tokens of the source batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
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
"""Kinds of pieces that a step falls into, and what one is called."""
NEEDS = {
    "documents": frozenset({"documents"}),
    "rows": frozenset({"dp * micro_batches"}),
    "ranks": frozenset({"dp"}),
    "shards": frozenset({"cp"}),
    "row shards": frozenset({"cp"}),
}
"""What there must be more than one of, so that pieces of a kind differ from the whole."""
AXES = ("cp", "dp", "tp", "micro_batches", "accumulation")


class Way(NamedTuple):
    """One way to divide a loss.

    Attributes:
        kind: the pieces within which it counts; "" for a count of the whole step.
        words: the way in words.
        loss: what it gives.
    """

    kind: str
    words: str
    loss: float


def ways(step: RecordedStep, context: Mapping[str, Any], *, exact: bool = False) -> list[Way]:
    """What each way of dividing makes of a step's per-token values; [] if the record does not have them.

    Formula: with s_p, n_p and a_p the sum, the count of trained and of all tokens of piece p of P: sum s / sum n;
             sum_p (s_p / n_p) and 1 / P of it; sum s over other counts. If exact: sum_p (s_p / n_p),
             sum_p (s_p / a_p) and sum_p s_p n_p over 1, P, P with empty pieces, sum n, documents, and each axis.

    Args:
        step: whose values.
        context: what the record says of its layout.
        exact: losses are known so well that one of many ways is not met by chance.
    """
    tokens = whole(step.tokens)
    if not {"losses", "trained"} <= set(tokens):
        return []
    trained = tokens["trained"].bool()
    values = tokens["losses"].double()[trained]
    total, count = float(values.sum()), max(int(trained.sum()), 1)
    found = [Way("", "all trained tokens of the step", total / count), Way("", "nothing", total)]
    found += [Way("", words, total / other) for words, other in _other_counts(step.counts, count).items()]
    for kind, piece in pieces(tokens, context).items():
        _, place = torch.unique(piece[trained], return_inverse=True)
        sums = torch.zeros(int(place.max()) + 1, dtype=torch.float64).index_add_(0, place, values)
        one, counts = PIECES[kind], torch.bincount(place)
        kinds, everywhere = torch.unique(piece, return_counts=True)
        whole_counts = everywhere[torch.isin(kinds, piece[trained])]
        divisors = _divisors(step.counts, context, kind, len(sums), count)
        by_count = {f"the mean over each {one}'s tokens": float((sums / counts).sum())}
        if exact:
            by_count |= {
                f"each {one}'s sum over all its tokens, prompts too": float((sums / whole_counts).sum()),
                f"each {one}'s sum times its tokens": float((sums * counts).sum()),
            }
        else:
            divisors = {by: divisors[by] for by in ("averaged", "summed")}
        found += [
            Way(kind, f"{words}, {by}", value / other)
            for words, value in by_count.items()
            for by, other in divisors.items()
        ]
    return found


def _divisors(
    counts: Mapping[str, float], context: Mapping[str, Any], kind: str, pieces: int, trained: int
) -> dict[str, float]:
    """By what a sum over pieces may be divided."""
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
    return {words: other for words, other in known.items() if other}


def _other_counts(counts: Mapping[str, float], trained: int) -> dict[str, float]:
    masked = counts.get("masked_documents", 0.0)
    known = {
        "all tokens, prompts too": counts.get("all_tokens"),
        "all tokens and padding": counts.get("padded_tokens"),
        "documents": counts.get("documents"),
        "all documents, also those that train nothing": counts.get("documents", 0.0) + masked if masked else None,
        "trained tokens, and one for each document that trains nothing": trained + masked if masked else None,
    }
    return {words: count for words, count in known.items() if count}


def pieces(tokens: Mapping[str, Tensor], context: Mapping[str, Any]) -> dict[str, Tensor]:
    """[S] number of the piece that a token lies in, by kind; of one piece, or of another's pieces, there is no kind."""
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
    found: dict[str, Tensor] = {}
    for kind in PIECES:
        if (
            kind in known
            and _number(known[kind][trained]) > 1
            and not any(_same_pieces(known[kind][trained], other[trained]) for other in found.values())
        ):
            found[kind] = known[kind]
    return found


def _number(labels: Tensor) -> int:
    return torch.unique(labels).numel()


def _same_pieces(first: Tensor, second: Tensor) -> bool:
    both = torch.unique(torch.stack((first, second)), dim=1).shape[1]
    return _number(first) == _number(second) == both


def reproduced(found: list[Way], loss: float, margin: float) -> list[Way]:
    """The ways that give this loss, but for ``margin``."""
    return [way for way in found if abs(way.loss - loss) <= margin]


# ---- factors ---------------------------------------------------------------------------------------------


def sizes(context: Mapping[str, Any], counts: Mapping[str, float]) -> dict[str, tuple[float, frozenset[str]]]:
    """Numbers that a factor may come from, the likeliest first, and what each needs more than one of.

    Axes and micro-batches, products of two or three, documents, counts of tokens against those that train, temperature,
    kept mass.
    """
    axes = {name: float(context[name]) for name in AXES if (context.get(name) or 1) > 1}
    found = {name: (size, frozenset({name})) for name, size in axes.items()}
    for several in (2, 3):
        for names in itertools.combinations(axes, several):
            product = 1.0
            for name in names:
                product *= axes[name]
            found[" * ".join(names)] = (product, frozenset(names))
    for first, second in itertools.permutations(axes, 2):
        if axes[first] > axes[second]:
            found[f"{first} / {second}"] = (axes[first] / axes[second], frozenset({first, second}))
    trained, documents = counts.get("trained_tokens"), counts.get("documents")
    masked = counts.get("masked_documents", 0.0)
    if documents:
        found["documents"] = (documents, frozenset({"documents"}))
        found["all documents / documents"] = ((documents + masked) / documents, frozenset({"masked_documents"}))
    if trained:
        found["trained tokens"] = (trained, frozenset())
        for name in ("all_tokens", "padded_tokens"):
            if counts.get(name):
                found[f"{name.replace('_', ' ')} / trained tokens"] = (counts[name] / trained, frozenset({name}))
        found["(trained tokens + masked documents) / trained tokens"] = (
            (trained + masked) / trained,
            frozenset({"masked_documents"}),
        )
        if documents:
            found["trained tokens / documents"] = (trained / documents, frozenset({"documents"}))
    if context.get("temperature"):
        found["temperature"] = (float(context["temperature"]), frozenset({"temperature"}))
    if counts.get("kept_mass"):
        found["kept mass"] = (counts["kept_mass"], frozenset({"kept_mass"}))
    return {name: (size, needs) for name, (size, needs) in found.items() if size > 0 and abs(size - 1) > 1e-6}


class Named(NamedTuple):
    """What a factor equals.

    Attributes:
        name: of the size.
        inverse: it is 1 over the size.
        off: how far from it, relatively.
        needs: what there must be more than one of.
    """

    name: str
    inverse: bool
    off: float
    needs: frozenset[str]

    @property
    def words(self) -> str:
        """Such as "1 / cp"."""
        return f"1 / ({self.name})" if self.inverse and " " in self.name else f"{'1 / ' * self.inverse}{self.name}"


def names_of(factor: float, known: Mapping[str, tuple[float, frozenset[str]]], bar: float) -> list[Named]:
    """What a factor equals, likeliest first.

    Example:
        >>> [found.words for found in names_of(0.5, {"cp": (2.0, frozenset({"cp"}))}, 1e-6)]
        ['1 / cp']
    """
    found = [
        Named(name, inverse, abs(factor / (1 / size if inverse else size) - 1), needs)
        for name, (size, needs) in known.items()
        for inverse in (False, True)
    ]
    return [each for each in found if each.off <= bar]
