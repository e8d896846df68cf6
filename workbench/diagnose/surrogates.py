"""Recognition of a record's loss: known surrogates of its own log-probabilities, against what it recorded.

A record with log-probabilities, old log-probabilities and advantages determines the value of each token under each
known surrogate; a reference and entropies add terms, whose coefficients are fitted. Values of tokens that were noted
are compared token by token; else one surrogate that gives the recorded loss, to rounding, under one way of dividing is
hardly an accident. So two records that are explained by different ones differ in the surrogate, or in the denominator.
Values of one record explain its own loss: the precision of the run does not enter.

Source: the surrogates of `workbench.losses`, written again here, as a record is explained without their code.

Letters: S tokens of the source batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from workbench.diagnose.denominators import Divisions, Way
from workbench.diagnose.ratios import log_ratios, over_documents
from workbench.diagnose.record import RecordedStep, whole
from workbench.diagnose.stated import caps, clip_ranges, is_number

MARGIN = 2e-5
"""Of the mean absolute value of a token: sums in float32 of some thousand tokens are right to a part of it."""
NICE = 1e-3
"""Relative distance of a fitted coefficient from one with two digits, as people set them."""
MOST = 4096
"""Tokens that are compared one by one: more of them tell no more."""
TOGETHER = 256
"""Surrogates that are compared at once: with `MOST` tokens 8 MiB of float64."""
MOST_PAIRS = 8
"""Pairs of which any may be swapped: of more, some choice gives nearly any loss."""
MOST_STEPS = 8
"""Steps whose losses are fitted at once: more of them tell no more."""
BOUNDS = ((0.2, 0.2), (0.2, 0.28), (0.1, 0.1), (0.3, 0.3), (0.2, 0.3), (0.2, 0.25), (0.28, 0.28), (3e-4, 4e-4))
"""Lower and upper range of a clip: PPO's and GRPO's 0.2, DAPO's 0.28 (arXiv 2503.14476), GSPO's 3e-4 and 4e-4 (arXiv
2507.18071), and others in use; those of the run's context come first."""
TRUNCATIONS = (math.inf, 2.0, 5.0, 10.0, 1.0)
"""Largest weights of a correction for the sampler that are in use: verl's and TRL's 2, NeMo-RL's 5 and 10."""
BETAS = (0.1, 0.05, 0.2, 0.3, 0.5, 0.01, 1.0)
"""Strengths of a preference: DPO's 0.1, and others in use; those of the run's context come first."""
_KL = ("kl_coef", "kl_coefficient", "kl_beta", "beta", "kl_loss_coef", "kl")
_ENTROPY = ("entropy_coef", "entropy_coeff", "entropy_coefficient", "ent_coef", "entropy")


class Form(NamedTuple):
    """The parts of a surrogate, as text; those that a loss does not have are empty."""

    ratios: str
    clip: str = ""
    correction: str = ""
    penalty: str = ""
    entropy: str = ""

    def __str__(self) -> str:
        """The parts that there are, one after another."""
        return " ".join(part for part in self if part)


class Explained(NamedTuple):
    """A surrogate, and the way in which its values are divided."""

    form: Form
    way: Way


def forms_of_tokens(step: RecordedStep, context: Mapping[str, Any]) -> list[Form]:
    """The surrogates that give the noted value of every trained token; [] if there are none, or none was noted."""
    tokens = whole(step.tokens)
    if not {"losses", "policy_logprobs", "trained"} <= set(tokens):
        return []
    trained = tokens["trained"].bool()
    here = trained.nonzero().flatten()[:MOST]
    if not len(here):
        return []
    noted = tokens["losses"].double()[here]
    terms = [each[here] for each in _penalties_and_entropy(tokens)]
    combinations = list(_combinations(tokens))
    forms = iter(_surrogates(tokens, context))
    exact_forms: list[Form] = []
    while several := list(itertools.islice(forms, TOGETHER)):
        left = torch.stack([noted - values[here] for _, values in several])
        margins = torch.stack([5 * MARGIN * values[trained].abs().mean() + 1e-9 for _, values in several])
        exact = left.abs().amax(1) <= margins
        fits = [_fits(torch.stack([terms[at] for at in chosen], 1), left, margins) for _, _, chosen in combinations]
        for at, (form, _) in enumerate(several):
            if exact[at]:
                exact_forms.append(form)
                continue
            for (kind, bonus, chosen), near in zip(combinations, fits, strict=True):
                columns = torch.stack([terms[each] for each in chosen], 1)
                fitted = _fitted(columns, left[at], float(margins[at])) if near[at] else None
                if fitted is not None:
                    exact_forms.append(_with(form, kind, bonus, fitted))
    return exact_forms


