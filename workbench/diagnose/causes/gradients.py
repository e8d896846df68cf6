"""Causes that show in gradients of parts of the model, of one of several modules, or over time.

Modules that share their ranks and not their layout, such as an encoder next to a policy, complete their gradients over
ranks of their own, and gradients cross between them once. A mistake in either leaves the other module, loss and
log-probabilities right. Features that cross wrongly in the forward pass change the policy's log-probabilities behind
them (`tokens.other_features`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from workbench.diagnose.causes import given
from workbench.diagnose.causes.cause import NOT, Family, Judged
from workbench.diagnose.causes.whole import another_gradient
from workbench.diagnose.denominators import names_of, sizes
from workbench.diagnose.facts import Facts, common_ratio, short
from workbench.diagnose.record import OTHER_NAMES
from workbench.metrics.step import LAYERS, parameter_layer

NEXT_TO_NOTHING = 1e-4
"""Share of the whole gradient: a parameter with less (a bias that a softmax cancels) is no evidence for its module."""

_NO_SETTINGS = (
    *("name", "precision", "dp", "cp", "tp", "pp", "ep", "micro_batches", "accumulation", "order", "attention"),
    *("sequence_parallel", "kernel"),
    *itertools.chain.from_iterable(OTHER_NAMES.values()),
)
"""Keys of a context that say how a step is divided and computed, and not what."""

DATA = 0.45
"""Of a lost gradient where what is left is divided by its own count: the loop was not given the rest."""

GRADIENTS = Family("gradient")


@GRADIENTS.cause("nothing is back-propagated", uses=("loss", "gradient"))
def _no_gradient(facts: Facts) -> Judged:
    if facts.without_gradient and len(facts.without_gradient) == len(facts.step.parameters):
        return 0.98, ["no parameter has a gradient"]
    return NOT


@GRADIENTS.cause("a part of the model gets no gradient")
def _part_without_gradient(facts: Facts) -> Judged:
    if not facts.without_gradient or len(facts.without_gradient) == len(facts.step.parameters):
        return NOT
    return 0.95, [f"{len(facts.without_gradient)} parameter(s) have no gradient, {facts.without_gradient[0]} first"]


def _only(groups: set[str], high: float) -> Callable[[Facts], Judged]:
    def judge(facts: Facts) -> Judged:
        if not facts.gradient_only or not facts.clear or not facts.groups_off() <= groups:
            return NOT
        ratios = sorted(p.ratio for p in facts.off.values())
        return high, [
            f"only {len(facts.off)} of {len(facts.step.parameters)} parameters differ, each of them "
            f"{' or '.join(sorted(groups))}; their norms are {ratios[0]:.3g} to {ratios[-1]:.3g} times as "
            "large"
        ]

    return judge


GRADIENTS.add(
    "norms_not_summed",
    "gradients of replicated norms are not summed over ranks that hold parts of them",
    _only({"norm"}, 0.95),
    "tp",
)


def _head_only(facts: Facts) -> Judged:
    score, why = _only({"head"}, 0.9)(facts)
    if (
        not score
        and facts.right
        and facts.off
        and facts.groups_off() == {"embedding"}
        and not any("lm_head" in name for name in facts.step.parameters)
    ):
        score, why = _only({"embedding"}, 0.85)(facts)  # a tied head is the embedding
    return score, why


def _small(facts: Facts) -> bool:
    return all(p.cosine is not None and p.cosine > 0.999 and abs(p.ratio - 1) < 0.02 for p in facts.off.values())


@GRADIENTS.cause("the head's gradient is summed in a lower precision")
def _head_rounded(facts: Facts) -> Judged:
    score, why = _head_only(facts)
    return (0.96, [*why, "by rounding of a lower precision"]) if score and _small(facts) else NOT


@GRADIENTS.cause("the head's own gradient is wrong")
def _head_gradient(facts: Facts) -> Judged:
    score, why = _head_only(facts)
    return NOT if not score or _small(facts) or facts.without_gradient else (score, why)


@GRADIENTS.cause("what flows back from the head into the model is wrong")
def _gradient_below_head(facts: Facts) -> Judged:
    """All but the head's own gradient is wrong: the head passes a wrong gradient down into the model."""
    if not facts.gradient_only:
        return NOT
    if (
        not any("lm_head" in name for name in facts.step.parameters)
        and (factor := facts.all_but_embedding_scaled) is not None
    ):
        return 0.88, [f"all but the embedding, which is the head too, is {factor:.6g} times the trusted gradient"]
    right = {name for name in facts.right if "lm_head" in name}
    others = [name for name in facts.right if name not in right and facts.right[name].share > 1e-3]
    if not facts.clear or not right or others:
        return NOT
    return 0.9, ["the head's own gradient is right, and everything below it is wrong"]


