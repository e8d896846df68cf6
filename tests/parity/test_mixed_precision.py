"""Mixed precision in real processes, against pure runs: which bits a cast, an accumulation and a reduction give.

The copies of a bf16_mixed step are the weights of a bfloat16 run, so one micro-batch must give that run's gradient bit
by bit. Sums over micro-batches or ranks are then rounded as the preset says, which is computed here by hand.
"""

import math

import pytest
import torch

from tests.helpers.bars import assert_float64_parity, distances
from tests.helpers.ranks import run_ranks
from tests.parity.cases import as_batch, many_steps, one_step, step_on
from tests.parity.test_fsdp import CLIP, LAYOUTS, OPTIMIZERS, train_all, truth_of
from tests.parity.test_layouts import settings
from tests.parity.test_oracle import documents_near
from workbench.policy.model import load_policy
from workbench.sharding.simulated import simulate
from workbench.specs.run import RunSpec
from workbench.train import step as flow

TWO = {"data": {"micro_batches": 2}}
DP2, SHARDED = {"dp": 2}, {"dp": 2, "shard_parameters": True}


@pytest.fixture(scope="module")
def documents():
    return documents_near(11)


@pytest.fixture(scope="module")
def halves(documents):
    """Gradients of the two rows that two micro-batches have, each by a pure bfloat16 run of its own loss weights."""
    return [_gradient_of_row(documents, row) for row in (0, 1)]


def _gradient_of_row(documents, row, given=None):
    spec = RunSpec.model_validate(given or settings({}, precision="bfloat16", **TWO))
    policy = load_policy("tiny-qwen3", precision="bfloat16", tied=True, seed=3)
    rows, totals = flow.prepare_rows(as_batch(documents), spec, policy.mesh)
    result = flow.run_step(
        policy, flow.build_loss(spec.loss), rows[row : row + 1], totals, keep_gradients=True, loss_spec=spec.loss
    )
    assert all(gradient.dtype == torch.bfloat16 for gradient in result.gradients.values())
    return {name: gradient.float() for name, gradient in result.gradients.items()}


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    unequal = [name for name, value in expected.items() if not torch.equal(actual[name], value.double())]
    assert unequal == []


def in_float32(halves):
    return {name: halves[0][name] + halves[1][name] for name in halves[0]}


def in_bfloat16(halves):
    return {name: (halves[0][name] + halves[1][name]).bfloat16().float() for name in halves[0]}


def test_one_micro_batch_has_the_gradient_of_a_pure_run(documents):
    pure = one_step(settings({}, precision="bfloat16"), documents)["gradients"]
    for precision in ("bf16_mixed", "deepspeed_bf16"):
        assert_same_bits(one_step(settings({}, precision=precision), documents)["gradients"], pure)
    exact = one_step(settings({}), documents)["gradients"]
    assert max(distances(pure, exact).values()) > 1e-3, "bfloat16 rounds"


@pytest.mark.parametrize(
    ("precision", "total"), [("bf16_mixed", in_float32), ("fsdp2_bf16", in_float32), ("deepspeed_bf16", in_bfloat16)]
)
def test_micro_batches_are_accumulated_in_the_dtype_of_the_preset(precision, total, documents, halves):
    assert any(not torch.equal(in_float32(halves)[name], in_bfloat16(halves)[name]) for name in halves[0])
    actual = one_step(settings({}, precision=precision, **TWO), documents)["gradients"]
    assert_same_bits(actual, total(halves))


def test_ranks_are_summed_in_the_dtype_of_the_preset_sharded_or_not(documents, halves, tmp_path):
    """The two rows of dp = 2 are the two micro-batches of one rank."""
    expected = {
        "bf16_mixed": in_float32(halves),
        "megatron_bf16": in_float32(halves),
        "fsdp2_bf16": in_bfloat16(halves),
    }
    asked = [(settings(layout, precision=name), documents) for layout in (DP2, SHARDED) for name in expected]
    for answers in run_ranks(many_steps, 2, tmp_path, asked):
        for (given, _), result in zip(asked, answers, strict=True):
            assert_same_bits(result["gradients"], expected[given["precision"]])


def test_a_sum_in_rank_order_rounds_each_partial_sum(documents):
    """Three simulated ranks in bfloat16: ((a + b) + c), each sum rounded, whatever a backend does."""
    in_order = {"reduction": "bfloat16", "reduction_order": "ranks"}
    spec = settings({"dp": 3}, precision="bf16_mixed", mixed_precision=in_order)
    rows = settings({}, precision="bfloat16", data={"micro_batches": 3})
    single = [_gradient_of_row(documents, row, rows) for row in range(3)]
    expected = {
        name: ((single[0][name] + single[1][name]).bfloat16().float() + single[2][name]).bfloat16().float()
        for name in single[0]
    }
    for result in simulate(lambda mesh: step_on(mesh, spec, documents), dp=3):
        assert_same_bits(result["gradients"], expected)


