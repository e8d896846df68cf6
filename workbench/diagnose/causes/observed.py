"""Causes that a recorder saw by itself (`workbench.records.observed`): settings, weights, parameters, modes, replicas.

What was seen is no inference: where two runs were set differently before their numbers part, that is told first, and
what follows from it comes behind. A difference that was not seen is not taken for none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from workbench.diagnose.causes import given
from workbench.diagnose.causes.cause import NOT, Family, Judged
from workbench.diagnose.facts import Facts

OBSERVED = Family("observed")
SEEN = 0.97
"""Score of what both recorders saw: above all inferences but those of numbers that are zero or not finite."""
DECLARED = 0.995
"""Of settings that differ where no number does, beyond its tolerance: above `no_difference`, for it is one."""
OF_MODEL = 0.95
"""Of the model's settings: below weights and parameters that differ, of which a setting is the cause."""
OTHER_RULE = 0.7
"""Of a bound of clipping that is not torch's any more, where gradients are clipped by another rule."""
_HOW = ("fused", "foreach", "capturable", "differentiable")
"""Settings of torch's optimizers that say how, and not what, they compute."""
DISAGREEMENT, REPLAYED = "router/disagreement/share", "router/replayed/checksum"
"""Metrics of replayed routes: those that the router would have chosen otherwise, and a number that tells them all."""
TOO_LATE = 0.2
"""Of a difference that was seen only after the numbers had parted: it may be another mistake, but not that one."""


def _starts(facts: Facts) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    trusted, suspect = (record.context.get("observed") or {} for record in (facts.evidence.trusted, facts.suspect))
    return trusted, suspect


def _steps(facts: Facts) -> Iterator[tuple[int, Mapping[str, Any], Mapping[str, Any]]]:
    """Number of each step that both recorded, and what the recorders saw in it."""
    suspect = {step.number: step.observed for step in facts.suspect.steps}
    for step in facts.evidence.trusted.steps:
        if step.number in suspect and step.observed and suspect[step.number]:
            yield step.number, step.observed, suspect[step.number]


def _comparable(facts: Facts) -> bool:
    """True if both records see the same parts of the model: rank 0 of as many shards."""
    trusted, suspect = _starts(facts)
    as_many = _as_many(facts, "tp", "pp", "ep")
    return bool(trusted and suspect) and as_many and trusted.get("sharded") == suspect.get("sharded")


def _as_many(facts: Facts, *axes: str) -> bool:
    """True if both runs have as many ranks in each of these axes."""
    one, other = (
        [record.context.get(axis) or 1 for axis in axes] for record in (facts.evidence.trusted, facts.suspect)
    )
    return one == other


@OBSERVED.cause("other parameters: some exist, train, are tied or have an optimizer in one run only")
def _other_parameters(facts: Facts) -> Judged:
    if not _comparable(facts):
        return NOT
    trusted, suspect = _starts(facts)
    reasons = []
    one, other = trusted.get("parameters", {}), suspect.get("parameters", {})
    for word, names in (("lacks", one.keys() - other.keys()), ("has also", other.keys() - one.keys())):
        if names:
            reasons.append(f"the suspect {word} {_listed(sorted(names))}")
    shared = [name for name in one if name in other]
    for key, word in (("trains", "trains"), ("shape", "has a shape")):
        if names := [name for name in shared if one[name][key] != other[name][key]]:
            reasons.append(f"{_listed(names)}: {word} {other[names[0]][key]}, not {one[names[0]][key]}")
    if trusted.get("tied") != suspect.get("tied"):
        reasons.append(f"tied: {suspect.get('tied') or 'nothing'}, not {trusted.get('tied') or 'nothing'}")
    if trusted.get("left_out", []) != suspect.get("left_out", []):
        reasons.append(f"in no optimizer: {_listed(suspect.get('left_out', [])) or 'nothing'}")
    return (_since(facts, -1), reasons) if reasons else NOT


@OBSERVED.cause("the runs start from other weights")
def _initial_weights(facts: Facts) -> Judged:
    trusted, suspect = _starts(facts)
    if not _comparable(facts) or trusted.get("parameters") != suspect.get("parameters"):
        return NOT
    if trusted.get("sharded") and not _as_many(facts, "dp", "cp"):  # FSDP: rank 0 has other parts of the weights
        return NOT
    if None in (trusted.get("weights"), suspect.get("weights")) or trusted["weights"] == suspect["weights"]:
        return NOT
    return SEEN, [f"checksum of the initial weights {suspect['weights']}, not {trusted['weights']}"]


