"""The same bits in every layout: real gloo processes, generated combinations, steps that are done again, and the run.

Everything that a step finds is compared bit for bit: terms of the loss, every metric, every token's values, gradients,
norms and weights after the optimizer. The mode without which all of it differs fails the same comparison.
"""

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.same_bits import differing, same_bits, train, train_all
from tests.parity.cases import as_batch
from tests.parity.layouts_of_bits import BLOCK, drawn, on_one_rank, oracle
from workbench.errors import SpecError
from workbench.policy.model import load_policy
from workbench.reproducible import OutOfRange
from workbench.sharding.mesh import single_process_mesh
from workbench.sharding.simulated import simulate
from workbench.specs.run import RunSpec
from workbench.train import step as flow
from workbench.train.exact import reproducible_mode

ROWS = 4
LAYOUTS = {
    "dp2": {"dp": 2},
    "cp2_zigzag_sharded": {"cp": 2, "order": "zigzag", "shard_parameters": True},
    "tp2": {"tp": 2},
    "cp4_zigzag": {"cp": 4, "order": "zigzag"},
    "dp4_sharded": {"dp": 4, "shard_parameters": True, "checkpointing": True},
    "cp2_tp2": {"cp": 2, "tp": 2},
    "dp2_cp2_sharded": {"dp": 2, "cp": 2, "order": "balanced", "block_tokens": BLOCK, "shard_parameters": True},
    "dp2_sharded_kept": {"dp": 2, "shard_parameters": True, "reshard_after_forward": False, "unit_layers": 2},
    "dp2_tp2": {"dp": 2, "tp": 2},
    "dp2_tp2_sharded": {"dp": 2, "tp": 2, "shard_parameters": True},
    "dp2_checkpointing": {"dp": 2, "checkpointing": True},
    "cp2_balanced": {"cp": 2, "order": "balanced", "block_tokens": 2 * BLOCK},
    "cp4_sharded": {"cp": 4, "shard_parameters": True},
}
ASKED = {
    "tied": {"precision": "float32"},
    "untied": {
        "precision": "float32",
        "model": {"source": "tiny-qwen3", "tied": False, "seed": 3},
        "optimizer": {"name": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.05},
    },
    "bfloat16": {"precision": "bfloat16"},
    "whole_documents": {"precision": "float32", "loss": {"name": "gspo"}, "data": {"keep_groups": True}},
    "done_again": {"precision": "float32", "reproducible": {"block_tokens": BLOCK, "weight_chunks": 2, "bits": 58}},
}
SAMPLE = {
    2: [("dp2", "whole_documents"), ("cp2_zigzag_sharded", "done_again"), ("tp2", "bfloat16")],
    4: [("dp4_sharded", "tied"), ("cp2_tp2", "untied"), ("dp2_cp2_sharded", "bfloat16")],
}
"""Ranks -> what they train in every run of the suite: layout, what is asked."""


def size(layout):
    return layout.get("dp", 1) * layout.get("cp", 1) * layout.get("tp", 1)


