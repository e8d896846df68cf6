"""A rank of `workbench verify`: train a decoder on GRPO losses, and write its last weights.

    python -m workbench.launch.verify_rank FOLDER

FOLDER has ``task.json``. A single rank writes the batches (``batches.safetensors``) and trains on whole rows; one of
several ranks reads those batches and trains on its share of every row. Each run writes ``RUN.safetensors``, the
weights, and ``RUN.json``.

Letters: B rows | T tokens of a row | t tokens of this rank.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from workbench.atomic import write_whole
from workbench.launch.verify import MIXTURE, Task
from workbench.losses.build import build_loss
from workbench.metrics.step import StepClock
from workbench.parallel_loss.align import Alignment, Engine, align_loss
from workbench.parallel_loss.rows import shifted
from workbench.policy.attention import with_our_attention, with_torch_attention
from workbench.policy.decoder import QWEN3, published_qwen3, tiny_qwen3, tiny_qwen3_moe
from workbench.policy.logprobs.from_logits import token_logprobs_from_logits
from workbench.policy.lora import install_lora
from workbench.policy.model import Policy
from workbench.policy.precision import lift_to_float64
from workbench.policy.stages import split_stages
from workbench.policy.tensor_plan import shard_experts
from workbench.rollouts.batch import RolloutBatch
from workbench.sharding.attention import AttentionShard
from workbench.sharding.collectives import all_max, all_sum_
from workbench.sharding.gradients import full_weights, trained_parameters
from workbench.sharding.mesh import Mesh, join, leave, make_mesh, single_process_mesh
from workbench.sharding.pipeline import share_tensors
from workbench.sharding.plan import ShardPlan
from workbench.sharding.tensor_parallel import ParameterShard
from workbench.specs.lora import LoraSpec
from workbench.specs.losses import LossSpec
from workbench.specs.run import RunSpec
from workbench.train.step import prepare_rows, run_step

VOCABULARY = 97
"""Of the tiny model; no rank count divides it."""

BATCHES = 4
"""Trained on in turn. The loss of the last one is on the first tokens of the first row only: one rank has them all."""

LOSS = LossSpec(name="grpo", kl={"coefficient": 0.05})


def make_model(
    name: str, device: torch.device, *, precision: str = "float32", ours: bool = False, lora_r: int = 0
) -> Any:
    """The decoder with its seeded weights, under torch's attention or ours; with adapters, none of which is 0."""
    tiny = tiny_qwen3_moe if name == MIXTURE else tiny_qwen3
    model = published_qwen3(name) if name in QWEN3 else tiny(VOCABULARY)
    if lora_r:
        shapes = {name: value.shape for name, value in model.named_parameters()}
        shards = dict.fromkeys(shapes, ParameterShard())
        spec = LoraSpec(r=lora_r, init_lora_weights="random")
        install_lora(model, single_process_mesh(), shards, spec, shapes=shapes)
    model = with_our_attention(model) if ours else with_torch_attention(model)
    return (lift_to_float64(model) if precision == "float64" else model).to(device)


# -- batches ---------------------------------------------------------------------------------------------------


