"""A test that ranks on this machine can connect: two new processes join as those of a job do, and sum a number.

The first of them also reports torch's build, so that the caller need not load torch.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from workbench.errors import LaunchError
from workbench.records.provenance import python_path, without_machine_paths

RANKS = 2


def check_rendezvous(*, timeout_s: float = 60.0) -> dict[str, Any]:
    """Let two processes join a job through gloo and sum a number.

    Returns:
        ``met_s``, time to connect once torch was loaded; ``loaded_s``, time to load it; and torch's build: ``torch``
        (version and build), ``cuda``, ``nccl`` (versions, "" without), ``gloo`` (available or not), ``gpus`` (name and
        capability of each).

    Raises:
        LaunchError: they did not connect, with the last line that each printed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    environment = os.environ | {
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": python_path(),
        "PYTHONUNBUFFERED": "1",  # the last line of a log is then the last thing that happened
    }
    command = [sys.executable, "-P", "-m", "workbench.launch.rendezvous", str(timeout_s)]
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="rendezvous-") as scratch:
        logs = [Path(scratch) / f"rank{rank}" for rank in range(RANKS)]
        ranks: list[subprocess.Popen[bytes]] = []
        codes: list[int | None]
        try:
            for rank, log in enumerate(logs):
                own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                with log.open("wb") as file:
                    ranks.append(
                        subprocess.Popen(
                            command, env=own, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
                        )
                    )
            codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in ranks]
        except subprocess.TimeoutExpired:
            codes = [None]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        texts = [log.read_text(encoding="utf8", errors="replace") for log in logs if log.exists()]
    outputs = [text.strip().splitlines() for text in texts]
    if any(codes):
        problem = "; ".join(f"rank {rank}: {lines[-1]}" for rank, lines in enumerate(outputs) if lines)
    elif codes == [None]:
        problem = f"no end after {timeout_s:.0f} s"
    else:
        return json.loads(outputs[0][-1])
    raise LaunchError(
        f"let {RANKS} ranks meet on this machine",
        found=without_machine_paths(problem) or "no output",
        rule="processes reach each other through 127.0.0.1; gloo finds an interface by the host's name",
        fix="see that the host's own name resolves (/etc/hosts) and that nothing closes the loopback; "
        "GLOO_SOCKET_IFNAME=lo names the interface",
    )


def main(timeout_s: float) -> None:
    """Run one rank."""
    began = time.monotonic()
    import torch
    import torch.distributed as dist

    from workbench.sharding.mesh import join, leave

    loaded = time.monotonic()
    join("cpu", timeout_s=timeout_s)
    total = torch.ones(())
    dist.all_reduce(total)
    assert total.item() == RANKS, f"the sum of {RANKS} ones is {total.item()}"
    met_s = time.monotonic() - loaded
    leave()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus and dist.is_nccl_available() else ""
    facts = {
        "met_s": met_s,
        "loaded_s": loaded - began,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "nccl": nccl or ("built in" if dist.is_nccl_available() else ""),
        "gloo": dist.is_gloo_available(),
        "gpus": [
            f"{torch.cuda.get_device_name(i)} ({'.'.join(map(str, torch.cuda.get_device_capability(i)))})" for i in gpus
        ],
    }
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
