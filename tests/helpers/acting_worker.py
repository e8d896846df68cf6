"""A worker for tests of processes: ranks that run the commands in ``faults``, and report the results.

Each rank first writes ``seen<rank>.json`` into the run directory: its place, arguments, threads, and what was loaded
before it. Then, in this order, where named: ``print`` says something; ``raise_1`` raises on rank 1, ``kill_1`` kills
rank 1, ``exit_3`` leaves with code 3, ``say_no`` leaves with a sentence; ``child`` starts a process of its own;
``stubborn`` ignores SIGTERM; ``wait`` waits for minutes. Needs no process group, but for ``meet``.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from workbench.records.directory import RunDirectory
from workbench.records.provenance import this_process

LOADED_BEFORE = sorted(name for name in sys.modules if "." not in name)


def main() -> None:
    import numpy
    import torch

    run, rank = RunDirectory.open(Path(sys.argv[1])), int(os.environ["RANK"])
    faults = run.spec.faults
    tell(
        run,
        f"seen{rank}",
        {
            "argv": sys.argv[1:],
            "environment": dict(os.environ),
            "threads": torch.get_num_threads(),
            "folder": str(Path.cwd()),
            "loaded": LOADED_BEFORE,
            "collects": gc.isenabled(),
            "path": sys.path,
            "random": numpy.random.random(),  # noqa: NPY002 (the generator that everybody shares)
            "cpu_s": time.process_time(),
            "process": this_process(),
            "parent": os.getppid(),
            "stdin": str(Path("/proc/self/fd/0").readlink()),
            "files": sorted(str(f.readlink()) for f in Path("/proc/self/fd").iterdir() if f.is_symlink()),
        },
    )
    if "meet" in faults:
        torch.distributed.init_process_group("gloo")
        total = torch.ones(())
        torch.distributed.all_reduce(total)
        tell(run, f"met{rank}", total.item())
    if "print" in faults:
        sys.stdout.write(f"rank {rank} says this\n")
        os.system("echo and its shell says that")
    if rank == 1 and "raise_1" in faults:
        raise ValueError("the second rank had enough")
    if rank == 1 and "kill_1" in faults:
        os.kill(os.getpid(), signal.SIGKILL)
    if "exit_3" in faults:
        sys.exit(3)
    if "say_no" in faults:
        sys.exit("no, thank you")
    if "child" in faults:
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"])
        tell(run, f"child{rank}", child.pid)
    if "stubborn" in faults:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "wait" in faults or "stubborn" in faults:
        tell(run, f"waiting{rank}", True)
        time.sleep(300)


def tell(run: RunDirectory, name: str, value: object) -> None:
    """Write a file whole."""
    part = run.path / f".{name}"
    part.write_text(json.dumps(value))
    part.rename(run.path / f"{name}.json")


if __name__ == "__main__":
    main()
