import itertools

import numpy as np
import pytest

from tests.helpers.system_batches import differing, packed, rectangle
from tests.oracles.systems import areal as oracle
from workbench.errors import SpecError
from workbench.specs.losses import LossSpec
from workbench.systems import loss_spec, replay, settings_for

PLAIN = {
    "level": "token",
    "eps_clip": 0.2,
    "eps_clip_higher": None,
    "c_clip": None,
    "rejection_sampling": None,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
}
RATIOS = [{"upper": 1.2, "lower": None}, {"upper": 1.1, "lower": 0.92}]
DISTANCES = [{"upper": 0.03, "lower": None}, {"upper": 0.05, "lower": 0.001}]
RULES = [
    {"level": level, "action": action, "metric": metric, "agg": agg, **bounds}
    for level, action, metric in itertools.product(
        ("token", "sequence"), ("mask", "clamp"), ("ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl")
    )
    for agg in (("mean",) if level == "token" else ("sum", "mean", "max"))
    for bounds in (RATIOS if metric == "ratio" or action == "clamp" else DISTANCES)
]


def check(function, config, seeds=((1, 0.05), (2, 0.4), (3, 3.0))):
    for seed, spread in seeds:
        kind, batch = (
            ("policy_loss", rectangle(seed, spread=spread))
            if seed % 2
            else ("policy_loss_packed", packed(seed, spread=spread))
        )
        result = replay("areal", kind, function, config, batch)
        assert differing(result, oracle.policy_loss(function, config, batch)) == [], (kind, seed)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    "change", [{}, {"eps_clip_higher": 0.28}, {"c_clip": 1.5}, {"eps_clip": 0.02, "c_clip": 1.01}], ids=str
)
def test_clipped(change, level):
    check("ppo_actor_loss_fn", {**PLAIN, **change, "level": level})


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("taus", [(1.0, 1.05), (2.0, 0.7)])
def test_soft(taus, level):
    check("sapo_loss_fn", {**PLAIN, "level": level, "tau_pos": taus[0], "tau_neg": taus[1]})


@pytest.mark.parametrize("bounds", [(1.0, 0.5), (0.2, 0.28)])
@pytest.mark.parametrize("rule", [None, RULES[0], RULES[2]], ids=str)
def test_truncated(bounds, rule):
    check("cispo_loss_fn", {**PLAIN, "eps_clip": bounds[0], "eps_clip_higher": bounds[1], "rejection_sampling": rule})


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(map(str, rule.values())))
def test_rejection(rule, level):
    seed = 10 + len(str(rule)) % 4 + (level == "token")  # rectangles and packed rows by turns
    check("ppo_actor_loss_fn", {**PLAIN, "level": level, "rejection_sampling": rule}, [(seed, 0.2)])


def test_advantages_of_tokens_are_averaged_for_a_ratio_of_sequences():
    batch = packed(4)
    batch["advantages"] = np.random.default_rng(4).standard_normal(batch["advantages"].shape)
    config = {**PLAIN, "level": "sequence"}
    for function in ("ppo_actor_loss_fn", "sapo_loss_fn"):
        result = replay("areal", "policy_loss_packed", function, config, batch)
        assert differing(result, oracle.policy_loss(function, config, batch)) == []


@pytest.mark.parametrize("kind", ["mse", "huber"])
@pytest.mark.parametrize("clip", [0.2, 5.0])
def test_critic(clip, kind):
    rng = np.random.default_rng(5)
    arrays = {name: 2 * rng.standard_normal((4, 6)) for name in ("values", "old_values", "returns")}
    arrays["mask"] = rectangle(5)["mask"]
    config = {"value_eps_clip": clip, "loss_fn_type": kind, "huber_delta": 0.7}
    result = replay("areal", "value_loss", "ppo_critic_loss_fn", config, arrays)
    assert differing(result, oracle.critic(config, arrays)) == []


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dim", [None, 1, [0]])
def test_normalization(dim, masked, unbiased):
    rng = np.random.default_rng(6)
    arrays = {"values": 3 + rng.standard_normal((4, 6))}
    if masked:
        arrays["mask"] = (rng.random((4, 6)) < 0.7) | (np.arange(6) < 2) | (np.arange(4) < 2)[:, None]
    config = {"unbiased": unbiased, "eps": 1e-3, **({} if dim is None else {"dim": dim})}
    result = replay("areal", "normalization", "masked_normalization", config, arrays)
    assert differing(result, oracle.normalization(config, arrays)) == []


# ---- settings ----------------------------------------------------------------------------------------------------


def test_defaults():
    spec = loss_spec("areal", {})
    assert (spec.surrogate.kind, spec.surrogate.clip_low, spec.surrogate.clip_high) == ("ppo", 0.2, 0.2)
    assert spec.denominator == "token"
    assert not spec.correction.acts


@pytest.mark.parametrize(
    "settings",
    [
        {"eps_clip_higher": 0.3, "c_clip": 2.0},
        {"importance_sampling_level": "sequence"},
        {"use_sapo_loss": True, "sapo_tau_pos": 2.0},
        {"use_sapo_loss": True, "importance_sampling_level": "sequence"},
        {"use_cispo_loss": True, "eps_clip": 1.0, "eps_clip_higher": 4.0},
    ],
    ids=str,
)
def test_there_and_back(settings):
    spec = loss_spec("areal", settings)
    assert loss_spec("areal", settings_for("areal", spec)) == spec


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(map(str, rule.values())))
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rejection_there_and_back(rule, level):
    spec = loss_spec("areal", {"importance_sampling_level": level, "rejection_sampling": rule})
    assert loss_spec("areal", settings_for("areal", spec)) == spec


def test_unsupported_settings_are_refused():
    with pytest.raises(SpecError, match="surrogate 'vespo'"):
        settings_for("areal", LossSpec(name="vespo"))
    with pytest.raises(SpecError, match=r"kl\.coefficient"):
        settings_for("areal", LossSpec(name="grpo", kl={"coefficient": 0.1}))
    with pytest.raises(SpecError, match="m2_threshold"):
        loss_spec("areal", {"m2_threshold": 0.04})
    with pytest.raises(SpecError, match="eps_clip_higher"):
        loss_spec("areal", {"use_cispo_loss": True})
    with pytest.raises(SpecError, match="takes no correction"):
        loss_spec("areal", {"use_sapo_loss": True, "rejection_sampling": {}})
    with pytest.raises(SpecError, match="unknown option 'eps_clipp'"):
        loss_spec("areal", {"eps_clipp": 0.1})
    for bounds in ({"lower": 2.0, "upper": 1.5}, {"action": "clamp", "upper": 0.0}):
        with pytest.raises(SpecError, match=r"rejection_sampling.*(above)"):
            loss_spec("areal", {"rejection_sampling": bounds})
