"""Other readings of a step, each by the name of a mistake: what a trainer that makes it would have recorded.

An alternative changes one thing: a value of tokens, a setting of the loss, the estimator or a factor. It is data for
the recomputation, which is the same for all.

Letters: T tokens | N documents | G completions of a prompt.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from workbench.check.divisors import wrong_divisors
from workbench.check.formulas import wrong_formulas
from workbench.check.reading import Reading, Whole
from workbench.dumps.step import LOGPROBS, StepDump
from workbench.errors import WorkbenchError
from workbench.specs.losses import LossSpec


@dataclass(frozen=True)
class Alternative:
    """One mistake.

    Attributes:
        kind: factor, denominator, mask, shift, order, estimator, stale, rounded, temperature, group, clip, penalty or
            correction.
        description: of what the trainer would have done.
        reading: of the step.
    """

    kind: str
    description: str
    reading: Reading


def loss_alternatives(reading: Reading) -> Iterator[Alternative]:
    """Yield the mistakes that change the loss of a step; those that the step cannot have are left out."""
    for kind, description, settings in _missing(reading.spec):
        yield Alternative(kind, description, reading.changed(**settings))
    for source in (_stale, _rounded, _temperature, _shifts, _orders, _masks, _factors):
        yield from source(reading)
    for kind, description, settings in _settings(reading):
        with contextlib.suppress(ValidationError, WorkbenchError):  # settings that contradict each other
            if (changed := reading.changed(**settings)).spec != reading.spec:
                yield Alternative(kind, description, changed)
    for kind, description, changed in wrong_divisors(reading):
        yield Alternative(kind, description, changed)
    for kind, description, wrong in wrong_formulas(reading):
        yield Alternative(kind, description, replace(reading, wrong=wrong))


# ---- values of tokens ----------------------------------------------------------------------------------------------


def _stale(reading: Reading) -> Iterator[Alternative]:
    tokens = reading.dump.tokens
    policy, old, sampler, ref = LOGPROBS
    for name, other in ((old, sampler), (old, policy), (sampler, old), (policy, old), (old, ref), (ref, old)):
        if name in tokens and other in tokens:
            changed = reading.with_tokens(**{name: tokens[other]})
            yield Alternative("stale", f"{other} in the place of {name}", changed)
    if old in tokens and sampler in tokens:
        swapped = reading.with_tokens(**{old: tokens[sampler], sampler: tokens[old]})
        yield Alternative("stale", f"{old} and {sampler} exchanged", swapped)


def _rounded(reading: Reading) -> Iterator[Alternative]:
    tokens = reading.dump.tokens
    present = [name for name in LOGPROBS if name in tokens]
    for dtype in (torch.bfloat16, torch.float16):
        for names in ([name] for name in present):
            yield _with_rounded(reading, names, dtype)
        if len(present) > 1:
            yield _with_rounded(reading, present, dtype)
        if (advantages_T := reading.dump.advantages_T) is not None:
            rounded_T = advantages_T.to(dtype).double()
            text = f"advantages rounded to {str(dtype).removeprefix('torch.')}"
            yield Alternative("rounded", text, reading.with_tokens(advantages=rounded_T))


def _with_rounded(reading: Reading, names: list[str], dtype: torch.dtype) -> Alternative:
    values = {name: reading.dump.tokens[name].to(dtype).double() for name in names}
    text = f"{' and '.join(names)} rounded to {str(dtype).removeprefix('torch.')}"
    return Alternative("rounded", text, reading.with_tokens(**values))


def _temperature(reading: Reading) -> Iterator[Alternative]:
    tokens, temperature = reading.dump.tokens, reading.dump.temperature
    if temperature == 1:
        return
    pairs: tuple[tuple[str, ...], ...]
    pairs = (("policy_logprobs", "old_logprobs"), ("policy_logprobs",), ("old_logprobs",), ("sampler_logprobs",))
    pairs += (("ref_logprobs",), ("old_logprobs", "sampler_logprobs"))
    for names in (names for names in pairs if set(names) <= set(tokens)):
        for factor, text in ((1 / temperature, "divided"), (temperature, "multiplied")):
            values = {name: tokens[name] * factor for name in names}
            description = f"{' and '.join(names)} {text} by the temperature {temperature:g}, and not the logits"
            yield Alternative("temperature", description, reading.with_tokens(**values))


def _shifts(reading: Reading) -> Iterator[Alternative]:
    dump = reading.dump
    values = {name: dump.tokens[name] for name in (*LOGPROBS, "correction_weights") if name in dump.tokens}
    if (advantages_T := dump.advantages_T) is not None:
        values["advantages"] = advantages_T
    for name, own_T in values.items():
        for by in (1, -1):
            neighbour = "the token before" if by == 1 else "the token after"
            for value_T in _shifted(dump, own_T, by):
                description = f"{name} of {neighbour}"
                yield Alternative("shift", description, reading.with_tokens(**{name: value_T}))
        if (moved_T := _compacted(dump, own_T)) is not None and name != "advantages":
            text = f"{name} of trained tokens one after another from the beginning of the document, without a tool's"
            yield Alternative("shift", text, reading.with_tokens(**{name: moved_T}))


def _shifted(dump: StepDump, value_T: Tensor, by: int) -> Iterator[Tensor]:
    """Values moved by one token in their document: the end wraps around, is 0, or is the neighbour document's."""
    ids_T = dump.document_ids_T
    rolled_T, same_T = value_T.roll(by), ids_T.roll(by) == ids_T
    widths_N = torch.bincount(ids_T, minlength=dump.num_documents)
    within_T = (dump.positions_T - by) % widths_N[ids_T]  # documents are whole and in order (`StepDump`)
    yield value_T[(widths_N.cumsum(0) - widths_N)[ids_T] + within_T]
    yield torch.where(same_T, rolled_T, torch.zeros_like(rolled_T))
    yield rolled_T
    yield torch.where(same_T, rolled_T, value_T)
    there_T = dump.tokens.get("token_mask", dump.loss_mask_T)
    packed = torch.nonzero(there_T).squeeze(1)  # as if there were no padding
    yield value_T.index_copy(0, packed, value_T[packed.roll(by)])
    trained = torch.nonzero(dump.loss_mask_T).squeeze(1)
    yield value_T.index_copy(0, trained, value_T[trained.roll(by)])


