"""A rank that does next to nothing: it joins its job, says when it had, sums a number, and leaves.

Started as a worker is: ``python -m experiments.benchmarks.trivial_rank RUN_DIR --project FOLDER``.
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
    total = all_sum(torch.ones(()), mesh["cp"])  # nobody leaves before the last one has come
    assert total.item() == world_size, f"{world_size} ranks sum to {total.item()}"
    leave()
    sys.stdout.flush()
    os._exit(0)  # as the worker of a run does


if __name__ == "__main__":
    main()
