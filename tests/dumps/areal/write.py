"""Write the dumps in this folder with AReaL's own code: trajectories, and with a hook the inputs of its loss.

    git clone https://github.com/inclusionAI/AReaL; git -C AReaL checkout 4aef98d8
    pip install torch==2.13.0 aiofiles
    python tests/dumps/areal/write.py AReaL tests/dumps/areal
    pip install --no-deps --target areal areal==1.0.4; pip install transformers omegaconf colorlog uvloop einops
    python tests/dumps/areal/write.py --loss areal tests/dumps/areal

Trajectories are those of `WorkflowExecutor._dump_trajectory` (`rollout.dump_to_file`).
The module imports engines, so the method is executed from its source file (own_source.py); its object gives it a folder
and a tokenizer that writes ids. Two tasks of three samples; the last sample of the second has no completion.

The inputs of the loss are those of `grpo_loss_fn`, after `PPOActor._compute_advantages`: six sequences in four
micro-batches of two ranks, packed without padding. `hooked` is what a user adds; the engine's factor of a micro-batch,
its share of the step's tokens (fsdp_engine.py), is written out here, and its mean over ranks is in the hook.
"""

import asyncio
import importlib
import json
import os
import shutil
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from own_source import Placeholder, function

REWARDS = ((1.0, 0.0, 0.5), (0.0, 1.0, 1.0))


def main(source: Path, folder: Path) -> None:
    """Write the trajectories of two tasks."""
    import aiofiles
    import aiofiles.os

    shutil.rmtree(folder / "rollout", ignore_errors=True)
    names = {"os": os, "json": json, "aiofiles": aiofiles, "Any": Any}
    dump = function(source / "areal/infra/workflow_executor.py", "WorkflowExecutor._dump_trajectory", names)
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))
    executor = SimpleNamespace(_get_dump_dir=lambda _: str(folder / "rollout"), _get_tokenizer=lambda: tokenizer)
    for task, rewards in enumerate(REWARDS):
        prompt = [7, 8, 9] if task else [4, 5]
        ids = torch.tensor([[*prompt, *range(20 + n, 24 + n)] for n in range(3)])
        mask = torch.zeros_like(ids)
        mask[:, len(prompt) :] = 1
        if task:
            mask[2] = 0
        trajectory = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "loss_mask": mask,
            "rewards": torch.tensor(rewards),
            "versions": torch.full_like(ids, 6),
        }
        written, reason = asyncio.run(dump(executor, trajectory, task, is_eval=False))
        assert written, reason


RANKS, MICRO = 2, 2
SEQUENCES = (((3, 6), (3, 3)), ((3, 5),), ((2, 4), (2, 2)), ((2, 7),))
"""Lengths of prompt and completion of each sequence, of each micro-batch, rank by rank."""


def hooked(grpo_loss_fn, folder: Path):
    """Return AReaL's loss function, saving its inputs and what came out; the file is written in the backward pass."""

    def loss_fn(logprobs, entropy, input_data, **options):
        loss = grpo_loss_fn(logprobs, entropy, input_data, **options)
        number = len(list(folder.glob("*.pt")))
        file = folder / f"rank_{number // MICRO}_micro_{number % MICRO}.pt"
        given = {name: value for name, value in input_data.items() if isinstance(value, torch.Tensor)}
        more = {"live_logprobs": logprobs.detach(), "loss": loss.detach()}
        logprobs.register_hook(lambda grad: torch.save({**given, **more, "grad_live_logprobs": grad / RANKS}, file))
        return loss

    return loss_fn


