"""slime's names, against manual values: sums over samples of token means, or sums over tokens."""

import math

import pytest
import torch

from workbench.losses.build import build_loss
from workbench.losses.terms import LossInputs
from workbench.metrics.quantities import DocumentSlots
from workbench.specs.losses import LossSpec
from workbench.systems.metrics import as_named_by, settings_of
from workbench.systems.slime.metrics import opsm_clipfrac

LOGS = torch.tensor([0.5, -0.1, 0.0, 0.3, 9.0], dtype=torch.float64)
MASK = torch.tensor([True, True, True, True, False])
ZERO = torch.zeros(5, dtype=torch.float64)
SLOTS = DocumentSlots(0, 3)


def named(documents=1, **settings):
    spec = LossSpec(**settings)
    inputs = LossInputs(
        LOGS, ZERO, ZERO + 1, ZERO - 0.2, ZERO + 0.4, loss_mask_T=MASK, document_ids_T=torch.tensor([0, 0, 0, 1, 1])
    )
    values = as_named_by(
        "slime",
        inputs,
        MASK,
        terms=build_loss(spec)(inputs),
        loss_spec=spec,
        slots=SLOTS,
        settings=settings_of(spec, SLOTS)._replace(num_documents=documents),
    )
    return {name: value.finish() for name, value in values.items()}


def test_sums_of_sample_means_are_divided_by_a_given_sample_count():
    metrics = named(denominator="document")
    assert metrics == {"pg_clipfrac": pytest.approx(1 / 3 + 1), "ppo_kl": pytest.approx(-(0.4 / 3 + 0.3))}
    assert named(4, denominator="document")["pg_clipfrac"] == pytest.approx((1 / 3 + 1) / 4)


def test_sums_of_sample_means_stay_sums_without_a_sample_count():
    assert named(None, denominator="document")["pg_clipfrac"] == pytest.approx(1 / 3 + 1)


def test_sums_over_tokens():
    metrics = named(denominator="token", kl={"coefficient": 0.5, "estimator": "k1"})
    assert metrics["pg_clipfrac"] == 2
    assert metrics["kl_loss"] == pytest.approx(0.5 - 0.1 + 0.3 - 4 * 0.4)


def test_a_correction_and_a_ratio_of_samples():
    correction = {"kind": "tis", "ratio_high": 1.1}
    metrics = named(denominator="document", correction=correction)
    assert metrics["ois"] == pytest.approx((math.exp(0.5) + math.exp(-0.1) + 1) / 3 + math.exp(0.3))
    assert (metrics["tis"], metrics["tis_clipfrac"]) == (pytest.approx(2 * math.exp(0.2)), 2)
    of_samples = {"name": "gspo", "surrogate": {"clip_high": 0.2}, "correction": correction}
    assert named(**of_samples, denominator="document")["ois"] == pytest.approx(math.exp(0.4 / 3) + math.exp(0.3))
    assert named(**of_samples, denominator="token")["ois"] == pytest.approx(3 * math.exp(0.4 / 3) + math.exp(0.3))


def test_cispo_counts_every_ratio_outside():
    spec = {"surrogate": {"kind": "cispo", "clip_low": 0.05, "clip_high": 0.4}, "denominator": "token"}
    assert named(**spec)["pg_clipfrac"] == 2


def test_masked_samples_count_their_tokens():
    inputs = LossInputs(
        ZERO - 1,
        ZERO,
        ZERO,
        loss_mask_T=torch.tensor([True, False, False, True, True]),
        document_ids_T=torch.tensor([0, 0, 0, 1, 1]),
    )
    advantages = torch.tensor([-1.0, -1.0, 1.0, -1.0, -1.0])
    assert opsm_clipfrac(inputs, advantages, 0.5) == 2 / 1 + 2 / 2
    assert opsm_clipfrac(inputs, advantages, 1.0) == 0
