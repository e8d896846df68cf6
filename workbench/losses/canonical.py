"""One form for every way to write a loss: two specs with the same form are the same loss and have the same gradient.

Each rule rewrites settings into others that give the same numbers on every batch, and says why. A form says what one
rank computes of one micro-batch; how a step is cut, and what an engine makes of it, is `LossSpec.scaling`'s.

The claim holds up to two things that no batch of use can show:

    far ratios   rules marked FAR ignore what happens to a token whose probability has moved by more than a factor of
                 e^20; clamps at 20 (NeMo-RL, verl, OpenRLHF) guard against overflow and are a setting of no other use
    epsilons     what is added to a count, up to 1e-7, so that nothing is divided by 0

Notation: r ratio, d its log, A advantage, l log-probability of the policy, sg[] without gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from workbench.specs.losses import PARAMETERS, LossSpec

FAR = 20.0
"""Log of the ratio beyond which a token does not count here."""
EPSILON = 1e-7
"""What may be added to a count without making another loss."""
PENALTIES = ("entropy_coefficient", "squared_logit_coefficient", "mean_squared_logit_coefficient")

Form = dict[str, Any]


def canonical(spec: LossSpec) -> Form:
    """The form of a loss: dotted setting -> value.

    Example:
        >>> canonical(LossSpec(name="luspo")) == canonical(LossSpec(
        ...     name="gspo", surrogate={"clip_low": 2e-3, "clip_high": 2.5e-3}, denominator="document_sum"))
        True
    """
    form = spec.model_dump()
    form["surrogate"] = dict.fromkeys(PARAMETERS) | form["surrogate"]
    for rule in RULES:
        rule(form)
    return {path: value for path, value in sorted(_flat(form).items()) if value is not None}


def canonical_gradient(spec: LossSpec) -> Form:
    """The form of its gradient: losses that differ by what has no gradient share it.

    on_policy is -exp(l - sg[l]) A = -A with the gradient -A; reinforce is -A l, whose gradient is -A too.
    """
    form = canonical(spec)
    if form["surrogate.kind"] == "on_policy":
        form["surrogate.kind"] = "reinforce"
    return form


# ---- what decides no number of one micro-batch -------------------------------------------------------------------


def _names(form: Form) -> None:
    """Names stand for settings, and all settings are written out."""
    del form["name"], form["correction"]["kind"]


def _one_micro_batch(form: Form) -> None:
    """Of one micro-batch on one rank every count is the step's, every size 1, and every statistic the step's."""
    scaling = form["scaling"]
    form["scaling"] = {}
    if scaling["least_tokens"] and form["denominator"] == "token":
        form["scaling"]["least_tokens"] = scaling["least_tokens"]
    for name in ("count_epsilon", "length_epsilon", "mean_epsilon"):
        if scaling[name] > EPSILON:
            form["scaling"][name] = scaling[name]
    del form["correction"]["population"]
    if form["denominator"] == "local_token":
        form["denominator"] = "token"
    if (
        form["entropy_denominator"] == "local_token"
        and form["denominator"] == "token"
        and form["top_entropy_share"] == 1
        and not form["scaling"]
    ):
        form["entropy_denominator"] = "penalty"


def _absent_terms(form: Form) -> None:
    """Settings of a term that is not there. A penalty in the reward is none: advantages, which are data, hold it."""
    if not form["kl"]["coefficient"] or form["kl"]["placement"] == "reward":
        form["kl"] = {}
    if not form["entropy_coefficient"]:
        del form["entropy_denominator"]


def _documents_counted(form: Form) -> None:
    """Documents are counted where they divide, and nowhere else."""
    if form["denominator"] in ("token", "raw", "group_length") and not form["normalize_by_documents"]:
        del form["documents_counted"]
    if form["denominator"] == "constant" and form["denominator_constant"] == 1:  # M times 1
        form["denominator"], form["denominator_constant"] = "document_sum", None


# ---- the correction ----------------------------------------------------------------------------------------------


def _correction(form: Form) -> None:
    """A correction without weight and gate does nothing; weights are above 0, so a bound at 0 binds nowhere."""
    spec = form["correction"]
    if spec["ratio_low"] == 0:
        spec["ratio_low"] = None
        if spec["ratio_high"] is None:
            spec["outside"] = "truncate"
    rejects = (
        spec["outside"] == "zero"
        or spec["gate"] != "none"
        or spec["unsampled"] == "drop"
        or spec["opsm_threshold"] is not None
        or spec["m2_threshold"] is not None
    )
    if spec["ratio"] == "none" and not rejects:
        form["correction"] = {}
        return
    if spec["given_epsilon"] <= EPSILON:
        del spec["given_epsilon"]
    if spec["mean_epsilon"] <= EPSILON:
        del spec["mean_epsilon"]
    # FAR: a token's own weight is within e^20; below a bound from above, a weight of less than e^-20 is 0 to any number
    # of digits that counts, and one above e^20 is the bound's (or rejected).
    bounded = spec["ratio"] in ("none", "token") or (spec["ratio_high"] is not None and not spec["normalize"])
    if spec["log_clamp"] is not None and spec["log_clamp"] >= FAR and bounded:
        spec["log_clamp"] = None


# ---- the KL penalty ----------------------------------------------------------------------------------------------


def _kl(form: Form) -> None:
    """Ways to write one penalty, with d = other - policy."""
    spec = form["kl"]
    if not spec:
        return
    if spec["input_clamp"] is not None and spec["input_clamp"] >= FAR:  # FAR
        spec["input_clamp"] = None
    of_documents = spec["importance_level"] == "document" and spec["gradient"] == "score"  # u's gradient is a mean's
    if spec["importance"] == "old" and form["old_policy"] == "current" and not of_documents:
        # u = exp(l - sg[l]) = 1; "score" gives this 1 its gradient with or without the name, "path" takes it as data.
        spec["importance"], spec["importance_level"] = "none", "token"
    if spec["output_clamp"] is not None:
        return  # a clamp of the value sees the estimator's scale, and takes gradients away
    if spec["estimator"] == "squared" and spec["gradient"] != "straight_through":
        # d^2 = 2 (d^2 / 2), and so every product with it; straight through it has the gradient of one d^2 / 2
        spec["estimator"], spec["coefficient"] = "k2", 2 * spec["coefficient"]
    if spec["input_clamp"] is None:
        if spec["estimator"] == "k3" and spec["gradient"] == "score" and not of_documents:
            # u (k' + k) = u ((1 - e^d) + (e^d - 1 - d)) = -u d, the gradient of k2 under the value of k3
            spec["gradient"] = "straight_through"
        if spec["estimator"] == "k2" and spec["gradient"] == "straight_through":  # its own gradient
            spec["gradient"] = "path"


# ---- the surrogate -----------------------------------------------------------------------------------------------


def _reinforce(form: Form) -> None:
    """Both gpg and reinforce are -A l; what the advantages are is no part of a loss."""
    if form["surrogate"]["kind"] == "gpg":
        form["surrogate"]["kind"] = "reinforce"


def _bounds(form: Form) -> None:
    """Bounds of the ratio themselves, not lengths from 1; r > 0, so a lower bound at or below 0 binds nowhere."""
    spec = form["surrogate"]
    if spec["kind"] == "gmpo" or spec["clip_high"] is None:
        return  # gmpo's are lengths of the log ratio from 0
    relative = spec.pop("bounds") != "absolute"
    low, high = spec.pop("clip_low"), spec.pop("clip_high")
    spec["upper"] = 1 + high if relative else high
    spec["lower"] = None if low is None else 1 - low if relative else low
    if spec["lower"] is not None and spec["lower"] <= 0:
        spec["lower"] = None


def _delta(form: Form) -> None:
    """A bound of r inside PPO's clip is a dual clip.

    Where A > 0 the value stops at min(upper, delta), and where A < 0 at max(delta, upper); a dual clip c stops it at c
    where A < 0.
    """
    spec = form["surrogate"]
    delta = spec.pop("delta")
    if delta is None:
        return
    above = max(delta, spec["upper"])
    spec["dual_clip"] = above if spec["dual_clip"] is None else min(spec["dual_clip"], above)
    spec["upper"] = min(spec["upper"], delta)


def _far_ratios(form: Form) -> None:
    """FAR: bounds of a token's |d| at 20 or more, and of its ratio at e^20 or more."""
    spec = form["surrogate"]
    for name, far in (("log_clamp", FAR), ("log_cap", FAR), ("dual_clip", math.exp(FAR)), ("ratio_cap", math.exp(FAR))):
        if spec[name] is not None and spec[name] >= far:
            spec[name] = None