@GRADIENTS.cause("gradients of keys and values miss the parts of other ranks or copies")
def _keys_values_not_summed(facts: Facts) -> Judged:
    if not facts.gradient_only or not facts.clear or not facts.top_off:
        return NOT
    if facts.top_off & {"k_proj", "v_proj"} and not facts.top_off & {"q_proj", "o_proj", "down_proj", "gate_proj"}:
        return 0.93, ["in the highest layer that differs, keys and values are wrong, and queries and outputs right"]
    return NOT


@GRADIENTS.cause("attention is right forward and wrong backward", "cp")
def _attention_backward(facts: Facts) -> Judged:
    if not facts.gradient_only or not facts.clear or not facts.top_off:
        return NOT
    if "q_proj" in facts.top_off and not facts.top_off & {"o_proj", "down_proj"} and facts.above_right:
        return 0.9, ["in the highest layer that differs, what is before attention is wrong, and behind it right"]
    return NOT


ROUTERS = {"gate", "router"}
"""Names of a mixture's router among the modules of a layer, in `transformers` and in Megatron-LM."""
ROUTER_LOSSES = "loss/router_"
"""Beginning of the names of their losses; without one, a gate may be part of a dense layer."""


@GRADIENTS.cause("the losses of a mixture's routers are right, and their gradient is not")
def _router_gradient(facts: Facts) -> Judged:
    """In the highest layer that differs, the experts are right, and the router and what is below it are wrong."""
    experts = {"experts", "gate_up_proj", "down_proj"}
    losses = any(key.startswith(ROUTER_LOSSES) for step in facts.evidence.trusted.steps for key in step.metrics)
    if not losses or not facts.gradient_only or not facts.clear or not facts.top_off & ROUTERS:
        return NOT
    if facts.top_off & experts or {short(name) for name in facts.off} <= ROUTERS:  # routers alone: a sum that they miss
        return NOT
    return 0.87, ["in the highest layer that differs, the experts are right, and their router is not"]


@GRADIENTS.cause("what flows back from a layer's projections into its input is wrong")
def _layer_input_gradient(facts: Facts) -> Judged:
    """In the highest layer that differs, projections are right, and everything before them is wrong."""
    if not facts.gradient_only or not facts.clear or not facts.top_off or facts.groups_off() == {"norm"}:
        return NOT
    mlp = {"down_proj", "gate_proj", "up_proj"}
    before_mlp = {"post_attention_layernorm", "o_proj"} <= facts.top_off and not facts.top_off & mlp
    before_attention = facts.top_off == {"input_layernorm"}
    if not before_mlp and not before_attention:
        return NOT
    return 0.85, [
        f"in the highest layer that differs, {'the MLP' if before_mlp else 'attention'} is right, and what "
        "it gives back to its input is not"
    ]


# ---- one module of several ----------------------------------------------------------------------------------


def differing_module(facts: Facts) -> str | None:
    """The module with layers of its own, all of whose gradients differ, while other layers and the loss agree.

    A parameter outside its layers may agree: the last bias gets the same sum from rows that were permuted.
    """
    if facts.loss_same is False or facts.forward_same is False or facts.mask_same is False or not facts.clear:
        return None
    paths = zip(*(name.split(".")[:-1] for name in facts.off), strict=False)
    common = [parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, paths)]
    module = ".".join(common[:-1] if common and common[-1] in LAYERS else common)
    if not module:
        return None
    begin = f"{module}."
    in_layers = [
        p.share
        for name, p in facts.right.items()
        if name.startswith(begin) and parameter_layer(name.removeprefix(begin)) is not None
    ]
    layers_inside = any(parameter_layer(name.removeprefix(begin)) is not None for name in facts.off)
    layers_outside = any(parameter_layer(name) is not None for name in facts.right if not name.startswith(begin))
    whole = layers_inside and layers_outside and max(in_layers, default=0.0) < NEXT_TO_NOTHING
    return module if whole else None


