"""ROLL against its formulas, row by row, for its ratios, clips, reductions and penalties."""

import pytest
import torch

from tests.oracles.systems import roll as oracle
from tests.unit.systems.skyrl.test_translate import batch as whole_batch
from workbench.errors import SpecError
from workbench.losses.canonical import canonical
from workbench.specs.losses import LossSpec
from workbench.systems.replays import replay
from workbench.systems.translate import loss_spec, settings_for, translation

PLAIN = {
    "importance_sampling": "token",
    "pg_clip": 0.2,
    "use_pg_clip_range": False,
    "pg_clip_low": 0.1,
    "pg_clip_high": 0.28,
    "dual_clip_loss": False,
    "loss_agg_mode": "token-mean",
    "use_kl_loss": False,
    "kl_loss_coef": 0.07,
    "rl_loss_coef": 1.0,
    "entropy_loss_coef": 0.0,
}
OPTIONS = {
    "plain": {},
    "range": {"use_pg_clip_range": True},
    "dual": {"dual_clip_loss": True, "pg_clip": 0.1},
    "rows": {"loss_agg_mode": "seq-mean-token-mean", "entropy_loss_coef": 0.02},
    "sums": {"loss_agg_mode": "seq-mean-token-sum", "use_kl_loss": True, "rl_loss_coef": 0.5},
    "sequence": {"importance_sampling": "seq", "loss_agg_mode": "seq-mean-token-mean", "use_kl_loss": True},
    "sequence_tokens": {"importance_sampling": "seq", "use_pg_clip_range": True, "use_kl_loss": True},
}


def batch(seed):
    arrays = whole_batch(seed)
    return {name: value for name, value in arrays.items() if name not in ("rollout_logprobs", "group_ids")}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_policy_loss_is_its_formula(name):
    config = PLAIN | OPTIONS[name]
    for seed in (0, 2):  # 1 has a row far beyond any clamp, and ROLL has none
        arrays = batch(seed)
        result = replay("roll", "policy_loss", "ActorWorker.loss_func", config, arrays)
        expected = oracle.policy_loss(config, arrays)
        for part in ("loss", "grad_logprobs"):
            torch.testing.assert_close(result[part], expected[part], rtol=1e-10, atol=1e-11)
        assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-10)


@pytest.mark.parametrize("name", OPTIONS)
def test_settings_round_trip(name):
    spec = loss_spec("roll", PLAIN | OPTIONS[name])
    assert canonical(loss_spec("roll", settings_for("roll", spec))) == canonical(spec)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "padded width"),
        ({"difficulty_loss_weight": True}, "scaled within a micro-batch"),
        ({"length_loss_weight": True}, "scaled within a micro-batch"),
        ({"train_infer_correction": {"is_weight": {"enabled": True}}}, "not translated"),
        ({"loss_agg_mode": "token-mean", "entropy_loss_coef": 0.1}, "padding included"),
        ({"pg_clipp": 0.2}, "did you mean 'pg_clip'"),
    ],
)
def test_options_without_a_translation_are_refused(settings, message):
    with pytest.raises(SpecError, match=message):
        loss_spec("roll", settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "cispo"}, "its losses are"),
        ({"denominator": "raw"}, "its modes are"),
        ({"surrogate": {"delta": 4.0}}, "ROLL"),
    ],
)
def test_a_loss_that_it_has_not_is_refused(changes, message):
    with pytest.raises(SpecError, match=message):
        settings_for("roll", LossSpec(**changes))


def test_implicit_behaviour_is_noted():
    notes = translation("roll", {"loss_agg_mode": "token-mean", "dual_clip_loss": True, "pg_clip": 0.1}).notes
    assert "takes no mask" in notes[0]
    assert "= 1.2" in notes[1]
