"""SkyRL's metrics of a correction and of losses without a clip; the others are in `test_translate.py`."""

import math

import pytest
import torch

from tests.oracles.systems.skyrl import weight_and_kept
from tests.unit.systems.skyrl.test_translate import CORRECTIONS, PLAIN, batch
from workbench.metrics.quantities import DocumentSlots
from workbench.specs.losses import LossSpec
from workbench.systems.metrics import aliases, settings_of
from workbench.systems.replays import replay


def shares(config, arrays):
    """(dropped share of tokens, of rows; capped share of tokens; mean ratio), row by row."""
    o, s, m = (arrays[name] for name in ("old_logprobs", "rollout_logprobs", "mask"))
    dropped, rows, capped, ratios = 0, 0, 0, []
    for i in range(len(o)):
        own = [t for t in range(m.shape[1]) if m[i, t] > 0]
        weight, kept = weight_and_kept(config, o[i], s[i], own)
        dropped += sum(not kept[t] for t in own)
        rows += bool(own) and not any(kept.values())
        ratios += [math.exp(float(o[i, t] - s[i, t])) for t in own]
        capped += sum(weight[t] < math.exp(float(o[i, t] - s[i, t])) - 1e-12 for t in own)
    return dropped / len(ratios), rows / len(o), capped / len(ratios), sum(ratios) / len(ratios)


@pytest.mark.parametrize(
    ("correction", "name", "which", "seed"),
    [
        ("tokens", "token_mask_ratio", 0, 1),
        ("geometric", "geo_sequence_mask_masked_ratio", 1, 1),
        ("product", "product_sequence_mask_masked_ratio", 1, 4),
        ("one_outlier", "outlier_seq_masked_ratio", 1, 1),
        ("token", "tis_token_clip_high_ratio", 2, 1),
    ],
)
def test_shares_of_a_correction(correction, name, which, seed):
    config, arrays = PLAIN | {"off_policy_correction": CORRECTIONS[correction]}, batch(seed)
    metrics = replay("skyrl", "policy_loss", "ppo_policy_loss", config, arrays)["metrics"]
    expected = shares(config, arrays)
    assert 0 < expected[which] < 1
    assert metrics[f"policy/loss_metrics/{name}"] == pytest.approx(expected[which])
    assert metrics["policy/loss_metrics/is_ratio_mean"] == pytest.approx(expected[3])


def test_nothing_counts_as_zero():
    arrays = batch(0)
    arrays["mask"] = torch.zeros_like(arrays["mask"])
    metrics = replay("skyrl", "policy_loss", "f", PLAIN | {"use_kl_loss": True}, arrays)["metrics"]
    assert set(metrics.values()) == {0.0}
    assert len(metrics) == 3


def test_a_correction_of_several_parts_reports_none_of_them():
    keys = {a.metric.key for a in aliases("skyrl", settings_of(LossSpec(), DocumentSlots(0, 3)))}
    assert keys == {"policy/loss_metrics/clip_ratio", "policy/policy_entropy"}
    config = PLAIN | {"off_policy_correction": {**CORRECTIONS["tokens"], **CORRECTIONS["outliers"]}}
    metrics = replay("skyrl", "policy_loss", "f", config, batch(1))["metrics"]
    assert "policy/loss_metrics/token_mask_ratio" not in metrics
