"""A trace: its numbers are those of the tensors that came by, no layout changes them, and it finds what was changed."""

from pathlib import Path

import pytest
import torch

from tests.helpers.planted_ulp import plant
from workbench.errors import RecordError, SpecError
from workbench.policy.model import load_policy
from workbench.records.directory import RunDirectory
from workbench.sharding.mesh import Axis
from workbench.sharding.tensor_parallel import ParameterShard
from workbench.specs.run import RunSpec
from workbench.train import policies
from workbench.train import trace as module
from workbench.train.trace import INPUT, Tracer, read_trace
from workbench.train.worker import run_here

PROJECT = Path(__file__).parents[3]
BLOCK = 8
BASE = {
    "model": {"source": "tiny-qwen3"},
    "data": {"documents_per_step": 6, "micro_batches": 2, "multiple_of": 32},
    "record": {"trace_tokens": BLOCK, "gradients": "none", "tokens": False},
}
EXACT = {"reproducible": {"block_tokens": BLOCK, "weight_chunks": 2}}


@pytest.fixture
def traced(tmp_path):
    def run(**changes):
        directory = RunDirectory.create(tmp_path, "one", RunSpec.model_validate(BASE).merged(changes))
        run_here(directory, PROJECT)
        return read_trace(directory, 0)

    return run


def loop(values_tF, places_t):
    """Fingerprint of some tokens, number by number, in Python's own integers."""
    last, total, features = (1 << 64) - 1, 0, values_tF.shape[1]
    for place, row in zip(places_t, values_tF.contiguous().view(torch.int32).tolist(), strict=True):
        for column, seed in enumerate(row):
            z = (seed + (place * features + column) * 0x9E3779B97F4A7C15) & last
            z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & last
            z = (z ^ z >> 27) * 0x94D049BB133111EB & last
            total += z ^ z >> 31
    return f"{total & last:016x}"


def padded(blocks):
    return [number for number, block in enumerate(blocks) if block == f"{0:016x}"]


def test_is_made_of_what_came_by(traced, monkeypatch):
    load, seen = policies.load_policy, {}

    def note(_, __, out):
        seen.setdefault("out", out.detach().clone())
        out.register_hook(lambda gradient: seen.update(gradient=seen.get("gradient", gradient.clone())))

    def watched(*given, **named):
        policy = load(*given, **named)
        policy.model.get_submodule("model.layers.1.self_attn.q_norm").register_forward_hook(note)
        return policy

    monkeypatch.setattr(policies, "load_policy", watched)
    found = traced()
    for what, blocks in (("out", found.forward), ("gradient", found.backward)):
        values_TF = seen[what][0].flatten(1)
        said = blocks["model.layers.1.self_attn.q_norm"][0]
        for block in (0, 2):
            places = range(block * BLOCK, (block + 1) * BLOCK)
            assert said[block] == loop(values_TF[places.start : places.stop], places), what


def test_stations_stand_in_the_order_of_the_pass(traced):
    found = traced()
    forward, backward = list(found.forward), list(found.backward)
    assert (forward[0], forward[1], forward[-1]) == ("tokens", "model.embed_tokens", "logprobs")
    layer = [name.removeprefix("model.layers.0.") for name in forward if name.startswith("model.layers.0.")]
    assert layer == [
        "input_layernorm",
        "self_attn.q_proj",
        "self_attn.q_norm",
        "self_attn.k_proj",
        "self_attn.k_norm",
        "self_attn.v_proj",
        f"self_attn.o_proj{INPUT}",
        "self_attn.o_proj",
        "self_attn",
        f"post_attention_layernorm{INPUT}",
        "post_attention_layernorm",
        "mlp.gate_proj",
        "mlp.act_fn",
        "mlp.up_proj",
        f"mlp.down_proj{INPUT}",
        "mlp.down_proj",
        "mlp",
    ]
    assert backward == [name for name in reversed(forward) if name not in ("tokens", "model.rotary_emb", "logprobs")]


def test_padding_counts_nothing(traced):
    found = traced(data={"multiple_of": 160})
    for name, rows in found.forward.items():
        assert [padded(row) for row in rows] == [padded(row) for row in found.forward["tokens"]], name
    assert all(padded(row) for row in found.forward["tokens"])


@pytest.mark.parametrize("layout", [{"dp": 2, "tp": 2}, {"cp": 2, "order": "zigzag"}, {"checkpointing": True}], ids=str)
def test_no_layout_of_the_reproducible_mode_changes_it(traced, layout):
    one = traced(**EXACT)
    other = traced(**EXACT, layout=layout, data={"micro_batches": 2 // layout.get("dp", 1)})
    assert other.forward == one.forward
    assert other.backward == one.backward


def test_ranks_of_tp_that_share_tokens_say_each_once(traced):
    one, other = traced(), traced(layout={"tp": 2, "sequence_parallel": True})
    for name in ("tokens", "model.embed_tokens", "model.layers.0.input_layernorm"):  # nothing is multiplied before
        assert other.forward[name] == one.forward[name], name
    assert set(one.forward) < set(other.forward), "hidden states are gathered before a block, and no module does it"
    assert other.forward["logprobs"] != one.forward["logprobs"]


def test_one_bit_is_found_where_it_is(traced, monkeypatch):
    one = traced()
    plant(monkeypatch, "model.layers.1.mlp.up_proj", place=17, loads=[0])
    other = traced()
    apart = [name for name in one.forward if one.forward[name] != other.forward[name]]
    assert apart[0] == "model.layers.1.mlp.up_proj"
    blocks = [
        number
        for number, (a, b) in enumerate(zip(one.forward[apart[0]][0], other.forward[apart[0]][0], strict=True))
        if a != b
    ]
    assert blocks == [17 // BLOCK]


class TestColumns:
    @pytest.mark.parametrize(("rank", "expected"), [(0, [0, 1, 4]), (1, [2, 3, 5])])
    def test_sections_are_cut_each_by_itself(self, rank, expected):
        columns_F, features = module._columns(torch.zeros(2, 3), ParameterShard(0, parts=(4, 2)), Axis("tp", 2, rank))
        assert (columns_F.tolist(), features) == (expected, 6)

    def test_transposed_layers_are_refused(self):
        policy = load_policy("tiny-qwen3")
        policy.shards["model.layers.0.mlp.up_proj.weight"] = ParameterShard(1)
        layer = torch.nn.Module()
        layer.nf, layer.weight = 3, None
        policy.model.model.layers[0].mlp.up_proj = layer
        with pytest.raises(SpecError, match=r"mlp\.up_proj, which holds its weight as \[inputs, outputs\]"):
            Tracer(policy, [], BLOCK)


class TestOnDisk:
    def test_a_damaged_trace_is_refused(self, tmp_path):
        run = RunDirectory.create(tmp_path, "one", RunSpec())
        run.write_json("traces/step0000.json", {"block_tokens": 8})
        with pytest.raises(RecordError, match="traces/step0000"):
            read_trace(run, 0)

    def test_none_was_asked_for(self, tmp_path):
        assert read_trace(RunDirectory.create(tmp_path, "one", RunSpec()), 0) is None
