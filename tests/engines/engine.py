"""Scripts that run another system in its own environment, and records of what they trained."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOOPS = Path(__file__).parent / "loops"


def run(system: str, *arguments: object, ranks: int = 1, timeout_s: float = 600, loop: str = "") -> str:
    """Run ``loops/of_SYSTEM.py``, or another loop, with arguments in the system's environment; return its output.

    With several ranks it is started by ``torch.distributed.run`` on this machine.
    """
    python = ROOT / ".engines" / system / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"no environment of {system}: make engines ENGINES={system}")
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [str(python), *start, str(LOOPS / f"of_{loop or system}.py"), *map(str, arguments)]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout
