"""TRL's names: means over rows and means over tokens, against manual values."""

import math

import pytest
import torch

from workbench.losses.build import build_loss
from workbench.losses.terms import LossInputs
from workbench.metrics.quantities import DocumentSlots
from workbench.metrics.values import finish_metrics
from workbench.sharding.mesh import Axis
from workbench.specs.losses import LossSpec
from workbench.systems.metrics import as_named_by, settings_of

GSPO = LossSpec(name="gspo", surrogate={"clip_low": 0.2, "clip_high": 0.2})
ROWS = [  # (log ratios of trained tokens, advantages); the last row has no trained token
    ([0.3, 0.5], [1.0, -1.0]),
    ([-0.6], [-2.0]),
    ([-0.1, 0.0, 0.1], [-1.0, 1.0, 1.0]),
    ([], []),
]


def named(spec, *, system="trl", by_token=False, rows=ROWS):
    """Metrics of rows whose padding is garbage; one advantage a row is the first of its tokens."""
    ratios, advantages, mask, ids = [], [], [], []
    for number, (log_ratios, own) in enumerate(rows):
        ratios += [*log_ratios, 9.0]
        advantages += [*(own if by_token else own[:1] * len(own)), math.nan]
        mask += [True] * len(log_ratios) + [False]
        ids += [number] * (len(log_ratios) + 1)
    old_T = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    inputs = LossInputs(
        old_T + torch.tensor(ratios, dtype=torch.float64),
        old_T,
        torch.tensor(advantages, dtype=torch.float64),
        ref_logprobs_T=old_T,
        document_ids_T=torch.tensor(ids),
        loss_mask_T=torch.tensor(mask),
    )
    slots = DocumentSlots(0, len(rows))
    settings = settings_of(spec, slots)._replace(token_advantages=by_token)
    values = as_named_by(
        system,
        inputs,
        inputs.loss_mask_T,
        terms=build_loss(spec)(inputs),
        loss_spec=spec,
        slots=slots,
        settings=settings,
    )
    return finish_metrics([values], Axis("dp_cp"))


def test_a_ratio_of_rows_is_counted_over_all_rows_also_those_without_tokens():
    metrics = named(GSPO)  # ratios exp(0.4), exp(-0.6), 1 and, of the empty row, 1
    assert (metrics["clip_ratio/high_mean"], metrics["clip_ratio/low_mean"], metrics["clip_ratio/region_mean"]) == (
        0.25,
        0.25,
        0.5,
    )
    assert (metrics["clip_ratio/low_min"], metrics["clip_ratio/high_max"]) == (0.0, 1.0)


def test_a_row_without_tokens_is_a_row_that_is_not_clipped():
    rows = [([-0.6], [-1.0]), ([], [])]
    assert named(GSPO, rows=rows)["clip_ratio/low_min"] == 0.0
    assert named(GSPO, rows=rows[:1])["clip_ratio/low_min"] == 1.0


def test_advantages_of_tokens_make_it_a_mean_over_tokens():
    metrics = named(GSPO, by_token=True)  # exp(0.4): one of two tokens pushes up; exp(-0.6): one of one pushes down
    assert (metrics["clip_ratio/high_mean"], metrics["clip_ratio/low_mean"]) == pytest.approx((1 / 6, 1 / 6))
    assert (metrics["clip_ratio/low_min"], metrics["clip_ratio/high_max"]) == (0.0, 0.5)


def test_cispo_looks_above_its_bound_over_tokens_or_rows():
    cispo = {"kind": "cispo", "bounds": "absolute", "clip_high": 1.2}
    assert named(LossSpec(surrogate=cispo))["cispo_clip_ratio"] == pytest.approx(2 / 6)
    assert named(LossSpec(surrogate=cispo | {"level": "document"}))["cispo_clip_ratio"] == 0.25


@pytest.mark.parametrize(
    ("delta", "high", "low"), [(None, 2 / 6, 1 / 6), (1.3, 2 / 6, 1 / 6), (1.2, 0.0, 1 / 6), (0.7, 0.0, 4 / 6)]
)
def test_a_bound_that_delta_keeps_out_of_reach_clips_nothing(delta, high, low):
    spec = LossSpec(surrogate={"clip_low": 0.2, "clip_high": 0.2, "delta": delta})
    metrics = named(spec)
    assert (metrics["clip_ratio/high_mean"], metrics["clip_ratio/low_mean"]) == pytest.approx((high, low))


def test_the_weight_of_vespo_is_a_mean_over_rows_and_1_where_nothing_counts():
    spec = LossSpec(name="vespo")

    def phi(log_w, advantage):
        k, decay = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
        return math.exp(decay + k * log_w - decay * math.exp(log_w))

    weights = [phi(0.8, 1.0), phi(-0.6, -1.0), phi(0.0, -1.0), 1.0]
    assert named(spec)["vespo/phi_seq_mean"] == pytest.approx(sum(weights) / 4, rel=1e-13)
    tokens = [phi(0.8, 1.0), phi(0.8, -1.0), phi(-0.6, -1.0), phi(0.0, -1.0), 1.0, 1.0]
    assert named(spec, by_token=True)["vespo/phi_seq_mean"] == pytest.approx(sum(tokens) / 6, rel=1e-13)


def test_the_kl_has_the_ratio_in_it_where_the_loss_has():
    log_ratios = [d for row, _ in ROWS for d in row]
    plain = [math.exp(-d) - 1 + d for d in log_ratios]
    assert named(LossSpec(kl={"coefficient": 0.1}))["kl"] == pytest.approx(sum(plain) / 6, rel=1e-13)
    corrected = LossSpec(kl={"coefficient": 0.1, "importance": "old", "gradient": "score"})
    weighted = [math.exp(d) * k for d, k in zip(log_ratios, plain, strict=True)]
    assert named(corrected)["kl"] == pytest.approx(sum(weighted) / 6, rel=1e-13)