def make_batches(task: Task, model: Any, device: torch.device) -> list[dict[str, Tensor]]:
    """Rows of seeded tokens, unequal masks, and log-probabilities near those of the untrained model."""
    g = torch.Generator().manual_seed(0)
    vocabulary, (b, t) = model.config.vocab_size, (task.rows, task.tokens)
    batches = []
    for number in range(BATCHES):
        lengths_B1 = torch.randint(t // 3, t + 1, (b, 1), generator=g)
        places_BT = torch.arange(t).expand(b, t)
        mask_BT = (places_BT < lengths_B1) & (places_BT > t // 8) & (torch.rand(b, t, generator=g) < 0.8)
        if number == BATCHES - 1:
            mask_BT = (places_BT > 0) & (places_BT < t // (2 * task.ranks)) & (torch.arange(b) == 0)[:, None]
        batch = {
            "tokens": torch.randint(vocabulary, (b, t), generator=g),
            "mask": mask_BT,
            "advantages": torch.randn(b, 1, generator=g).expand(b, t).contiguous(),
        }
        own_BT = _own_logprobs(model, {name: value.to(device) for name, value in batch.items()}).float().cpu()
        for name in ("old_logprobs", "ref_logprobs"):
            batch[name] = (own_BT + 0.1 * torch.randn(b, t, generator=g)).clamp_max(-1e-3)
        batches.append(batch)
    return batches


@torch.no_grad()
def _own_logprobs(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """[B, T] log-probability of each token itself, 0 for a row's first."""
    rows = shifted(batch["tokens"], torch.ones_like(batch["mask"]))
    logits = model(input_ids=batch["tokens"], use_cache=False).logits
    own_T = token_logprobs_from_logits(logits.flatten(0, 1), rows["targets"].flatten(), outputs=()).logprobs_T
    return own_T.view(rows["targets"].shape).roll(1, dims=1).index_fill(1, torch.tensor([0], device=own_T.device), 0.0)


def saved(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Flatten batches for one file."""
    return {f"{number}.{name}": value for number, batch in enumerate(batches) for name, value in batch.items()}


def loaded(content: Mapping[str, Tensor], device: torch.device) -> list[dict[str, Tensor]]:
    """Read batches from a file's content, on a device."""
    return [
        {name.partition(".")[2]: value.to(device) for name, value in content.items() if name.startswith(f"{number}.")}
        for number in range(BATCHES)
    ]


# -- training --------------------------------------------------------------------------------------------------

Backward = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]
"""Forward, loss and backward of one batch; returns the loss of all ranks."""


def on_whole_rows(order_B: Tensor, times: float = 1.0) -> Backward:
    """Step of one rank, with the rows in an order, and the loss times a number: 1 is right."""
    return under_torch(align_loss(engine="sum"), order_B, times)


def under_torch(align: Alignment, order_B: Tensor | slice = slice(None), times: float = 1.0) -> Backward:
    """Step of a rank under torch's context parallelism; see `on_whole_rows`."""

    def backward(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        with align.torch_context_parallel(**{name: value[order_B] for name, value in batch.items()}) as rows:
            loss = rows.policy_loss(LOSS, logits=model(**rows.model_inputs).logits)
            (loss * times).backward()
        return loss

    return backward


def under_ours(align: Alignment, task: Task) -> Backward:
    """Step of a rank under the workbench's context parallelism: the rows packed into one, in zigzag order."""
    plan = ShardPlan.make("zigzag", num_tokens=task.rows * task.tokens, cp=align.cp.size)
    ids_T = torch.arange(task.rows).repeat_interleave(task.tokens)
    shard = AttentionShard.make(plan, ids_T, align.cp, kernel="plain")

    def backward(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        whole = shifted(**batch) | {"documents": ids_T.view(task.rows, task.tokens).to(batch["tokens"].device)}
        local = {name: plan.split(value.flatten(), align.cp.rank) for name, value in whole.items()}
        logits = model(
            input_ids=local["tokens"][None], position_ids=local["positions"][None], use_cache=False, shard=shard
        ).logits[0]
        logprobs = token_logprobs_from_logits(logits, local["targets"], outputs=()).logprobs_T
        loss = align.policy_loss(
            LOSS,
            policy_logprobs=logprobs,
            old_logprobs=local["old_logprobs"],
            ref_logprobs=local["ref_logprobs"],
            advantages=local["advantages"],
            mask=local["mask"],
            documents=local["documents"],
            num_documents=task.rows,
        )
        loss.backward()
        return loss

    return backward


def train(
    model: nn.Module,
    backward: Backward,
    batches: list[dict[str, Tensor]],
    task: Task,
    *,
    mesh: Mesh,
    engine: Engine | None = None,
) -> dict[str, Any]:
    """Train a model in place with plain SGD on batches in turn, and return the loss and memory of each step.

    The engine reduces gradients: "sum", a plain all-reduce; "mean", DDP with its defaults. None: no reduction; one rank
    records the norm of its gradient, too, which shows if anything was trained.
    """
    wrapped: nn.Module = model
    if engine == "mean":
        ids = [mesh.device.index] if mesh.device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=ids, process_group=mesh["cp"].group)
    trained = trained_parameters(model).values()
    optimizer = torch.optim.SGD(trained, lr=task.learning_rate)
    losses, norms, allocated, reserved = [], [], [], []
    with StepClock(mesh.device) as clock:
        for number in range(task.steps):
            optimizer.zero_grad(set_to_none=True)
            losses.append(backward(wrapped, batches[number % BATCHES]).item())
            if engine == "sum":
                all_sum_([_gradient(parameter) for parameter in trained], mesh["cp"])
            if engine is None:
                each = [torch.linalg.vector_norm(_gradient(parameter)) for parameter in trained]
                norms.append(torch.linalg.vector_norm(torch.stack(each)).item())
            optimizer.step()
            if mesh.device.type == "cuda":
                allocated.append(torch.cuda.memory_allocated(mesh.device))
                reserved.append(torch.cuda.memory_reserved(mesh.device))
    return {
        "losses": losses,
        "gradient_norms": norms,
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "step_ms": clock.step_ms / task.steps,
    }


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "every rank's loss reaches every parameter"
    return parameter.grad


def train_in_layout(task: Task, layout: Mapping[str, int], batches: list[dict[str, Tensor]], policy: Policy) -> dict:
    """Train a policy in pipeline stages, or with experts on several ranks, as `train` does; each row is a micro-batch.

    Returns what `train` returns, and if every weight has the same bits on all ranks that have it.
    """
    mesh = policy.mesh
    rows = {"micro_batches": max(1, task.rows // mesh["dp"].size)}
    spec = RunSpec.model_validate({"loss": LOSS.model_dump(), "layout": dict(layout), "data": rows})
    prepared, loss = [prepare_rows(as_rollouts(batch), spec, mesh) for batch in batches], build_loss(LOSS)
    optimizer = torch.optim.SGD(trained_parameters(policy.model).values(), lr=task.learning_rate)
    losses, allocated, reserved = [], [], []
    with StepClock(mesh.device) as clock:
        for number in range(task.steps):
            result = run_step(policy, loss, *prepared[number % BATCHES], level="none")
            losses.append(float(result.loss["total"]))
            optimizer.step()
            if mesh.device.type == "cuda":
                allocated.append(torch.cuda.memory_allocated(mesh.device))
                reserved.append(torch.cuda.memory_reserved(mesh.device))
    return {
        "losses": losses,
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "step_ms": clock.step_ms / task.steps,
        "same_on_all_ranks": copies_agree(policy),
    }


def as_rollouts(batch: Mapping[str, Tensor]) -> RolloutBatch:
    """The rows of a batch as documents."""
    names = {"tokens": "tokens", "loss_mask": "mask", **{n: n for n in ("advantages", "old_logprobs", "ref_logprobs")}}
    rows = {
        name: batch[key].to(torch.int64 if name == "loss_mask" else batch[key].dtype) for name, key in names.items()
    }
    return RolloutBatch.from_documents(
        [{name: values_BT[row].tolist() for name, values_BT in rows.items()} for row in range(len(batch["tokens"]))]
    )


def make_policy(task: Task, mesh: Mesh) -> Policy:
    """This rank's part of the decoder: its pipeline stages, or its experts."""
    model = make_model(task.model, torch.device("cpu"), ours=True)
    shapes = {name: value.shape for name, value in model.named_parameters()}
    shards = shard_experts(model, mesh, dict.fromkeys(shapes, ParameterShard()))
    stages, shards = split_stages(model, mesh, shards, schedule_name="1f1b", stages_per_rank=1)
    model.to(mesh.device)
    return Policy(model, mesh, shards, model.config.vocab_size, 1.0, "reference", stages=stages, shapes=shapes)


def copies_agree(policy: Policy) -> bool:
    """True if the ranks of dp x cp have the same bits, experts aside, and this stage tied weights as the last one has.

    Two collectives a parameter, and one over pp.
    """
    mesh, parameters = policy.mesh, trained_parameters(policy.model)
    alike = [
        _alike(parameter, mesh, "dp_cp") for name, parameter in parameters.items() if not policy.shards[name].over_ep
    ]
    tied = {name: parameter for name, parameter in parameters.items() if policy.shards[name].on_both_ends}
    for name, of_last in share_tensors({name: value.detach() for name, value in tied.items()}, mesh).items():
        alike.append(name not in tied or torch.equal(tied[name], of_last))
    return all(alike)


def _alike(parameter: Tensor, mesh: Mesh, axis: str) -> bool:
    """True if all ranks of an axis have a parameter with the same bits."""
    most, least = all_max(parameter, mesh[axis]), -all_max(-parameter.detach(), mesh[axis])
    return torch.equal(most, least)


def same_on_all_ranks(model: nn.Module, mesh: Mesh) -> bool:
    """True if every weight has the same bits on every rank of cp. Two collectives a parameter."""
    alike = [_alike(parameter, mesh, "cp") for parameter in trained_parameters(model).values()]
    return all(alike)


# -- the two jobs ----------------------------------------------------------------------------------------------


Run = tuple[str, dict[str, Tensor], dict[str, Any]]
"""Name of a run, its weights in the end, and what `train` returned."""


def one_rank(task: Task, folder: Path, device: torch.device) -> Iterator[Run]:
    """The truth, one rank's float32 in several orders of the rows, and a gradient that is off by the ranks."""
    mesh = make_mesh(device=device, alone=True)
    exact = make_model(task.model, device, precision="float64", lora_r=task.lora_r)
    save_file(saved(make_batches(task, exact, device)), folder / "batches.safetensors")
    batches = loaded(load_file(folder / "batches.safetensors"), device)
    in_order = torch.arange(task.rows, device=device)
    wide = [
        {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
        for batch in batches
    ]
    save_file(_weights(exact), folder / "start.safetensors")
    result = train(exact, on_whole_rows(in_order), wide, task, mesh=mesh)
    yield "truth", _weights(exact), result
    for number in range(task.orders):
        model = make_model(task.model, device, lora_r=task.lora_r)
        order_B = in_order.roll(number)
        result = train(model, on_whole_rows(order_B), batches, task, mesh=mesh)
        yield f"one_rank{number}", _weights(model), result
    model = make_model(task.model, device, lora_r=task.lora_r)
    result = train(model, on_whole_rows(in_order, 1 / task.ranks), batches, task, mesh=mesh)
    yield "off_by_ranks", _weights(model), result


def several_ranks(task: Task, folder: Path, device: torch.device) -> Iterator[Run]:
    """Each kind of context parallelism under each kind of engine; pipeline stages, and experts on several ranks."""
    mesh = make_mesh(cp=task.ranks, device=device)
    batches = loaded(load_file(folder / "batches.safetensors"), device)
    for attention in task.attentions():
        for engine in ("sum", "mean"):
            align = align_loss(mesh, engine=engine)
            backward = under_torch(align) if attention == "torch" else under_ours(align, task)
            model = make_model(task.model, device, ours=attention == "ours", lora_r=task.lora_r)
            result = train(model, backward, batches, task, mesh=mesh, engine=engine)
            same = {"same_on_all_ranks": same_on_all_ranks(model, mesh)}
            yield f"{attention}_{engine}", _weights(model), result | same
    for name, layout in task.layouts().items():
        policy = make_policy(task, make_mesh(**layout, device=device))
        result = train_in_layout(task, layout, batches, policy)
        whole = full_weights(policy.model, policy.shards, policy.mesh)
        yield name, {key: value.cpu().contiguous() for key, value in whole.items()}, result


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Trained weights."""
    return {name: value.detach().cpu().contiguous() for name, value in trained_parameters(model).items()}


def main(arguments: list[str]) -> None:
    """Do the runs of one rank, and write their results if it is the first."""
    folder = Path(arguments[0])
    task = Task(**json.loads((folder / "task.json").read_text()))
    device = join(task.device, timeout_s=task.timeout_s)
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    for name, weights, result in (one_rank if alone else several_ranks)(task, folder, device):
        if int(os.environ.get("RANK", "0")) == 0:
            save_file(weights, folder / f"{name}.safetensors")
            write_whole(folder / f"{name}.json", json.dumps(result).encode())
    leave()


if __name__ == "__main__":
    main(sys.argv[1:])
