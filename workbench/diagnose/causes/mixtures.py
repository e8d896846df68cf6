"""Causes in mixtures of experts: gates, losses of routers, gradients of experts on several ranks."""

from __future__ import annotations

import statistics

from workbench.diagnose.causes.cause import NOT, Family, Judged
from workbench.diagnose.causes.gradients import ROUTER_LOSSES, ROUTERS
from workbench.diagnose.denominators import names_of
from workbench.diagnose.facts import Facts, common_ratio, short

MIXTURES = Family("metrics")
ZERO_GATES = "router/zero_gates/share"
"""Share of the routes whose gate is 0; of a router's own formula it is 0, as no score is."""
EXPERTS = {"experts", "gate_up_proj", "down_proj", "gate_proj", "up_proj"}
"""Names of the modules or parameters of experts in a layer."""
BALANCE, Z, LOADS = "loss/router_balance", "loss/router_z", "router/load/"


@MIXTURES.cause("gates of experts that tokens take are zero: the experts and their gradients are lost")
def _zero_gates(facts: Facts) -> Judged:
    suspect = {step.number: step.metrics for step in facts.suspect.steps}
    for step in facts.evidence.trusted.steps:
        right, wrong = (metrics.get(ZERO_GATES) for metrics in (step.metrics, suspect.get(step.number, {})))
        if right is not None and wrong is not None and wrong > right:
            return 0.97, [
                f"in step {step.number} {wrong:.4g} of the routes have a gate of 0, {right:.4g} in the trusted run"
            ]
    return NOT


def _router_terms(facts: Facts) -> set[str]:
    """Losses of routers that differ, if no other term, load or input of the loss does; else nothing."""
    off = {"/".join(key.split("/")[:2]) for key in facts.terms[0]} - {"loss/total"}
    alone = bool(off) and all(key.startswith(ROUTER_LOSSES) for key in off)
    one, other = ({key: value for key, value in step.metrics.items() if key.startswith(LOADS)} for step in facts.pair)
    return off if alone and facts.inputs_same and one == other else set()


@MIXTURES.cause("losses of routers count other tokens, such as padding")
def _router_tokens(facts: Facts) -> Judged:
    """The loss of log-normalisers has no shares of routes: where it differs, its tokens do."""
    off = _router_terms(facts)
    if not any(key.startswith(Z) for key in off) or facts.gradient_same is not False:
        return NOT
    return 0.85, [
        f"{', '.join(sorted(off))} differ, and neither loads of experts nor other terms do: other tokens count"
    ]


@MIXTURES.cause("the load-balancing loss takes the loads of a rank or a micro-batch in place of the step's")
def _router_loads(facts: Facts) -> Judged:
    off = _router_terms(facts)
    if not off or not all(key.startswith(BALANCE) for key in off) or facts.gradient_same is not False:
        return NOT
    several = [axis for axis in ("dp", "cp", "micro_batches") if (facts.context.get(axis) or 1) > 1]
    if not several:
        return NOT
    return 0.85, [
        f"only {BALANCE} differs; loads of parts of the step ({', '.join(several)}) are other ones than its own"
    ]


@MIXTURES.cause("the gradient of gates is that of a rank's own experts", "ep", uses=("gradient",))
def _gates_of_own_experts(facts: Facts) -> Judged:
    """In the highest layer that differs, experts are right, and the router and what is below it are wrong."""
    if not facts.gradient_only or not facts.clear or not facts.top_off & ROUTERS or facts.top_off & EXPERTS:
        return NOT
    if {short(name) for name in facts.off} <= ROUTERS:  # routers alone: a sum over ranks that they miss
        return NOT
    if any(key.startswith(ROUTER_LOSSES) for step in facts.evidence.trusted.steps for key in step.metrics):
        return NOT
    return 0.88, ["in the highest layer that differs, experts are right, and the gates that weigh them are not"]


def _experts_alone(facts: Facts) -> bool:
    """True if the gradients that differ are all of experts, and others are right."""
    return facts.gradient_only and facts.clear and all("experts" in name.split(".") for name in facts.off)


@MIXTURES.cause("gradients of experts are counted once a rank, or averaged over too many", "ep", uses=("gradient",))
def _experts_scaled(facts: Facts) -> Judged:
    if not _experts_alone(facts) or any(p.cosine is None for p in facts.off.values()):
        return NOT
    bar = max(1e-4, facts.step.noise.gradient)
    factor = common_ratio(list(facts.off.values()), bar)
    if factor is None or factor <= 0:
        return NOT
    ep = float(facts.context.get("ep") or 1)
    replicas = float((facts.context.get("dp") or 1) * (facts.context.get("cp") or 1)) / ep
    own = {"the experts' ranks (ep)": ep, "the ranks with the same experts": replicas}
    named = [
        f"{word} {name}"
        for name, size in own.items()
        for word, value in (("times", size), ("divided by", 1 / size))
        if size > 1 and abs(factor / value - 1) <= bar
    ] or [name.description for name in names_of(factor, facts.sizes, bar)]
    if not named:
        return 0.6, [f"every gradient of an expert is {factor:.6g} times the trusted one, and no other differs"]
    return 0.95, [f"every gradient of an expert is {factor:.6g} times the trusted one: {named[0]}; no other differs"]


@MIXTURES.cause(
    "gradients of experts are added again with every micro-batch", "ep", "micro_batches", uses=("gradient",)
)
def _experts_repeated(facts: Facts) -> Judged:
    if not _experts_alone(facts) or common_ratio(list(facts.off.values()), max(1e-4, facts.step.noise.gradient)):
        return NOT
    longer = statistics.median(p.ratio for p in facts.off.values())
    if longer <= 1:
        return NOT
    return 0.9, [
        f"only gradients of experts differ, by no common factor, {longer:.3g} times as long: parts count twice"
    ]