@GRADIENTS.cause("one module's gradient is summed over ranks too many, or averaged over some", "one rank")
def _module_scaled(facts: Facts) -> Judged:
    """Score of one common factor on every gradient of one module."""
    module = differing_module(facts)
    if module is None:
        return NOT
    telling = [p for p in facts.off.values() if p.share > NEXT_TO_NOTHING]
    ratio = common_ratio(telling, facts.bar) if telling else None
    if ratio is None:
        return NOT
    # sizes of the module's own layout, if that was recorded, and of the run's
    layouts = ((f" of {module}", sizes(facts.context.get("modules", {}).get(module, {}), {})), ("", facts.sizes))
    names = [f"{named.description}{of}" for of, known in layouts for named in names_of(ratio, known, facts.bar)]
    meaning = f", which is {names[0]}" if names else ", which equals no size on record"
    return 0.96 if names else 0.92, [
        f"every gradient of {module} is {ratio:.6g} times the trusted one{meaning}; the loss and all others are right"
    ]


@GRADIENTS.cause("the gradient that crosses into one module is not that of all its readers", "one rank")
def _module_reached_wrongly(facts: Facts) -> Judged:
    """Score of another gradient in all of one module."""
    module = differing_module(facts)
    if module is None or _module_scaled(facts)[0]:
        return NOT
    ratios = sorted(p.ratio for p in facts.off.values())
    return 0.94, [
        f"all of {module} has another gradient, {ratios[0]:.3g} to {ratios[-1]:.3g} times as large; loss and "
        "all other gradients are right: what comes back to it across its boundary is wrong"
    ]


@GRADIENTS.cause("a part of the model has another gradient")
def _some_parameters(facts: Facts) -> Judged:
    if not facts.gradient_only or not facts.clear or facts.scaled:
        return NOT
    straight = all(p.cosine is not None for p in facts.off.values())
    if straight and (factor := common_ratio(facts.off.values(), max(1e-4, facts.step.noise.gradient))) is not None:
        named = names_of(factor, facts.sizes, max(1e-4, facts.step.noise.gradient / 5))
        return 0.5, [
            f"{len(facts.off)} of {len(facts.step.parameters)} parameters are {factor:.6g} times the trusted "
            f"ones{', which is ' + named[0].description if named else ''}; {next(iter(facts.off))} first"
        ]
    return 0.3, [f"{len(facts.off)} of {len(facts.step.parameters)} parameters differ, {next(iter(facts.off))} first"]


# ---- all of the model ---------------------------------------------------------------------------------------


@GRADIENTS.cause(
    "gradients of some ranks or micro-batches are not added", "dp * cp * micro_batches", uses=("loss", "gradient")
)
def _ranks_lost(facts: Facts) -> Judged:
    """Only a part of the tokens reaches the gradient: another direction, and shorter."""
    if "micro-batches" in facts.absent:
        return (DATA if facts.smaller_step else 0.92), [facts.absent]
    if text := given.met_fewer(facts):
        return 0.8, [text]  # or each was kept, and added by other means
    if given.fewer_calls(facts) and facts.other_tokens == 0:
        return _of_fewer_calls(facts), [given.fewer(facts)]
    if facts.lost_pieces:
        return 0.88, [f"no token of some {facts.lost_pieces} trains, and all of the others do"]
    text = another_gradient(facts)
    if not text:
        return NOT
    return (0.6 if _partial(facts) else 0.3), [f"{text}: a part of the tokens does not reach it"]


def _of_fewer_calls(facts: Facts) -> float:
    """Score of lost calls by which rows train: those of whole calls are missing, or others are there too."""
    outputs = facts.outputs
    if facts.smaller_step:
        return DATA
    if outputs is None:
        return 0.7 if given.calls_alike(facts) else 0.45
    lost = outputs.rows_lost
    return 0.7 if lost is not None and lost[1] else 0.3


