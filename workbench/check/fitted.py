"""Causes with a number that is read off a step's recorded values: a factor, a coefficient, an order, lost tokens.

Letters: T tokens | N documents.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from pydantic import ValidationError
from torch import Tensor

from workbench.check.alternatives import Alternative, of_documents
from workbench.check.numbers import Numbers
from workbench.check.reading import Reading, Scale
from workbench.diagnose.denominators import Named, names_of, sizes
from workbench.dumps.step import StepDump
from workbench.errors import listed

BAR = {"float64": 1e-7, "float32": 1e-3, "bfloat16": 3e-2}
"""Relative distance within which a fitted number is exact: 100 times `RELATIVE`, or that of bfloat16; a convention."""


def common_factor(
    dump: StepDump, recorded: Tensor | float, expected: Tensor | float, bounds: Tensor | float
) -> tuple[float, int] | None:
    """Return the factor of all recorded values against the expected ones, and how many show it; None without one."""
    recorded_T, expected_T = torch.as_tensor(recorded).reshape(-1), torch.as_tensor(expected).reshape(-1)
    there_T = expected_T.abs() > 1e-3 * expected_T.abs().max()
    if not bool(there_T.any()):
        return None
    factors_T = (recorded_T / expected_T)[there_T]
    factor, spread = float(factors_T.median()), float((factors_T - factors_T.median()).abs().max())
    bar = BAR[dump.dtype]
    bounds_T = torch.as_tensor(bounds).reshape(-1) * max(1.0, abs(factor))
    beyond_T = (recorded_T - factor * expected_T).abs() > bounds_T + bar * (factor * expected_T).abs()
    if spread > bar * abs(factor) or abs(factor - 1) <= bar or bool(beyond_T.any()):
        return None
    return factor, len(factors_T)


def named_sizes(dump: StepDump, factor: float, bar: float) -> list[Named]:
    """Return the sizes of a step that a factor equals, the likeliest first."""
    trained, documents = float(dump.loss_mask_T.sum()), float(dump.document_ids_T[dump.loss_mask_T].unique().numel())
    counts = {
        "trained_tokens": trained,
        "documents": documents,
        "masked_documents": dump.num_documents - documents,
        "padded_tokens": float(len(dump.loss_mask_T)),
        "all_tokens": float(dump.tokens["token_mask"].sum()) if "token_mask" in dump.tokens else 0.0,
    }
    return names_of(abs(factor), sizes({**dump.layout, "temperature": dump.temperature}, counts), bar)


def in_words(dump: StepDump, factor: float, bar: float) -> str:
    """Return " = dp or documents", or "" if a factor is no size of the step."""
    text = listed((name.description for name in named_sizes(dump, factor, bar)), 3, separator=" or ")
    return f" = {text}" if text else ""


# ---- terms ---------------------------------------------------------------------------------------------------------


def fitted_terms(reading: Reading, null: Numbers) -> Iterator[Alternative]:
    """Yield the weight of one term that the recorded coefficients, or losses of terms, show."""
    spec, dump = reading.spec, reading.dump
    if not spec.kl.coefficient or spec.kl.placement != "loss":
        return
    bar = BAR[dump.dtype]
    weights = _of_coefficients(null) or _of_losses(null)
    if weights is None:
        return
    policy, penalty = weights
    ones_T = torch.ones(len(dump.document_ids_T), dtype=torch.float64)
    if abs(policy - 1) <= bar < abs(penalty - 1) and abs(penalty) > bar:
        text = f"the KL penalty is weighed by {penalty * spec.kl.coefficient:.5g}, not {spec.kl.coefficient:g}: times "
        scale = Scale(penalty * ones_T, of="penalty")
        text += f"{penalty:.5g}{in_words(dump, penalty, bar)}"
        yield Alternative("penalty", text, replace(reading, scale=scale))
    if abs(penalty - 1) <= bar < abs(policy - 1) and abs(policy) > bar:
        scale = Scale(policy * ones_T, of="policy")
        text = f"the policy term is multiplied by {policy:.5g}{in_words(dump, policy, bar)}, the KL penalty is not"
        if abs(policy + 1) <= bar:
            text = "the sign of the policy term is reversed, that of the KL penalty is not"
        yield Alternative("factor", text, replace(reading, scale=scale))


def _of_coefficients(null: Numbers) -> tuple[float, float] | None:
    """Factors of the policy's and the penalty's coefficients whose sum is nearest to the recorded ones."""
    parts = [null.expected.get(f"parts/{name}") for name in ("policy", "kl")]
    recorded_T = null.recorded.get("coefficients")
    if not isinstance(recorded_T, Tensor) or any(part is None for part in parts):
        return None
    mask_T = null.reading.dump.loss_mask_T & recorded_T.isfinite()
    columns = torch.stack([torch.as_tensor(part)[mask_T] for part in parts], 1)
    if len(columns) < 3 or int(torch.linalg.matrix_rank(columns)) < 2:
        return None
    solution = torch.linalg.lstsq(columns, recorded_T[mask_T][:, None]).solution
    return float(solution[0]), float(solution[1])


def _of_losses(null: Numbers) -> tuple[float, float] | None:
    pairs = [(null.recorded.get(f"losses/{name}"), null.expected.get(f"losses/{name}")) for name in ("policy", "kl")]
    if any(not recorded or not expected for recorded, expected in pairs):
        return None
    policy, penalty = (float(recorded or 0) / float(expected or 1) for recorded, expected in pairs)
    return policy, penalty


# ---- order ---------------------------------------------------------------------------------------------------------


def fitted_order(reading: Reading, null: Numbers, recorded_T: Tensor, expected_T: Tensor) -> Iterator[str]:
    """Yield which documents have the advantages of which others, if the recorded ones are the expected ones moved."""
    dump = reading.dump
    pair = [of_documents(dump, value_T) for value_T in (recorded_T, expected_T)]
    if pair[0] is None or pair[1] is None:
        return
    trained_N = torch.bincount(dump.document_ids_T[dump.loss_mask_T], minlength=dump.num_documents) > 0
    recorded_N, expected_N = (value_N[trained_N] for value_N in pair if value_N is not None)
    bound = BAR[dump.dtype] * max(1.0, float(expected_N.abs().max()))
    if float((recorded_N.sort().values - expected_N.sort().values).abs().max()) > bound:
        return
    numbers = torch.nonzero(trained_N).squeeze(1)
    moved = torch.nonzero((recorded_N - expected_N).abs() > bound).squeeze(1).tolist()
    pairs = []
    for at in moved:
        sources = torch.nonzero((expected_N - recorded_N[at]).abs() <= bound).squeeze(1).tolist()
        pairs.append(f"{int(numbers[at])} has that of {listed(numbers[sources].tolist(), 3, separator=' or ')}")
    yield f"advantages of other documents: {listed(pairs, 4, separator=', ')}"


# ---- bounds --------------------------------------------------------------------------------------------------------


def fitted_bounds(reading: Reading, null: Numbers) -> Iterator[Alternative]:
    """Yield bounds of the clip, and of the correction's weight, that the recorded coefficients show."""
    spec, dump = reading.spec, reading.dump
    recorded_T, advantages_T = null.recorded.get("coefficients"), dump.advantages_T
    ratios_T = null.expected.get("ratios")
    if not isinstance(recorded_T, Tensor) or advantages_T is None or not isinstance(ratios_T, Tensor):
        return
    own_T = recorded_T - torch.as_tensor(null.expected.get("parts/kl", 0.0))
    weights_T = torch.as_tensor(null.expected["loss_weights"])
    applied_T = torch.as_tensor(null.expected.get("correction_weights", 1.0))
    free_T = -weights_T * applied_T * advantages_T * ratios_T
    there_T = dump.loss_mask_T & (free_T.abs() > 1e-3 * free_T.abs().max())
    settings = spec.surrogate.model_dump()
    if spec.surrogate.kind == "ppo" and settings.get("clip_low") is not None:
        off_T = own_T.abs() < 0.1 * free_T.abs()
        bounds = {"clip_low": float(settings["clip_low"]), "clip_high": float(settings["clip_high"])}
        for name, sign in (("clip_high", 1), ("clip_low", -1)):
            signed_T = there_T & (advantages_T * sign > 0)
            distance_T = (ratios_T - 1) * sign
            within, beyond = distance_T[signed_T & ~off_T], distance_T[signed_T & off_T & (distance_T > 0)]
            if not len(within) or not len(beyond) or float(within.max()) >= float(beyond.min()):
                continue
            low, high = max(float(within.max()), 0.0), float(beyond.min())
            if not low <= bounds[name] <= high:
                nice = _shortest(low, high)
                text = f"{name} is {nice:g} or near: between {low:.4g} and {high:.4g}, not {bounds[name]:g}"
                yield Alternative("clip", text, reading.changed(surrogate={name: nice}))
        if not settings.get("dual_clip"):
            signed_T = there_T & (advantages_T < 0)
            within, beyond = ratios_T[signed_T & ~off_T], ratios_T[signed_T & off_T & (ratios_T > 1)]
            if len(within) and len(beyond) and float(within.max()) < float(beyond.min()):
                nice = _shortest(max(float(within.max()), math.nextafter(1.0, 2.0)), float(beyond.min()))
                text = f"there is a dual clip at {nice:g} or near"
                yield Alternative("clip", text, reading.changed(surrogate={"dual_clip": nice}))
    if spec.correction.ratio == "token" and spec.correction.outside == "truncate":
        implied_T = (own_T / free_T * applied_T)[there_T & (own_T != 0)]
        if not len(implied_T):
            return
        for name, bound in (("ratio_high", float(implied_T.max())), ("ratio_low", float(implied_T.min()))):
            at = int(((implied_T / bound - 1).abs() < BAR[dump.dtype]).sum()) if bound > 0 else 0
            given = getattr(spec.correction, name)
            if at > 1 and (given is None or abs(bound / given - 1) > BAR[dump.dtype]):
                nice = _shortest(bound * (1 - BAR[dump.dtype] / 4), bound * (1 + BAR[dump.dtype] / 4))
                text = (
                    f"weights are truncated at {nice:g}, not {given:g}"
                    if given
                    else f"weights are truncated at {nice:g}"
                )
                with contextlib.suppress(ValidationError):
                    yield Alternative("correction", text, reading.changed(correction={name: nice}))


def _shortest(low: float, high: float) -> float:
    """The number with the fewest digits between two."""
    for digits in range(12):
        rounded = round((low + high) / 2, digits)
        if low <= rounded <= high:
            return rounded
    return (low + high) / 2


# ---- rounding ------------------------------------------------------------------------------------------------------


def fitted_rounding(name: str, recorded_T: Tensor, expected_T: Tensor, dtype: str) -> Iterator[str]:
    """Yield the precision in which all recorded values are exact, if they are the expected ones rounded to it."""
    for other, bits in (("bfloat16", 8), ("float16", 11)):
        if other == dtype:
            continue
        exact = bool((recorded_T == recorded_T.to(getattr(torch, other)).double()).all())
        near = bool(((recorded_T - expected_T).abs() <= 2.0**-bits * expected_T.abs() + 1e-8).all())
        if exact and near and bool(recorded_T.any()):
            yield f"{name} rounded to {other}"


# ---- counts --------------------------------------------------------------------------------------------------------


def fitted_divisor(reading: Reading, factor: float) -> Iterator[str]:
    """Yield the whole number that divides the loss in the place of the right count, if a factor gives one."""
    dump, spec = reading.dump, reading.spec
    documents = float(dump.document_ids_T[dump.loss_mask_T].unique().numel())
    right = {
        "token": (float(dump.loss_mask_T.sum()), "trained tokens"),
        "document": (documents, "documents"),
        "document_sum": (documents, "documents"),
        "constant": (spec.denominator_constant or 0.0, "tokens a document"),
    }.get(spec.denominator)
    if right is None or factor <= 0:
        return
    other = right[0] / factor
    if other > 1.5 and abs(other - round(other)) < BAR[dump.dtype] * other / 100 and dump.dtype != "bfloat16":
        yield f"the loss is divided by {round(other)} {right[1]}, not by {right[0]:g}"


