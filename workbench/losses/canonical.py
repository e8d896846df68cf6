"""Canonical form of a loss: two specs with the same form are the same loss and have the same gradient.

Each rule rewrites settings into others that give the same numbers on every batch, and its docstring says why. A form
describes one micro-batch on one rank; the split of a step and the scaling of an engine belong to `LossSpec.compat`.

The claim holds up to two things that no practical batch can show:

    far ratios   rules marked FAR ignore tokens whose probability has moved by more than a factor of e^20; clamps at 20
                 (NeMo-RL, verl, OpenRLHF) only guard against overflow
    epsilons     up to 1e-7, added to a count to avoid a division by 0

Notation: r ratio, d its log, A advantage, l log-probability of the policy, sg[] without gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from workbench.specs.losses import PARAMETERS, LossSpec

FAR = 20.0
"""Log of the ratio beyond which a token is ignored here."""
EPSILON = 1e-7
"""Largest number that may be added to a count without changing the loss."""
PENALTIES = ("entropy_coefficient", "squared_logit_coefficient", "mean_squared_logit_coefficient")

Form = dict[str, Any]


def canonical(spec: LossSpec) -> Form:
    """Return the form of a loss: dotted setting -> value.

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
    """Return the form of its gradient, shared by losses that differ only in parts without gradient.

    on_policy is -exp(l - sg[l]) A = -A with the gradient -A; reinforce is -A l, whose gradient is -A too.
    """
    form = canonical(spec)
    if form["surrogate.kind"] == "on_policy":
        form["surrogate.kind"] = "reinforce"
    return form


# ---- settings without effect on one micro-batch ------------------------------------------------------------------


def _names(form: Form) -> None:
    """Drop names: they stand for settings, and all settings are written out."""
    del form["name"], form["correction"]["kind"]


def _one_micro_batch(form: Form) -> None:
    """With one micro-batch on one rank all counts and statistics are the step's, and all sizes are 1."""
    compat, given = form["compat"], form["compat"]["scaling"]
    epsilons = ("count_epsilon", "length_epsilon", "mean_epsilon")
    compat["scaling"] = scaling = {name: given[name] for name in epsilons if given[name] > EPSILON}
    if given["least_tokens"] and form["denominator"] == "token":
        scaling["least_tokens"] = given["least_tokens"]
    del form["correction"]["population"]
    if form["denominator"] == "local_token":
        form["denominator"] = "token"
    plain_mean = form["denominator"] == "token" and form["top_entropy_share"] == 1 and not scaling
    if compat["entropy_denominator"] == "local_token" and plain_mean:
        compat["entropy_denominator"] = "penalty"


def _absent_terms(form: Form) -> None:
    """Drop settings of absent terms. A penalty in the reward is absent: it is part of the advantages (data)."""
    if not form["kl"]["coefficient"] or form["kl"]["placement"] == "reward":
        form["kl"] = {}
        del form["compat"]["kl_denominator"]
    elif form["compat"]["kl_denominator"] == form["denominator"]:
        form["compat"]["kl_denominator"] = "penalty"
    if not form["entropy_coefficient"]:
        del form["compat"]["entropy_denominator"]
    elif form["compat"]["entropy_denominator"] == form["denominator"]:
        form["compat"]["entropy_denominator"] = "penalty"


def _documents_counted(form: Form) -> None:
    """Keep the document count only where it is a divisor."""
    counted = form["compat"]["normalize_by_documents"] or form["compat"].get("kl_denominator") == "document"
    if form["denominator"] in ("token", "raw", "group_length") and not counted:
        del form["compat"]["documents_counted"]
    if form["denominator"] == "constant" and form["denominator_constant"] == 1:  # M times 1
        form["denominator"], form["denominator_constant"] = "document_sum", None


# ---- the correction ----------------------------------------------------------------------------------------------


def _correction(form: Form) -> None:
    """A correction without weight and gate does nothing; weights are above 0, so a bound at 0 never binds."""
    spec = form["correction"]
    if spec["ratio_low"] == 0:
        spec["ratio_low"] = None
        if spec["ratio_high"] is None:
            spec["outside"] = "truncate"
    rejects = spec["outside"] == "zero" or spec["gate"] != "none" or spec["unsampled"] == "drop"
    rejects |= spec["opsm_threshold"] is not None or spec["m2_threshold"] is not None
    if spec["ratio"] == "none" and not rejects:
        form["correction"] = {}
        return
    for name in ("given_epsilon", "mean_epsilon"):
        if spec[name] <= EPSILON:
            del spec[name]
    # FAR: a token's own weight is within e^20; under an upper bound, a weight below e^-20 is 0 at working precision,
    # and one above e^20 is the bound (or rejected).
    bounded = spec["ratio"] in ("none", "token") or (spec["ratio_high"] is not None and not spec["normalize"])
    if spec["log_clamp"] is not None and spec["log_clamp"] >= FAR and bounded:
        spec["log_clamp"] = None


