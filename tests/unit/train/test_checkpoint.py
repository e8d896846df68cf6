"""Checkpoints: full tensors in every layout, whole or absent, and a resumed run that matches an uninterrupted one."""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import online_runs
from tests.helpers.batches import nasty_documents
from tests.helpers.online_runs import spec_of
from tests.helpers.ranks import run_ranks
from tests.helpers.same_bits import differing
from workbench import atomic as whole_files
from workbench.errors import RecordError, SpecError
from workbench.policy.decoder import load_decoder
from workbench.policy.lora import merged_weights
from workbench.policy.model import load_policy
from workbench.policy.sampling import Sampler, by_uniforms
from workbench.records.directory import RunDirectory
from workbench.rollouts import files
from workbench.rollouts.batch import RolloutBatch
from workbench.sharding.gradients import copy_local_part, full_tensor, full_weights
from workbench.sharding.mesh import make_mesh, single_process_mesh
from workbench.sharding.simulated import simulate
from workbench.specs.groups import LayoutSpec
from workbench.specs.precision import PRESETS
from workbench.specs.reading import merge
from workbench.specs.run import RunSpec
from workbench.train import checkpoint
from workbench.train import step as flow
from workbench.train.checkpoint import (
    build_policy,
    continue_run,
    load_checkpoint,
    save_checkpoint,
    trained_policy,
)
from workbench.train.optimizer import build_optimizer
from workbench.train.worker import run_here

LAYOUTS = {"one": {}, "tp2": {"tp": 2}, "dp2": {"dp": 2}}


def done(folder, name="run", continues=None, **changes):
    """A run that samples all its prompts at once, unless it is asked otherwise."""
    return online_runs.done(folder, name, continues, **merge({"online": {"prompts_at_once": 3}}, changes))


def new_run(folder, **changes):
    return RunDirectory.create(folder, "run", spec_of(**changes))


def held(spec, mesh=None):
    policy = build_policy(spec, mesh or single_process_mesh(), Path(), temperature=1.0)
    return policy, build_optimizer(policy, spec)


def train(policy, optimizer, steps=2):
    """Steps with gradients made up, the same in every layout."""
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        for name, parameter in policy.model.named_parameters():
            shape = full_weights(policy.model, policy.shards, policy.mesh)[name].shape
            parameter.grad = torch.zeros_like(parameter)
            copy_local_part(
                parameter.grad, torch.randn(shape, generator=draw).to(parameter.dtype), policy.shards[name], policy.mesh
            )
        optimizer.step()


def kept(folder):
    return {
        f"{name}/{key}": value
        for name in ("weights", "optimizer")
        for key, value in load_file(folder / f"{name}.safetensors").items()
    }


def newest(run):
    return kept(list(run.checkpoints().values())[-1])


# ---- saved state -------------------------------------------------------------------------------------------------


