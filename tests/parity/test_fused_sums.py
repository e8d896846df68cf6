"""Sums over documents that straddle cp ranks, under a fused loss: three GEMMs where they are data, four where the
current policy enters them; the oracle's loss and gradients in either case."""

import functools
from dataclasses import replace

import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.parity.cases import as_batch
from tests.parity.sequence_cases import LOSSES, Oracle
from workbench.losses import Term
from workbench.losses.corrections import CORRECTION_WEIGHTS
from workbench.policy.logprobs.engine import count_gemms
from workbench.policy.logprobs.fused_loss import fused_loss
from workbench.policy.model import load_policy
from workbench.rollouts.batch import Extension
from workbench.sharding.simulated import simulate
from workbench.specs.run import RunSpec
from workbench.train import step as flow

CP2 = {"cp": 2, "order": "zigzag"}
CHUNK = 5


@functools.cache
def oracle():
    return Oracle(11)


@functools.cache
def policy(rank, fused_loss):
    """A copy for each simulated rank."""
    return load_policy("tiny-qwen3", precision="float64", seed=3, fused_loss=fused_loss)


def step(loss, *, fused, layout=CP2, make=flow.build_loss, made_from_spec=True, chunk_tokens=CHUNK):
    """One step on simulated ranks, and the GEMMs of each for every token that trains on it."""
    head = {"fused_loss": True, "chunk_tokens": chunk_tokens} if fused else {}
    spec = RunSpec.model_validate(
        {
            "model": {"source": "tiny-qwen3", "seed": 3},
            "precision": "float64",
            "loss": loss,
            "layout": layout,
            "policy": head,
            "data": {"micro_batches": 2},
        }
    )
    batch = as_batch(oracle().documents)
    weights_T = 0.5 + torch.arange(batch.num_tokens, dtype=torch.float64) % 7 / 4
    batch = replace(
        batch,
        extensions=batch.extensions | {CORRECTION_WEIGHTS: Extension(weights_T, "token", "1", "of another program")},
    )

    def rank(mesh):
        held = replace(policy(mesh["dp_cp"].rank, fused), mesh=mesh, chunk_tokens=spec.policy.chunk_tokens)
        rows, totals = flow.prepare_rows(batch, spec, mesh)
        with count_gemms(this_thread=True) as count:
            result = flow.run_step(
                held,
                make(spec.loss),
                rows,
                totals,
                num_source=batch.num_tokens,
                keep_gradients=True,
                level="full",
                loss_spec=spec.loss if made_from_spec else None,
                fused=fused,
            )
        return result, count.rows / sum(int(local.row.loss_mask_T.sum()) for local in rows)

    return simulate(rank, dp=layout.get("dp", 1), cp=layout.get("cp", 1), tp=layout.get("tp", 1))


def assert_same(found, expected, context):
    assert float(found.loss["total"]) == pytest.approx(float(expected.loss["total"]), rel=1e-12, abs=1e-13), context
    assert_float64_parity(found.gradients, expected.gradients, context=context)
    trained = expected.tokens["trained"]
    torch.testing.assert_close(
        found.tokens["policy_logprobs"][trained], expected.tokens["policy_logprobs"][trained], rtol=0, atol=1e-12
    )
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-9, abs=1e-12, nan_ok=True), context


@pytest.mark.parametrize("name", ["sequence_tis_sum", "sequence_tis_mean"])
def test_a_weight_of_documents_is_the_oracles_for_three_products(name):
    settings, _, denominator = LOSSES[name]
    expected_loss, expected = oracle()(LOSSES[name])
    for result, products in step(settings | denominator, fused=True):
        assert (products, result.fallbacks) == (3, ())
        assert abs(float(result.loss["total"]) - expected_loss) <= 1e-12 * max(1, abs(expected_loss))
        assert_float64_parity(result.gradients, expected, context=name)


DATA = {
    "sequence_mask": {"kind": "sequence_mask", "ratio_high": 1.05},
    "segment_tis": {"kind": "segment_tis", "ratio_high": 1.01},
    "given": {"ratio": "given_document_mean", "ratio_high": 1.2},
    "gate": {"kind": "geometric_gate"},
    "veto": {"ratio": "token", "gate": "ratio", "gate_low": 0.9, "gate_level": "document_min"},
    "survivors": {"kind": "sequence_mask", "ratio_high": 1.05, "denominator": "survivors"},
}