# ---- the KL penalty ----------------------------------------------------------------------------------------------


def _kl(form: Form) -> None:
    """Unify the ways to write one penalty, with d = other - policy."""
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
        return  # a clamp of the value depends on the estimator's scale, and removes gradients
    if spec["estimator"] == "squared" and spec["gradient"] != "straight_through":
        # d^2 = 2 (d^2 / 2), also when multiplied by u; straight through it has the gradient of one d^2 / 2
        spec["estimator"], spec["coefficient"] = "k2", 2 * spec["coefficient"]
    if spec["input_clamp"] is None:
        if spec["estimator"] == "k3" and spec["gradient"] == "score" and not of_documents:
            # u (k' + k) = u ((1 - e^d) + (e^d - 1 - d)) = -u d, the gradient of k2 under the value of k3
            spec["gradient"] = "straight_through"
        if spec["estimator"] == "k2" and spec["gradient"] == "straight_through":  # its own gradient
            spec["gradient"] = "path"


# ---- the surrogate -----------------------------------------------------------------------------------------------


def _reinforce(form: Form) -> None:
    """Both gpg and reinforce are -A l; the advantage estimator is not part of a loss."""
    if form["surrogate"]["kind"] == "gpg":
        form["surrogate"]["kind"] = "reinforce"


def _bounds(form: Form) -> None:
    """Convert clip distances from 1 to bounds of the ratio; r > 0, so a lower bound at or below 0 never binds."""
    spec = form["surrogate"]
    if spec["kind"] == "gmpo" or spec["clip_high"] is None:
        return  # gmpo's are distances of the log ratio from 0
    relative = spec.pop("bounds") != "absolute"
    low, high = spec.pop("clip_low"), spec.pop("clip_high")
    spec["upper"] = 1 + high if relative else high
    spec["lower"] = None if low is None else 1 - low if relative else low
    if spec["lower"] is not None and spec["lower"] <= 0:
        spec["lower"] = None


def _delta(form: Form) -> None:
    """Rewrite delta, a bound of r inside PPO's clip, as a dual clip.

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
    """FAR: drop bounds of a token's |d| at 20 or more, and of its ratio at e^20 or more."""
    spec = form["surrogate"]
    for name, far in (("log_clamp", FAR), ("log_cap", FAR), ("dual_clip", math.exp(FAR)), ("ratio_cap", math.exp(FAR))):
        if spec[name] is not None and spec[name] >= far:
            spec[name] = None


def _current_policy(form: Form) -> None:
    """If the old policy is sg[policy], a token's ratio to it is the number 1 with the gradient of l."""
    spec = form["surrogate"]
    if form["old_policy"] != "current" or spec["anchor"] != "old":
        return
    if spec["kind"] in ("ppo", "importance_sampling") and spec.get("upper", 1) >= 1:
        # 1 is within every bound (a bound keeps the gradient), so the value is -exp(l - sg[l]) A
        form["surrogate"] = {"kind": "on_policy", "coefficient": spec["coefficient"]}
    elif spec["kind"] == "cispo" and spec["upper"] >= 1 and (spec["lower"] is None or spec["lower"] <= 1):
        # the truncated weight is sg[1], for a document as for a token, so the value is -A l
        form["surrogate"] = {"kind": "reinforce", "coefficient": spec["coefficient"]}


def _old_policy(form: Form) -> None:
    """Drop the choice of old policy for a loss that does not use one."""
    policies = (form["surrogate"].get("anchor"), form["kl"].get("against"), form["kl"].get("importance"))
    if "old" not in policies and not form["correction"]:
        del form["old_policy"]


def _luspo(form: Form) -> None:
    """LUSPO is L times GSPO, so its mean over documents of token means, 1 / (M L), is GSPO's of sums, 1 / M.

    Penalties share the denominator, so there may be none; and L and the denominator count the same tokens.
    """
    spec, counted = form["surrogate"], {"denominator": "original", "surrogate_over": "trained"}
    alone = not form["kl"] and not any(form[name] for name in PENALTIES) and not form["compat"]["scaling"]
    alone &= all(form["correction"].get(name, value) == value for name, value in counted.items())
    if spec["kind"] == "luspo" and form["denominator"] == "document" and alone:
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
"""In this order: later rules rely on the output of earlier ones."""


def _flat(form: Form, prefix: str = "") -> Form:
    flat: Form = {}
    for name, value in form.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = float(f"{value:.12g}") if isinstance(value, float) else value
    return flat