AT_RANDOM = {"precision": "bfloat16", "mixed_precision": {"moments": "float32", "stochastic_rounding": True}}


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        ("tiny-qwen3", {"precision": "float32"}),
        ("tiny-qwen3-moe", {"precision": "float32"}),
        ("tiny-qwen3", {"precision": "bf16_mixed", "mixed_precision": {"moments": "bfloat16"}}),
        ("tiny-qwen3", AT_RANDOM),
    ],
)
def test_a_checkpoint_does_not_depend_on_the_layout(source, settings, tmp_path):
    """Written in one, read in another and written again; the vocabulary of 19 is uneven over tp."""
    spec, result = spec_of(model={"source": source}, **settings), {}
    layouts = LAYOUTS if source == "tiny-qwen3" else {"one": {}, "tp2": {"tp": 2}, "ep2": {"dp": 2, "ep": 2}}
    for name, sizes in layouts.items():
        run = new_run(tmp_path / name)

        def save(mesh, run=run):
            policy, optimizer = held(spec, mesh)
            train(policy, optimizer)
            save_checkpoint(run, 2, policy, optimizer)

        simulate(save, **sizes)
        result[name] = newest(run)
    whole, dtype = dict(load_decoder(source).named_parameters()), getattr(torch, spec.dtypes.weights)
    for name, parameter in whole.items():
        assert result["one"][f"weights/{name}"].shape == parameter.shape
        assert result["one"][f"optimizer/{name}/exp_avg"].shape == parameter.shape
        assert float(result["one"][f"optimizer/{name}/step"]) == 2.0
        assert not torch.equal(result["one"][f"weights/{name}"], parameter.to(dtype))
    for name in layouts:
        assert differing(result[name], result["one"]) == [], name

    for name, sizes in layouts.items():
        run = new_run(tmp_path / f"{name} again")

        def copy(mesh, run=run):
            policy, optimizer = held(spec, mesh)
            load_checkpoint(tmp_path / "one" / run.path.name / "checkpoints" / "step0002", policy, optimizer)
            save_checkpoint(run, 2, policy, optimizer)
            steps = {state["step"].device.type for state in optimizer.state.values()}
            return steps, {name: p.dtype for name, p in policy.model.named_parameters()}

        assert all(text == ({"cpu"}, dict.fromkeys(whole, dtype)) for text in simulate(copy, **sizes))
        assert differing(newest(run), result["one"]) == [], name


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_a_checkpoint_is_in_the_runs_own_precision(precision, tmp_path):
    run, spec = new_run(tmp_path), spec_of(precision=precision)
    policy, optimizer = held(spec)
    train(policy, optimizer)
    save_checkpoint(run, 2, policy, optimizer)
    dtype = getattr(torch, precision)
    assert {value.dtype for name, value in newest(run).items() if not name.endswith("/step")} == {dtype}
    other, its = held(spec)
    load_checkpoint(run.checkpoints()[2], other, its)
    for before, after in zip(policy.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(before, after)
        for key, value in optimizer.state[before].items():
            assert torch.equal(its.state[after][key], value)
            assert its.state[after][key].dtype == value.dtype


def test_a_plain_optimizer_has_nothing_to_keep(tmp_path):
    run, spec = new_run(tmp_path), spec_of(optimizer={"name": "sgd"})
    policy, optimizer = held(spec)
    train(policy, optimizer)
    save_checkpoint(run, 2, policy, optimizer)
    assert load_file(run.checkpoints()[2] / "optimizer.safetensors") == {}
    other, its = held(spec)
    load_checkpoint(run.checkpoints()[2], other, its)
    assert torch.equal(policy.model.lm_head.weight, other.model.lm_head.weight)


def sharded_copy(source, sizes, folder):
    """Read a checkpoint with parameters sharded over dp x cp, and return it in full, and the local amount."""
    spec = spec_of(model={"source": source}, precision="float32", layout=sizes | {"shard_parameters": True})
    mesh = make_mesh(**spec.layout.mesh_sizes)
    policy, optimizer = held(spec, mesh)
    load_checkpoint(folder, policy, optimizer)
    output = {f"weights/{name}": value for name, value in full_weights(policy.model, policy.shards, mesh).items()}
    for name, parameter in policy.model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            output[f"optimizer/{name}/{key}"] = (
                value if key == "step" else full_tensor(value, policy.shards[name], mesh)
            )
    return output, sum(parameter.to_local().numel() for parameter in policy.model.parameters())


@pytest.mark.parametrize(
    ("source", "sizes"),
    [
        ("tiny-qwen3", {"dp": 2}),
        pytest.param("tiny-qwen3", {"dp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("tiny-qwen3", {"dp": 4}, marks=pytest.mark.slow),
        pytest.param("tiny-qwen3", {"dp": 4, "shard_ranks": 2}, marks=pytest.mark.slow),
        pytest.param("tiny-qwen3-moe", {"cp": 2}, marks=pytest.mark.slow),
    ],
)
def test_sharded_parameters_take_their_parts(source, sizes, tmp_path):
    run = new_run(tmp_path)
    policy, optimizer = held(spec_of(model={"source": source}, precision="float32"))
    train(policy, optimizer)
    save_checkpoint(run, 2, policy, optimizer)
    ranks = sizes.get("dp", 1) * sizes.get("cp", 1) * sizes.get("tp", 1)
    elements = sum(parameter.numel() for parameter in policy.model.parameters())
    for text, here in run_ranks(sharded_copy, ranks, tmp_path / "ranks", source, sizes, run.checkpoints()[2]):
        assert differing(text, newest(run)) == []
        assert here < 0.6 * elements


# ---- whole or absent ---------------------------------------------------------------------------------------------


def test_only_the_newest_stays_whole_or_absent(tmp_path, monkeypatch):
    run = new_run(tmp_path)
    policy, optimizer = held(spec_of())
    for steps in (2, 4):
        train(policy, optimizer, 1)
        save_checkpoint(run, steps, policy, optimizer)
        assert list(run.checkpoints()) == [steps]
    before = newest(run)

    def dies(path, tensors):
        if path.name == checkpoint.OPTIMIZER:
            raise KeyboardInterrupt
        return whole_files.write_tensors(path, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "whole_files", SimpleNamespace(write_tensors=dies))
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(run, 6, policy, optimizer)
    assert (run.path / "checkpoints" / ".step0006" / "weights.safetensors").is_file(), "something is left over"
    assert list(run.checkpoints()) == [4]
    assert differing(newest(run), before) == []

    (run.path / "checkpoints" / ".step0006" / "rubbish").write_text("half")
    train(policy, optimizer, 1)
    save_checkpoint(run, 6, policy, optimizer)
    assert list(run.checkpoints()) == [6]
    assert sorted(path.name for path in (run.path / "checkpoints").iterdir()) == ["step0006"]
    assert sorted(path.name for path in run.checkpoints()[6].iterdir()) == [
        "optimizer.safetensors",
        "weights.safetensors",
    ]


def test_the_newest_is_the_one_after_the_most_steps(tmp_path):
    """Names of four digits and of five do not sort as the numbers do."""
    run = new_run(tmp_path)
    for steps in (10000, 9998):
        (run.path / "checkpoints" / f"step{steps:04d}").mkdir(parents=True)
    assert list(run.checkpoints()) == [9998, 10000]


# ---- going on ----------------------------------------------------------------------------------------------------


class Killed(Exception):
    """As a machine that went away."""


@pytest.fixture
def killed(monkeypatch):
    """A run that dies in a step, named by its number."""

    def interrupted(folder, step, **changes):
        taken, run_step = [], flow.run_step

        def dies(*args, **more):
            if len(taken) == step:
                raise Killed
            taken.append(1)
            return run_step(*args, **more)

        with monkeypatch.context() as patch:
            patch.setattr(flow, "run_step", dies)
            with pytest.raises(Killed):
                done(folder, "killed", **changes)
        [run] = RunDirectory.find(folder, "killed")
        return run

    return interrupted


def contents(run):
    """All results of a run, of every step, without times."""
    lines = [
        {key: value for key, value in record.items() if not key.startswith(("time/", "memory/", "run/"))}
        for record in run.steps()
    ]
    tensors = {path.name: load_file(path) for path in sorted((run.path / "tensors").glob("*"))}
    rollouts = {path.name: files.load(path) for path in sorted((run.path / "rollouts").glob("*"))}
    rollouts = {name: batch.token_fields() | batch.document_fields() for name, batch in rollouts.items()}
    output = {
        f"{of}/{name}": value
        for kind in (tensors, rollouts)
        for of, named in kind.items()
        for name, value in named.items()
    }
    return lines, output | newest(run)


RECORDED = {
    "online": {"task": None, "prompts": 16, "answers": 8, "max_new_tokens": 64, "prompts_at_once": 8},
    "data": {"path": "rollouts", "documents_per_step": 4, "advantages": {"name": "recorded"}},
}
KINDS = {
    "adamw": {},
    "sgd": {"optimizer": {"name": "sgd", "learning_rate": 0.3}},
    "bfloat16": {"precision": "bfloat16"},
    "two updates and a reference": {
        "online": {"updates": 2},
        "data": {"documents_per_step": 5},
        "loss": {"kl": {"coefficient": 0.1}},
    },
    "recorded": RECORDED,
    "recorded, sgd": RECORDED | {"optimizer": {"name": "sgd", "learning_rate": 0.3}},
    "8 bits": {"precision": "bf16_mixed", "mixed_precision": {"moments": "8bit"}},
    "reproducible": {"reproducible": {"block_tokens": 8, "weight_chunks": 1}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_resumes_as_if_uninterrupted(kind, killed, tmp_path):
    changes = {"precision": "float32", "steps": 4, "record": {"checkpoint_every": 2}} | KINDS[kind]
    files.save(RolloutBatch.from_documents(nasty_documents(4)), tmp_path / "rollouts")
    unbroken = done(tmp_path, "unbroken", **changes)
    assert list(unbroken.checkpoints()) == [4]
    begun = killed(tmp_path, 3, **changes)
    assert (list(begun.checkpoints()), len(begun.steps())) == ([2], 3)
    before = contents(begun)
    goes_on = done(tmp_path, "goes_on", continues=begun.path.name, **changes)
    lines, text = contents(goes_on)
    expected_lines, expected = contents(unbroken)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert lines == expected_lines
    assert differing(text, expected) == []
    assert contents(begun)[0] == before[0], "what was interrupted stays as it ended"
    assert differing(contents(begun)[1], before[1]) == []
    assert {record["step"]: record["run/continues"] for record in goes_on.steps() if "run/continues" in record} == {
        2: begun.path.name
    }
    if kind == "reproducible":
        names = [sorted(path.name for path in (run.path / "certificates").iterdir()) for run in (goes_on, unbroken)]
        assert names[0] == names[1] == [f"step{step:04d}.json" for step in range(4)]


def test_counts_of_a_fused_optimizer_are_on_the_device_of_its_parameters():
    parameter = torch.nn.Parameter(torch.zeros(2, device="meta"))  # stands for a GPU
    for fused in (True, False):
        state = {parameter: {"step": torch.tensor(2.0), "exp_avg": torch.zeros(2)}}
        optimizer = SimpleNamespace(param_groups=[{"params": [parameter], "fused": fused}], state=state)
        checkpoint._place_counts(optimizer)
        devices = [value.device.type for value in state[parameter].values()]
        assert devices == ["meta" if fused else "cpu", "cpu"]


def test_a_run_resumed_on_several_ranks_copies_once(tmp_path):
    layout = {"layout": {"dp": 2, "tp": 2}, "record": {"checkpoint_every": 2}, "precision": "float32"}
    layout["online"] = {"prompts_at_once": 1}  # the ranks share them
    half = done(tmp_path, "half", **layout, steps=2)
    whole = done(tmp_path, "whole", **layout, steps=3)
    goes_on = done(tmp_path, "goes_on", continues=half.path.name, **layout, steps=3)
    (lines, text), (expected_lines, expected) = contents(goes_on), contents(whole)
    assert lines == expected_lines
    assert differing(text, expected) == []


def test_a_run_that_was_interrupted_when_all_was_done_has_a_checkpoint_all_the_same(tmp_path):
    changes = {"record": {"checkpoint_every": 2}, "steps": 2}
    begun = done(tmp_path, "begun", **changes)
    goes_on = done(tmp_path, "goes_on", continues=begun.path.name, **changes)
    assert len(goes_on.steps()) == 2
    assert differing(newest(goes_on), newest(begun)) == []


def test_an_invalid_resume_is_refused(tmp_path):
    spec = spec_of(record={"checkpoint_every": 2})
    policy, optimizer = held(spec)

    def after(name):
        return RunDirectory.create(tmp_path, "after", spec, **({} if name is None else {"continues": name}))

    assert continue_run(after(None), policy, optimizer) == 0
    with pytest.raises(RecordError, match="gone"):
        continue_run(after("gone"), policy, optimizer)
    begun = new_run(tmp_path)
    with pytest.raises(RecordError, match="found: no checkpoint"):
        continue_run(after(begun.path.name), policy, optimizer)
    train(policy, optimizer, 1)
    save_checkpoint(begun, 2, policy, optimizer)
    untied, its = held(spec_of(model={"tied": False}))
    with pytest.raises(RecordError, match=r"only one of model and checkpoint has lm_head\.weight"):
        continue_run(after(begun.path.name), untied, its)
    path = begun.checkpoints()[2] / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(RecordError, match=r"read step0002/optimizer.safetensors(.|\n)*--fresh"):
        continue_run(after(begun.path.name), policy, optimizer)


def test_weights_that_are_not_finite_replace_none_that_are(tmp_path, monkeypatch):
    clip = flow.clip_gradients
    taken = []

    def breaks(policy, norms, max_norm):
        taken.append(1)
        return clip(policy, norms, max_norm) if len(taken) < 4 else math.nan

    monkeypatch.setattr(flow, "clip_gradients", breaks)
    run = done(tmp_path, steps=6, record={"checkpoint_every": 2}, online={"updates": 2})
    assert list(run.checkpoints()) == [2]


def test_only_the_requested_checkpoints_are_kept(tmp_path):
    run = done(tmp_path)
    assert run.checkpoints() == {}
    assert not (run.path / "checkpoints").exists()
    with pytest.raises(RecordError, match=r"the policy that run-.* trained\n  found: no checkpoint"):
        trained_policy(run)


# ---- adapters ------------------------------------------------------------------------------------------------------

LORA = {"r": 2, "init_lora_weights": "random", "target_modules": ["q_proj", "o_proj", "lm_head"]}
OF_EXPERTS = LORA | {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def test_a_checkpoint_of_adapters_does_not_depend_on_the_layout(tmp_path):
    spec, results = spec_of(model={"source": "tiny-qwen3-moe"}, precision="float32", lora=OF_EXPERTS), {}
    for name, sizes in {"one": {}, "tp2": {"tp": 2}, "ep2": {"dp": 2, "ep": 2}, "pp2": {"pp": 2}}.items():
        run = RunDirectory.create(tmp_path / name, "run", spec)

        def save(mesh, run=run):
            policy, optimizer = held(spec.model_copy(update={"layout": LayoutSpec(pp=mesh["pp"].size)}), mesh)
            trained = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
            for number, each in enumerate(policy.lora.trained):  # the same gradients in every layout
                if (parameter := trained.get(each)) is not None:
                    draw = torch.Generator().manual_seed(number)
                    whole = torch.randn(policy.shapes[each], generator=draw)
                    parameter.grad = torch.zeros_like(parameter)
                    copy_local_part(parameter.grad, whole, policy.shards[each], mesh)
            optimizer.step()
            save_checkpoint(run, 1, policy, optimizer)
            again, fresh = held(spec.model_copy(update={"layout": LayoutSpec(pp=mesh["pp"].size)}), mesh)
            load_checkpoint(run.checkpoints()[1], again, fresh)
            assert not differing(
                dict(again.model.named_parameters()), {k: v.detach() for k, v in policy.model.named_parameters()}
            )
            assert optimizer.state_dict()["state"].keys() == fresh.state_dict()["state"].keys()

        simulate(save, **sizes)
        folder = run.checkpoints()[1]
        assert sorted(path.name for path in folder.iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
            "optimizer.safetensors",
        ]
        results[name] = load_file(folder / "adapter_model.safetensors") | load_file(folder / "optimizer.safetensors")
    for name, result in results.items():
        assert not differing(result, results["one"]), name


def test_a_resumed_run_with_adapters_matches_an_uninterrupted_one(tmp_path):
    settings = {"precision": "float32", "record": {"checkpoint_every": 1}, "lora": LORA, "steps": 3}
    whole = done(tmp_path / "whole", **settings)
    half = done(tmp_path / "half", **settings | {"steps": 2})
    shutil.copytree(half.path, tmp_path / "whole" / half.path.name)
    rest = done(tmp_path / "whole", "rest", continues=half.path.name, **settings)
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        assert not differing(load_file(rest.checkpoints()[3] / name), load_file(whole.checkpoints()[3] / name)), name
    assert rest.steps()[2]["loss/total/sum"] == whole.steps()[2]["loss/total/sum"]


def test_the_trained_policy_has_its_adapters_merged(tmp_path):
    run = done(tmp_path, steps=2, record={"checkpoint_every": 2}, lora=LORA)
    model = trained_policy(run)
    policy = build_policy(run.spec, single_process_mesh(), Path(), temperature=1.0)
    load_checkpoint(run.checkpoints()[2], policy, build_optimizer(policy, run.spec))
    weights = merged_weights(policy.lora, {k: v.detach() for k, v in policy.model.named_parameters()})
    assert not differing(dict(model.named_parameters()), weights)
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


def test_a_checkpoint_of_other_adapters_is_refused(tmp_path):
    run = done(tmp_path, steps=1, record={"checkpoint_every": 1}, lora=LORA)
    spec = spec_of(lora=LORA | {"target_modules": ["q_proj"]})
    with pytest.raises(SpecError, match=r"continue from step0001\n.*with .*lm_head\.lora_A"):
        load_checkpoint(run.checkpoints()[1], *held(spec))


# ---- the policy that was trained ---------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
def test_the_trained_policy_is_a_stock_model_with_the_last_weights(precision, tmp_path):
    run = done(tmp_path, steps=3, precision=precision, record={"checkpoint_every": 2}, model={"tied": False, "seed": 4})
    assert list(run.checkpoints()) == [3], "at the end too"
    weights, model = load_file(run.checkpoints()[3] / "weights.safetensors"), trained_policy(run)
    results = dict(model.named_parameters())
    assert results.keys() == weights.keys()
    assert all(
        torch.equal(results[name], value) and results[name].dtype == value.dtype for name, value in weights.items()
    )
    as_it_samples = Sampler("tiny-qwen3", precision=precision, tied=False, seed=4)
    as_it_samples.load_weights(weights)
    tokens = torch.tensor([[16, 3, 12, 4, 15, 7, 7, 1]])
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, as_it_samples.model(input_ids=tokens).logits)


def test_the_trained_policy_can_be_saved_and_named_as_a_source(tmp_path):
    run = done(tmp_path, steps=2, precision="float32", record={"checkpoint_every": 2})
    trained_policy(run).save_pretrained(tmp_path / "trained")
    weights = load_file(run.checkpoints()[2] / "weights.safetensors")
    for name, value in load_decoder("trained", project=tmp_path).named_parameters():
        assert torch.equal(value, weights[name]), name
    next_spec = spec_of(model={"source": "trained"}, precision="float32")
    following = RunDirectory.create(tmp_path, "next", next_spec)
    run_here(following, tmp_path)
    assert following.status == "succeeded"
    [answer] = Sampler("trained", project=tmp_path).answers(
        [[16, 3, 15]], by_uniforms(torch.full((1, 2), 0.5)), temperature=1.0, max_new_tokens=2, end_ids=()
    )
    assert len(answer.tokens) == 2


def test_the_checkpoint_of_another_layout_continues(tmp_path):
    """A checkpoint contains no layout; a run on other ranks continues with the same numbers."""
    changes = {"record": {"checkpoint_every": 2}}
    half = done(tmp_path, "half", **changes, steps=2)
    one, other = (
        done(tmp_path, name, continues=half.path.name, **changes, steps=4, layout=layout)
        for name, layout in (("one", {}), ("other", {"tp": 2}))
    )
    for mine, theirs in zip(other.steps(), one.steps(), strict=True):
        assert mine["loss/total/sum"] == pytest.approx(theirs["loss/total/sum"], rel=1e-9, abs=1e-12)
    shutil.rmtree(half.path)
    assert list(one.checkpoints()) == [4], "it needs the earlier run no longer"


# -- the policy of a spec ------------------------------------------------------------------------------------------

MODEL = {"source": "tiny-qwen3", "tied": False, "seed": 7}


def test_every_setting_is_handed_on(monkeypatch):
    """Numbers are the same without most of them, so no number would show it."""
    asked = {}
    monkeypatch.setattr(checkpoint, "load_policy", lambda source, **given: asked.update({"source": source} | given))
    spec = RunSpec.model_validate(
        {
            "model": MODEL,
            "precision": "bfloat16",
            "policy": {
                "logprobs": "chunked",
                "fp32_head": True,
                "chunk_tokens": 8,
                "keep_bytes": 99,
                "fused_loss": True,
            },
            "layout": {
                "shard_parameters": True,
                "checkpointing": True,
                "sequence_parallel": True,
                "pp": 2,
                "pipeline_schedule": "interleaved_1f1b",
                "stages_per_rank": 2,
                "stage_layers": [1, 1, 1, 0],
            },
            "kernels": {"norm": "compiled"},
            "lora": {"r": 3},
            "routing": {"z": 0.1},
        }
    )
    mesh, project = single_process_mesh(), Path("somewhere")
    build_policy(spec, mesh, project, temperature=0.7)
    assert asked == MODEL | {
        "mesh": mesh,
        "project": project,
        "precision": PRESETS["bfloat16"],
        "temperature": 0.7,
        "implementation": "chunked",
        "fp32_head": True,
        "chunk_tokens": 8,
        "keep_bytes": 99,
        "shard_parameters": True,
        "reshard_after_forward": True,
        "unit_layers": 1,
        "checkpointing": True,
        "sequence_parallel": True,
        "fused_loss": True,
        "kernels": {"norm": "compiled", "rope": "torch", "mlp": "torch"},
        "pipeline_schedule": "interleaved_1f1b",
        "stages_per_rank": 2,
        "stage_layers": (1, 1, 1, 0),
        "depths": 0,
        "routing": True,
        "lora": spec.lora,
    }
    handed_on = set(load_policy.__kwdefaults__) - set(asked)
    assert not handed_on, "load_policy has learnt something that no spec can ask for"


@pytest.mark.parametrize(("given", "expected"), [(None, 0.7), (1.3, 1.3)])
def test_the_temperature_is_that_of_the_rollouts_unless_given(given, expected):
    spec = RunSpec.model_validate({"model": MODEL, "policy": {"temperature": given}})
    policy = build_policy(spec, single_process_mesh(), Path(), temperature=0.7)
    assert policy.temperature == expected
    assert policy.model.config.tie_word_embeddings is False