def fitted_count(dump: StepDump, name: str, recorded: float) -> Iterator[str]:
    """Yield what a recorded count of tokens or documents counts."""
    mask_T, ids_T = dump.loss_mask_T, dump.document_ids_T
    values_T = {"tokens": mask_T, "all tokens": dump.tokens.get("token_mask", torch.ones_like(mask_T))}
    counts = {"all tokens and padding": float(len(mask_T)), "all tokens": float(values_T["all tokens"].sum())}
    counts |= {"all documents": float(dump.num_documents), "tokens": float(mask_T.sum())}
    counts["documents"] = float(ids_T[mask_T].unique().numel())
    lengths_N = torch.bincount(ids_T[mask_T], minlength=dump.num_documents)
    counts["trained tokens, and one for each document without a trained token"] = float(lengths_N.clamp_min(1).sum())
    for one, piece_T in _pieces(dump).items():
        if one in ("rank", "micro-batch"):
            for piece in piece_T.unique().tolist():
                counts[f"tokens of {one} {piece}"] = float((mask_T & (piece_T == piece)).sum())
                counts[f"documents of {one} {piece}"] = float(ids_T[mask_T & (piece_T == piece)].unique().numel())
    texts = [text for text, count in counts.items() if count == recorded and text != name]
    if texts:
        yield f"the loss is divided by {recorded:g}: {listed(texts, 3, separator=' or ')}"


