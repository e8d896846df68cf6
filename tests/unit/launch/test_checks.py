"""What settings and files tell is checked before a process starts: every mistake of every run in one message."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from workbench.errors import LaunchError, ShardingError, SpecError
from workbench.launch import checks
from workbench.launch.ablation import load_ablation
from workbench.launch.checks import check_runs
from workbench.launch.run import launch, requests
from workbench.records.damage import CLUSTER_RANKS
from workbench.records.provenance import project_root
from workbench.sharding.attention.kernels import KERNELS

PROJECT = project_root()


def check(settings, where="processes", gpus=(), project=PROJECT):
    check_runs(load_ablation(settings).expand(), project, where=where, gpus=gpus)


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"layout": {"tp": 3}}, ShardingError, "tp=3\n  found: 4 query heads, 2 key/value heads"),
        ({"layout": {"cp": 8, "attention": "ulysses"}}, ShardingError, "heads dealt to 8 ranks"),
        (
            {"layout": {"cp": 6, "attention": "hybrid", "ulysses": 3}},
            ShardingError,
            "heads dealt to 3 ranks",
        ),
        ({"layout": {"dp": 9}, "data": {"documents_per_step": 8}}, ShardingError, "8 documents a step over dp=9"),
        ({"data": {"documents_per_step": 73}}, SpecError, "72 documents in data/arithmetic/rollouts"),
        ({"layout": {"dp": 10**9}, "data": {"path": "none"}}, SpecError, "1000000000 ranks"),
        ({"data": {"multiple_of": 3}, "layout": {"cp": 2}}, SpecError, "multiples of 2 tokens"),
        ({"data": {"path": "data/none"}}, SpecError, "data.path = 'data/none'"),
        ({"model": {"source": "data/arithmetic/none"}}, SpecError, "model.source = 'data/arithmetic/none'"),
        ({"model": {"source": "data/none"}}, SpecError, "model.source = 'data/none'"),
        ({"lora": {"source": "adapters/none"}}, SpecError, "lora.source = 'adapters/none'"),
        ({"model": {"tied": True}}, SpecError, "a checkpoint defines whether its head is tied"),
        ({"loss": {"name": "none.py:mine"}}, SpecError, "loss.name = 'none.py:mine'"),
        ({"device": "cuda"}, LaunchError, "0 of 1 GPU here"),
        ({"layout": {"kernel": "flash"}, "precision": "bfloat16"}, SpecError, "a run on the CPU"),
        ({"policy": {"logprobs": "triton"}}, SpecError, "a run on the CPU"),
        ({"policy": {"logprobs": "reference"}, "layout": {"tp": 2}}, SpecError, "needs the whole vocabulary"),
        ({"reproducible": {"block_tokens": 8, "weight_chunks": 4}}, SpecError, "weight_chunks = 4"),
        (
            {"online": {"task": "none.py:Task"}, "data": {"advantages": {"name": "grpo"}}},
            SpecError,
            "online.task = 'none.py:Task'",
        ),
        (
            {"online": {"task": "arithmetic", "prompts": 1, "answers": 2}, "data": {"advantages": {"name": "grpo"}}}
            | {"layout": {"dp": 3}},
            ShardingError,
            "2 documents a step over dp=3",
        ),
    ],
)
def test_a_mistake_is_found_without_a_process(settings, kind, words):
    with pytest.raises(kind) as caught:
        check(settings)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "gpus"),
    [
        ({"layout": {"dp": 2, "cp": 2, "tp": 2, "attention": "ulysses"}}, ()),
        ({"layout": {"cp": 4, "attention": "hybrid", "ulysses": 2}}, ()),
        ({"layout": {"kernel": "flash"}, "precision": "bfloat16"}, ["0"]),
        ({"device": "cuda"}, ["0"]),
        ({"model": {"source": "owner/name"}, "layout": {"tp": 3}}, ()),
        ({"model": {"source": "tiny-qwen3-moe"}, "layout": {"tp": 2}}, ()),
    ],
)
def test_what_ranks_can_do_passes(settings, gpus):
    assert check(settings, gpus=gpus) is None


class TestOneMessage:
    def test_every_mistake_once_with_its_runs(self):
        base = {"precision": "float64", "data": {"path": "none"}, "model": {"source": "data/none"}, "device": "cuda"}
        others = {f"c{number}": {"layout": {"cp": 2}} for number in range(60)}
        with pytest.raises(SpecError) as caught:
            check({"base": base, "reference": "a", "configurations": {"a": {}, "b": {"layout": {"tp": 2}}, **others}})
        message = str(caught.value)
        assert "launch 62 runs\n  found: 4 mistakes" in message
        assert message.count("data.path = 'none'") == message.count("model.source = 'data/none'") == 1
        assert "every run: data.path" in message
        assert "b, c0, c1, c2 and 57 more: run" in message  # of two GPUs, and `a` of one
        assert len(message) < 4000

    def test_a_single_mistake_keeps_its_kind_and_names_its_runs(self):
        base = {"reference": "a", "base": {"precision": "float64"}}
        with pytest.raises(ShardingError) as caught:
            check({**base, "configurations": {"a": {}, "b": {"layout": {"tp": 3}}}})
        assert caught.value.__notes__ == ["in b"]


@pytest.mark.parametrize(("where", "limit"), [("slurm", CLUSTER_RANKS), ("processes", 64)])
def test_ranks_are_limited_by_the_machine(monkeypatch, where, limit):
    memory = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(total=64 * checks.RANK_BYTES))
    monkeypatch.setattr(checks, "psutil", memory)
    monkeypatch.setattr(checks, "cores", lambda: ["0", "1"])
    checks.check_ranks(limit, where, 0)
    with pytest.raises(LaunchError, match=f"at most {limit} ranks"):
        checks.check_ranks(limit + 1, where, 0)


@pytest.mark.parametrize("manifest", ["{}", "[]", "{", '{"counts": {"documents": "many"}}'])
def test_a_manifest_without_counts_is_left_to_the_ranks(tmp_path, manifest):
    (tmp_path / "manifest.json").write_text(manifest)
    (tmp_path / "own").mkdir()
    settings = {"data": {"path": str(tmp_path)}, "layout": {"dp": 9}, "model": {"source": "tiny-qwen3"}}
    assert check(settings) is None


def test_the_kernels_of_a_cpu_are_those_that_take_its_tensors():
    query = torch.zeros(1, 2, 8, 16)
    taken = []
    for kernel in KERNELS:
        try:
            refused = kernel.refusal(query, query, None)
        except AttributeError:  # it would look at the block, so it does not refuse the device
            refused = None
        taken += [] if refused else [kernel.name]
    assert ["auto", *taken] == list(checks.CPU_KERNELS)


def test_launching_and_the_dry_run_check_before_anything_is_written(tmp_path):
    planned = load_ablation({"layout": {"tp": 3}}).expand()
    for call in (launch, requests):
        with pytest.raises(ShardingError, match="tp=3"):
            call(planned, tmp_path, where="torchx", project=PROJECT)
    assert list(tmp_path.iterdir()) == []


def test_shipped_ablations_pass():
    files = sorted(PROJECT.glob("experiments/*/ablation.yaml"))
    assert files
    for file in files:
        check_runs(load_ablation(file).expand(), PROJECT, where="slurm")


def test_checking_imports_no_torch():
    code = (
        "import sys; from pathlib import Path; from workbench.launch.ablation import load_ablation; "
        "from workbench.launch.checks import check_runs; "
        "check_runs(load_ablation({'layout': {'tp': 2}}).expand(), Path(sys.argv[1]), where='torchx'); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(PROJECT)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
