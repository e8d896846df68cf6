"""None"""

import math

import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.oracles.step import exact, grpo_step
from workbench.errors import ShapeError, SpecError
from workbench.losses.build import build_loss
from workbench.policy.decoder import tiny_qwen3
from workbench.prove import prove
from workbench.prove.arrangement import (
    GRADIENT_BAR,
    LOSS_BAR,
    Arrangement,
    Outcome,
    difference,
    one_rank_policy,
    one_row,
    perform,
)
from workbench.prove.documents import draw_documents, silent_documents
from workbench.prove.subject import WorkbenchSubject
from workbench.specs.run import RunSpec


def subject(**loss):
    spec = RunSpec(loss={"name": "grpo", "kl": {"coefficient": 0.07}, **loss})
    return WorkbenchSubject("grpo", spec, build_loss(spec.loss))


@pytest.fixture(scope="module")
def documents():
    return draw_documents("11", one_rank_policy())


@pytest.fixture(scope="module")
def truth(documents):
    """The paper's loss and gradients, by a stock model that knows nothing of rows and ranks."""
    told = [
        {
            "tokens": list(d.tokens),
            "loss_mask": list(d.loss_mask),
            "advantages": list(d.advantages),
            "old_logprobs": list(d.old_logprobs),
            "ref_logprobs": list(d.ref_logprobs),
        }
        for d in documents
    ]
    return grpo_step(
        exact(tiny_qwen3(19)), told, clip_low=0.2, clip_high=0.2, kl_coefficient=0.07, denominator="document"
    )[:2]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cp": 2, "order": "zigzag"},
        {"tp": 2, "chunk_tokens": 5},
        {"chunk_tokens": 3, "fused": True},
        {"dp": 2, "multiple_of": 4, "rows": ((9, 1, 2), (3, 4), (5, 0), (8, 7, 6))},
    ],
)
def test_every_arrangement_finds_the_papers_numbers(settings, documents, truth):
    arrangement = one_row(documents, **settings) if "rows" not in settings else Arrangement(documents, **settings)
    result = perform(subject(denominator="document"), arrangement)
    assert result.error is None
    assert result.loss == pytest.approx(truth[0], rel=1e-12)
    assert_float64_parity(result.gradients, truth[1], context=str(arrangement), bar=1e-11)
    assert result.metrics["loss/policy"] + result.metrics["loss/kl"] == pytest.approx(result.loss, rel=1e-12)


def test_a_rank_without_work_is_seen(documents):
    everything = tuple(range(len(documents)))
    assert not perform(subject(), Arrangement(documents, (everything[:5], everything[5:]), dp=2)).idle
    assert perform(subject(), Arrangement(documents, (everything, ()), dp=2)).idle


def test_an_error_of_a_rank_is_an_outcome(documents):
    needs_pairs = WorkbenchSubject("dpo", RunSpec(loss={"name": "dpo"}), build_loss(RunSpec(loss={"name": "dpo"}).loss))
    assert isinstance(perform(needs_pairs, one_row(documents)).error, SpecError)


def test_has_a_short_description(documents):
    few = documents[:3]
    assert str(one_row(few)) == "one rank"
    assert str(Arrangement(few, ((2, 0), (1,)))) == "one rank, 2 micro-batches, documents 2 0 | 1"
    assert str(Arrangement(few, ((0, 1, 2), ()), dp=2)) == "dp=2, documents 0 1 2 | none"
    tokens = sum(len(document.tokens) for document in few)
    assert str(one_row(few, multiple_of=tokens + 1)) == f"one rank, padded to {tokens + 1} tokens"
    assert str(one_row(few, chunk_tokens=2, fused=True)) == "one rank, head 2 tokens at a time, fused"


def test_ranks_have_their_own_weights_and_a_step_leaves_them_unchanged(documents):
    first = perform(subject(), one_row(documents, cp=2))
    again = perform(subject(), one_row(documents, cp=2))
    assert first.loss == again.loss
    assert all(first.gradients[name].equal(again.gradients[name]) for name in again.gradients)
    assert not perform(subject(), one_row(documents, cp=2, multiple_of=4)).metrics.keys() ^ first.metrics.keys()


DOCUMENTS = silent_documents("0", 3, group_id=0)
PLAIN = Outcome(
    2.0,
    {"a": torch.tensor([3.0, 0.0]).double(), "b": torch.tensor([0.0, 4.0]).double()},
    {"kl/mean": 0.5, "gradient/norm/all": 5.0, "nothing": math.nan, "zero": 0.0},
)