# ---- tokens --------------------------------------------------------------------------------------------------------


def fitted_pieces(
    dump: StepDump, recorded_T: Tensor, expected_T: Tensor, bounds_T: Tensor
) -> Iterator[tuple[str, str]]:
    """Yield (kind, description) of a factor that is the same within each micro-batch, rank, prompt or document."""
    for one, piece_T in _pieces(dump).items():
        factors = _factors(dump, recorded_T, expected_T, bounds_T, piece_T)
        if factors is None:
            continue
        bar = BAR[dump.dtype]
        off = {piece: factor for piece, factor in factors.items() if abs(factor - 1) > bar}
        if len(factors) < 2 or not off:
            continue
        plural = one.replace("micro-batch", "micro-batche") + "s"
        if all(abs(factor) <= bar for factor in off.values()):
            yield "mask", f"{plural} {listed(off, 6)} do not train"
        elif len({round(factor, 4) for factor in off.values()}) == 1:
            factor = next(iter(off.values()))
            yield "factor", f"{plural} {listed(off, 6)} times {factor:.5g}{in_words(dump, factor, bar)}"
        else:
            texts = (f"{piece} times {factor:.4g}" for piece, factor in off.items())
            yield "denominator", f"each {one} has a divisor of its own: {listed(texts, 4)}"
        return


def fitted_mask(dump: StepDump, recorded_T: Tensor, expected_T: Tensor, bounds_T: Tensor) -> Iterator[str]:
    """Yield the tokens that do not train, or that train though they are masked, if all others have one factor."""
    mask_T = dump.loss_mask_T
    shown_T = mask_T & (expected_T.abs() > 1e-3 * expected_T.abs().max())
    lost_T = shown_T & (recorded_T == 0)
    extra_T = ~mask_T & (recorded_T != 0)
    rest_T = shown_T & ~lost_T
    if not bool((lost_T | extra_T).any()) or int(rest_T.sum()) < 3:
        return
    factor = float((recorded_T / expected_T)[rest_T].median())
    slack_T = bounds_T * max(1.0, abs(factor)) + BAR[dump.dtype] * (factor * expected_T).abs()
    if bool((rest_T & ((recorded_T - factor * expected_T).abs() > slack_T)).any()):
        return
    for tokens_T, text in ((lost_T, "do not train"), (extra_T, "train, though they are masked")):
        if bool(tokens_T.any()):
            at = torch.nonzero(tokens_T).squeeze(1).tolist()
            yield f"{len(at)} tokens {text}: {listed((dump.place(one) for one in at), 4, separator='; ')}"


def _pieces(dump: StepDump) -> Mapping[str, Tensor]:
    """[T] piece of each token, by kind."""
    ids_T, known = dump.document_ids_T, dict[str, Tensor]()
    if (rows_N := dump.documents.get("rows")) is not None:
        if dump.size("dp") > 1:
            known["rank"] = (rows_N // dump.size("micro_batches"))[ids_T]
        if dump.size("micro_batches") > 1:
            known["micro-batch"] = rows_N[ids_T]
    if (groups_N := dump.documents.get("group_ids")) is not None:
        known["prompt"] = groups_N[ids_T]
    return known | {"document": ids_T}


def _factors(
    dump: StepDump, recorded_T: Tensor, expected_T: Tensor, bounds_T: Tensor, piece_T: Tensor
) -> dict[int, float] | None:
    """Factor of each piece; None if it is not the same within one, or if too few tokens show it."""
    bar, factors, shown = BAR[dump.dtype], dict[int, float](), 0
    there_T = dump.loss_mask_T & (expected_T.abs() > 1e-3 * expected_T.abs().max())
    for piece in piece_T[there_T].unique().tolist():
        own_T = there_T & (piece_T == piece)
        ratio_T = recorded_T[own_T] / expected_T[own_T]
        factor = float(ratio_T.median())
        beyond_T = (recorded_T - factor * expected_T).abs()[own_T] > bounds_T[own_T] * max(1.0, abs(factor)) + bar * (
            factor * expected_T[own_T]
        ).abs()
        if bool(beyond_T.any()):
            return None
        factors[piece] = factor
        shown += len(ratio_T) - 1
    # As many tokens must agree with each other as there are factors: a document of one token always has one.
    return factors if shown >= max(2, len(factors)) else None