def _penalties_and_entropy(tokens: Mapping[str, Tensor]) -> list[Tensor]:
    entropy = _entropy(tokens)
    return [*penalties_of(tokens).values(), *([entropy] if entropy is not None else [])]


def _combinations(tokens: Mapping[str, Tensor]) -> Iterator[tuple[str | None, bool, list[int]]]:
    """Kind of penalty, if one, an entropy, and the places of both among `_penalties_and_entropy`."""
    kinds = list(penalties_of(tokens))
    bonuses = (False, True) if _entropy(tokens) is not None else (False,)
    for (at, kind), bonus in itertools.product([(-1, None), *enumerate(kinds)], bonuses):
        if chosen := [*([at] if kind is not None else []), *([len(kinds)] if bonus else [])]:
            yield kind, bonus, chosen


def _fits(columns: Tensor, left: Tensor, margins: Tensor) -> Tensor:
    """[F] bool, surrogates of which the columns, [n, k], explain all that is left, [F, n], but for rounding.

    What least squares leave is at most sqrt(n) times as large in one token as in that of the best fit.
    """
    if not bool(columns.isfinite().all()):
        return torch.zeros(len(left), dtype=torch.bool)
    rest = left - (left @ torch.linalg.pinv(columns).T) @ columns.T
    return rest.norm(dim=1) <= margins * math.sqrt(left.shape[1])


def explained(step: RecordedStep, context: Mapping[str, Any], steps: Sequence[RecordedStep] = ()) -> list[Explained]:
    """The surrogates and denominators that give the recorded loss of a step; [] if it lacks what they need.

    Coefficients of a penalty and an entropy bonus are those of the context, or fitted to the losses of ``steps``, of
    which there must be more.
    """
    tokens = whole(step.tokens)
    if step.loss is None or "losses" in tokens or not {"policy_logprobs", "trained"} <= set(tokens):
        return []
    forms, values = _stacked(step, context)
    divisions = Divisions(step, context)
    losses, margins = divisions.losses(values), _margins(values, tokens)
    hits = ((losses - step.loss).abs() <= margins[:, None]).nonzero().tolist()
    found = [Explained(forms[form], divisions.way(way, float(losses[form, way]))) for form, way in hits]
    return found or [*_preferences(step, context)] or [*_with_terms(step, context, steps)]


def _stacked(step: RecordedStep, context: Mapping[str, Any]) -> tuple[list[Form], Tensor]:
    """Surrogates, and their values, [F, S]."""
    known = dict(_surrogates(whole(step.tokens), context))
    return list(known), torch.stack(list(known.values()))


def _preferences(step: RecordedStep, context: Mapping[str, Any]) -> Iterator[Explained]:
    """Losses of pairs of documents, such as DPO's (arXiv 2305.18290): neighbours, or of two halves, one preferred."""
    tokens = whole(step.tokens)
    if not {"documents", "ref_logprobs"} <= set(tokens):
        return
    trained, policy = tokens["trained"].bool(), tokens["policy_logprobs"].double()
    betas = [float(context[name]) for name in ("beta", "dpo_beta", "kl_beta") if is_number(context.get(name))]
    for of, values in (("", policy - tokens["ref_logprobs"].double()), (" without a reference", policy)):
        sums, means = (each[trained] for each in over_documents(values, tokens["documents"], trained))
        first = _first_places(tokens["documents"][trained])
        if len(first) % 2:
            return
        for text, each in (("", sums[first]), (" of means", means[first])):
            for pairing, (good, bad) in (("neighbours", each.view(-1, 2).T), ("two halves", each.view(2, -1))):
                for beta in dict.fromkeys([*betas, *BETAS]):
                    kind = f"preferences{text} between {pairing}{of}"
                    yield from _of_pairs(Form(kind, clip=f"at beta {beta:g}"), beta * (good - bad), step.loss or 0.0)


def _of_pairs(form: Form, margins: Tensor, loss: float) -> Iterator[Explained]:
    """Losses of margins, [P] times beta, that give the recorded one; the second may be preferred of all, or of some."""
    for smoothing in (0.0, 0.1):
        penalty = f"smoothed by {smoothing:g}" if smoothing else ""
        losses, others = (
            -functional.logsigmoid(x) * (1 - smoothing) - functional.logsigmoid(-x) * smoothing
            for x in (margins, -margins)
        )
        near = MARGIN * float(losses.abs().mean())
        whole_step = ((losses, ""), (others, ", the second preferred"))
        hits = [(each, which) for each, which in whole_step if abs(float(each.mean()) - loss) <= near]
        if not hits and 2 < len(losses) <= MOST_PAIRS and not smoothing:
            choices = torch.tensor(list(itertools.product((0.0, 1.0), repeat=len(losses))), dtype=torch.float64)
            sums = losses.mean() + choices @ (others - losses) / len(losses)
            fitting = ((sums - loss).abs() <= near).nonzero().flatten().tolist()
            if len(fitting) == 1:
                several = int(choices[fitting[0]].sum())
                hits = [(losses, f", the second preferred in {several} of {len(losses)}")]
        for _, which in hits:
            yield Explained(form._replace(ratios=form.ratios + which, penalty=penalty), Way("", "pairs", loss))


