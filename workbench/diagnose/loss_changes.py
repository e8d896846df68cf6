"""Changes of noted values of the loss, token by token, from equal inputs: which part of a loss moves them so.

The values of two records suffice, whatever their loss is: a factor that was lost or computed otherwise is the quotient
of the two, a term that was added or lost their difference, and another clip moves the tokens at an end of the ratios
and no others. One or two fitted numbers that explain the values of many tokens are hardly an accident.

Letters: n tokens that train in both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.diagnose.ratios import log_ratios
from workbench.diagnose.stated import caps
from workbench.diagnose.surrogates import TRUNCATIONS, penalties_of

LEFT = 0.03
"""Share of a change, by norm, that an explanation may leave: in bfloat16 a log-probability of 1 is right to 2^-8."""
LEAST = 8
"""Tokens below which one fitted number proves nothing."""
SMALL = 1e-3
"""Of the mean size of a value: the quotient of smaller ones is rounding, and so is a smaller change."""
CHANCE = 0.02
"""Probability below which tokens are not at an end of the ratios by accident."""


class Change(NamedTuple):
    """A part of the loss that moves the values of tokens.

    Attributes:
        kind: "term", "correction", "ratio", "clip", "ids", "lengths" or "documents".
    """

    kind: str
    clause: str


def change_of_losses(
    trusted: Mapping[str, Tensor], suspect: Mapping[str, Tensor], context: Mapping[str, Any]
) -> Change | None:
    """The part of the loss that explains how noted values moved; None if none does, or too little is known."""
    needed = {"losses", "policy_logprobs", "trained"}
    if not needed <= set(trusted) or not needed <= set(suspect):
        return None
    here = trusted["trained"].bool() & suspect["trained"].bool()
    one, other = (tokens["losses"].double()[here] for tokens in (trusted, suspect))
    if len(one) < LEAST or not bool(one.isfinite().all() & other.isfinite().all()):
        return None
    moved, scale = other - one, float(torch.maximum(one.abs(), other.abs()).mean())
    if float(moved.norm()) <= SMALL * float(one.norm()) or _one_factor(one, other):
        return None
    tokens = {name: values[here] for name, values in trusted.items() if len(values) == len(here)}
    large = torch.maximum(one.abs(), other.abs()) > SMALL * scale
    known = (one.abs() > SMALL * scale) & (other.abs() > SMALL * scale)
    if int(known.sum()) >= max(LEAST, len(one) // 2) and not bool((large & ~known).any()):
        quotients = (other / one)[known]
        of_known = {name: values[known] for name, values in tokens.items()}
        for rule in (_by_label, _by_ratio, _by_correction):
            if (found := rule(quotients, of_known, context)) is not None:
                return found
    return _by_clip(one[large], other[large], {k: v[large] for k, v in tokens.items()}) or _by_term(one, other, tokens)


def _one_factor(one: Tensor, other: Tensor) -> bool:
    slope = float(one @ other) / max(float(one @ one), 1e-300)
    return float((other - slope * one).norm()) <= LEFT / 10 * float(other.norm())


def _near(values: Tensor, expected: Tensor) -> bool:
    """True if the expectation explains what values differ from 1 by."""
    apart = float((values - 1).norm())
    return float((values - expected).norm()) <= LEFT * apart


def _by_label(quotients: Tensor, tokens: Mapping[str, Tensor], context: Mapping[str, Any]) -> Change | None:
    """Factors of documents, or of vocabulary ids, of which several have more than one token."""
    for name, kind in (("documents", "documents"), ("targets", "ids")):
        if name not in tokens or (kind == "documents" and "advantages" not in tokens and "old_logprobs" in tokens):
            continue
        _, place, counts = torch.unique(tokens[name], return_inverse=True, return_counts=True)
        means = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, place, quotients) / counts
        several = counts > 1
        if int(several.sum()) < 3 or not _near(quotients, means[place]) or 2 * len(counts) > len(quotients):
            continue
        if kind == "documents" and any(_spread(each[several]) <= LEFT for each in (means * counts, means / counts)):
            return Change("lengths", "values of documents differ by factors that go with their lengths")
        return Change(kind, f"values of tokens have one factor for each of {len(counts)} {name}, {_range(means)}")
    return None


def _by_correction(quotients: Tensor, tokens: Mapping[str, Tensor], context: Mapping[str, Any]) -> Change | None:
    if "sampler_logprobs" not in tokens:
        return None
    known = dict(_corrections(tokens, context, (float(quotients.max()), float((1 / quotients).max()))))
    for (right, one), (wrong, other) in itertools.permutations(known.items(), 2):
        if _near(quotients, other / one):
            return Change("correction", f"values are weighed by {wrong}, and in the trusted run by {right}")
    return None


def _corrections(
    tokens: Mapping[str, Tensor], context: Mapping[str, Any], seen: tuple[float, ...]
) -> Iterator[tuple[str, Tensor]]:
    """Weights that correct for the sampler, by name: none, and ratios up to a largest one."""
    sampler = tokens["sampler_logprobs"].double()
    yield "nothing", torch.ones_like(sampler)
    largest = dict.fromkeys([*caps(context), *TRUNCATIONS, *(each for each in seen if 1 < each < 100)])
    for name, of in (("old_logprobs", "old"), ("policy_logprobs", "policy")):
        if name not in tokens:
            continue
        far = tokens[name].double() - sampler
        for text, log_weights in ((f"{of} over sampler", far), (f"sampler over {of}", -far)):
            for most in largest:
                yield f"{text} up to {most:.4g}", log_weights.exp().clamp_max(most)


def _by_ratio(quotients: Tensor, tokens: Mapping[str, Tensor], context: Mapping[str, Any]) -> Change | None:
    """One kind of ratio in place of another, or of none."""
    kinds = {"none": torch.zeros_like(quotients), **log_ratios(tokens)}
    for (right, one), (wrong, other) in itertools.permutations(kinds.items(), 2):
        if _near(quotients, (other - one).exp()):
            return Change("ratio", f"values follow {wrong}, and in the trusted run {right}")
    return None


def _by_clip(one: Tensor, other: Tensor, tokens: Mapping[str, Tensor]) -> Change | None:
    """Tokens that moved are those at the ends of the ratios, of advantages of one sign."""
    if "advantages" not in tokens:
        return None
    moved, advantages = (other - one).abs(), tokens["advantages"].double()
    off = moved > SMALL * torch.maximum(one.abs(), other.abs())
    if not bool(off.any()) or bool(off.all()):
        return None
    kinds = log_ratios(tokens)
    if {"old_logprobs", "sampler_logprobs"} <= set(tokens):
        kinds["ratios of the old policy to the sampler"] = (
            tokens["old_logprobs"] - tokens["sampler_logprobs"]
        ).double()
    for kind, ratios in kinds.items():
        chances = [_chance(off[side], ratios[side]) for side in (advantages > 0, advantages < 0)]
        if math.prod(math.inf if each is None else each for each in chances) < CHANCE:
            text = f"{int(off.sum())} of {len(off)} values moved, those at the ends of {kind}: clipped at other bounds"
            return Change("correction" if "sampler" in kind else "clip", text)
    return None


def _chance(off: Tensor, ratios: Tensor) -> float | None:
    """Probability that as many tokens lie at the ends by accident; None if they do not all lie there, and 1 of none."""
    number, many = len(off), int(off.sum())
    if not many:
        return 1.0
    still = off[ratios.argsort()].logical_not().nonzero().flatten()
    if len(still) and int(still[-1] - still[0]) + 1 != len(still):
        return None
    return (many + 1) / math.comb(number, many)


def _by_term(one: Tensor, other: Tensor, tokens: Mapping[str, Tensor]) -> Change | None:
    """A penalty, an entropy or a likelihood with another coefficient, or one estimator in place of another."""
    moved, policy = other - one, tokens["policy_logprobs"].double()
    terms = {f"{kind} of the reference": values for kind, values in penalties_of(tokens).items()}
    terms |= {"the entropy": tokens["entropy_nats"].double()} if "entropy_nats" in tokens else {}
    terms |= {"the log-probability": policy}
    single = [(name,) for name in terms]
    for names in (*single, *itertools.combinations(terms, 2)):
        columns = torch.stack([terms[name] for name in names], 1)
        if not bool(columns.isfinite().all()) or not bool(columns.any(0).all()):
            continue
        fitted = torch.linalg.lstsq(columns, moved[:, None]).solution
        if float((columns @ fitted)[:, 0].sub(moved).norm()) <= LEFT * float(moved.norm()):
            text = " and ".join(f"{float(by):.3g} times {name}" for by, name in zip(fitted, names, strict=True))
            return Change("term", f"to every value of the loss {text} is added")
    alone = [_one_factor(policy, values) for values in (one, other)]
    if alone[0] != alone[1]:
        which = "suspect" if alone[1] else "trusted run"
        return Change("term", f"values of the {which} are log-probabilities alone, and those of the other are not")
    return None


def _spread(values: Tensor) -> float:
    """Largest over smallest of positive numbers, less 1."""
    least = float(values.min())
    return float(values.max()) / least - 1 if least > 0 else math.inf


def _range(values: Tensor) -> str:
    return f"{float(values.min()):.4g} to {float(values.max()):.4g}"
