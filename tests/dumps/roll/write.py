"""Write the dumps here with ROLL's own code: advantages, the actor's loss, `_dump_batch`, `write_to_json_process`.

    git clone https://github.com/alibaba/ROLL; git -C ROLL checkout 8eb27cc2
    pip install torch==2.13.0 tensordict codetiming
    python tests/dumps/roll/write.py ROLL tests/dumps/roll

`DataProto` is imported, with placeholders for Ray and the modules of engines; functions and methods are executed from
their source files (own_source.py) on objects that have their attributes. Six sequences of two prompts, padded on both
sides, of one rank and two micro-batches, whose engine's factor is left out: counts are those of the batch. A hook adds
`log_probs`, `grad_log_probs` and the sums of the actor's metrics.
"""

import asyncio
import importlib
import json
import os
import pickle
import shutil
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Optional

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from own_source import Placeholder, function

FUNCTIONS = "roll/utils/functionals.py"
PROMPTS, LENGTHS = (3, 3, 3, 2, 2, 2), (6, 3, 5, 4, 2, 7)
REWARDS = (1.0, 0.0, 0.5, 0.0, 1.0, 0.25)
LOGGER = SimpleNamespace(info=lambda _: None, warning=lambda _: None)


def imported(source: Path):
    """Import the module of `DataProto`, with placeholders for what it imports of engines."""
    for name in ("roll", "roll.distributed", "roll.distributed.scheduler", "roll.utils"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(source / name.replace(".", "/"))]
    for name in ("ray", "roll.utils.functionals", "roll.utils.logging", "roll.distributed.scheduler.transfer_backend"):
        sys.modules[name] = Placeholder()
    platform = SimpleNamespace(is_npu=lambda: False, is_available=lambda: False)
    sys.modules["roll.platforms"] = SimpleNamespace(current_platform=platform)
    sys.modules["roll.utils.functionals"].union_two_dict = lambda one, two: {**one, **two}
    return importlib.import_module("roll.distributed.scheduler.protocol")


def functions(source: Path) -> SimpleNamespace:
    """Functions of functionals.py, executed from the file."""
    names = {"torch": torch, "Optional": Optional, "logger": LOGGER}
    own = SimpleNamespace()
    wanted = ("masked_mean", "masked_sum", "agg_loss", "compute_approx_kl", "reward_norm", "compute_reinforce_return")
    for name in (*wanted, "compute_advantage"):
        names[name] = function(source / FUNCTIONS, name, names)
        setattr(own, name, getattr(names[name], "__wrapped__", names[name]))
    return own


def rollouts(protocol, seed: int):
    """Return the batch of a rollout, as it is before advantages, and the live policy's log-probabilities."""
    g, rows, width = torch.Generator().manual_seed(seed), len(LENGTHS), 4 + max(LENGTHS)
    ids, real, mask = (torch.zeros(rows, width, dtype=torch.long) for _ in range(3))
    for row, (p, n) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        start = 4 - p  # prompts are padded on the left
        ids[row, start : 4 + n] = torch.randint(5, 40, (p + n,), generator=g)
        real[row, start : 4 + n] = 1
        mask[row, 4 : 4 + n] = 1
    mask[2, 5:7] = 0  # a tool wrote them

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(rows, width - 1, generator=g)

    old = -1.5 - normal(0.7).abs()
    tensors = {
        "input_ids": ids, "attention_mask": real, "response_mask": mask, "scores": torch.tensor(REWARDS),
        "infer_logprobs": old + normal(0.1), "prompt_id": torch.tensor([0, 0, 0, 1, 1, 1]),
    }  # fmt: skip
    batch = protocol.DataProto.from_dict(tensors, meta_info={"global_step": 3})
    return batch, old, old + normal(0.2), old + normal(0.25)


