"""Both of Liger's names, against manual values."""

import math

import pytest

from tests.unit.systems.trl.test_metrics import ROWS
from tests.unit.systems.trl.test_metrics import named as named_by
from workbench.specs.losses import LossSpec
from workbench.systems.liger import metrics as liger
from workbench.systems.metrics import PeerSettings


def named(spec, **more):
    """The rows of TRL's tests under Liger's names."""
    return named_by(spec, system="liger", **more)


def test_the_clip_looks_at_the_sign_and_before_delta():
    clip = {"clip_low": 0.2, "clip_high": 0.2}
    for delta in (None, 1.3, 1.1):
        metrics = named(LossSpec(surrogate=clip | {"delta": delta}))
        assert metrics["clip_fraction"] == pytest.approx(3 / 6)
    against = [([0.5], [-1.0]), ([-0.6], [1.0])]
    assert named(LossSpec(surrogate=clip), rows=against)["clip_fraction"] == 0.0


def test_a_clip_of_rows_weighs_by_their_tokens():
    spec = LossSpec(name="gspo", surrogate={"clip_low": 0.2, "clip_high": 0.2})
    assert named(spec)["clip_fraction"] == pytest.approx(3 / 6)
    assert named(spec, rows=ROWS[1:])["clip_fraction"] == pytest.approx(1 / 4)


def test_a_clip_of_tokens_looks_at_each_tokens_own_ratio():
    """Of one document the ratios cancel: its own ratio is 1, and one of its two tokens is beyond the bound."""
    metrics = named(LossSpec(surrogate={"clip_low": 0.2, "clip_high": 0.2}), rows=[([0.5, -0.5], [1.0, 1.0])])
    assert metrics["clip_fraction"] == pytest.approx(1 / 2)


@pytest.mark.parametrize("of_documents", [False, True])
def test_a_loss_without_a_clip_has_no_clip_fraction(of_documents):
    assert [alias.metric.key for alias in liger.names(PeerSettings(None, of_documents=of_documents))] == ["kl"]


def test_cispo_counts_the_upper_bound_alone():
    spec = LossSpec(surrogate={"kind": "cispo", "bounds": "absolute", "clip_high": 1.2})
    assert named(spec)["clip_fraction"] == pytest.approx(2 / 6)


def test_the_kl_is_the_penalty_without_its_coefficient():
    assert "kl" not in named(LossSpec())
    plain = [math.exp(-d) - 1 + d for row, _ in ROWS for d in row]
    assert named(LossSpec(kl={"coefficient": 0.1}))["kl"] == pytest.approx(sum(plain) / 6, rel=1e-13)
