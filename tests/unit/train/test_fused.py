"""The fused path of a step: every preset as without fusion, and the number of GEMMs with the head."""

import functools
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.helpers.batches import nasty_documents
from workbench.errors import SpecError
from workbench.losses import Term
from workbench.policy.logprobs.engine import count_gemms
from workbench.policy.model import load_policy
from workbench.records.directory import RunDirectory
from workbench.rollouts.batch import RolloutBatch
from workbench.specs.losses import PRESETS
from workbench.specs.reading import parse_spec
from workbench.specs.run import RunSpec
from workbench.train import fused as of_step
from workbench.train import step as flow
from workbench.train.worker import run_here

ROW_PRESETS = {"clip_cov": 4, "kl_cov": 4}
"""Presets that couple tokens across documents, and their products where a row does not fit into a chunk."""
NARROW = {"gspo", "gspo_token", "luspo"}
"""Presets whose clip bounds are four ten-thousandths."""
TINY = {"source": "tiny-qwen3"}
PROJECT = Path(__file__).parents[3]


@functools.cache
def policy(fused_loss=False):
    return load_policy("tiny-qwen3", precision="float64", fused_loss=fused_loss)


@functools.cache
def documents(spread, advantages="documents"):
    """Eight documents in pairs, up to 41 tokens, near the policy; rewards and advantages of both signs."""
    results = [d for d in nasty_documents(3) if any(d["loss_mask"])]
    spec = RunSpec.model_validate({"model": TINY, "precision": "float64"})
    rows, totals = flow.prepare_rows(RolloutBatch.from_documents(results), spec, policy().mesh)
    number = sum(len(d["tokens"]) for d in results)
    own = flow.run_step(policy(), flow.build_loss(spec.loss), rows, totals, num_source=number).tokens
    own, rng, taken = own["policy_logprobs"].tolist(), random.Random(5), 0
    for place, document in enumerate(results):
        size, away = len(document["tokens"]), (place % 4 - 1.5) * spread
        for name in ("old_logprobs", "ref_logprobs", "sampler_logprobs"):
            document[name] = [min(-1e-3, value + away + rng.gauss(0, spread)) for value in own[taken : taken + size]]
        if advantages == "tokens":
            document["advantages"] = [rng.gauss(0, 1) for _ in range(size)]
        document |= {"reward": float(place % 2), "group_id": place // 2}
        taken += size
    return results[: 2 * (len(results) // 2)]


def step(loss, batch, *, make=flow.build_loss, loss_spec=True, frozen_clip=None, **settings):
    """One step under a spec; its result, and GEMMs with the head for each trained token."""
    spec = RunSpec.model_validate({"model": TINY, "precision": "float64", "loss": loss} | settings)
    held = replace(
        policy(spec.policy.fused_loss), chunk_tokens=spec.policy.chunk_tokens, keep_bytes=spec.policy.keep_bytes
    )
    batch = RolloutBatch.from_documents(batch)
    rows, totals = flow.prepare_rows(batch, spec, held.mesh)
    with count_gemms() as count:
        result = flow.run_step(
            held,
            make(spec.loss),
            rows,
            totals,
            num_source=batch.num_tokens,
            keep_gradients=True,
            frozen_clip_S=frozen_clip,
            level="full",
            loss_spec=spec.loss if loss_spec else None,
            fused=spec.policy.fused_loss,
        )
    return result, count.rows / max(1, totals.tokens)


def fused(chunk_tokens, **more):
    return {"policy": {"fused_loss": True, "chunk_tokens": chunk_tokens, **more}}


def preset(name):
    return {"name": name} | ({"denominator_constant": 24.0} if name == "dr_grpo" else {})


def assert_same(found, expected, context=""):
    for name, scalar in expected.loss.items():
        assert float(found.loss[name]) == pytest.approx(float(scalar), rel=1e-12, abs=1e-13), f"{context}: {name}"
    assert_float64_parity(found.gradients, expected.gradients, context=context)
    trained = expected.tokens["trained"]
    assert found.tokens.keys() == expected.tokens.keys()
    for name, values in expected.tokens.items():
        torch.testing.assert_close(found.tokens[name][trained], values[trained], rtol=1e-12, atol=1e-12)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-9, abs=1e-12, nan_ok=True), context


def test_the_head_is_told_how_many_targets_are_trained(monkeypatch):
    """On a GPU the host would wait for that number, and the device then for the host."""
    told, right = [], of_step.fused_loss
    monkeypatch.setattr(
        of_step, "fused_loss", lambda *all, **more: (told.append(more["expected_rows"]), right(*all, **more))[1]
    )
    batch = documents(0.05)
    step({"name": "grpo"}, batch, policy={"fused_loss": True})
    assert sum(told) == int(RolloutBatch.from_documents(batch).loss_mask_T.sum())


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_as_without_fusion(name):
    """In chunks that documents of up to 26 trained tokens do not fit into, in larger ones, and in one."""
    batch = documents(3e-4 if name in NARROW else 0.1)
    expected, none = step(preset(name), batch)
    assert none == 0, "without fusion no engine is asked"
    assert max(float(g.abs().max()) for g in expected.gradients.values()) > 1e-4
    for chunk_tokens, products in ((7, ROW_PRESETS.get(name, 3)), (45, ROW_PRESETS.get(name, 3)), (500, 3)):
        result, taken = step(preset(name), batch, **fused(chunk_tokens))
        assert_same(result, expected, f"{name}, {chunk_tokens} rows at a time")
        assert taken == products, chunk_tokens
        assert bool(result.fallbacks) == (products > 3), result.fallbacks


@pytest.mark.parametrize("name", ["gspo", "clip_cov", "vapo"])
def test_a_budget_saves_the_fourth_product(name):
    batch = documents(3e-4 if name in NARROW else 0.1)
    result, taken = step(preset(name), batch, **fused(7, keep_bytes=2**20))
    assert_same(result, step(preset(name), batch)[0])
    assert (taken, result.fallbacks) == (3, ())


@pytest.mark.parametrize(
    "loss",
    [
        {"name": "gspo", "kl": {"coefficient": 0.1}, "entropy_coefficient": 0.01},
        {"name": "ppo", "entropy_coefficient": 0.02, "squared_logit_coefficient": 1e-3, "kl": {"coefficient": 0.05}},
        {"name": "vespo", "positive_nll_coefficient": 0.1},
        {"name": "gspo", "surrogate": {"level": "segment", "clip_high": 0.1, "clip_low": 0.1}},
        {"name": "grpo", "correction": {"kind": "sequence_tis_sum", "ratio_high": 1.1}},
        {"name": "grpo", "correction": {"kind": "m2po", "m2_threshold": 0.01}},
        {"name": "grpo", "correction": {"kind": "batch_normalized", "population": "micro_batch"}},
        {"name": "gmpo", "correction": {"kind": "opsm", "opsm_threshold": 0.01}},
        {"name": "grpo", "denominator": "document_sum", "compat": {"normalize_by_documents": True}},
    ],
    ids=lambda loss: "-".join([loss["name"], *loss][:1] + [k for k in loss if k != "name"]),
)
@pytest.mark.parametrize("cut", [{}, {"micro_batches": 3}], ids=["", "micro_batches"])
def test_terms_corrections_and_advantages_of_tokens(loss, cut):
    batch = documents(0.1, "tokens")
    expected, _ = step(loss, batch, data=cut)
    for chunk_tokens in (7, 500):
        result, taken = step(loss, batch, data=cut, **fused(chunk_tokens))
        assert_same(result, expected, f"{chunk_tokens} rows at a time")
        assert 3 <= taken <= 6
        assert (taken == 3) == (not result.fallbacks)


@pytest.mark.parametrize("kind", ["sequence_tis_sum", "geometric_gate"])
def test_sums_over_data_cost_no_product(kind):
    """A document's weight must be known for its first chunk; the rest of the policy's tokens need not be."""
    loss, batch = {"name": "grpo", "correction": {"kind": kind}}, documents(0.1, "tokens")
    result, taken = step(loss, batch, **fused(7))
    assert_same(result, step(loss, batch)[0])
    assert (taken, result.fallbacks) == (3, ())


def test_clip_decisions_taken_elsewhere_act():
    batch = documents(0.1)
    free, _ = step(preset("grpo"), batch)
    frozen = ~free.tokens["clipped"] & free.tokens["trained"]
    expected, _ = step(preset("grpo"), batch, frozen_clip=frozen)
    assert_same(step(preset("grpo"), batch, frozen_clip=frozen, **fused(7))[0], expected)
    assert float(expected.loss["total"]) != pytest.approx(float(free.loss["total"]), rel=1e-3)


def test_user_loss_matches_reference_and_reports_gemms():
    def of_the_row(inputs):
        centred_T = inputs.counted_logprobs_T - inputs.counted_logprobs_T.sum() / inputs.counts_T.sum()
        return {"policy": Term(-inputs.advantages_T * centred_T)}

    batch = documents(0.1, "tokens")
    expected, _ = step({"name": "grpo"}, batch, make=lambda spec: of_the_row)
    result, taken = step({"name": "grpo"}, batch, make=lambda spec: of_the_row, **fused(7))
    assert_same(result, expected)
    rows = int(expected.tokens["trained"].sum())
    last = (rows - 1) % 7 + 1  # has the coefficients of the whole row: all others are recomputed
    assert taken == pytest.approx(6 - 3 * last / rows, rel=1e-12)
    assert "the loss looks across tokens, and their coefficients in the whole row differ" in result.fallbacks[0]


def test_a_selection_by_covariance_is_detected_without_its_spec():
    batch = documents(0.1)
    expected, _ = step(preset("kl_cov"), batch, loss_spec=False)
    result, taken = step(preset("kl_cov"), batch, loss_spec=False, **fused(7))
    assert_same(result, expected)
    assert taken > 3
    assert result.fallbacks


def test_a_step_with_nothing_to_train_gives_zeros():
    batch = [d | {"loss_mask": [0] * len(d["tokens"])} for d in documents(0.1)]
    for name in ("grpo", "gspo", "kl_cov"):
        result, taken = step(preset(name), batch, **fused(7))
        assert taken == 0
        assert float(result.loss["total"]) == 0
        assert not any(g.any() for g in result.gradients.values())


def test_a_loss_is_never_evaluated_on_no_tokens():
    def highest(inputs):
        return {"policy": Term(-inputs.counted_logprobs_T / inputs.advantages_T.amax())}

    batch = [d | {"loss_mask": [0] * len(d["tokens"])} for d in documents(0.1)]
    result, _ = step({"name": "grpo"}, batch, make=lambda spec: highest, **fused(7))
    assert not any(g.any() for g in result.gradients.values())


def test_only_trained_tokens_go_through_the_head():
    batch = documents(0.1)
    result, _ = step(preset("grpo"), batch, **fused(7))
    trained = result.tokens["trained"]
    assert (result.tokens["entropy_nats"][trained] > 0).all()
    assert not result.tokens["entropy_nats"][~trained].any()


# -- settings and records --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"policy": {"logprobs": "reference", "fused_loss": True}},
            "fused_loss with logprobs 'reference', which holds",
        ),
        (
            {"policy": {"logprobs": "vocabulary_parallel", "chunk_tokens": 8, "keep_bytes": 1}},
            "chunk_tokens and keep_bytes with logprobs 'vocabulary_parallel'",
        ),
        (
            {"policy": {"fp32_head": True}, "precision": "float64"},
            "policy.fp32_head casts the head to float32, and the",
        ),
        ({"policy": {"chunk_tokens": 0}}, "policy.chunk_tokens = 0"),
        ({"policy": {"keep_bytes": -1}}, "policy.keep_bytes = -1"),
    ],
)
def test_settings_that_are_void_together_are_refused(settings, words):
    with pytest.raises(SpecError, match=words):
        parse_spec(RunSpec, settings, where="here")


def test_settings_of_runs_before_there_was_a_choice_still_read():
    old = parse_spec(RunSpec, {"policy": {"logprobs": "auto", "temperature": None}}, where="an old record")
    assert old == RunSpec()
    assert not old.policy.fused_loss


def test_a_run_records_the_reason_for_more_than_three_gemms(tmp_path, capsys):
    records = {}
    for name, how in {"plain": {}, "chunks": {"fused_loss": True, "chunk_tokens": 64}}.items():
        spec = RunSpec(precision="float64", loss={"name": "kl_cov"}, data={"documents_per_step": 4}, policy=how)
        run = RunDirectory.create(tmp_path, name, spec)
        run_here(run, PROJECT)
        records[name] = run.steps()[0]
    assert "fused_loss/fallbacks" not in records["plain"]
    (words,) = records["chunks"]["fused_loss/fallbacks"]
    assert words.endswith("tokens, more than 64, went forward twice: the loss couples the whole row")
    assert f"step 0: fused_loss: {words}" in capsys.readouterr().out
    for key in ("loss/total/sum", "gradient/norm/global", "entropy/policy/mean"):
        assert records["chunks"][key] == pytest.approx(records["plain"][key], rel=1e-11), key
