"""Write the trajectories in this folder with AReaL's own `WorkflowExecutor._dump_trajectory` (`rollout.dump_to_file`).

    git clone https://github.com/inclusionAI/AReaL; git -C AReaL checkout 4aef98d8
    pip install torch==2.13.0 aiofiles
    python tests/dumps/areal/write.py AReaL tests/dumps/areal

The module imports engines, so the method is executed from its source file (own_source.py); its object gives it a folder
and a tokenizer that writes ids. Two tasks of three samples; the last sample of the second has no completion.
"""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiofiles
import aiofiles.os
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from own_source import function

REWARDS = ((1.0, 0.0, 0.5), (0.0, 1.0, 1.0))


def main(source: Path, folder: Path) -> None:
    """Write the trajectories of two tasks."""
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