def imported(source: Path):
    """Return AReaL's `ppo_actor_loss_fn`, without the ``__init__`` of its packages, which import engines."""
    sys.path.insert(0, str(source))
    for name in ("areal", "areal.utils", "areal.utils.functional", "areal.api", "areal.engine", "areal.infra"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [f"{source}/{name.replace('.', '/')}"]
    absent = ("areal.engine.fsdp_utils", "areal.engine.fsdp_utils.attn_impl", "areal.infra.platforms", "ray", "numba")
    for name in absent:
        sys.modules[name] = Placeholder()
    return importlib.import_module("areal.utils.functional.functional")


def sequences(seed: int) -> list[dict[str, torch.Tensor]]:
    """Return the padded batch of each micro-batch, as rollouts come in: values stand at their tokens."""
    g, batches = torch.Generator().manual_seed(seed), []
    for own in SEQUENCES:
        width = max(p + n for p, n in own)
        batch = {name: torch.zeros(len(own), width) for name in ("attention_mask", "loss_mask", "logprobs")}
        for row, (p, n) in enumerate(own):
            batch["attention_mask"][row, : p + n] = 1
            batch["loss_mask"][row, p : p + n] = 1
        batch["loss_mask"][0, own[0][0] + 1] = 0  # a tool wrote it
        batch["input_ids"] = torch.randint(5, 40, (len(own), width), generator=g)
        batch["logprobs"] = -1.5 - torch.randn(len(own), width, generator=g).abs()
        batch["prox_logp"] = (batch["logprobs"] + 0.1 * torch.randn(len(own), width, generator=g)).roll(-1, 1)
        batch["rewards"] = torch.rand(len(own), generator=g) - 0.5
        batches.append(batch)
    return batches


def losses(source: Path, folder: Path, **options: Any) -> None:
    """Write the inputs of the loss of one optimizer step."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    functional = imported(source)
    actor = source / "areal/trainer/ppo/actor.py"
    tracker = Placeholder()
    names = {"torch": torch, "stats_tracker": tracker, "infer_token_denominator": lambda data, mask: mask}
    names |= {"ppo_actor_loss_fn": functional.ppo_actor_loss_fn, "sapo_loss_fn": functional.sapo_loss_fn}
    names |= {
        "_resolve_proximal_logp": lambda prox_logp_gt, **_: prox_logp_gt,
        "PROX_LOGP_METHOD_RECOMPUTE": "recompute",
    }
    names |= {"_log_proximal_approximation_stats": lambda **_: None, "_log_version_staleness_stats": lambda **_: None}
    advantages = function(actor, "PPOActor._compute_advantages", names)
    config = SimpleNamespace(overlong_reward_penalty=False, use_decoupled_loss=True, recompute_logprob=True)
    owner = SimpleNamespace(
        config=config, reward_bias=0.0, reward_scaling=1.0, reward_clip=20.0, reward_norm=None, kl_ctl=0.0,
        kl_estimator=lambda one, other: one - other, mask_no_eos_with_zero=False, discount=1.0, gae_lambda=1.0,
        adv_norm=None,
    )  # fmt: skip
    batches = [advantages(owner, batch) for batch in sequences(0)]
    total = sum(batch["loss_mask"].count_nonzero() for batch in batches)
    loss_fn = hooked(function(actor, "grpo_loss_fn", names), folder)
    g = torch.Generator().manual_seed(1)
    for batch in batches:
        real = batch["attention_mask"].bool()
        keys = ("input_ids", "loss_mask", "logprobs", "prox_logp", "advantages")
        data: dict[str, Any] = {name: batch[name][real] for name in keys}
        data["cu_seqlens"] = torch.cat([torch.zeros(1), real.sum(1).cumsum(0)]).int()
        live = (data["prox_logp"] + 0.25 * torch.randn(len(data["prox_logp"]), generator=g)).requires_grad_()
        loss = loss_fn(live, torch.zeros_like(live), data, **options)
        (loss * (data["loss_mask"].count_nonzero() / total * RANKS)).backward()


if __name__ == "__main__":
    if sys.argv[1] == "--loss":
        clip = {"eps_clip": 0.2, "eps_clip_higher": 0.28, "c_clip": 3.0}
        losses(Path(sys.argv[2]), Path(sys.argv[3]) / "loss_inputs", **clip)
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
