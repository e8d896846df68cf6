"""From two explained columns to parts: each factor switched alone, what they do together, and the rest.

With f(X) the column of configuration X, t the trainer's as explained and s the sampler's:
    gap           recorded trainer - recorded sampler; a trainer that recorded nothing is computed as it states
    part i        f(t) - f(t with the values of factor i that s has)
    interactions  f(t) - f(s) - sum of parts
    rest          gap - (f(t) - f(s))

Letters: T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from workbench.mismatch.alarm import calibrate
from workbench.mismatch.computing import Computation
from workbench.mismatch.configuration import Configuration
from workbench.mismatch.documents import read_documents
from workbench.mismatch.factors import BY_NAME, FACTORS, SAMPLING, Factor, Switch
from workbench.mismatch.floor import Floor, measure_floor
from workbench.mismatch.likelihood import DECISIVE, evidence
from workbench.mismatch.sampled import explain_sampled
from workbench.mismatch.search import REPRODUCED, Explanation, configured
from workbench.mismatch.settings import Sampler, Trainer
from workbench.mismatch.verdict import Attribution, Part, Verdict, summary
from workbench.rollouts.vocabulary import read_vocabulary

EVEN = 0.7
"""Nats of log-likelihood, odds of 2 to 1, below which the drawn tokens are silent and the nearer switch stays."""
SCALE_DRAWS = 2
"""Draws of the floor before the search, which needs its size alone."""


def attribute_gap(trainer: Trainer, sampler: Sampler, *, draws: int, device: str) -> Attribution:
    """See `workbench.mismatch.attribute`."""
    documents = read_documents(sampler.rollouts)
    computation = Computation(
        trainer,
        documents,
        vocabulary=None if sampler.vocabulary is None else read_vocabulary(sampler.vocabulary),
        device=device,
    )
    stated = {"trainer": Configuration.stated(trainer), "sampler": Configuration.stated(sampler)}
    sampler_T = torch.cat([d.sampler_C for d in documents])
    first = min(draws, SCALE_DRAWS)
    floor = measure_floor(computation, stated["trainer"], stated["sampler"], draws=first) if draws else None
    noise = floor.mean if floor else 0.0
    trainer_T = _trainer_column(computation, stated["trainer"])
    own = explain_sampled(computation, stated["trainer"], trainer_T, noise=noise)
    other = _decided(
        computation, stated["sampler"], explain_sampled(computation, stated["sampler"], sampler_T, noise=noise)
    )
    found = {"trainer": own, "sampler": other}
    if floor is not None:  # a temperature scales the noise, and at the edge of a support a token moves its sum
        everywhere = {side: [s for s in one.switches if s.documents is None] for side, one in found.items()}
        whole = {side: configured(stated[side], switches) for side, switches in everywhere.items()}
        first_floor = floor
        if whole != stated:
            floor = measure_floor(computation, whole["trainer"], whole["sampler"], draws=draws)
        if whole != stated and _worse(computation, found, trainer_T - sampler_T, first_floor, floor):
            found, whole = {side: one.none() for side, one in found.items()}, stated
            own, other, floor = found["trainer"], found["sampler"], first_floor
        if whole == stated and draws > first:
            floor = floor.with_draws(
                measure_floor(computation, whole["trainer"], whole["sampler"], draws=draws - first, seed=first)
            )

    counted_T = computation.counted_T
    parts, alone = [], {}
    total_T = own.column_T - other.column_T
    for factor in FACTORS:
        part_T = _alone(computation, stated, found, factor)
        if part_T is None:
            continue
        alone[factor.name] = part_T
        parts.append(_part(factor, stated, found, part_T[counted_T]))
    summed_T = sum(alone.values(), torch.zeros_like(total_T))
    rest_T = trainer_T - sampler_T - total_T
    gap_T = trainer_T - sampler_T
    compared_T = counted_T & rest_T.isfinite()
    alarm = None if floor is None else calibrate(floor, int(computation.document_T.max()) + 1)
    alarms = {}
    if alarm is not None and compared_T.any():
        alarms = alarm.raised(rest_T[compared_T], computation.document_T[compared_T])
    parts.sort(key=lambda part: (part.stated, -part.mean_distance))
    verdict: Verdict = "unexplained" if alarms else "explained" if parts else "at the floor"
    if not compared_T.any():
        verdict = "unsound"
    return Attribution(
        verdict,
        summary(gap_T[counted_T]),
        tuple(parts),
        summary((total_T - summed_T)[counted_T])["mean_distance"],
        summary(rest_T[counted_T]),
        floor.as_json() if floor else {"mean": 0.0, "rms": 0.0, "p99": 0.0, "draws": 0},
        alarms,
        tuple(_undecided(computation, bool(alarms), _rounding(stated["sampler"], other, rest_T[compared_T]))),
        _evidence(computation, compared_T),
        {"gap": gap_T, "rest": rest_T, "explained": total_T, **alone},
        floor,
        alarm,
    )


def _worse(
    computation: Computation, found: dict[str, Explanation], gap_T: Tensor, stated_floor: Floor, floor: Floor
) -> bool:
    """True if what is stated is at its floor, and what was found is above its own.

    Another implementation of the same precision may round less than ours, and lie nearer to a higher precision.
    """
    before_T = gap_T - (found["trainer"].stated_T - found["sampler"].stated_T)
    after_T = gap_T - (found["trainer"].column_T - found["sampler"].column_T)
    raised = []
    for rest_T, one in ((before_T, stated_floor), (after_T, floor)):
        compared_T = computation.counted_T & rest_T.isfinite()
        alarm = calibrate(one, len(computation.documents))
        raised.append(alarm.raised(rest_T[compared_T], computation.document_T[compared_T]) if compared_T.any() else {})
    return not raised[0] and bool(raised[1])


def _trainer_column(computation: Computation, stated: Configuration) -> Tensor:
    recorded = [d.trainer_C for d in computation.documents]
    if recorded[0] is None:
        return computation.column(stated)
    return torch.cat([one for one in recorded if one is not None])


def _decided(computation: Computation, stated: Configuration, explanation: Explanation) -> Explanation:
    """Choose between switches of the sampling settings that come as near, by what the drawn tokens say."""
    switches, rivals = list(explanation.switches), []
    for switch, others in explanation.rivals:
        undecided = [one for one in others if one.factor not in SAMPLING]
        chosen = switch
        for rival in [one for one in others if switch.factor in SAMPLING and one.factor in SAMPLING]:
            rest = [one for one in switches if one is not chosen]
            first, second = (configured(stated, [*rest, one]) for one in (chosen, rival))
            odds = evidence(computation, first, second)
            if abs(odds) < DECISIVE:
                undecided.append(rival if odds >= -EVEN else chosen)
            if odds < -EVEN:
                switches[switches.index(chosen)], chosen = rival, rival
        rivals.append((chosen, tuple(undecided)))
    column_T = computation.assembled(stated, switches)
    return Explanation(tuple(switches), column_T, explanation.stated_T, tuple(rivals))


def _alone(
    computation: Computation, stated: dict[str, Configuration], found: dict[str, Explanation], factor: Factor
) -> Tensor | None:
    """Effect of a factor alone, from the trainer's values to the sampler's; None if both have the same."""
    own, other = found["trainer"], found["sampler"]
    values = {name: getattr(stated["sampler"], name) for name in factor.fields}
    stated_switch = Switch(factor.name, "", tuple(values.items()))
    of_trainer = [one for one in own.switches if one.factor == factor.name]
    of_sampler = [one for one in other.switches if one.factor == factor.name]
    here = configured(stated["trainer"], [one for one in of_trainer if one.documents is None])
    differs = any(getattr(here, name) != value for name, value in values.items())
    if not differs and not of_trainer and not of_sampler:
        return None
    rest = [one for one in own.switches if one.factor != factor.name]
    switched_T = computation.assembled(stated["trainer"], [*rest, stated_switch, *of_sampler])
    return own.column_T - switched_T


def _part(factor: Factor, stated: dict[str, Configuration], found: dict[str, Explanation], part_T: Tensor) -> Part:
    side: Literal["trainer", "sampler"] = "sampler"
    for name in ("sampler", "trainer"):
        for switch in found[name].switches:
            if switch.factor == factor.name:
                side = "sampler" if name == "sampler" else "trainer"
                rivals = dict(found[name].rivals).get(switch, ())
                figures = summary(part_T)
                return Part(
                    factor.name,
                    switch.label,
                    side,
                    False,
                    figures["mean"],
                    figures["mean_distance"],
                    figures["largest"],
                    None if switch.documents is None else len(switch.documents),
                    tuple(f"{one.factor} ({one.label})" for one in rivals),
                    _records(factor, rivals) if rivals else "",
                )
    figures = summary(part_T)
    changed = ", ".join(
        f"{name} {getattr(stated['trainer'], name)} -> {getattr(stated['sampler'], name)}"
        for name in factor.fields
        if getattr(stated["trainer"], name) != getattr(stated["sampler"], name)
    )
    return Part(factor.name, changed, side, True, figures["mean"], figures["mean_distance"], figures["largest"])


def _records(factor: Factor, rivals: Sequence[Switch]) -> str:
    keys = [factor.record, *(BY_NAME[one.factor].record for one in rivals)]
    return " or ".join(dict.fromkeys(one for one in keys if one))


def _rounding(stated: Configuration, explanation: Explanation, rest_T: Tensor) -> bool:
    """True if the sampler computes in half precision and its rounding is not reproduced."""
    own = configured(stated, explanation.switches)
    half = any(name.startswith(("bfloat16", "float16")) for name in (own.precision, own.head_dtype))
    return half and bool(len(rest_T)) and float(rest_T.abs().median()) > REPRODUCED


def _undecided(computation: Computation, alarmed: bool, rounded: bool) -> list[str]:
    """Records that are missing to decide about factors that could not be switched, or change the rounding alone."""
    sentences = []
    if rounded:
        once = "the sampler's rounding is not reproduced; record one pass over the whole row (prompt_logprobs)"
        sentences += [f"attention kernel: {once}", f"head precision: of logits over the same weights, {once}"]
        if computation.adapter is not None:
            sentences.append(f"LoRA merge: merged or unmerged, {once}")
    if not computation.older:
        sentences.append(
            "stale weights: no older checkpoint is given; give trainer.older, or hashes of the engine's weights"
        )
    if computation.mixture and computation.documents[0].routes is None:
        sentences.append("routes: the sampler's are not recorded; record sampler_routes")
    if computation.vocabulary is None and "sampler_ids" not in computation.readings:
        sentences.append("tokenisation: record sampler_ids, or give sampler.vocabulary")
    if alarmed:
        sentences.append(
            "the rest is above the floor and no switch explains it: an engine's own kernel or format, or a cause of "
            "which the record has nothing; record the log-probabilities of prompts as well (prompt_logprobs)"
        )
    return sentences


def _evidence(computation: Computation, compared_T: Tensor) -> str:
    documents = len(computation.documents)
    return f"{int(compared_T.sum())} tokens of {documents} completions compared"