@OBSERVED.cause("the model's settings or buffers differ: positions, windows, scales, activations")
def _model_settings(facts: Facts) -> Judged:
    """Settings and buffers count only where numbers differ: one alone may have no effect."""
    trusted, suspect = _starts(facts)
    if not _comparable(facts) or not any(step.differs for step in facts.evidence.steps):
        return NOT
    reasons = []
    one, other = trusted.get("config", {}), suspect.get("config", {})
    for name in (name for name in one if name in other and one[name] != other[name]):
        reasons.append(f"{name} of the model's config is {other[name]!r}, not {one[name]!r}")
    one, other = trusted.get("buffers", {}), suspect.get("buffers", {})
    shared = [name for name in one if name in other and one[name][:-1] == other[name][:-1]]
    if off := [name for name in shared if one[name] != other[name]]:
        reasons.append(f"buffers have other values: {_listed(off)}")
    return (OF_MODEL, reasons[:6]) if reasons else NOT


@OBSERVED.cause("the optimizer, its settings or the bound of clipping differ")
def _optimizer_settings(facts: Facts) -> Judged:
    trusted, suspect = _starts(facts)
    right, wrong = (start.get("optimizers") for start in (trusted, suspect))
    if right and wrong and right != wrong:
        return _since(facts, -1), [f"{' and '.join(wrong)}, not {' and '.join(right)}"]
    for number, one, other in _steps(facts):
        settings, clipping = list(_settings_off(one, other)), list(_clipping_off(one, other))
        if reasons := [*settings, *clipping]:
            score = _since(facts, number)
            if not settings and _other_rule(facts, one, other):
                score = min(score, OTHER_RULE)
            return score, [f"in step {number}: {reason}" for reason in reasons[:6]]
    return NOT