@pytest.mark.parametrize("name", DATA)
def test_a_correction_of_data_is_as_without_fusion_for_three_products(name):
    loss = {"name": "grpo", "correction": DATA[name]}
    [(expected, _)] = step(loss, fused=False, layout={})
    for result, products in step(loss, fused=True):
        assert (products, result.fallbacks) == (3, ())
        assert_same(result, expected, name)


def test_a_row_selection_with_document_weights_needs_as_many_gemms_as_the_selection():
    """The sums of documents are replayed; the selection makes every token go forward twice, and no more."""
    loss = {"name": "kl_cov", "correction": {"kind": "sequence_tis_sum", "ratio_high": 1.1}}
    for (expected, _), (result, products) in zip(step(loss, fused=False), step(loss, fused=True), strict=True):
        assert products == 4
        assert result.fallbacks[0].endswith("went forward twice: the loss couples the whole row")
        assert_same(result, expected, "kl_cov")


@pytest.mark.parametrize(
    "loss",
    [
        {"name": "gspo"},
        {"name": "grpo", "correction": {"kind": "opsm", "opsm_threshold": 0.01}},
        {
            "name": "grpo",
            "correction": {"kind": "sequence_tis_sum"},
            "kl": {"coefficient": 0.1, "importance": "old", "importance_level": "document"},
        },
        {"name": "grpo", "correction": {"kind": "sequence_tis_sum", "ratio_high": 1.1}, "old_policy": "current"},
    ],
    ids=["gspo", "opsm", "kl", "current"],
)
def test_sums_of_the_live_policy_are_evaluated_between_forward_and_backward(loss):
    """opsm compares the live policy without a gradient, and "current" makes it the old one."""
    for (expected, _), (result, products) in zip(step(loss, fused=False), step(loss, fused=True), strict=True):
        assert products <= 4
        assert "whose tokens lie on 2 cp ranks: it is evaluated between forward and backward" in result.fallbacks[0]
        assert_same(result, expected, str(loss))


def own(value_of):
    """A token loss times a sum over documents, as a user loss."""

    def make(spec):
        def loss(inputs):
            return {
                "policy": Term(
                    -inputs.advantages_T * inputs.counted_logprobs_T * inputs.document_sums.document(value_of(inputs))
                )
            }

        return loss

    return make


OWN = {
    "only_a_gradient": (lambda i: 1 + i.policy_logprobs_T - i.policy_logprobs_T.detach(), "at once"),
    "only_a_value": (lambda i: i.policy_logprobs_T.detach(), "at once"),
    "here_and_not_there": (
        lambda i: (i.policy_logprobs_T.detach() - i.old_logprobs_T - 0.01).abs().lt(0.009).double(),
        "late",
    ),
    "data": (lambda i: i.sampler_logprobs_T.exp(), "never"),
}
"""What is summed, and when it shows that the policy enters it."""


@pytest.mark.parametrize("name", OWN)
def test_an_undeclared_loss_is_correct(name):
    """One sum is the same for both policies that the loss is evaluated on, and not for the real one."""
    value_of, shows = OWN[name]
    results = [step({"name": "grpo"}, fused=fused, make=own(value_of), made_from_spec=False) for fused in (False, True)]
    for (expected, _), (result, products) in zip(*results, strict=True):
        assert bool(result.fallbacks) == (shows != "never")
        assert products == {"at once": 4, "never": 3}.get(shows, products)
        assert (products > 4) == (shows == "late")
        assert_same(result, expected, name)


def test_products_of_simulated_tp_ranks_are_their_own():
    """Ranks are threads that take turns inside each other's passes."""
    spec = RunSpec.model_validate({"model": {"source": "tiny-qwen3", "seed": 3}, "precision": "float64"})
    batch = as_batch(oracle().documents)

    def rank(mesh):
        held = load_policy("tiny-qwen3", mesh=mesh, precision="float64", seed=3, fused_loss=True, chunk_tokens=CHUNK)
        rows, _ = flow.prepare_rows(batch, spec, mesh)
        result = fused_loss(
            rows[0].hidden_states(held),
            targets_T=rows[0].row.targets_T,
            loss_fn=lambda said, places: said.logprobs_T.sum(),
            active_T=rows[0].row.loss_mask_T,
            implementation="chunked",
            **held.head_arguments(),
        )
        return result.gemms, result.fallback

    assert simulate(rank, tp=2) == [(3.0, None)] * 2