def _first_places(labels: Tensor) -> Tensor:
    """The place of each label's first occurrence, labels in ascending order."""
    _, place = torch.unique(labels, return_inverse=True)
    first = torch.full((int(place.max()) + 1,), len(labels)) if len(labels) else torch.zeros(0, dtype=torch.long)
    return first.scatter_reduce(0, place, torch.arange(len(labels)), "amin") if len(labels) else first


def _with_terms(step: RecordedStep, context: Mapping[str, Any], steps: Sequence[RecordedStep]) -> Iterator[Explained]:
    """Surrogates with a penalty, an entropy bonus or both: coefficients are stated, or fitted to all losses at once."""
    names = set(whole(step.tokens))
    others = [other for other in steps if other.number != step.number and other.loss is not None]
    several = [step, *(other for other in others if names <= set(whole(other.tokens)))][:MOST_STEPS]
    stated = [
        next((float(context[name]) for name in of if is_number(context.get(name))), None) for of in (_KL, _ENTROPY)
    ]
    divisions = [Divisions(each, context) for each in several]
    shared = [text for text in divisions[0].descriptions if all(text in each.descriptions for each in divisions)]
    places = [[each.descriptions.index(text) for text in shared] for each in divisions]
    stacks = [_stacked(each, context) for each in several]
    forms = [form for form in stacks[0][0] if all(form in names for names, _ in stacks)]
    values = [stack[[names.index(form) for form in forms]] for names, stack in stacks]
    divided = [each.losses(v)[:, at] for each, v, at in zip(divisions, values, places, strict=True)]
    left = torch.stack(
        [float(each.loss or 0.0) - of for each, of in zip(several, divided, strict=True)], -1
    )  # [F, W, n]
    margins = torch.stack([_margins(v, whole(each.tokens)) for each, v in zip(several, values, strict=True)], -1)

    def by_way(of_steps: Sequence[Tensor]) -> Tensor:
        """[W, n] of a term's values in each step."""
        rows = [each.losses(values[None])[0] for each, values in zip(divisions, of_steps, strict=True)]
        return torch.stack([row[at] for row, at in zip(rows, places, strict=True)], -1)

    penalties = [penalties_of(whole(each.tokens)) for each in several]
    terms = {kind: by_way([each[kind] for each in penalties]) for kind in penalties[0]}
    entropies = [-whole(each.tokens)["entropy_nats"].double() for each in several if "entropy_nats" in names]
    entropy = by_way(entropies) if entropies else None
    for kind, with_entropy in itertools.product((None, *terms), (False, True)):
        if (kind is None and not with_entropy) or (with_entropy and entropy is None):
            continue
        columns = [each for each in (terms.get(kind or ""), entropy if with_entropy else None) if each is not None]
        given = [known for known, there in zip(stated, (kind, with_entropy), strict=True) if there]
        for form, way, fitted in _coefficients(torch.stack(columns, -1), left, margins, given):
            at = divisions[0].way(places[0][way], float(divided[0][form, way]))
            yield Explained(_with(forms[form], kind, with_entropy, fitted), at)


def _coefficients(
    columns: Tensor, left: Tensor, margins: Tensor, given: Sequence[float | None]
) -> Iterator[tuple[int, int, list[float]]]:
    """Surrogate, way and coefficients that explain what is left of the losses.

    Coefficients are those stated, in either sign, which one step suffices to check; or fitted to more steps than there
    are of them.

    Args:
        columns: [W, n, k] of k terms in n steps.
        left: [F, W, n] of the losses.
        margins: [F, n].
        given: the k coefficients, as far as they are stated.
    """
    known = [value for value in given if value]
    if len(known) == len(given):
        for signs in itertools.product((1.0, -1.0), repeat=len(known)):
            signed = [sign * value for sign, value in zip(signs, known, strict=True)]
            sums = columns[:, 0] @ torch.tensor(signed, dtype=torch.float64)
            for form, way in ((left[:, :, 0] - sums).abs() <= margins[:, :1]).nonzero().tolist():
                yield form, way, signed
    if left.shape[2] <= columns.shape[2]:
        return
    sizes = columns.norm(dim=1, keepdim=True).clamp_min(1e-300)
    scaled = (columns / sizes).expand(len(left), *columns.shape)
    solved = torch.linalg.lstsq(scaled, left[..., None], driver="gelsd").solution
    off = (left - (scaled @ solved)[..., 0]).abs()
    for form, way in (off <= margins[:, None]).all(-1).nonzero().tolist():
        fitted = _fitted(columns[way], left[form, way], float(margins[form].max()))
        if fitted is not None:
            yield form, way, fitted