def _other_rule(facts: Facts, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if gradients are clipped all the same, by a rule that is not torch's of norms: no setting was changed."""
    if "given" not in one or "given" not in other:
        return False
    return bool(_clipped_otherwise(one["given"], other["given"], _bounds(facts)))


def _bounds(facts: Facts) -> set[float]:
    return {float(facts.context.get("max_grad_norm") or 1.0), *USUAL_BOUNDS}


def _since(facts: Facts, number: int) -> float:
    """Score of a setting that differs from a step on, and acts on what is after it."""
    parts = ("loss", "gradient", "tokens")
    first = next((step.number for step in facts.evidence.steps if any(part in step.differs for part in parts)), None)
    return DECLARED if first is None else SEEN if number < first else TOO_LATE


@OBSERVED.cause("the optimizer's state was lost or restarted")
def _optimizer_state(facts: Facts) -> Judged:
    for number, one, other in _steps(facts):
        if one.get("updates") != other.get("updates") and None not in (one.get("updates"), other.get("updates")):
            return _since(facts, number - 1), [
                f"before step {number} its state has counted {other['updates']} updates, not {one['updates']}"
            ]
        if set(one.get("kept", ())) - set(other.get("kept", one.get("kept", ()))):
            kept, right = (_listed(seen["kept"]) or "nothing" for seen in (other, one))
            return _since(facts, number - 1), [f"before step {number} its state keeps {kept}, not {right}"]
    return NOT


def _settings_off(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    if "optimizers" not in one or "optimizers" not in other:
        return
    for at, (groups, others) in enumerate(zip(one["optimizers"], other["optimizers"], strict=False)):
        if len(groups) != len(others):
            yield f"optimizer {at} has {len(others)} groups, not {len(groups)}"
        for group, (right, wrong) in enumerate(zip(groups, others, strict=False)):
            for name in right:
                if name in wrong and right[name] != wrong[name] and name not in _HOW:
                    yield f"{name} of group {group} is {wrong[name]}, not {right[name]}"


def _clipping_off(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    if "optimizers" not in one or "optimizers" not in other:
        return  # without an optimizer clipping is not watched
    bounds = [seen.get("clip", {}).get("max_norm") for seen in (one, other)]
    if bounds[0] != bounds[1]:
        texts = ["no clipping by torch" if bound is None else f"clipped to {bound:g}" for bound in bounds]
        yield f"{texts[1]}, where the trusted run has {texts[0]}"


@OBSERVED.cause("replicas of the weights are not equal on all ranks")
def _replicas_apart(facts: Facts) -> Judged:
    for number, one, other in _steps(facts):
        off = other.get("replicas")
        if isinstance(off, list) and not isinstance(one.get("replicas"), list):
            return SEEN, [f"in step {number} {_listed(off)} differ between ranks"]
    if facts.forward_same is not False or facts.mask_same is False or facts.other_tokens > 0:
        return NOT
    if (parts := facts.rows_moved) is None:
        return NOT
    return 0.92, [
        f"log-probabilities of {len(parts[0])} micro-batches differ in nearly every token, and those of the other "
        f"{len(parts[1])} in none: they are computed with other weights"
    ]


@OBSERVED.cause("dropout is active in one run only")
def _dropout(facts: Facts) -> Judged:
    differs = any(step.differs for step in facts.evidence.steps)
    for number, one, other in _steps(facts):
        if one.get("dropout") != other.get("dropout"):
            return SEEN, [f"in step {number} {other.get('dropout')} modules drop, not {one.get('dropout')}"]
        if (
            differs
            and one.get("training") != other.get("training")
            and None not in (one.get("training"), other.get("training"))
        ):
            mode = "training" if other["training"] else "evaluation"
            return 0.9, [f"in step {number} the model is in {mode} mode, and the trusted one is not"]
    return NOT


@OBSERVED.cause("gradients are clipped by another rule: another norm, at another time, or in one run only")
def _gradient_clipping(facts: Facts) -> Judged:
    """Both recorders saw what clipping did; or the factor is one number, and the norm of one run is a usual bound."""
    bounds = _bounds(facts)
    for number, one, other in _steps(facts):
        if text := _clipped_at_another_time(one, other):
            return _since(facts, number - 1), [f"in step {number} {text}"]
        if "given" in one and "given" in other and (text := _clipped_otherwise(one["given"], other["given"], bounds)):
            return _since(facts, number), [f"in step {number} {text}"]
    if (judged := _clipped_in_pieces(facts))[0]:
        return judged
    if not facts.scaled or facts.loss_same is not True or facts.factor_names:
        return NOT
    if facts.outputs is not None and facts.outputs.weights_same is False:
        return NOT
    norms = [math.sqrt(sum(value**2 for value in step.gradient_norms.values())) for step in facts.pair]
    at = [next((bound for bound in bounds if abs(norm / bound - 1) < 1e-4), None) for norm in norms]
    if (at[0] is None) == (at[1] is None):
        return (0.45, [_norms_of(norms)]) if at[0] is None and _changes(facts) else NOT
    which = "suspect" if at[0] is None else "trusted run"
    return 0.9, [
        f"the loss is right, and the whole gradient of the {which} is as long as {at[1] or at[0]:g}; {_norms_of(norms)}"
    ]


def _clipped_at_another_time(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Clause for a clipping after some backwards of a step that all went before it in the trusted run; "" if not so.

    Both have as many backwards, so that they divide the step alike.
    """
    after = [seen.get("clipped_after") for seen in (one, other)]
    backwards = [1 + seen["met"][1] if "met" in seen else None for seen in (one, other)]
    right, wrong = after
    if right is None or wrong is None or not backwards[0] == backwards[1] == right or wrong >= right:
        return ""
    return f"gradients are clipped after {wrong} of {right} backwards, and in the trusted run after all"


def _clipped_in_pieces(facts: Facts) -> Judged:
    """A gradient of another direction that is no longer than the bound of clipping allows its pieces to be together.

    One that each micro-batch was clipped to may be as long as the bound times their number, and is, of a rank that
    clips what it has added up, as long as the bound.
    """
    bound = facts.pair[1].observed.get("clip", {}).get("max_norm") or facts.context.get("max_grad_norm")
    if not bound or facts.gradient_same is not False or facts.loss_same is not True or facts.forward_same is False:
        return NOT
    if facts.outputs is not None and facts.outputs.weights_same is False:
        return NOT  # the gradient is another one before anything clips it
    right, wrong = (math.sqrt(sum(value**2 for value in step.gradient_norms.values())) for step in facts.pair)
    pieces = max(int(facts.context.get(axis) or 1) for axis in ("micro_batches", "accumulation", "dp"))
    pieces = max(pieces, int(facts.pair[1].observed.get("inputs", {}).get("calls") or 1))
    at_bound = abs(wrong / bound - 1) <= RULE
    if right <= bound * pieces * (1 + RULE) or wrong > bound * pieces * (1 + RULE) or pieces < 2:
        return NOT
    how = f"as long as the bound of clipping, {bound:g}" if at_bound else f"within {pieces} times the bound, {bound:g}"
    likely = at_bound or bool(given.met_fewer(facts))
    return (0.85 if likely else 0.6 if facts.forward_same else 0.45), [
        f"the loss is right, and the gradient before clipping is {how}, and {right:.4g} in the trusted run: "
        "pieces of it were clipped one by one"
    ]


def _clipped_otherwise(right: Mapping[str, Any], wrong: Mapping[str, Any], bounds: set[float]) -> str:
    """Clause for gradients that were changed by another rule before the update; "" if the rules may be the same.

    A rule that clips to a norm leaves that norm, whatever the gradient was.
    """
    times = [right["times"], wrong["times"]]
    each = [most - least > RULE * most for least, most in times]
    if each[0] != each[1]:
        texts = [
            f"each by a factor of its own, {least:.3g} to {most:.3g}" if own else f"all by {most:.3g}"
            for own, (least, most) in zip(each, times, strict=True)
        ]
        return f"gradients are multiplied before the update, {texts[1]}; in the trusted run {texts[0]}"
    norms = [right["norm"], wrong["norm"]]
    bound = [
        next((bound for bound in bounds if most < 1 - RULE and abs(norm / bound - 1) < RULE), None)
        for norm, (_, most) in zip(norms, times, strict=True)
    ]
    longer = [norm > (other or math.inf) * (1 + RULE) for norm, other in zip(norms, reversed(bound), strict=True)]
    if any(each) or not any(longer):
        return ""
    texts = [
        f"clipped to {to:g}" if to else f"given with a norm of {norm:.4g}"
        for to, norm in zip(bound, norms, strict=True)
    ]
    return f"the optimizer's gradient is {texts[1]}, in the trusted run {texts[0]}"


RULE = 1e-2
"""Relative distance between factors of one clip: twice the rounding, 2^-8, of a bfloat16 gradient of one element."""
USUAL_BOUNDS = (0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Largest norms of a gradient that trainers set: verl's, TRL's and Megatron's 1, Lightning's 0.5, ..."""


def _norms_of(norms: list[float]) -> str:
    return f"norms are {norms[1]:.6g} and {norms[0]:.6g}"


def _changes(facts: Facts) -> bool:
    """True if the factor of the gradient is another one in a later step with right losses: no constant was lost."""
    factors = [step.factor for step in facts.evidence.steps if step.factor and step.parallel and step.loss_same]
    return len(factors) > 1 and abs(factors[0] / factors[1] - 1) > 0.01


@OBSERVED.cause("an update left the weights as they were")
def _no_update(facts: Facts) -> Judged:
    before: tuple[str, str] | None = None
    for number, one, other in _steps(facts):
        now = (str(one.get("weights")), str(other.get("weights")))
        if before is not None and now[1] == before[1] and now[0] != before[0]:
            return SEEN, [f"the weights of step {number} are those of the step before; the trusted ones changed"]
        before = now
    return NOT


@OBSERVED.cause("weights, gradients or the optimizer's state have other dtypes")
def _precision_settings(facts: Facts) -> Judged:
    reasons = []
    trusted, suspect = _starts(facts)
    dtypes = [
        sorted({entry["dtype"] for entry in start.get("parameters", {}).values()}) for start in (trusted, suspect)
    ]
    if all(dtypes) and dtypes[0] != dtypes[1]:
        reasons.append(f"weights in {' and '.join(dtypes[1])}, not {' and '.join(dtypes[0])}")
    for number, one, other in _steps(facts):
        if one.get("grid") != other.get("grid"):
            reasons.append(f"before step {number} the weights lie on the grid of {other.get('grid') or 'float32'}")
        if one.get("gradient_grid") != other.get("gradient_grid") and "gradient_grid" in one:
            grid = other.get("gradient_grid") or "float32"
            reasons.append(f"gradients of step {number} lie on the grid of {grid}")
        for part, right in one.get("dtypes", {}).items():
            wrong = other.get("dtypes", {}).get(part)
            if wrong and right and wrong != right:
                reasons.append(f"{part} of step {number} in {' and '.join(wrong)}, not {' and '.join(right)}")
        if reasons:
            break
    if not reasons or not any(step.differs for step in facts.evidence.steps):
        return (DECLARED, reasons) if reasons else NOT
    return 0.9, reasons


@OBSERVED.cause("routes of a mixture of experts were replayed that are not the same")
def _other_routes(facts: Facts) -> Judged:
    suspect = {step.number: step.metrics for step in facts.suspect.steps}
    for step in facts.evidence.trusted.steps:
        right, wrong = step.metrics, suspect.get(step.number, {})
        if REPLAYED not in right or REPLAYED not in wrong:
            return NOT
        if right[REPLAYED] != wrong[REPLAYED]:
            shares = wrong.get(DISAGREEMENT, math.nan), right.get(DISAGREEMENT, math.nan)
            reasons = [
                f"in step {step.number} other experts were taken; {shares[0]:.4g} of the routes are not the routers' "
                f"own choice, {shares[1]:.4g} in the trusted run"
            ]
            return _since(facts, step.number - 1), reasons + (["routers chose by themselves"] if not shares[0] else [])
    return NOT


@OBSERVED.cause("steps were skipped by the loss scaler in one run only")
def _skipped_steps(facts: Facts) -> Judged:
    for number, one, other in _steps(facts):
        if one.get("skipped") != other.get("skipped") and "skipped" in one and "skipped" in other:
            return SEEN, [f"before step {number} {other['skipped']} steps were skipped, not {one['skipped']}"]
    return NOT


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
