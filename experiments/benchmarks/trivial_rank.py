"""Minimal rank: it joins its job, writes the time of joining, sums a number, and leaves.

Started like a worker: ``python -m experiments.benchmarks.trivial_rank RUN_DIR --project FOLDER``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from workbench.sharding.collectives import all_sum
from workbench.sharding.mesh import join, leave, make_mesh


def main() -> None:
    """Join, write ``ready<rank>`` into the run directory (nanoseconds since 1970), sum, leave."""
    rank, world_size = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    device = join("cpu", timeout_s=60.0)
    ready_ns = time.time_ns()
    (Path(sys.argv[1]) / f"ready{rank}").write_text(str(ready_ns))
    mesh = make_mesh(cp=world_size, device=device)
    total = all_sum(torch.ones(()), mesh["cp"])  # no rank leaves before the last one has joined
    assert total.item() == world_size, f"{world_size} ranks sum to {total.item()}"
    leave()
    sys.stdout.flush()
    os._exit(0)  # like the worker of a run


if __name__ == "__main__":
    main()