def _compacted(dump: StepDump, value_T: Tensor) -> Tensor | None:
    """Values of trained tokens moved to the beginning of their document, 0 after them; None if they are there."""
    mask_T, ids_T = dump.loss_mask_T, dump.document_ids_T
    before_T = mask_T.long().cumsum(0) - 1
    widths_N = torch.bincount(ids_T, minlength=dump.num_documents)
    starts_N = widths_N.cumsum(0) - widths_N
    trained_N = torch.bincount(ids_T[mask_T], minlength=dump.num_documents)
    of_document_T = before_T - (trained_N.cumsum(0) - trained_N)[ids_T]
    to_T = (starts_N[ids_T] + of_document_T)[mask_T]
    if bool((to_T == torch.nonzero(mask_T).squeeze(1)).all()):
        return None
    return torch.zeros_like(value_T).index_copy(0, to_T, value_T[mask_T])


def _orders(reading: Reading) -> Iterator[Alternative]:
    dump, number = reading.dump, reading.dump.num_documents
    lengths = torch.bincount(dump.document_ids_T, minlength=number)
    advantages_N = None if dump.advantages_T is None else of_documents(dump, dump.advantages_T)
    for text, order_N in permutations(dump).items():
        if advantages_N is not None:
            moved_T = advantages_N[order_N][dump.document_ids_T]
            yield Alternative(
                "order", f"advantages of other documents ({text})", reading.with_tokens(advantages=moved_T)
            )
        if int(lengths.min()) == int(lengths.max()):
            for name in (name for name in LOGPROBS if name in dump.tokens):
                moved_T = dump.tokens[name].reshape(number, -1)[order_N].reshape(-1)
                changed = reading.with_tokens(**{name: moved_T})
                yield Alternative("order", f"{name} of other documents ({text})", changed)


def of_documents(dump: StepDump, advantages_T: Tensor) -> Tensor | None:
    """[N] advantages, if each document has one; 0 where nothing trains."""
    values_N = torch.zeros(dump.num_documents, dtype=torch.float64)
    mask_T = dump.loss_mask_T
    values_N[dump.document_ids_T[mask_T]] = advantages_T[mask_T]
    constant = bool((values_N[dump.document_ids_T] == advantages_T)[mask_T].all())
    return values_N if constant else None