def _partial(facts: Facts) -> bool:
    """True if a gradient may be that of some ranks and micro-batches only.

    Gradients of other tokens are nearly orthogonal to it, so the remaining part is neither along nor against the lost
    one, and a share q of n similar parts is sqrt(q) times as long, q at least 1 / n.
    """
    norm, factor = facts.norm_factor, facts.step.factor
    if norm is None or norm > 1:  # longer than the whole: it can only lack parts that point against it
        return False
    parts = math.prod(int(facts.context.get(axis) or 1) for axis in ("dp", "cp", "micro_batches", "accumulation"))
    if not norm or norm**2 < 1 / (4 * max(parts, 2)):
        return False
    if facts.step.cosine is None or factor is None:
        return norm < 0.85
    lost = math.sqrt(max(1 - 2 * factor + norm**2, 0.0))
    return lost > 0.2 and abs(factor - norm**2) < 0.35 * norm * lost


@GRADIENTS.cause(
    "gradients of earlier ranks or micro-batches are added again and again",
    "dp * cp * tp * micro_batches",
    uses=("loss", "gradient"),
)
def _added_repeatedly(facts: Facts) -> Judged:
    """Some parts of the tokens reach the gradient more often than others: another direction, and longer."""
    text = another_gradient(facts)
    if not text or (facts.norm_factor or 1) < 1.25:
        return NOT
    likely = (facts.step.cosine or 0) <= 0.97 and (facts.step.factor or 1) > 1.25
    return (0.55 if likely else 0.45), [f"{text}: parts of it are added more than once"]


@GRADIENTS.cause("a term of the loss is detached, or differentiates what it should not", uses=("loss", "gradient"))
def _term_without_gradient(facts: Facts) -> Judged:
    """The value of a term is right and its derivative is not."""
    text = another_gradient(facts)
    if not text:
        return NOT
    known = facts.token_losses_same and facts.ratios_of_one_kind  # at ratios of 1, another kind has the same value
    return (0.7 if known else 0.49), [f"{text}: a term's value is right and its derivative is not"]


# ---- over time ----------------------------------------------------------------------------------------------


@GRADIENTS.cause("gradients of the step before are added again")
def _gradients_not_cleared(facts: Facts) -> Judged:
    """The gradient of a later step contains that of the step before as well."""
    if (seen := given.kept_gradients(facts))[0]:
        return seen
    excess = facts.excess_of_earlier_step
    if facts.pair[1].observed.get("cleared"):  # the recorder saw that no gradient was there before
        return NOT
    if excess is None or excess[1] > max(0.02, 2 * facts.step.noise.gradient):
        return NOT
    return 0.97, [
        f"what is too much in step {facts.step.number} is {excess[0]:.4g} times the gradient of the step before"
    ]


@GRADIENTS.cause("optimizer, learning rate or clipping differ", uses=("gradient", "tokens"))
def _update(facts: Facts) -> Judged:
    """The first gradients agree, and the weights after them do not."""
    steps = facts.evidence.steps
    before = [step for step in steps if step.number < facts.step.number]
    if not before or facts.forward_same is not False or facts.mask_same is False or facts.other_documents:
        return NOT
    if not all(step.gradient_same for step in before if step.gradient_same is not None):
        return NOT
    if facts.turned_before:
        return 0.3, ["norms agree before, but predictions weighed otherwise"]
    return 0.9, [
        f"loss and gradient agree up to step {before[-1].number}, and from step {facts.step.number} on the "
        "policy is another one: the update differs"
    ]


@GRADIENTS.cause("the two runs have different settings", uses=())
def _other_settings(facts: Facts) -> Judged:
    trusted, suspect = facts.evidence.trusted.context, facts.context
    off = [
        name
        for name, value in suspect.items()
        if name not in _NO_SETTINGS and isinstance(value, str | int | float) and trusted.get(name, value) != value
    ]
    if not off or not any(step.differs for step in facts.evidence.steps):
        return NOT
    return 0.7, [f"{name} is {suspect[name]!r}, not {trusted[name]!r}" for name in off]
