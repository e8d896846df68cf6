"""A notebook kernel for the chaos: a process that launches an ablation and waits for its end.

python -m tests.chaos.launcher EXPERIMENT WHERE NUMBER_OF_RUNS
"""

from __future__ import annotations

import sys
from pathlib import Path

from workbench.launch import processes
from workbench.launch.ablation import AblationSpec
from workbench.launch.run import launch

STEPS = 50


def main() -> None:
    experiment, where, runs = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    processes.PRELOAD = ("psutil", "pydantic", "yaml", "torch", "torch.distributed")  # the ranks need no model
    base = {
        "steps": STEPS,
        "device": "cpu",
        "precision": "float64",
        "model": {"source": "tiny-qwen3"},
        "data": {"path": "data/own"},
    }
    ablation = AblationSpec(
        reference="run0",
        base=base,
        configurations={f"run{number}": {"seed": number, "layout": {"cp": 1 + number % 2}} for number in range(runs)},
    )
    launch(ablation, experiment, where=where, project=experiment, worker="tests.chaos.worker").wait()


if __name__ == "__main__":
    main()