def settings(layout, asked="tied", **more):
    """Steps that are all clipped, of four rows; the second starts from what the optimizer kept."""
    given = {
        "model": {"source": "tiny-qwen3", "tied": True, "seed": 3},
        "steps": 2,
        "record": {"metrics": "full"},
        "loss": {"name": "grpo", "kl": {"coefficient": 0.05}},
        "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.05},
        "reproducible": {"block_tokens": BLOCK, "weight_chunks": 2},
    } | ASKED[asked]
    data = given.get("data", {}) | {"micro_batches": ROWS // layout.get("dp", 1)}
    return given | {"layout": layout, "data": data} | more


@pytest.fixture(scope="module")
def one_rank():
    """The results of one rank, computed once."""
    known = {}

    def found(asked, **more):
        key = asked, *more.items()
        if key not in known:
            known[key] = train(settings({}, asked, **more), oracle().documents)
        return known[key]

    return found


def check(chosen, one_rank, folder, **more):
    cases = [(settings(LAYOUTS[layout], asked, **more), oracle().documents) for layout, asked in chosen]
    for rank, answers in enumerate(run_ranks(train_all, size(LAYOUTS[chosen[0][0]]), folder, cases, timeout_s=300)):
        for (layout, asked), answer in zip(chosen, answers, strict=True):
            assert differing(answer, one_rank(asked, **more)) == [], f"{layout}, {asked}, rank {rank}"


@pytest.mark.parametrize("ranks", SAMPLE)
def test_two_steps_are_the_same_bits_on_real_ranks(ranks, one_rank, tmp_path):
    check(SAMPLE[ranks], one_rank, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_five_steps_of_every_layout_are_the_same_bits(layout, one_rank, tmp_path):
    check([(layout, asked) for asked in ASKED], one_rank, tmp_path, steps=5)


def test_every_step_was_clipped_and_moved_the_weights(one_rank):
    result = one_rank("tied")
    assert all(float(result[f"{step}/norm"]) > 0.1 for step in range(2))
    assert not same_bits(result["1/weight/model.norm.weight"], result["0/weight/model.norm.weight"])


def generated(number):
    draw = drawn(number)
    dp, cp, tp = draw.shape
    expected = on_one_rank(number)
    answers = simulate(
        lambda mesh: train(draw.settings(laid_out=True), oracle().documents, mesh, draw.dealt(laid_out=True)),
        dp=dp,
        cp=cp,
        tp=tp,
    )
    for rank, answer in enumerate(answers):
        assert differing(answer, expected) == [], f"rank {rank} of {draw}"


CHOSEN = (16, 36, 49, 55)
"""Between them every axis, rows dealt and filled, both precisions, and a loss with every output of the head."""


@pytest.mark.parametrize("number", CHOSEN)
def test_a_sample_of_drawn_combinations_is_the_same_bits(number):
    generated(number)


@pytest.mark.slow
@pytest.mark.parametrize("number", [number for number in range(64) if number not in CHOSEN])
def test_every_drawn_combination_is_the_same_bits(number):
    generated(number)


@pytest.mark.parametrize("layout", [{"cp": 2, "order": "zigzag"}, {"dp": 2}, {"tp": 2}])
def test_the_ordinary_mode_fails_the_same_comparison(layout):
    ordinary = {"reproducible": {}, "steps": 1}
    expected = train(settings({}, **ordinary), oracle().documents)
    axes = {name: n for name, n in layout.items() if name != "order"}
    for answer in simulate(lambda mesh: train(settings(layout, **ordinary), oracle().documents, mesh), **axes):
        assert sum("gradient/" in name for name in differing(answer, expected)) > 10


def test_other_blocks_give_other_bits(one_rank):
    """The comparison is not so coarse that anything would pass."""
    other = train(
        settings({}, reproducible={"block_tokens": 2 * BLOCK, "weight_chunks": 2}, steps=1), oracle().documents
    )
    first = {name: value for name, value in one_rank("tied").items() if name.startswith("0/")}
    assert sum("gradient/" in name for name in differing(other, first)) > 10


@pytest.mark.parametrize("bits", [58, 4])
def test_an_out_of_range_step_is_repeated_identically_in_every_layout(bits):
    """Too many bits overflow, too few lose the small gradients."""
    asked = {"reproducible": {"block_tokens": BLOCK, "weight_chunks": 2, "bits": bits}, "steps": 1}
    expected = train(settings({}, **asked), oracle().documents)
    assert float(expected["0/retries"]) > 0
    assert float(expected["0/bits"]) != bits
    layout = {"cp": 2, "order": "zigzag"}
    for answer in simulate(lambda mesh: train(settings(layout, **asked), oracle().documents, mesh), cp=2):
        assert differing(answer, expected) == []


def test_a_gradient_that_is_not_finite_is_an_error_on_every_rank():
    """A gradient of 1e38 a token is a number, and its sum over the width of a layer is none."""
    broken = [document | {"advantages": [3e38] * len(document["advantages"])} for document in oracle().documents]
    texts = []

    def rank(mesh):
        with pytest.raises(OutOfRange, match="finite") as caught:
            train(settings({"dp": 2}, steps=1), broken, mesh)
        texts.append(caught.value.bits)

    simulate(rank, dp=2)
    assert texts == [None, None]


def test_a_loss_is_close_to_the_ordinary_mode(one_rank):
    """The same numbers, not only the same bits: one step without the mode is the same up to rounding."""
    ordinary = train(settings({}, reproducible={}, steps=1), oracle().documents)
    for name, value in ordinary.items():
        if name.startswith(("0/loss/", "0/gradient/", "0/token/policy_logprobs")):
            torch.testing.assert_close(one_rank("tied")[name], value, rtol=1e-4, atol=1e-6, check_dtype=False)


def test_rows_of_the_ordinary_mode_are_refused():
    spec, ordinary = RunSpec.model_validate(settings({})), RunSpec.model_validate(settings({}, reproducible={}))
    policy = load_policy("tiny-qwen3", mesh=single_process_mesh())
    rows, totals = flow.prepare_rows(as_batch(oracle().documents), ordinary, policy.mesh)
    with reproducible_mode(policy, spec), pytest.raises(SpecError, match="rows that were prepared without it"):
        flow.run_step(policy, flow.build_loss(spec.loss), rows, totals)