def changed(loss=2.0, a=(3.0, 0.0), b=(0.0, 4.0), **metrics):
    gradients = {"a": torch.tensor(a, dtype=torch.float64), "b": torch.tensor(b, dtype=torch.float64)}
    return Outcome(loss, gradients, {**PLAIN.metrics, **metrics})


def held(outcome, arrangement=None):
    return difference(PLAIN, outcome, (one_row(DOCUMENTS), arrangement or one_row(DOCUMENTS, cp=2)))


def test_a_difference_within_tolerance_is_none():
    result = held(changed(2.0 + LOSS_BAR, (3.0 + 2 * GRADIENT_BAR, 0.0), zero=1e-13))
    assert result.differing == ()
    assert 0 < result.worst < GRADIENT_BAR
    assert held(changed(2.0 + 6 * LOSS_BAR)).differing == ("loss",)
    assert held(changed(a=(3.0 + 4 * GRADIENT_BAR, 0.0))).differing == ("gradient",)


def test_a_small_parameter_is_compared_with_a_floor():
    small = Outcome(2.0, {"a": torch.zeros(2).double(), "b": PLAIN.gradients["b"]})
    arrangements = one_row(DOCUMENTS), one_row(DOCUMENTS, cp=2)
    noise, signal = changed(a=(1e-14, 0.0)), changed(a=(1e-9, 0.0))
    assert difference(small, noise, arrangements).differing == ()
    assert difference(small, signal, arrangements).differing == ("gradient",)


def test_a_factor_is_measured_and_named():
    half = held(changed(1.0, (1.5, 0.0), (0.0, 2.0), **{"gradient/norm/all": 2.5}))
    assert half.differing == ("gradient", "loss"), "norms of the gradient and terms of the loss go without saying"
    assert (half.factor, half.factor_name) == (0.5, "1 / cp")
    assert half.description == "the gradient is 0.5 times the plain one (1 / cp); the loss is 1, not 2"
    other = held(changed(2.0, (2.1, 0.0), (0.0, 2.8)))
    assert (other.factor, other.factor_name) == (pytest.approx(0.7), "")
    assert held(changed(2.0, (0.0, 0.0), (0.0, 0.0))).description == "the gradient is 0"


@pytest.mark.parametrize(
    ("settings", "factor", "name"),
    [
        ({"dp": 3, "rows": ((0,), (1,), (2,))}, 3.0, "dp"),
        ({"rows": ((0,), (1, 2))}, 0.5, "1 / micro_batches"),
        ({"dp": 3, "cp": 2, "rows": ((0,), (1,), (2,))}, 6.0, "cp * dp"),
        ({"cp": 2}, 0.25, "1 / (cp * cp)"),
        ({"tp": 2}, 2.0, "tp"),
    ],
)
def test_a_factor_may_come_from_any_size(settings, factor, name):
    arrangement = Arrangement(DOCUMENTS, **settings) if "rows" in settings else one_row(DOCUMENTS, **settings)
    result = held(changed(2.0, (3.0 * factor, 0.0), (0.0, 4.0 * factor)), arrangement)
    assert result.factor_name == name


def test_a_factor_may_be_a_share():
    tokens = sum(len(document.tokens) for document in DOCUMENTS)
    padded = one_row(DOCUMENTS, multiple_of=2 * tokens + 1)
    share = tokens / padded.tokens
    result = held(changed(2.0, (3.0 * share, 0.0), (0.0, 4.0 * share)), padded)
    assert result.factor_name == "tokens / padded tokens"
    more = one_row(DOCUMENTS + silent_documents("1", 2, group_id=5))
    result = held(changed(2.0, (3.0 * 3 / 5, 0.0), (0.0, 4.0 * 3 / 5)), more)
    assert result.factor_name == "documents / all documents"


def test_another_gradient_has_no_factor():
    turned = held(changed(2.0, (3.0, 1.0), (0.0, 4.0)))
    assert (turned.factor, turned.factor_name) == (None, "")
    assert turned.description.startswith("the gradient is another one: cosine 0.981, 1.02 times as long, farthest in a")
    assert held(changed(2.0, (3.0, 0.01), (0.0, 4.0))).description.startswith(
        "the gradient is nearly 1 times the plain one"
    )


