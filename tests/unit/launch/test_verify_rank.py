"""Inputs of a rank of `workbench verify`: batches that come back from disk, losses that are one, gradients too."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from tests.helpers.lent_kernels import lend_to_cpu
from tests.helpers.ranks import run_ranks
from workbench.launch import verify_rank
from workbench.launch.verify import MIXTURE, Task
from workbench.launch.verify_rank import (
    BATCHES,
    loaded,
    make_batches,
    make_model,
    on_whole_rows,
    saved,
    several_ranks,
    train,
)
from workbench.sharding import torch_context_parallel
from workbench.sharding.mesh import single_process_mesh

CPU = torch.device("cpu")
TASK = Task(steps=2, rows=2, tokens=128)


@pytest.fixture(scope="module")
def batches():
    return make_batches(TASK, make_model(TASK.model, CPU, precision="float64"), CPU)


def test_batches_come_back_from_disk(batches):
    again = loaded(saved(batches), CPU)
    assert len(again) == BATCHES
    for one, other in zip(batches, again, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_masks_are_unequal_and_the_last_batch_is_one_ranks(batches):
    assert len({str(batch["mask"].sum(1).tolist()) for batch in batches}) == BATCHES
    assert batches[-1]["mask"].nonzero().tolist() == [[0, t] for t in range(1, 128 // 4)]
    near = (batches[0]["old_logprobs"] - batches[0]["ref_logprobs"])[batches[0]["mask"]]
    assert 0 < near.abs().max() < 1


def test_old_log_probabilities_are_of_the_token_itself(batches):
    model, batch = make_model(TASK.model, CPU), batches[0]
    with torch.no_grad():
        text = model(input_ids=batch["tokens"], use_cache=False).logits.log_softmax(-1)
    own = torch.stack([text[b, torch.arange(127), batch["tokens"][b, 1:]] for b in range(2)])
    assert (batch["old_logprobs"][:, 1:] - own).abs().max() < 0.6


def test_the_order_of_rows_is_rounding_and_a_factor_is_not(batches):
    results = {}
    for name, backward in {
        "plain": on_whole_rows(torch.tensor([0, 1])),
        "turned": on_whole_rows(torch.tensor([1, 0])),
        "half": on_whole_rows(torch.tensor([0, 1]), 0.5),
    }.items():
        model = make_model(TASK.model, CPU)
        text = train(model, backward, batches, TASK, mesh=single_process_mesh())
        results[name] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), text
    start = torch.cat([parameter.detach().flatten() for parameter in make_model(TASK.model, CPU).parameters()])
    moved = (results["plain"][0] - start).norm()
    assert (results["turned"][0] - results["plain"][0]).norm() < 1e-5 * moved
    assert (results["half"][0] - results["plain"][0]).norm() > 0.3 * moved
    assert results["turned"][1]["losses"] == pytest.approx(results["plain"][1]["losses"], rel=1e-5)
    assert (len(results["plain"][1]["losses"]), results["plain"][1]["allocated_bytes"]) == (2, [])


def test_where_torch_cannot_train_only_ours_does():
    assert Task(device="cpu").attentions() == ("ours",)
    assert Task(device="cuda").attentions() == ("torch", "ours")


def trained(folder):
    """Runs of two ranks: under torch's own ring, with kernels lent to the CPU, and under ours."""
    ring = lend_to_cpu()
    torch_context_parallel.torch_ring = lambda: ring
    Task.attentions = lambda task: ("torch", "ours")
    task = json.loads((folder / "task.json").read_text())
    return {
        name: (weights, text["same_on_all_ranks"]) for name, weights, text in several_ranks(Task(**task), folder, CPU)
    }


@pytest.mark.parametrize("model", ["tiny-qwen3", pytest.param(MIXTURE, marks=pytest.mark.slow)])
def test_two_ranks_train_like_one(model, tmp_path):
    """Under context parallelism, in pipeline stages, and a mixture with its experts on both ranks."""
    task = dataclasses.replace(TASK, model=model)
    alone, batches = make_model(model, CPU), make_batches(task, make_model(model, CPU, precision="float64"), CPU)
    verify_rank.save_file(saved(batches), tmp_path / "batches.safetensors")
    (tmp_path / "task.json").write_text(json.dumps(dataclasses.asdict(task)))
    train(alone, on_whole_rows(torch.tensor([0, 1])), batches, task, mesh=single_process_mesh())
    expected = dict(alone.named_parameters())
    whole = torch.cat([value.detach().flatten() for value in expected.values()]).norm()
    for result in run_ranks(trained, 2, tmp_path / "ranks", tmp_path):
        assert list(result) == ["torch_sum", "torch_mean", "ours_sum", "ours_mean", *task.layouts()]
        for weights, same in result.values():
            assert same
            assert weights.keys() == expected.keys()
            apart = torch.cat([(weights[name] - value.detach()).flatten() for name, value in expected.items()])
            assert apart.norm() < 1e-6 * whole


def test_adapters_alone_are_trained_and_compared(batches):
    start, model = make_model(TASK.model, CPU, lora_r=2), make_model(TASK.model, CPU, lora_r=2)
    result = train(model, on_whole_rows(torch.arange(2)), batches, TASK, mesh=single_process_mesh())
    moved = {n for (n, a), b in zip(model.named_parameters(), start.parameters(), strict=True) if not torch.equal(a, b)}
    assert moved == {n for n, value in model.named_parameters() if ".lora_" in n}
    assert len(moved) == 2 * 3 * 7
    assert all(norm > 0 for norm in result["gradient_norms"])
