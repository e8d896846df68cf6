"""Rows of a step: packed for a layout, numbered alike in every layout, split over cp."""

import pytest
import torch

from tests.helpers.batches import nasty_documents
from workbench.errors import SpecError
from workbench.policy.model import load_policy
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.targets import shift_targets
from workbench.sharding.mesh import Axis, Mesh, single_process_mesh
from workbench.specs.run import RunSpec
from workbench.train import rows as train_rows
from workbench.train import step as flow
from workbench.train.rows import row_numbers


def grouped():
    """The nasty documents in groups of three, with rewards."""
    return RolloutBatch.from_documents(
        [d | {"group_id": number // 3, "reward": float(number)} for number, d in enumerate(nasty_documents(4))]
    )


def test_attention_and_its_kernel_follow_the_layout():
    """All implementations give the same numbers; only this detects that the requested one ran."""
    lines = {
        "dp": Axis("dp"),
        "tp": Axis("tp"),
        "cp": Axis("cp", 4, 3),
        "dp_cp": Axis("dp_cp", 4, 3),
        "cp_inner": Axis("cp_inner", 2, 1),
        "cp_outer": Axis("cp_outer", 2, 1),
    }
    mesh, result = Mesh(lines, torch.device("cpu")), []
    for attention, more in (("gathered", {}), ("ring", {}), ("ulysses", {}), ("hybrid", {"ulysses": 2})):
        layout = {"cp": 4, "order": "zigzag", "attention": attention, "kernel": "plain"} | more
        spec = RunSpec.model_validate({"layout": layout})
        (row,), _ = flow.prepare_rows(RolloutBatch.from_documents(nasty_documents(4)), spec, mesh)
        shard, eighth = row.attention, len(row.row.tokens_T) // 2
        result.append((shard.algorithm, shard.kernel, shard.inner.size, shard.outer.size))
        held = shard.positions_GUt.view(4, -1)[3]
        assert held.tolist() == list(range(3 * eighth, 5 * eighth))  # the last rank has the two chunks in the middle
    assert result == [
        ("gathered", "plain", 1, 4),
        ("ring", "plain", 1, 4),
        ("ulysses", "plain", 4, 1),
        ("hybrid", "plain", 2, 2),
    ]


def test_every_rank_of_a_mesh_takes_its_own_rows():
    batch = RolloutBatch.from_documents(nasty_documents(4))
    seen = []
    for dp in range(2):
        for cp in range(2):
            axes = {"dp": Axis("dp", 2, dp), "cp": Axis("cp", 2, cp), "tp": Axis("tp"), "dp_cp": Axis("dp_cp", 4)}
            spec = RunSpec(layout={"dp": 2, "cp": 2, "order": "zigzag"}, data={"micro_batches": 2})
            rows, totals = flow.prepare_rows(batch, spec, Mesh(axes, torch.device("cpu")))
            assert len(rows) == 2
            seen += [int(s) for local in rows for s in local.row.source_T[local.row.loss_mask_T]]
    assert sorted(seen) == torch.nonzero(batch.loss_mask_T).squeeze(1).tolist()
    assert totals.tokens == batch.num_trained_tokens


@pytest.mark.parametrize(
    ("layout", "needed"),
    [
        ({"cp": 2, "order": "zigzag"}, 4),
        ({"dp": 2, "tp": 4, "sequence_parallel": True}, 4),
        ({"cp": 2, "tp": 4, "sequence_parallel": True}, 8),
    ],
)
def test_rows_that_a_layout_can_only_split_by_luck_are_refused(layout, needed):
    """On every rank, and in the first step: not on one of them, in the first step with a row of another length."""
    batch = RolloutBatch.from_documents(nasty_documents(4))
    lucky = batch.select([0, 7])
    assert lucky.num_tokens % needed == 0, "this batch must divide"
    spec = RunSpec(layout=layout, data={"multiple_of": 2})
    with pytest.raises(SpecError, match=f"rows of this layout are multiples of {needed} tokens"):
        flow.pack_step(lucky, spec)


@pytest.mark.parametrize(
    ("layout", "data", "words"),
    [
        (
            {"cp": 2, "order": "balanced"},
            {"multiple_of": 4},
            "multiples of 256 tokens(.|\n)*smaller layout.block_tokens",
        ),
        ({"cp": 4, "order": "document_zigzag"}, {"multiple_of": 51}, "multiples of 8 tokens"),
        (
            {"cp": 4, "order": "document_zigzag"},
            {"micro_batch_tokens": 40},
            r"of 48 tokens with their padding to multiples of 8(.|\n)*allow at least 48 tokens",
        ),
        ({"cp": 2, "order": "balanced"}, {"micro_batch_tokens": 200}, "allow at least 256 tokens"),
    ],
)
def test_rows_that_an_order_cannot_deal_are_refused(layout, data, words):
    batch = RolloutBatch.from_documents(nasty_documents(4))
    axes = {name: Axis(name) for name in ("dp", "tp", "dp_cp")} | {"cp": Axis("cp", layout["cp"])}
    with pytest.raises(ValueError, match=words):
        flow.prepare_rows(batch, RunSpec(layout=layout, data=data), Mesh(axes, torch.device("cpu")))


def test_groups_stay_in_one_row_on_request():
    kept = flow.pack_step(grouped(), RunSpec(data={"micro_batches": 3, "keep_groups": True}))
    assert sorted(row.group_ids_N.unique().tolist() for row in kept) == [[0], [1], [2]]
    loose = flow.pack_step(grouped(), RunSpec(data={"micro_batches": 3}))
    assert max(row.group_ids_N.unique().numel() for row in loose) > 1


def test_groups_of_a_batch_without_groups_are_refused():
    batch = RolloutBatch.from_documents(nasty_documents(4))
    with pytest.raises(SpecError, match=r"data.keep_groups\n  found: a batch without group_ids"):
        flow.pack_step(batch, RunSpec(data={"keep_groups": True}))


def test_rows_may_be_assigned_manually_and_are_padded_for_the_layout():
    batch, told = grouped(), [[5, 0, 1, 8], [2, 3, 4, 7, 6]]
    starts = (batch.positions_T == 0).nonzero().squeeze(1)
    rows = flow.pack_step(batch, RunSpec(layout={"cp": 2, "order": "zigzag"}), told)
    for row, documents in zip(rows, told, strict=True):
        firsts = row.source_T[(row.positions_T == 0) & (row.source_T >= 0)]
        assert torch.equal(firsts, starts[documents])
        assert row.num_tokens % 4 == 0
    mine, _ = flow.prepare_rows(batch, RunSpec(), single_process_mesh(), told)
    assert [int(local.row.document_ids_T.max()) + 1 for local in mine] == [4, 5]


@pytest.mark.parametrize("tokens", [48, 72, 96])
def test_as_many_micro_batches_are_taken_as_the_documents_need(tokens):
    batch = RolloutBatch.from_documents(nasty_documents(4))
    one_row, whole = flow.prepare_rows(batch, RunSpec(), single_process_mesh())
    rows, totals = flow.prepare_rows(batch, RunSpec(data={"micro_batch_tokens": tokens}), single_process_mesh())
    assert len(rows) == {48: 3, 72: 2, 96: 1}[tokens]
    assert totals == whole
    weights = {float(w) for local in (*rows, *one_row) for w in local.weights["policy"].loss_T[local.row.loss_mask_T]}
    assert weights == {float(torch.tensor(1 / totals.tokens))}, "every micro-batch is divided by the whole step"


def test_rows_are_cut_in_one_way():
    with pytest.raises(ValueError, match="give one of them"):
        RunSpec(data={"micro_batches": 2, "micro_batch_tokens": 8})
    with pytest.raises(ValueError, match="balance is that of micro_batches"):
        RunSpec(data={"balance": "work", "micro_batch_tokens": 8})


def test_rows_of_equal_work_train_the_same_policy():
    batch = RolloutBatch.from_documents([document for _ in range(4) for document in nasty_documents(4)])
    policy = load_policy("tiny-qwen3", precision="float64")
    results, rows = {}, {}
    for balance in ("tokens", "work"):
        spec = RunSpec(precision="float64", data={"micro_batches": 3, "balance": balance})
        rows[balance], totals = flow.prepare_rows(batch, spec, policy.mesh)
        loss = flow.build_loss(spec.loss)
        results[balance] = flow.run_step(policy, loss, rows[balance], totals, keep_gradients=True)
    dealt = [[sorted(local.row.source_T.tolist()) for local in some] for some in rows.values()]
    assert dealt[0] != dealt[1]
    for name, gradient in results["tokens"].gradients.items():
        torch.testing.assert_close(results["work"].gradients[name], gradient, rtol=0, atol=1e-13)


def test_rows_are_counted_by_their_first_target():
    batch = RolloutBatch.from_documents(nasty_documents(4))
    rows = [
        shift_targets(row)
        for row in (batch.select([5, 6]), batch.select([0, 8]), batch.select([]).pad_to(8), batch.select([3]))
    ]
    assert row_numbers(rows) == [2, 0, 3, 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_trained_targets_of_a_rank_are_counted(monkeypatch, rank):
    monkeypatch.setattr(train_rows.AttentionShard, "make", lambda *whole, **settings: None)  # it asks the other rank
    axes = {"dp": Axis("dp"), "cp": Axis("cp", 2, rank), "tp": Axis("tp"), "dp_cp": Axis("dp_cp", 2, rank)}
    spec = RunSpec(layout={"cp": 2, "order": "zigzag", "kernel": "plain"})
    batch = RolloutBatch.from_documents(nasty_documents(4))
    (local,), _ = flow.prepare_rows(batch, spec, Mesh(axes, torch.device("cpu")))
    assert local.trained == int(local.row.loss_mask_T.sum())
    assert 0 < local.trained < int(batch.loss_mask_T.sum())


def test_all_that_a_chunk_of_the_head_takes_from_a_row_lies_on_its_device(monkeypatch):
    """A tensor on the host would make every chunk of a fused head wait for a copy; the device here has no memory."""
    monkeypatch.setattr(train_rows.AttentionShard, "make", lambda *whole, **settings: None)  # it reads values
    axes = {"dp": Axis("dp"), "cp": Axis("cp", 2, 1), "tp": Axis("tp"), "dp_cp": Axis("dp_cp", 2, 1)}
    mesh = Mesh(axes, torch.device("meta"))
    spec = RunSpec(layout={"cp": 2, "order": "zigzag", "kernel": "plain"})
    (local,), _ = flow.prepare_rows(RolloutBatch.from_documents(nasty_documents(4)), spec, mesh)
    values = [vars(local.row), vars(local.sums), *(vars(pair) for pair in local.weights.values())]
    devices = {name: value.device.type for each in values for name, value in each.items() if torch.is_tensor(value)}
    assert "positions_t" in devices
    assert {*devices.values()} == {"meta"}, devices