def _current_policy(form: Form) -> None:
    """Where the old policy is sg[policy], a token's ratio to it is the number 1 with the gradient of l."""
    spec = form["surrogate"]
    if form["old_policy"] != "current":
        return
    if spec["anchor"] == "old":
        if spec["kind"] in ("ppo", "importance_sampling") and spec.get("upper", 1) >= 1:
            # 1 is within every bound (a bound keeps the gradient), so the value is -exp(l - sg[l]) A
            form["surrogate"] = {"kind": "on_policy", "coefficient": spec["coefficient"]}
        elif spec["kind"] == "cispo" and spec["upper"] >= 1 and (spec["lower"] is None or spec["lower"] <= 1):
            # the truncated weight is sg[1], a document's as a token's, so the value is -A l
            form["surrogate"] = {"kind": "reinforce", "coefficient": spec["coefficient"]}


def _old_policy(form: Form) -> None:
    """Who the old policy is does not matter to a loss that never asks."""
    asked = (form["surrogate"].get("anchor"), form["kl"].get("against"), form["kl"].get("importance"))
    if "old" not in asked and not form["correction"]:
        del form["old_policy"]


def _luspo(form: Form) -> None:
    """LUSPO is L times GSPO, so its mean over documents of token means, 1 / (M L), is GSPO's of sums, 1 / M.

    Penalties share the denominator, so there may be none; and L and the denominator count the same tokens.
    """
    spec = form["surrogate"]
    alone = not form["kl"] and not any(form[name] for name in PENALTIES)
    correction = form["correction"]
    counted = (
        correction.get("denominator", "original") == "original"
        and correction.get("surrogate_over", "trained") == "trained"
    )
    if spec["kind"] == "luspo" and form["denominator"] == "document" and alone and counted and not form["scaling"]:
        spec["kind"], spec["level"], form["denominator"] = "gspo", "document", "document_sum"


RULES: tuple[Callable[[Form], None], ...] = (
    _names,
    _one_micro_batch,
    _absent_terms,
    _documents_counted,
    _correction,
    _kl,
    _reinforce,
    _bounds,
    _delta,
    _far_ratios,
    _current_policy,
    _old_policy,
    _luspo,
)
"""In this order: later rules take what earlier ones leave."""


def _flat(form: Form, prefix: str = "") -> Form:
    flat: Form = {}
    for name, value in form.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = float(f"{value:.12g}") if isinstance(value, float) else value
    return flat