ROUNDED, ROUNDING = {"tp2": {"tp": 2}, "cp2": {"cp": 2, "order": "zigzag"}}, ("bf16_mixed", "fp8_rowwise")


@pytest.fixture(scope="module")
def rounded(documents, tmp_path_factory):
    """The first rank's step of each layout, in each precision."""
    asked = [(layout, precision) for layout in ROUNDED for precision in ROUNDING]
    cases = [(settings(ROUNDED[layout], precision=precision), documents) for layout, precision in asked]
    first, _ = run_ranks(many_steps, 2, tmp_path_factory.mktemp("ranks"), cases)
    return dict(zip(asked, first, strict=True))


@pytest.mark.parametrize("precision", ROUNDING)
@pytest.mark.parametrize("layout", ROUNDED)
def test_layouts_round_no_more_than_one_rank(layout, precision, documents, rounded):
    """In the distance from float64 of the whole gradient; 2.5 is the factor of a comparison's budget."""
    exact = one_step(settings({}), documents)["gradients"]
    alone = one_step(settings({}, precision=precision), documents)["gradients"]
    actual = rounded[layout, precision]

    def error(gradients):
        return sum(float((gradients[name] - exact[name]).square().sum()) for name in exact) ** 0.5

    assert 0 < error(actual["gradients"]) < 2.5 * error(alone)


ALL_FLOAT64 = {
    "precision": "fp16_amp",
    "mixed_precision": dict.fromkeys(("weights", "compute", "gradients", "reduction", "moments"), "float64"),
}


@pytest.fixture(scope="module")
def all_float64(documents, tmp_path_factory):
    """What each layout trains in float64, by rank, and what the paper does."""
    asked = [(layout, sharded) for layout in ("dp2", "cp2") for sharded in (False, True)]
    cases = [
        (
            settings(LAYOUTS[layout] | {"shard_parameters": sharded}, optimizer=OPTIMIZERS["adamw"], **TWO)
            | ALL_FLOAT64,
            documents,
        )
        for layout, sharded in asked
    ]
    per_rank = run_ranks(train_all, 2, tmp_path_factory.mktemp("ranks"), cases)
    truth = truth_of(documents, OPTIMIZERS["adamw"], tied=True)
    return dict(zip(asked, zip(*per_rank, strict=True), strict=True)), truth


@pytest.mark.parametrize("layout", ["dp2", "cp2"])
@pytest.mark.parametrize("sharded", [False, True])
def test_with_every_dtype_float64_two_steps_are_those_of_the_paper(layout, sharded, all_float64):
    trained, (steps, weights) = all_float64
    for actual in trained[layout, sharded]:
        for (_, gradients, norm, _), (_, paper, paper_norm) in zip(actual["steps"], steps, strict=True):
            assert_float64_parity(gradients, paper, context=layout)
            assert norm == pytest.approx(paper_norm, rel=1e-12)
            assert norm > CLIP
        assert_float64_parity(actual["weights"], weights, context=f"weights, {layout}")


def test_a_loss_scale_keeps_small_gradients_of_float16(documents):
    small = settings({}, precision="fp16_amp", loss={"surrogate": {"coefficient": 1e-5}, "kl": {"coefficient": 0.0}})
    expected = one_step(small | {"precision": "float64"}, documents)["gradients"]
    scaled = one_step(small, documents)["gradients"]
    unscaled = one_step(small | {"mixed_precision": {"loss_scale": 1.0}}, documents)["gradients"]
    assert max(distances(scaled, expected).values()) < 0.05
    assert max(distances(unscaled, expected).values()) > 0.5, "the gradient underflows without a scale"


def test_a_loss_in_bfloat16_has_rounded_inputs_and_exact_arithmetic(documents):
    """The clipped surrogate of rounded numbers, token by token, from the log-probabilities of the exact run."""
    plain = settings({}, denominator="token") | {"loss": {"name": "grpo"}}
    exact = one_step(plain, documents)
    actual = one_step(plain | {"mixed_precision": {"loss": "bfloat16"}}, documents)

    def loss_of(rounding):
        terms, at = [], 0
        for document in documents:
            for place, counts in enumerate(document["loss_mask"]):
                if counts:
                    policy = rounding(float(exact["tokens"]["policy_logprobs"][at + place]))
                    old = rounding(document["old_logprobs"][place])
                    advantage = rounding(document["advantages"][place])
                    ratio = math.exp(policy - old)
                    terms.append(-min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage))
            at += len(document["tokens"])
        return sum(terms) / len(terms)

    assert abs(float(exact["loss"]) - loss_of(float)) < 1e-12
    assert abs(float(actual["loss"]) - loss_of(_to_bfloat16)) < 1e-12
    assert abs(loss_of(float) - loss_of(_to_bfloat16)) > 1e-5


def _to_bfloat16(value):
    return float(torch.tensor(value, dtype=torch.float64).bfloat16())
