"""A fingerprint matches a plain loop, detects every bit and every position, and no layout changes it."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from workbench.reproducible.fingerprints import fingerprint, fingerprints, row_fingerprints
from workbench.sharding.mesh import single_process_mesh
from workbench.sharding.simulated import simulate
from workbench.sharding.tensor_parallel import ParameterShard

LAST = (1 << 64) - 1


def splitmix(seed, count):
    """The count-th output of SplitMix64, from the paper, in Python's own integers."""
    z = (seed + count * 0x9E3779B97F4A7C15) & LAST
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & LAST
    z = (z ^ z >> 27) * 0x94D049BB133111EB & LAST
    return z ^ z >> 31


def drawn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(dtype)


class TestOneTensor:
    @pytest.mark.parametrize(
        ("dtype", "bits"),
        [
            (torch.float64, torch.int64),
            (torch.float32, torch.int32),
            (torch.bfloat16, torch.int16),
            (torch.bool, torch.int8),
        ],
    )
    def test_is_the_sum_of_a_plain_loop(self, dtype, bits):
        values = drawn(3, 5, 7, dtype=dtype)
        seeds = values.flatten().view(bits).tolist()
        assert fingerprint(values) == sum(splitmix(seed, place) for place, seed in enumerate(seeds)) & LAST

    def test_mixes_as_published(self):
        # The first numbers of SplitMix64 from seed 0, as every implementation's test has them.
        assert [splitmix(0, count) for count in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
        output = row_fingerprints(torch.zeros(2, 1), torch.tensor([1, 2]), torch.tensor([0]))
        assert [int(number) & LAST for number in output] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]

    def test_every_single_bit_counts(self):
        values, seen = drawn(4, 4), set()
        seen.add(fingerprint(values))
        for place in range(16):
            for bit in range(32):
                changed = values.clone()
                changed.view(torch.int32).view(-1)[place] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)
                seen.add(fingerprint(changed))
        assert len(seen) == 1 + 16 * 32

    def test_order_shape_and_sign_of_zero(self):
        values = drawn(2, 6)
        assert fingerprint(values) != fingerprint(values.flip(1))
        assert fingerprint(values) == fingerprint(values.view(3, 4)), "places count, in row-major order"
        assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))

    def test_long_tensors_are_processed_in_pieces(self, monkeypatch):
        values = drawn(40, 8)
        whole = fingerprint(values)
        monkeypatch.setattr("workbench.reproducible.fingerprints._PIECE", 50)
        assert fingerprint(values) == whole

    def test_scalars_and_nothing(self):
        assert fingerprint(torch.tensor(1.5)) == fingerprint(torch.tensor([1.5]))
        assert fingerprint(torch.zeros(0, 3)) == 0

    def test_strides_do_not_count(self):
        values = drawn(6, 4)
        assert fingerprint(values.T) == fingerprint(values.T.contiguous())


@dataclass
class Dealt:
    """FSDP2's view of a parameter on a rank: the shape of all of it, and a piece."""

    shape: torch.Size
    piece: Tensor

    def to_local(self):
        return self.piece


WHOLE = {
    "embedding": drawn(19, 6),
    "column": drawn(8, 6),
    "row": drawn(6, 8),
    "sections": drawn(12, 6),
    "experts": drawn(2, 6, 8),
    "norm": drawn(6),
    "bias": drawn(8),
}
SHARDS = {
    "embedding": ParameterShard(0),
    "column": ParameterShard(0),
    "row": ParameterShard(1),
    "sections": ParameterShard(0, parts=(8, 4)),
    "experts": ParameterShard(2),
    "norm": ParameterShard(gradient_is_partial=True),
    "bias": ParameterShard(0),
}
"""The embedding's 19 rows lie in pieces of 10 and 9 over two ranks, 5, 5, 5 and 4 over four."""