def permutations(dump: StepDump) -> dict[str, Tensor]:
    """Orders in which documents are mixed up, by name."""
    number = dump.num_documents
    numbers_N = torch.arange(number)
    orders = {"reversed": numbers_N.flip(0), "shifted by one": numbers_N.roll(1), "shifted back": numbers_N.roll(-1)}
    lengths = {"trained tokens": dump.loss_mask_T, "tokens": dump.tokens.get("token_mask", dump.loss_mask_T)}
    for what, mask_T in lengths.items():
        lengths_N = torch.bincount(dump.document_ids_T[mask_T], minlength=number)
        for down in (True, False):
            order_N = lengths_N.argsort(stable=True, descending=down)
            text = f"sorted by {what}, the {'longest' if down else 'shortest'} first"
            orders |= {text: order_N, f"restored from {text}, of others": order_N.argsort()}
    for size, one in ((number // dump.size("dp"), "rank"), (group_size(dump), "group"), (number // 2, "half")):
        if 1 < size < number and number % size == 0:
            orders |= {
                f"shifted by one {one}": numbers_N.roll(size),
                f"shifted back by one {one}": numbers_N.roll(-size),
            }
            orders[f"reversed in each {one}"] = numbers_N.reshape(-1, size).flip(1).reshape(-1)
            orders[f"each {one} begins one document late"] = numbers_N.reshape(-1, size).roll(1, 1).reshape(-1)
    sizes = {dump.size("dp"), dump.size("micro_batches"), group_size(dump)}
    for size in sorted(size for size in sizes if 1 < size < number and number % size == 0):
        orders[f"dealt to {size} and read in order"] = numbers_N.reshape(-1, size).t().reshape(-1)
        orders[f"read as dealt to {size}"] = numbers_N.reshape(size, -1).t().reshape(-1)
    return {text: order_N for text, order_N in orders.items() if number > 1 and not bool((order_N == numbers_N).all())}


def group_size(dump: StepDump) -> int:
    """Return the completions of a prompt, if all prompts have as many; else 1."""
    groups_N = dump.documents.get("group_ids")
    sizes = torch.ones(1) if groups_N is None else groups_N.unique(return_counts=True)[1]
    return int(sizes[0]) if bool((sizes == sizes[0]).all()) else 1


def _masks(reading: Reading) -> Iterator[Alternative]:
    dump = reading.dump
    mask_T, ids_T = dump.loss_mask_T, dump.document_ids_T
    places_T = torch.arange(len(ids_T))
    last_N = torch.full((dump.num_documents,), -1).scatter_reduce(0, ids_T[mask_T], places_T[mask_T], "amax")
    first_N = torch.full((dump.num_documents,), len(ids_T)).scatter_reduce(0, ids_T[mask_T], places_T[mask_T], "amin")
    same_T = ids_T.roll(1) == ids_T
    there_T = dump.tokens.get("token_mask", torch.ones_like(mask_T))
    before_T, after_T = mask_T.roll(1) & same_T, mask_T.roll(-1) & (ids_T.roll(-1) == ids_T)
    masks = {
        "the last trained token of each document does not train": mask_T & (places_T != last_N[ids_T]),
        "the first trained token of each document does not train": mask_T & (places_T != first_N[ids_T]),
        "the mask is that of the token before": before_T & there_T,
        "the mask is that of the token after": after_T & there_T,
    }
    if not bool(there_T[before_T].all()):
        masks["the mask is that of the token before, padding too"] = before_T
    silent_N = torch.bincount(ids_T[mask_T], minlength=dump.num_documents) == 0
    masks["documents that are masked as a whole train"] = mask_T | (there_T & silent_N[ids_T])
    if "token_mask" in dump.tokens:
        masks["every token of a completion trains, also what a tool wrote"] = dump.tokens["token_mask"]
        masks["every token trains, padding too"] = torch.ones_like(mask_T)
    for text, other_T in masks.items():
        if bool(other_T.any()) and not bool((other_T == mask_T).all()) and _all_finite(dump, other_T):
            yield Alternative("mask", text, reading.with_tokens(loss_mask=other_T, token_mask=None))


def _all_finite(dump: StepDump, mask_T: Tensor) -> bool:
    reals = (value_T for value_T in dump.tokens.values() if value_T.is_floating_point())
    logprobs = (dump.tokens[name] for name in LOGPROBS if name in dump.tokens)
    above = any(bool((value_T[mask_T] > 1e-4).any()) for value_T in logprobs)
    return not above and all(bool(value_T[mask_T].isfinite().all()) for value_T in reals)


# ---- factors and settings ------------------------------------------------------------------------------------------


def _factors(reading: Reading) -> Iterator[Alternative]:
    yield Alternative("factor", "the sign is reversed", replace(reading, factor=-1.0))
    if (advantages_T := reading.dump.advantages_T) is not None and reading.spec.kl.coefficient:
        text = "the sign of the policy term (of the advantages) is reversed"
        yield Alternative("factor", text, reading.with_tokens(advantages=-advantages_T))
    for name in ("dp", "cp", "micro_batches"):
        if (size := reading.dump.size(name)) > 1:
            yield Alternative("factor", f"times {name} ({size})", replace(reading, factor=float(size)))
            yield Alternative("factor", f"divided by {name} ({size})", replace(reading, factor=1.0 / size))


def _settings(reading: Reading) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (kind, description, changed settings) of other losses."""
    yield from _denominators(reading)
    spec = reading.spec
    surrogate = spec.surrogate.model_dump()
    low, high = surrogate.get("clip_low"), surrogate.get("clip_high")
    if low is not None and high is not None and low != high:
        yield "clip", f"the clip is {low:g} on both sides", {"surrogate": {"clip_high": low}}
        yield "clip", f"the clip is {high:g} on both sides", {"surrogate": {"clip_low": high}}
        yield "clip", "the two lengths of the clip are exchanged", {"surrogate": {"clip_low": high, "clip_high": low}}
    if low is not None and high is not None:
        yield "clip", "nothing is clipped", {"surrogate": {"clip_low": 1.0, "clip_high": math.inf}}
        yield "clip", "there is no upper bound of the clip", {"surrogate": {"clip_high": math.inf}}
        yield "clip", "there is no lower bound of the clip", {"surrogate": {"clip_low": 1.0}}
        for below, above in _BOUNDS:
            if (below, above) != (low, high):
                text = f"the clip is {below:g} below and {above:g} above 1, not {low:g} and {high:g}"
                yield "clip", text, {"surrogate": {"clip_low": below, "clip_high": above}}
        text = f"the bounds of the clip are those of the log ratio: e^-{low:g} and e^{high:g}"
        yield "clip", text, {"surrogate": {"clip_low": 1 - math.exp(-low), "clip_high": math.expm1(high)}}
        if high < 1:
            text = f"the upper bound is {high:g} itself, not 1 + {high:g}"
            yield "clip", text, {"surrogate": {"clip_low": 1.0, "clip_high": high - 1}}
    if surrogate.get("dual_clip"):
        yield "clip", "there is no dual clip", {"surrogate": {"dual_clip": None}}
    elif "dual_clip" in surrogate:
        yield "clip", "there is a dual clip at 3", {"surrogate": {"dual_clip": 3.0}}
    for kind in ("ppo", "gspo", "gspo_token", "cispo", "importance_sampling", "on_policy", "reinforce"):
        bounds = {"clip_low": low, "clip_high": high} if low is not None and kind not in _WITHOUT_CLIP else {}
        if kind != surrogate["kind"]:
            yield "estimator", f"the surrogate is {kind}", {"surrogate": Whole({"kind": kind, **bounds})}
    yield from _penalties(reading)
    yield from _corrections(reading)


_BOUNDS = ((0.2, 0.2), (0.2, 0.28), (0.1, 0.1), (0.3, 0.3), (0.2, 0.3), (0.2, 0.25), (3e-4, 4e-4), (0.05, 0.05))
"""Bounds that trainers have as defaults or in recipes: PPO and GRPO, DAPO, GSPO."""
_WITHOUT_CLIP = ("importance_sampling", "on_policy", "reinforce")


def _denominators(reading: Reading) -> Iterator[tuple[str, str, dict[str, Any]]]:
    dump, spec = reading.dump, reading.spec
    width = int(torch.bincount(dump.document_ids_T).max())
    meanings = {
        "token": "by all trained tokens of the step",
        "document": "by documents, each over its own tokens",
        "document_sum": "by documents",
        "raw": "by nothing",
        "prompt_group": "by prompts, each over its own tokens",
    }
    for name, text in meanings.items():
        changes: dict[str, Any] = {"denominator": name, "denominator_constant": None}
        yield "denominator", f"the loss is divided {text}", changes
        if dump.size("dp") * dump.size("micro_batches") > 1:
            local = {
                "counts": "micro_batch",
                "multiplied_by": (),
                "divided_by": ("micro_batches",),
                "replicated": False,
            }
            scaling = {"scaling": {**local, "engine_multiplies": (), "engine_divides": ("dp",)}}
            text_of_each = f"each micro-batch is divided {text.replace('of the step', 'of its own')}, then averaged"
            yield "denominator", text_of_each, {**changes, "compat": scaling}
            exact = {"scaling": {**local, "counts": "step", "divided_by": (), "engine_divides": ()}}
            yield "denominator", f"the loss is divided {text}, counted over the step", {**changes, "compat": exact}
    constant = {"denominator": "constant", "denominator_constant": float(width)}
    yield "denominator", f"the loss is divided by documents times the padded width {width}", constant
    other = {"trained": "all", "all": "trained"}[spec.compat.documents_counted]
    text = (
        "documents without a trained token count"
        if other == "all"
        else "documents without a trained token do not count"
    )
    yield "denominator", text, {"compat": {"documents_counted": other}}
    if spec.correction.rejects:
        of_survivors = {"correction": {"denominator": "survivors"}}
        yield "denominator", "tokens that the correction rejects are not counted", of_survivors


def _penalties(reading: Reading) -> Iterator[tuple[str, str, dict[str, Any]]]:
    spec = reading.spec
    if spec.kl.coefficient:
        for estimator in ("k1", "k2", "k3", "abs", "squared"):
            if estimator != spec.kl.estimator:
                yield "estimator", f"the KL estimator is {estimator}", {"kl": {"estimator": estimator}}
        for gradient in ("path", "score", "straight_through"):
            if gradient != spec.kl.gradient:
                yield "estimator", f"the KL penalty has the gradient {gradient!r}", {"kl": {"gradient": gradient}}
        for importance in ("none", "old"):
            if importance != spec.kl.importance:
                text = "with the importance ratio" if importance == "old" else "without an importance ratio"
                yield "penalty", f"the KL penalty is {text}", {"kl": {"importance": importance}}
    if spec.entropy_coefficient:
        yield "penalty", "there is no entropy bonus", {"entropy_coefficient": 0.0}
        yield "penalty", "the entropy bonus has the other sign", {"entropy_coefficient": -spec.entropy_coefficient}


def _missing(spec: LossSpec) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the terms that can be missing; first, since a stale value may look the same."""
    if spec.correction.acts:
        yield "correction", "there is no correction of the sampler's mismatch", {"correction": Whole({"kind": "none"})}
    if spec.kl.coefficient:
        yield "penalty", "there is no KL penalty", {"kl": {"coefficient": 0.0}}


def _corrections(reading: Reading) -> Iterator[tuple[str, str, dict[str, Any]]]:
    spec, sampler = reading.spec.correction, "sampler_logprobs" in reading.dump.tokens
    if not sampler:
        return
    bounds = {"ratio_low": spec.ratio_low, "ratio_high": spec.ratio_high, "outside": spec.outside}
    for ratio in ("token", "document_mean", "document_sum"):
        if ratio != spec.ratio:
            text = f"the correction's ratio is one of the {ratio.replace('_', ', by its ')}"
            yield "correction", text, {"correction": {**bounds, "ratio": ratio}}
    if spec.ratio_low is not None or spec.ratio_high is not None:
        outside = {"truncate": "zero", "zero": "truncate"}[spec.outside]
        text = "rejected" if outside == "zero" else "truncated"
        yield "correction", f"weights outside their bounds are {text}", {"correction": {"outside": outside}}
        unbounded = {"ratio_low": None, "ratio_high": None, "outside": "truncate"}
        yield "correction", "weights have no bounds", {"correction": unbounded}
    if spec.ratio != "none":
        text = "not divided by their mean" if spec.normalize else "divided by their mean"
        yield "correction", f"weights are {text}", {"correction": {"normalize": not spec.normalize}}
