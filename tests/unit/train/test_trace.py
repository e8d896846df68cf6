"""A trace: its numbers are those of the observed tensors, no layout changes them, and it locates a change."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.planted_ulp import plant
from workbench.errors import RecordError, SpecError
from workbench.policy.model import load_policy
from workbench.records.directory import RunDirectory
from workbench.sharding.mesh import Axis, single_process_mesh
from workbench.sharding.tensor_parallel import ParameterShard
from workbench.specs.run import RunSpec
from workbench.train import checkpoint
from workbench.train import trace as module
from workbench.train.trace import INPUT, Tracer, certify, fingerprint_gradients, read_trace
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


def test_is_made_of_the_observed_tensors(traced, monkeypatch):
    load, seen = checkpoint.load_policy, {}

    def note(_, __, out):
        seen.setdefault("out", out.detach().clone())
        out.register_hook(lambda gradient: seen.update(gradient=seen.get("gradient", gradient.clone())))

    def watched(*given, **named):
        policy = load(*given, **named)
        policy.model.get_submodule("model.layers.1.self_attn.q_norm").register_forward_hook(note)
        return policy

    monkeypatch.setattr(checkpoint, "load_policy", watched)
    result = traced()
    for what, blocks in (("out", result.forward), ("gradient", result.backward)):
        values_TF = seen[what][0].flatten(1)
        output = blocks["model.layers.1.self_attn.q_norm"][0]
        for block in (0, 2):
            places = range(block * BLOCK, (block + 1) * BLOCK)
            assert output[block] == loop(values_TF[places.start : places.stop], places), what


def test_stations_stand_in_the_order_of_the_pass(traced):
    result = traced()
    forward, backward = list(result.forward), list(result.backward)
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
    result = traced(data={"multiple_of": 160})
    for name, rows in result.forward.items():
        assert [padded(row) for row in rows] == [padded(row) for row in result.forward["tokens"]], name
    assert all(padded(row) for row in result.forward["tokens"])


@pytest.mark.parametrize("layout", [{"dp": 2, "tp": 2}, {"cp": 2, "order": "zigzag"}, {"checkpointing": True}], ids=str)
def test_no_layout_of_the_reproducible_mode_changes_it(traced, layout):
    one = traced(**EXACT)
    other = traced(**EXACT, layout=layout, data={"micro_batches": 2 // layout.get("dp", 1)})
    assert other.forward == one.forward
    assert other.backward == one.backward


def test_tp_ranks_that_share_tokens_record_each_once(traced):
    one, other = traced(), traced(layout={"tp": 2, "sequence_parallel": True})
    for name in ("tokens", "model.embed_tokens", "model.layers.0.input_layernorm"):  # nothing is multiplied before
        assert other.forward[name] == one.forward[name], name
    assert set(one.forward) < set(other.forward), "hidden states are gathered before a block, and no module does it"
    assert other.forward["logprobs"] != one.forward["logprobs"]


def test_one_flipped_bit_is_located(traced, monkeypatch):
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

    def test_none_without_a_request(self, tmp_path):
        assert read_trace(RunDirectory.create(tmp_path, "one", RunSpec()), 0) is None


# -- certificates: one label a tensor, in the order of computation, and no label that misses a bit ---------------------


@pytest.fixture
def step():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 1, bias=False))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    policy = SimpleNamespace(
        model=model, shards={name: ParameterShard() for name, _ in model.named_parameters()}, mesh=single_process_mesh()
    )
    return policy, SimpleNamespace(tokens={"policy_logprobs": torch.randn(4)}, loss={"total": 0.5, "kl": 0.25})


def certificate_of(step):
    policy, result = step
    return certify(policy, result, fingerprint_gradients(policy))


def test_labels_stand_in_the_order_of_computation(step):
    assert list(certificate_of(step).fingerprints) == [
        "logprobs",
        "loss/total/sum",
        "loss/kl/sum",
        "gradient/1.weight",
        "gradient/0.weight",
        "weight/0.weight",
        "weight/1.weight",
    ]


def test_the_same_step_has_the_same_certificate(step):
    assert certificate_of(step) == certificate_of(step)


def last_bit(tensor):
    tensor.data.view(-1)[0] = torch.nextafter(tensor.data.view(-1)[0], torch.tensor(9.0))


@pytest.mark.parametrize(
    ("change", "label"),
    [
        (lambda policy, result: last_bit(result.tokens["policy_logprobs"]), "logprobs"),
        (lambda policy, result: result.loss.update(kl=0.25000001), "loss/kl/sum"),
        (lambda policy, result: last_bit(policy.model[1].weight.grad), "gradient/1.weight"),
        (lambda policy, result: last_bit(policy.model[0].weight), "weight/0.weight"),
    ],
    ids=["log-probabilities", "loss", "gradient", "weight"],
)
def test_one_bit_changes_one_label(step, change, label):
    before = certificate_of(step)
    change(*step)
    after = certificate_of(step)
    changed = [name for name, value in after.fingerprints.items() if value != before.fingerprints[name]]
    assert changed == [label]
    assert after.hash != before.hash