def _fitted(columns: Tensor, values: Tensor, margin: float) -> list[float] | None:
    """Coefficients of the columns, if they give all values within the margin, and people would set them so."""
    sizes = columns.norm(dim=0)
    if not bool((sizes > 0).all() & sizes.isfinite().all() & values.isfinite().all()):
        return None  # a reference that allows a token nothing, for one
    scaled = columns / sizes
    if len(columns[0]) > 1 and abs(float(scaled[:, 0] @ scaled[:, 1])) > 1 - 1e-9:
        return None
    solved = torch.linalg.lstsq(scaled, values[:, None]).solution[:, 0] / sizes
    if float((columns @ solved - values).abs().max()) > margin:
        return None
    coefficients = [float(value) for value in solved]
    if not all(value and abs(float(f"{value:.2g}") / value - 1) <= NICE for value in coefficients):
        return None
    return coefficients


def _with(form: Form, kind: str | None, bonus: bool, fitted: Sequence[float]) -> Form:
    texts = [f"{value:.2g}" for value in fitted]
    penalty = f"plus {texts[0]} times {kind} of the reference" if kind else ""
    return form._replace(penalty=penalty, entropy=f"minus {texts[-1]} times the entropy" if bonus else "")


def _margins(values: Tensor, tokens: Mapping[str, Tensor]) -> Tensor:
    """[F] tolerances of values [F, S]."""
    return MARGIN * values[:, tokens["trained"].bool()].abs().mean(1)


def penalties_of(tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Estimators of the divergence from a reference, http://joschu.net/blog/kl-approx.html, and mistakes of them."""
    if "ref_logprobs" not in tokens:
        return {}
    far = tokens["ref_logprobs"].double() - tokens["policy_logprobs"].double()
    return {
        "k3": far.exp() - 1 - far,
        "k1": -far,
        "k2": far.square() / 2,
        "the absolute k1": far.abs(),
        "k3 the other way round": (-far).exp() - 1 + far,
        "the square": far.square(),
    }


def _entropy(tokens: Mapping[str, Tensor]) -> Tensor | None:
    return -tokens["entropy_nats"].double() if "entropy_nats" in tokens else None


def _surrogates(tokens: Mapping[str, Tensor], context: Mapping[str, Any]) -> Iterator[tuple[Form, Tensor]]:
    """Surrogates and their per-token values, [S], to be minimised; those corrected for the sampler last."""
    plain = list(_uncorrected(tokens, context))
    yield from plain
    if {"old_logprobs", "sampler_logprobs"} <= set(tokens):
        far = tokens["old_logprobs"].double() - tokens["sampler_logprobs"].double()
        if bool(far.abs().max() <= 1e-6):
            return
        largest = dict.fromkeys([*caps(context), *TRUNCATIONS])
        for (kind, of), most in itertools.product((("old over sampler", far), ("sampler over old", -far)), largest):
            text, weights = f"weighed by {kind}" + ("" if most == math.inf else f" up to {most:g}"), of.exp()
            yield from ((form._replace(correction=text), values * weights.clamp_max(most)) for form, values in plain)


def _uncorrected(tokens: Mapping[str, Tensor], context: Mapping[str, Any]) -> Iterator[tuple[Form, Tensor]]:
    policy = tokens["policy_logprobs"].double()
    yield Form("negative log-likelihood"), -policy
    if "advantages" not in tokens:
        return
    advantages = tokens["advantages"].double()
    yield Form("advantage times log-probability"), -advantages * policy
    if {"old_logprobs", "sampler_logprobs"} & set(tokens):
        yield Form("advantage times a ratio of 1"), -advantages
    for kind, values in log_ratios(tokens).items():
        ratios = values.exp()
        plain = ratios * advantages
        yield Form(kind, "without a clip"), -plain
        for low, high in dict.fromkeys([*clip_ranges(context), *BOUNDS]):
            bounded = ratios.clamp(1 - low, 1 + high)
            clipped, text = bounded * advantages, f"clipped at {low:g} and {high:g}"
            smaller = torch.minimum(plain, clipped)
            yield Form(kind, text), -smaller
            yield Form(kind, f"{text}, the larger objective"), -torch.maximum(plain, clipped)
            yield Form(kind, f"{text} on both sides"), -clipped
            yield Form(f"log-probability times {kind}", text), -clipped * policy
            dual = torch.where(advantages < 0, torch.maximum(smaller, 3 * advantages), smaller)
            yield Form(kind, f"{text}, and at 3 where advantages are negative"), -dual