def held(name, tp):
    values, shard = WHOLE[name], SHARDS[name]
    if shard.dim is None:
        return values
    sections = values.split(shard.parts, shard.dim) if shard.parts else [values]
    return torch.cat(
        [section.split(-(-section.shape[shard.dim] // tp.size), shard.dim)[tp.rank] for section in sections], shard.dim
    )


class TestOverRanks:
    @pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 4}, {"dp": 2, "cp": 2}, {"dp": 2, "tp": 2}])
    def test_no_layout_changes_it(self, sizes):
        def rank(mesh):
            return fingerprints({name: held(name, mesh["tp"]) for name in WHOLE}, SHARDS, mesh)

        whole = {name: fingerprint(values) for name, values in WHOLE.items()}
        assert simulate(rank, **sizes) == [(whole, ())] * len(simulate(rank, **sizes))

    @pytest.mark.parametrize("sizes", [{"dp": 2, "cp": 2}, {"dp": 3}, {"cp": 2, "tp": 2}])
    def test_nor_does_dealing_it_over_dp_and_cp(self, sizes):
        shards = {name: ParameterShard(shard.dim, over_dp_cp=True, parts=shard.parts) for name, shard in SHARDS.items()}

        def rank(mesh):
            over, dealt = mesh["dp_cp"], {}
            for name in WHOLE:
                whole = held(name, mesh["tp"])
                each = -(-len(whole) // over.size)
                dealt[name] = Dealt(whole.shape, whole[over.rank * each : (over.rank + 1) * each])
            return fingerprints(dealt, shards, mesh)

        whole = {name: fingerprint(values) for name, values in WHOLE.items()}
        for text in simulate(rank, **sizes):
            assert text == (whole, ())

    @pytest.mark.parametrize("dealt", [False, True])
    @pytest.mark.parametrize("sizes", [{"dp": 4, "ep": 2}, {"dp": 2, "cp": 2, "ep": 4}, {"dp": 2, "ep": 2, "tp": 2}])
    def test_nor_do_experts_on_several_ranks(self, sizes, dealt):
        whole = {"experts": drawn(4, 6, 8), "router": drawn(4, 6)}
        shards = {
            "experts": ParameterShard(2, over_dp_cp=dealt, over_ep=True),
            "router": ParameterShard(over_dp_cp=dealt),
        }

        def rank(mesh):
            experts = whole["experts"].chunk(mesh["ep"].size)[mesh["ep"].rank].chunk(mesh["tp"].size, 2)
            local = {"experts": experts[mesh["tp"].rank], "router": whole["router"]}
            for name, axis in (("experts", mesh["edp"]), ("router", mesh["dp_cp"])) if dealt else ():
                each = -(-len(local[name]) // axis.size)
                local[name] = Dealt(local[name].shape, local[name][axis.rank * each : (axis.rank + 1) * each])
            return fingerprints(local, shards, mesh)

        expected = {name: fingerprint(values) for name, values in whole.items()}
        for output in simulate(rank, **sizes):
            assert output == (expected, ())

    def test_experts_that_differ_between_their_ranks_are_named(self):
        def rank(mesh):
            local = drawn(4, 6).chunk(2)[mesh["ep"].rank].clone()
            local[1, 2] += float(mesh["dp"].rank == 3)
            return fingerprints({"experts": local}, {"experts": ParameterShard(over_ep=True)}, mesh)

        assert {unlike for _, unlike in simulate(rank, dp=4, ep=2)} == {("experts",)}

    def test_one_rank_needs_no_group(self):
        assert fingerprints(WHOLE, SHARDS, single_process_mesh())[0]["row"] == fingerprint(WHOLE["row"])

    @pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"tp": 3}])
    def test_differing_replicas_are_named(self, sizes):
        def rank(mesh):
            local = dict(WHOLE)
            if mesh["tp"].rank == mesh["tp"].size - 1 and mesh["dp_cp"].rank == mesh["dp_cp"].size - 1:
                local["norm"] = WHOLE["norm"].clone()
                local["norm"][2] = torch.nextafter(local["norm"][2], torch.tensor(9.0))
            return fingerprints(local, dict.fromkeys(WHOLE, ParameterShard()), mesh)

        output = simulate(rank, **sizes)
        assert {unlike for _, unlike in output} == {("norm",)}
        assert all(result == output[0][0] for result, _ in output)