def update(source: Path, own: SimpleNamespace, batch, live: torch.Tensor, options: SimpleNamespace):
    """Forward and backward of both micro-batches by ROLL's `loss_func`; (gradients, sums of metrics)."""
    names = {"torch": torch, "np": np, **vars(own)}
    worker = "roll/pipeline/rlvr/actor_worker.py"
    names["compute_train_infer_correction"] = lambda **given: (None, torch.ones_like(given["response_mask"]), {})
    loss_func = function(source / worker, "ActorWorker.loss_func", names)
    mask = batch.batch["response_mask"][:, 1:]
    counts = {"response_mask": mask.sum(), "final_response_mask": mask.sum()}
    samples = {name: torch.tensor(float(len(mask))) for name in counts}
    sums: dict[str, float] = {}
    gradients = []
    for start in (0, 3):
        leaf = live[start : start + 3].clone().requires_grad_()
        actor = SimpleNamespace(pipeline_config=options, logger=LOGGER)
        actor.strategy = SimpleNamespace(op_compute_log_probs=lambda leaf=leaf, **_: leaf)
        actor.get_old_log_probs_with_cache = lambda data, _: data.batch["old_log_probs"]
        weights = function(source / worker, "ActorWorker.compute_sample_weights", names)
        actor.compute_sample_weights = types.MethodType(weights, actor)
        part = {name: value[start : start + 3] for name, value in batch.batch.items()}
        meta = {"batch_num_tokens": counts, "global_valid_samples": samples}
        loss, metrics = loss_func(actor, SimpleNamespace(batch=part, meta_info=meta, non_tensor_batch={}), None)
        loss.backward()
        gradients.append(leaf.grad)
        for name, value in metrics.items():
            if name.endswith("@sum"):
                sums[name] = sums.get(name, 0.0) + float(value)
    return torch.cat(gradients), sums


def main(source: Path, folder: Path) -> None:
    """Write a rollout as ROLL pickles it, a step of two losses with the hook, and generations."""
    protocol, own = imported(source), functions(source)
    for name in ("mock", "generations"):
        shutil.rmtree(folder / name, ignore_errors=True)
    names = {"os": os, "pickle": pickle, "logger": LOGGER}
    dump = function(source / "roll/distributed/scheduler/rollout_mock_mixin.py", "RolloutMockMixin._dump_batch", names)
    mixin = SimpleNamespace(mock_config=SimpleNamespace(dump_dir=str(folder / "mock")))
    off = SimpleNamespace(is_weight=SimpleNamespace(enabled=False))
    plain = {
        "importance_sampling": "token", "pg_clip": 0.2, "use_pg_clip_range": False, "pg_clip_low": 0.2,
        "pg_clip_high": 0.2, "dual_clip_loss": False, "loss_agg_mode": "seq-mean-token-mean", "use_kl_loss": False,
        "kl_loss_coef": 0.0, "rl_loss_coef": 1.0, "entropy_loss_coef": 0.0, "train_infer_correction": off,
        "enable_old_logprobs_recompute": False, "difficulty_loss_weight": False, "length_loss_weight": False,
    }  # fmt: skip
    steps = {
        "token_mean": {"loss_agg_mode": "token-mean", "use_kl_loss": True, "kl_loss_coef": 0.05},
        "seq_mean": {
            "importance_sampling": "seq",
            "use_pg_clip_range": True,
            "pg_clip_low": 0.03,
            "pg_clip_high": 0.05,
        },
    }
    for seed, (name, changes) in enumerate(steps.items()):
        batch, old, ref, live = rollouts(protocol, seed)
        mixin._get_mode_str = lambda name=name: name
        if not seed:
            mixin._get_mode_str = lambda: "rollout"
            asyncio.run(dump(mixin, batch, 3))
            mixin._get_mode_str = lambda name=name: name
        mask = batch.batch["response_mask"][:, 1:]
        rewards = own.reward_norm(batch.batch["scores"], n_sample=3, norm_mean_type="group", norm_std_type="group")
        last = torch.tensor([3 + n - 1 for n in LENGTHS])
        of_tokens = torch.zeros_like(old)
        of_tokens[torch.arange(len(last)), last] = rewards
        for key, value in (("old_log_probs", old), ("ref_log_probs", ref), ("token_level_rewards", of_tokens)):
            batch.batch[key] = value
        batch = own.compute_advantage(batch, 1.0, 1.0, "reinforce", response_mask=mask)
        batch.batch["log_probs"] = live
        gradient, sums = update(source, own, batch, live, SimpleNamespace(**(plain | changes)))
        batch.batch["grad_log_probs"] = gradient
        batch.meta_info["metrics"] = sums
        asyncio.run(dump(mixin, batch, 3))
    names = {"os": os, "json": json, "numpy": np, "Timer": Placeholder(), "logger": LOGGER}
    write = function(source / "roll/pipeline/rlvr/utils.py", "write_to_json_process", names)
    columns = {
        "global_step": [3] * 6, "prompt": [f"prompt {row // 3}" for row in range(6)],
        "responses": [f"response {row}" for row in range(6)], "scores": np.array(REWARDS), "left_out": [0] * 6,
    }  # fmt: skip
    write(str(folder / "generations"), columns, [[name, "string"] for name in columns if name != "left_out"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