def test_a_small_difference_is_marked():
    epsilon = 1 - 5e-9
    result = held(changed(2.0 * epsilon, (3.0 * epsilon, 0.0), (0.0, 4.0 * epsilon)))
    assert result.description == "the gradient is 1 - 5.0e-09 times the plain one; the loss is 1.99999999, not 2"
    assert held(changed(2.0 + 1e-11)).description == "the loss is 2.00000000001, not 2: 1 + 5.0e-12 times"
    assert held(changed(**{"kl/mean": 0.50000001})).description == "kl/mean is 0.50000001, not 0.5"


def test_a_gradient_of_rounding_is_none():
    result = held(changed(2.0, (1e-17, 0.0), (0.0, -1e-16)))
    assert (result.factor, result.description) == (0.0, "the gradient is 0")


def test_a_loss_alone_has_a_factor_too():
    result = held(changed(4.0))
    assert (result.differing, result.factor, result.factor_name) == (("loss",), 2.0, "cp")
    assert result.description == "the loss is 4, not 2: 2 times (cp)"


def test_so_has_a_metric_alone():
    result = held(changed(zero=1.0, **{"kl/mean": 1.0}))
    assert result.differing == ("metric kl/mean", "metric zero")
    assert (result.factor, result.factor_name) == (2.0, "cp")
    assert result.description == "kl/mean is 1, not 0.5, and 1 more metrics differ"
    assert held(changed(nothing=0.0)).differing == ("metric nothing",), "a number where there is none"
    gone = Outcome(2.0, PLAIN.gradients, {"kl/mean": 0.5})
    assert held(gone).differing == ("metric gradient/norm/all", "metric zero"), "a metric that is missing is NaN"


def test_nan_and_errors_are_differences():
    assert held(changed(a=(math.nan, 0.0))).differing == ("not a number",)
    assert "the gradient of 1 parameter(s), a first" in held(changed(a=(math.inf, 0.0))).description
    assert held(changed(math.nan)).description == "the loss is not a number"
    error = held(Outcome(error=ShapeError("split 7 tokens", found="an odd row")))
    assert (error.differing, error.description) == (("error",), "ShapeError: split 7 tokens; found: an odd row")
    assert held(Outcome(error=KeyError())).description == "KeyError: "


def test_a_signature_stays_constant_while_shrinking():
    assert held(changed(1.0, (1.5, 0.0), (0.0, 2.0))).signature == ("gradient", False, "1 / cp")
    assert held(changed(2.0, (3.0, 1.0))).signature == ("gradient", True, "")


def test_a_bug_of_experts_is_refuted_by_the_invariant_of_their_axis(unshrunk):
    spec = RunSpec(loss={"name": "grpo"}, faults=["expert_gradients_times_ep"])
    proof = prove(spec, invariants=["pipeline", "expert_degree"], rounds=1)
    assert proof.broken == ("expert_degree",), proof


@pytest.mark.parametrize("fault", ["routes_shifted_by_one", "routes_of_another_layer"])
def test_a_bug_of_replayed_routes_is_refuted_by_their_invariant(fault, unshrunk):
    proof = prove(RunSpec(loss={"name": "grpo"}, faults=[fault]), invariants=["expert_degree", "routes"], rounds=1)
    assert proof.broken == ("routes",), proof


def test_a_trainers_own_step_replays_routes():
    def loss(row, outputs, totals):
        return -(outputs.policy_logprobs_T * row.advantages_T)[row.loss_mask_T].sum() / totals.tokens

    assert not prove(loss, engine="sum", invariants=["routes"], rounds=2).broken


def test_a_run_with_adapters_is_proved_with_them_everywhere(documents):
    spec = RunSpec(loss={"name": "grpo"}, lora={"r": 3, "lora_alpha": 6, "target_modules": ["no_such_layer"]})
    run = one_row(documents, mixture=True).spec(spec)
    assert (run.lora.r, run.lora.scale, run.lora.init_lora_weights) == (3, 2, "random")
    outcome = perform(WorkbenchSubject("grpo", spec, build_loss(spec.loss)), one_row(documents))
    assert len(outcome.gradients) == 2 * (3 * 7 + 1)
    assert all(value.norm() > 0 for value in outcome.gradients.values())
    assert not RunSpec().lora.on
    assert one_row(documents).spec(RunSpec()).lora == RunSpec().lora


@pytest.mark.parametrize("fault", ["adapter_factor_not_summed_over_tp", "adapter_counted_by_every_tp_rank"])
def test_a_wrong_adapter_is_refuted(fault, unshrunk):
    spec = RunSpec(loss={"name": "grpo"}, lora={"r": 2}, faults=[fault])
    assert not prove(spec, invariants=["tp"], rounds=1).ok
