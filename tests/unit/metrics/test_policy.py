import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.metric_rows import inputs_of, nasty_documents, segment_lengths
from tests.helpers.ranks import reductions_counted, run_ranks
from tests.oracles import metrics as oracle
from workbench.errors import SpecError
from workbench.losses.build import build_loss
from workbench.losses.terms import LossInputs, Term
from workbench.metrics.definitions import DocumentMetric
from workbench.metrics.policy import Quantities, measure, policy_metrics
from workbench.metrics.quantities import Advantage, DocumentSlots, LogRatio
from workbench.metrics.values import finish_metrics
from workbench.sharding.mesh import Axis, make_mesh
from workbench.specs.losses import LossSpec
from workbench.systems.metrics import as_named_by
from workbench.systems.registry import SYSTEMS

ALONE = Axis("dp_cp")
PPO = LossSpec(surrogate={"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0})
GSPO = LossSpec(name="gspo", surrogate={"clip_low": 0.03, "clip_high": 0.04})


def finished(inputs, terms, mask, level="full", spec=PPO, slots=None):
    return finish_metrics([policy_metrics(inputs, terms, mask, level, spec, slots)], ALONE)


def test_metrics_of_two_trained_tokens_and_one_that_is_not():
    policy = torch.log(torch.tensor([2.0, 0.9, 100.0], dtype=torch.float64))
    zero = torch.zeros(3, dtype=torch.float64)
    inputs = LossInputs(
        policy,
        zero,
        torch.tensor([1.0, -3.0, 50.0], dtype=torch.float64),
        ref_logprobs_T=zero,
        entropy_T=torch.tensor([0.5, 1.5, 9.0]),
        loss_mask_T=torch.tensor([True, True, False]),
    )
    terms = build_loss(LossSpec(kl={"coefficient": 0.1}))(inputs)
    metrics = finished(inputs, terms, inputs.loss_mask_T, "basic")
    assert metrics["tokens/trained/sum"] == 2
    assert metrics["ratio/policy_old/mean"] == pytest.approx(1.45)
    assert metrics["ratio/policy_old/std"] == pytest.approx(0.55)
    assert metrics["ratio/policy_old/max"] == pytest.approx(2.0)
    assert metrics["ratio/policy_old/min"] == pytest.approx(0.9)
    assert metrics["ratio/policy_old/sum"] == pytest.approx(2.9)
    assert metrics["ratio/policy_old/squared_sum"] == pytest.approx(4.81)
    assert metrics["ratio/policy_old/effective_samples"] == pytest.approx(2.9**2 / 4.81)
    assert (
        metrics["clip/policy/fraction"] == metrics["clip/region/fraction"] == metrics["clip/sign_aware/fraction"] == 0.5
    )
    assert metrics["entropy/policy/mean"] == 1.0
    assert metrics["advantage/all/mean"] == -1.0
    assert metrics["logprob/policy/mean"] == pytest.approx(math.log(1.8) / 2)
    assert (metrics["advantage/all/min"], metrics["advantage/all/max"]) == (-3.0, 1.0)
    k3 = [math.expm1(-math.log(r)) + math.log(r) for r in (2.0, 0.9)]
    assert metrics["kl/policy_ref/k3_mean"] == pytest.approx(sum(k3) / 2)
    assert "kl/policy_sampler/k3_mean" not in metrics
    assert "documents/trained/sum" not in metrics, "nobody said which token belongs to which document"


def test_three_definitions_of_clipped_are_three_numbers():
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0, 1.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, -1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    everywhere = torch.ones(6, dtype=torch.bool)
    inputs = LossInputs(ratios.log(), torch.zeros(6, dtype=torch.float64), advantages)
    metrics = finished(inputs, build_loss(LossSpec())(inputs), everywhere, "basic", LossSpec())
    assert metrics["clip/region/fraction"] == pytest.approx(4 / 6)
    assert metrics["clip/sign_aware/fraction"] == metrics["clip/policy/fraction"] == pytest.approx(2 / 6)
    assert metrics["clip/gradient_zero/fraction"] == pytest.approx(4 / 6)


def test_weights_of_a_correction_raw_and_applied():
    raw = torch.tensor([0.5, 4.0, 9.0, 1.0], dtype=torch.float64)
    applied = torch.tensor([0.5, 2.0, 0.0, 1.0], dtype=torch.float64)
    zeros, counts = torch.zeros(4, dtype=torch.float64), torch.tensor([True, True, True, False])
    term = Term(zeros, extras={"raw_weight": raw, "applied_weight": applied, "kept": applied > 0})
    inputs = LossInputs(zeros, zeros, zeros + 1)
    metrics = finished(inputs, {"policy": term}, counts)
    assert metrics["weight/raw/mean"] == 4.5
    assert (metrics["weight/raw/min"], metrics["weight/raw/max"]) == (0.5, 9.0)
    assert metrics["weight/applied/mean"] == pytest.approx(2.5 / 3)
    assert metrics["weight/raw/effective_samples"] == pytest.approx(13.5**2 / 97.25)
    assert metrics["weight/applied/effective_samples"] == pytest.approx(2.5**2 / 4.25)
    assert metrics["weight/kept/fraction"] == pytest.approx(2 / 3)
    assert metrics["weight/truncated/fraction"] == pytest.approx(1 / 3)
    assert metrics["weight/dropped/sum"] == 1
    assert metrics["clip/gradient_zero/fraction"] == pytest.approx(1 / 3)
    stated = Term(zeros, extras={**term.extras, "truncated": torch.tensor([True, True, False, False])})
    assert finished(inputs, {"policy": stated}, counts)["weight/truncated/fraction"] == pytest.approx(2 / 3)


def test_the_correction_of_a_loss_reaches_the_metrics():
    documents = nasty_documents(3, infinite=False)
    inputs, mask = inputs_of(documents)
    spec = LossSpec(correction={"kind": "tis", "ratio_high": 1.1})
    inputs = replace(inputs, loss_mask_T=mask)
    metrics = finished(inputs, build_loss(spec)(inputs), mask, "basic", spec)
    assert metrics["weight/applied/mean"] < metrics["weight/raw/mean"]
    assert metrics["weight/raw/max"] > 1.1


def test_levels():
    documents = nasty_documents(1)
    inputs, mask = inputs_of(documents)
    basic, full = (policy_metrics(inputs, {}, mask, level, PPO) for level in ("basic", "full"))
    assert policy_metrics(inputs, {}, mask, "none", PPO) == {}
    assert finish_metrics([{}, {}], ALONE) == {}
    assert 20 < len(basic) < len(full)
    assert basic.keys() < full.keys()
    with pytest.raises(SpecError, match="one of none, basic, full"):
        policy_metrics(inputs, {}, mask, "some", PPO)


# ---- against the oracle, in any cut ----------------------------------------------------------------------


def pieces_of(documents, spec, labels=None, parts=1):
    """The metrics of every part of a cut of the tokens, canonical and as others name them."""
    pieces = []
    labels = [0] * sum(len(d["mask"]) for d in documents) if labels is None else labels
    for part in range(parts):
        places = [place for place, label in enumerate(labels) if label == part]
        inputs, mask = inputs_of(documents, places)
        slots = DocumentSlots(0, len(documents), segment_lengths(documents, places))
        named = policy_metrics(inputs, {}, mask, "full", spec, slots)
        for system in SYSTEMS:
            named |= {
                f"{system} {key}": value
                for key, value in as_named_by(system, inputs, mask, loss_spec=spec, slots=slots).items()
            }
        pieces.append(named)
    return pieces


def held_to(expected, found, *, least):
    common = expected.keys() & found.keys()
    assert len(common) >= least
    for key in sorted(common):
        assert found[key] == pytest.approx(expected[key], rel=1e-9, abs=1e-12, nan_ok=True), key


@pytest.mark.parametrize("seed", range(6))
def test_canonical_metrics_are_the_oracles(seed):
    documents = nasty_documents(seed)
    expected = oracle.canonical(documents, lower=0.8, upper=1.28)
    metrics = finish_metrics(pieces_of(documents, PPO), ALONE)
    held_to(expected, metrics, least=100)
    assert expected["tokens/nonfinite/sum"] == 3
    missing = {key for key in expected if key not in metrics}
    assert missing == set()
    quantile = sorted(oracle.ratio("policy", "old")(t) for _, t in oracle.counted(documents, "policy", "old"))
    assert metrics["ratio/policy_old/p99"] == pytest.approx(quantile[math.ceil(0.99 * len(quantile)) - 1], rel=0.0101)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("spec", [PPO, GSPO], ids=["tokens", "documents"])
def test_any_cut_into_ranks_and_micro_batches_gives_the_numbers_of_one_pass(spec, data):
    documents = nasty_documents(data.draw(st.integers(0, 20)))
    tokens = sum(len(d["mask"]) for d in documents)
    labels = data.draw(st.lists(st.integers(0, 3), min_size=tokens, max_size=tokens))
    whole = finish_metrics(pieces_of(documents, spec), ALONE)
    cut = finish_metrics(pieces_of(documents, spec, labels, 4), ALONE)
    assert cut.keys() == whole.keys()
    for key, value in whole.items():
        assert cut[key] == pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True), key


def test_a_step_without_counted_tokens_is_reported():
    documents = [d | {"mask": [0] * len(d["mask"])} for d in nasty_documents(0)]
    metrics = finish_metrics(pieces_of(documents, PPO, parts=2), ALONE)
    assert metrics["tokens/trained/sum"] == metrics["documents/trained/sum"] == metrics["segments/trained/sum"] == 0
    assert math.isnan(metrics["ratio/policy_old/mean"])
    assert math.isnan(metrics["ratio_document/policy_old/mean"])
    assert (metrics["advantage/all/min"], metrics["advantage/all/max"]) == (math.inf, -math.inf)


def test_a_surrogate_of_documents_is_clipped_by_documents():
    documents = nasty_documents(5, infinite=False)
    metrics = finish_metrics(pieces_of(documents, GSPO), ALONE)
    ratios = iter(oracle.document_ratios(documents))
    outside = cut = total = 0
    for document in documents:
        length = sum(document["mask"])
        if length:
            ratio, advantage = next(ratios), document["advantage"][document["mask"].index(1)]
            outside += length * (ratio < 0.97 or ratio > 1.04)
            cut += length * ((ratio < 0.97 and advantage < 0) or (ratio > 1.04 and advantage > 0))
            total += length
    assert metrics["clip/region/fraction"] == pytest.approx(outside / total)
    assert metrics["clip/sign_aware/fraction"] == pytest.approx(cut / total)
    assert 0 < cut < outside


def test_metrics_of_one_quantity_share_a_table_and_others_do_not():
    documents = nasty_documents(5, infinite=False)
    inputs, mask = inputs_of(documents)
    slots = DocumentSlots(0, len(documents))
    read = {
        "sum": ((LogRatio("policy", "old"),), (), lambda tokens_N, sum_N: float(sum_N.sum())),
        "tokens": ((LogRatio("policy", "old"),), (), lambda tokens_N, sum_N: float(tokens_N.sum())),
        "largest": ((LogRatio("policy", "old"),), (Advantage(),), lambda tokens_N, sum_N, most_N: float(most_N.max())),
        "other": ((Advantage(),), (), lambda tokens_N, sum_N: float(sum_N.sum())),
    }
    metrics = [DocumentMetric(key, "", "1", of, reads, extremes=most) for key, (of, most, reads) in read.items()]
    values = measure(metrics, Quantities(inputs, {}, mask, slots=slots))
    assert values["sum"].sums is values["tokens"].sums
    assert len({id(value.sums) for value in values.values()}) == 3
    advantages = inputs.advantages_T[mask]
    log_ratios = (inputs.policy_logprobs_T - inputs.old_logprobs_T)[mask]
    assert {key: value.finish() for key, value in values.items()} == pytest.approx(
        {
            "sum": float(log_ratios.sum()),
            "tokens": int(mask.sum()),
            "largest": float(advantages.max()),
            "other": float(advantages.sum()),
        }
    )


def on_ranks(documents):
    """Rank 1 has nothing, rank 3 only uncounted tokens; the others share the tokens unevenly."""
    axis = make_mesh(dp=2, cp=2)["dp_cp"]
    tokens = [(place, keep) for place, keep in enumerate(k for d in documents for k in d["mask"])]
    labels = [(0 if place % 3 else 2) if keep else 3 for place, keep in tokens]
    local = [place % 2 if label == axis.rank else 9 for place, label in enumerate(labels)]
    with reductions_counted() as sizes:
        metrics = finish_metrics(pieces_of(documents, PPO, local, 2), axis)
    return metrics, len(sizes)


def test_four_ranks_take_two_collectives_for_all_metrics_together(tmp_path):
    documents = nasty_documents(2)
    expected = oracle.canonical(documents, lower=0.8, upper=1.28)
    for result, collectives in run_ranks(on_ranks, 4, tmp_path, documents):
        assert collectives == 2
        held_to(expected, result, least=100)


@pytest.mark.parametrize("name", ["grpo", "reinforce", "sft", "dpo", "dro", "kl_cov", "sapo", "gmpo", "clip_cov"])
@pytest.mark.parametrize("advantage", [0.0, 1.0])
def test_the_share_without_gradient_is_that_of_autograd(name, advantage):
    g = torch.Generator().manual_seed(0)
    old_T, *others = (-torch.rand(8, generator=g, dtype=torch.float64) for _ in range(4))
    policy_T = others[0].requires_grad_()
    mask_T = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1]).bool()
    ids_T = torch.arange(8) // 4
    inputs = LossInputs(
        policy_T,
        old_T,
        torch.full((8,), advantage, dtype=torch.float64),
        others[1],
        others[2],
        loss_mask_T=mask_T,
        document_ids_T=ids_T,
        rewards_T=ids_T.double(),
        group_ids_T=torch.zeros_like(ids_T),
    )
    spec = LossSpec(name=name)
    terms = build_loss(spec)(inputs)
    (slope_T,) = torch.autograd.grad(terms["policy"].values_T[mask_T].sum(), policy_T)
    result = policy_metrics(inputs, terms, mask_T, "basic", spec)["clip/gradient_zero/fraction"].finish()
    assert result == pytest.approx(float((slope_T[mask_T] == 0).double().mean()))
