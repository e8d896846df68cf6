"""A step whose sums of gradients start in backward has the gradients, bit for bit, of one whose sums start after it.

Backend: gloo, whose sums run asynchronously too; a step uses them with NCCL alone.
"""

import contextlib

import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.helpers.ranks import run_ranks
from tests.parity.cases import one_step
from tests.parity.test_layouts import settings
from tests.parity.test_oracle import documents_near
from tests.parity.test_oracle import oracle as oracle_of
from workbench.faults import planted
from workbench.policy.model import load_policy
from workbench.sharding import collectives, early_sums, gradients
from workbench.sharding.simulated import simulate
from workbench.specs.run import RunSpec
from workbench.train import step as flow

TWO = {"data": {"micro_batches": 2}}
CASES = {
    "dp, cp": settings({"dp": 2, "cp": 2, "order": "zigzag"}, **TWO),
    "dp, tp, fused, tied": settings(
        {"dp": 2, "tp": 2, "sequence_parallel": True, "checkpointing": True},
        policy={"logprobs": "chunked", "chunk_tokens": 8, "fused_loss": True},
        **TWO,
    ),
    "mixed": settings({"dp": 4}, precision="bf16_mixed", mixed_precision={"reduction": "bfloat16"}, **TWO),
    "lora": settings({"dp": 4}, lora={"r": 2}),
    "idle": settings({"dp": 2, "cp": 2}, tied=False),  # three ranks train nothing
}


@contextlib.contextmanager
def starts_noted():
    """Sums in small buckets: the size of each that starts early, and whether that is inside a backward."""
    started, start, deal = [], early_sums.start_all_sum_, collectives.buckets

    def noted(bucket, axis):
        started.append((sum(map(torch.numel, bucket)), torch._C._current_graph_task_id() != -1))
        return start(bucket, axis)

    early_sums.start_all_sum_ = noted
    collectives.buckets = early_sums.buckets = lambda items, limit, measure: deal(items, 4000, measure)
    try:
        yield started
    finally:
        early_sums.start_all_sum_, collectives.buckets, early_sums.buckets = start, deal, deal


def both_ways(documents, idle):
    """Each case with sums after backward, and as on NCCL: what differs, the sums that start early, and gradients."""
    unequal, starts, gradients_of = {}, {}, {}
    for name, case in CASES.items():
        given = idle if name == "idle" else documents
        with starts_noted() as started:
            after = one_step(case, given)
            assert not started, "gloo sums after backward"
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(gradients, "overlaps", lambda group: True)
                during = one_step(case, given)
        pairs = {key: (during["gradients"][key], value) for key, value in after["gradients"].items()}
        unequal[name] = [key for key, pair in pairs.items() if not torch.equal(*pair)]
        unequal[name] += [key for key, norm in after["norms"].items() if during["norms"][key] != norm]
        starts[name] = started
        if name in IN_FLOAT64:
            gradients_of[name] = during["gradients"]
    return unequal, starts, gradients_of


IN_FLOAT64 = ("dp, tp, fused, tied", "idle")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    documents = documents_near(11)
    untied = documents_near(11, tied=False)
    idle = [d for d in untied if sum(d["loss_mask"]) == 0] + [max(untied, key=lambda d: len(d["tokens"]))]
    by_rank = run_ranks(both_ways, 4, tmp_path_factory.mktemp("early"), documents, idle, timeout_s=300.0)
    return by_rank, documents, idle


def test_gradients_have_the_same_bits(results):
    by_rank, documents, idle = results
    assert [unequal for unequal, _, _ in by_rank] == [{name: [] for name in CASES}] * 4
    right = dict(zip(IN_FLOAT64, (oracle_of(documents)[1], oracle_of(idle, tied=False)[1]), strict=True))
    for name, expected in right.items():
        assert_float64_parity(by_rank[0][2][name], expected, context=name)


def test_sums_start_in_backward_in_one_order(results):
    by_rank, _, _ = results
    for name in CASES:
        starts = [starts[name] for _, starts, _ in by_rank]
        tp = CASES[name]["layout"].get("tp", 1)
        for first in range(tp):  # ranks of tp have parts of their own
            assert len({tuple(size for size, _ in each) for each in starts[first::tp]}) == 1, "one order on every rank"
        assert len(starts[0]) > 3
        assert all(inside for each in starts for _, inside in each), name


@pytest.mark.parametrize(
    ("change", "early"),
    [
        ({}, True),
        ({"precision": "fsdp2_bf16"}, True),
        ({"precision": "deepspeed_bf16"}, False),  # gradients are added in copies of the weights
        ({"precision": "bf16_mixed", "mixed_precision": {"reduction_order": "ranks"}}, False),
        ({"faults": ["missing_cp_factor"]}, False),  # its gradients are those that nothing has summed
    ],
)
def test_other_sums_wait_for_the_end_of_backward(change, early, monkeypatch):
    monkeypatch.setattr(gradients, "overlaps", lambda group: True)
    spec = RunSpec.model_validate(settings({"dp": 2}, **change))

    def chosen(mesh):
        return flow.sums_in_backward(load_policy("tiny-qwen3", mesh=mesh, precision=spec.dtypes)) is not None

    with planted(spec.faults):
        assert simulate(chosen, dp=2) == [early, early]
