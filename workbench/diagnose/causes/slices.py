"""Causes where tokens, norms or layers are cut over ranks: slices of other ranks, norms of a slice, ends of stages."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from workbench.diagnose.causes.cause import NOT, Family, Judged
from workbench.diagnose.facts import Facts
from workbench.diagnose.record import whole
from workbench.metrics.step import parameter_group, parameter_layer
from workbench.records.integrity import piece_of_norm

SLICES = Family("tokens")
MOST_SLICES = 8
"""Slices of a row whose subsets are tried: 255 of 8."""
MOSTLY = 0.85
"""Share of the tokens that such a mistake changes: another slice has the same token in some places, by chance."""
NORM = "gradient/norm/"


@SLICES.cause("norms of sharded parameters are those of one rank's slice", "tp", uses=("gradient",))
def _norm_of_slice(facts: Facts) -> Judged:
    """Every gradient is right, and each norm that differs is that of the first slice of its gradient."""
    suspect = facts.pair[1]
    off = [name for key in facts.metrics_off(NORM) if (name := key.removeprefix(NORM)) in suspect.gradient_norms]
    gradients = whole(suspect.gradients)
    if not off or not facts.gradient_same or facts.loss_same is False or not set(off) <= set(gradients):
        return NOT
    pieces = [piece_of_norm(gradients[name], suspect.gradient_norms[name]) for name in off]
    if not all(pieces):
        return NOT
    number = max(piece[1] for piece in pieces if piece is not None)
    return 0.97, [
        f"norms of {off[0]} and {len(off) - 1} more are those of the first of {number} slices of their gradients"
    ]


@SLICES.cause("slices of a row's tokens are computed in place of others", "tp")
def _other_slices(facts: Facts) -> Judged:
    """Score of differences in some slices and behind them in their documents, and nowhere else."""
    off, tokens = facts.off_tokens("policy_logprobs"), facts.tokens[1]
    if off is None or facts.trained is None or not {"slices", "places", "documents"} <= set(tokens):
        return NOT
    wrong, number = off & facts.trained, int(tokens["slices"].max()) + 1
    if number > MOST_SLICES or not bool(wrong.any()):
        return NOT
    best, chosen = 0.0, tuple[int, ...]()
    for several in _subsets(number):
        there = _behind(tokens, several) & facts.trained
        if bool((wrong & ~there).any()) or not bool((facts.trained & ~there).any()):
            continue  # a token elsewhere differs, or nothing is left that could be right
        share = int(wrong.sum()) / int(there.sum())
        if share > best:
            best, chosen = share, several
    if best < MOSTLY:
        return NOT
    return 0.92, [
        f"{best:.0%} of the tokens in slices {', '.join(map(str, chosen))} of {number} of a row, and behind them in "
        "their documents, differ, and no others"
    ]


def _subsets(number: int) -> Iterator[tuple[int, ...]]:
    """Some slices, not all of them; few first."""
    for size in range(1, number):
        yield from itertools.combinations(range(number), size)


def _behind(tokens: Mapping[str, Tensor], chosen: tuple[int, ...]) -> Tensor:
    """[S] bool, predictions in the chosen slices, or behind one of these in the same document."""
    documents, places = tokens["documents"].long(), tokens["places"].long()
    inside = torch.isin(tokens["slices"], torch.tensor(chosen)) & (documents >= 0)
    first = torch.full((int(documents.max()) + 1,), torch.iinfo(torch.int64).max)
    first.scatter_reduce_(0, documents[inside], places[inside], "amin")
    return (documents >= 0) & (places >= first[documents.clamp_min(0)])


@SLICES.cause("hidden states between layers are those of other ranks' tokens", "tp")
def _hidden_of_other_ranks(facts: Facts) -> Judged:
    """Nearly every token differs, in every document from its first: nothing that only some tokens read is wrong."""
    if facts.forward_same is not False or facts.mask_same is False or facts.share_off("policy_logprobs") < MOSTLY:
        return NOT
    if not facts.context.get("sequence_parallel") or facts.change() is None or facts.targets_shifted:
        return NOT
    return 0.45, [
        "nearly every token differs, the first of documents too, where tokens are sliced over tp between layers"
    ]


@SLICES.cause("attention is right in the first micro-batch, and in later ones stays on a rank", "cp", "micro_batches")
def _attention_of_first_row(facts: Facts) -> Judged:
    """Behind the edges of ranks, tokens of the first micro-batch are right and those of others are not."""
    off, place = facts.off_tokens("policy_logprobs"), facts.places.get("behind shard edges")
    rows, number = facts.tokens[1].get("rows"), int(facts.context.get("micro_batches") or 1)
    if off is None or place is None or rows is None or facts.trained is None or number < 2:
        return NOT
    wrong, first = off & facts.trained, rows % number == 0
    if not bool(wrong.any()) or bool((wrong & (first | ~place)).any()) or not bool((place & first).any()):
        return NOT
    share = float(wrong[place & ~first].double().mean())
    if share < 0.9:
        return NOT
    return 0.93, [
        f"behind the edges of ranks {share:.0%} of the tokens of later micro-batches differ, and none of the first"
    ]


@SLICES.cause("activations are recomputed from another input than the forward pass had", uses=("gradient",))
def _recomputed(facts: Facts) -> Judged:
    """The loss is right, and all layers are wrong from the highest one down; what is above it is right."""
    if not facts.context.get("checkpointing") or not facts.gradient_only or not facts.clear:
        return NOT
    above = all(parameter_group(name) in ("norm", "head") for name in facts.right)
    layers = {layer for name in facts.right if (layer := parameter_layer(name)) is not None and "post_norm" not in name}
    if not facts.right or not above or layers:
        return NOT
    return 0.7, [f"all but {', '.join(sorted(facts.right)[:2])}, which backward reaches first, have another gradient"]


@SLICES.cause(
    "copies of a tied weight at both ends of the pipeline have gradients of their own", "pp", uses=("gradient",)
)
def _ends_not_summed(facts: Facts) -> Judged:
    if not facts.gradient_only or not facts.clear or facts.groups_off() != {"embedding"}:
        return NOT
    if any("lm_head" in name for name in facts.step.parameters):
        return NOT
    if all(p.cosine is not None and p.cosine > 0.999 for p in facts.off.values()):  # rounding, or a factor
        return NOT
    return 0.9, [
        "only the embedding, which is the head too, has another gradient: the parts of both ends are not summed"
    ]


_SAME_WEIGHTS = 1e-6
"""Relative distance of two norms of the same weights: of sums in float64 of numbers in any precision."""


@SLICES.cause("layers of a pipeline stage have the weights of other layers", "pp", uses=())
def _other_layers(facts: Facts) -> Judged:
    """Every norm that differs before the first step is that of the same weight in another layer of the trusted run."""
    trusted, suspect = (record.steps[0].weight_norms for record in (facts.evidence.trusted, facts.suspect))
    off = [
        name
        for name, norm in trusted.items()
        if name in suspect and not math.isclose(norm, suspect[name], rel_tol=_SAME_WEIGHTS)
    ]
    taken: dict[int | None, set[int]] = {}
    for name in off:
        layer, alike = parameter_layer(name), _of_layers(name, trusted)
        here = {other for other, norm in alike.items() if math.isclose(norm, suspect[name], rel_tol=_SAME_WEIGHTS)}
        taken[layer] = taken.get(layer, here) & here
    if not taken or not all(taken.values()):
        return NOT
    listed = ", ".join(f"layer {layer} those of layer {min(others)}" for layer, others in taken.items())
    return 0.97, [f"before the first step, {listed} of the trusted run"]


def _of_layers(name: str, norms: Mapping[str, float]) -> dict[int, float]:
    """Norm of the same weight in each layer."""
    pattern = re.compile(re.sub(r"\\\.\d+\\\.", r"\\.(\\d+)\\.", re.escape(name), count=1) + "$")
    return {int(match[1]): norm for other, norm in norms.items() if (match := pattern.match(other)) and match.lastindex}
