"""Cost of launching: a torchx job over bare `torch.distributed.run`, and the time until forked ranks are ready.

The torchx job and the bare command run the same ranks, which only join their process group, sum a number and leave.
They alternate, so that other load on the machine affects both, and the overhead is taken pair by pair. Ranks of the
process pool have the imports of a real run, and are ready when the last of them has joined; the first start pays for
the fork server, later ones do not. Both are measured in a script and in a live Jupyter kernel.

Units: all times are seconds of the wall clock; samples are in the order of measurement.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.errors import LaunchError
from workbench.launch import jobs, processes
from workbench.launch.component import environment_of
from workbench.launch.devices import Placement
from workbench.records.directory import RunDirectory
from workbench.records.provenance import project_root, provenance
from workbench.specs.run import RunSpec

TRIVIAL, READY = "experiments.benchmarks.trivial_rank", "experiments.benchmarks.ready_rank"
"""Ranks that only join, sum a number and leave; the second has the imports of a real run's rank."""

RANKS = 2
PAIRS = 7

BARS = {"torchx_overhead_s": 0.5, "ranks_ready_s": 0.3}
"""Upper bounds: the median overhead of a torchx job, and the median time until two ranks are ready, server warm."""

_POLL_S = 0.02
_GIVE_UP_S = 180.0


def measure(
    *,
    pairs: int = PAIRS,
    later: int | None = None,
    kernel: bool = True,
    report_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure everything and return a record.

    Args:
        pairs: torchx job and bare command, alternating; one more of each comes first and is not counted.
        later: starts with a warm server, for each number of ranks; None for as many as pairs.
        kernel: also measure inside a Jupyter kernel.
        report_progress: called with progress messages.

    Raises:
        LaunchError: ranks that failed or did not end.
    """
    load_before = os.getloadavg()
    torchx = _alternating(pairs, report_progress)
    report_progress("ranks of the process pool, in this process")
    later = pairs if later is None else later
    ready = {"script": ranks_ready(later=later)}
    if kernel:
        report_progress("ranks of the process pool, in a Jupyter kernel")
        ready["kernel"] = _in_a_kernel(later)
    medians = {
        "torchx_overhead_s": torchx["overhead_median_s"],
        "ranks_ready_s": max(measured[str(RANKS)]["later_median_s"] for measured in ready.values()),
    }
    return {
        "benchmark": "launch_overhead",
        "ranks": RANKS,
        "torchx_job": torchx,
        "ranks_ready": ready,
        "bars": {
            name: {"bar": bar, "median": medians[name], "holds": medians[name] <= bar} for name, bar in BARS.items()
        },
        "load_average": {"before": list(load_before), "after": list(os.getloadavg())},
        "provenance": provenance(project_root()),
    }


def ranks_ready(*, ranks: tuple[int, ...] = (2, 4), later: int = PAIRS) -> dict[str, Any]:
    """Measure the time from `processes.start` until the last rank has joined its process group.

    Args:
        ranks: numbers of ranks to measure.
        later: starts with a warm server, for each of them.

    Returns:
        ``first_s``, of a start that loads the server first; and for each number of ranks ``later_s`` and its median.
    """
    processes.shut_down()
    with tempfile.TemporaryDirectory() as folder:
        measured: dict[str, Any] = {"first_s": _ready_s(Path(folder), ranks[0])}
        for count in ranks:
            samples = [_ready_s(Path(folder), count) for _ in range(later)]
            measured[str(count)] = {"later_s": samples, "later_median_s": statistics.median(samples)}
    processes.shut_down()
    return measured


def format_record(record: dict[str, Any]) -> str:
    """Format a record as lines of text."""
    torchx = record["torchx_job"]
    lines = [
        f"torchx job of {record['ranks']} ranks: {torchx['torchx_median_s']:.2f} s, bare "
        f"torch.distributed.run: {torchx['bare_median_s']:.2f} s (medians of {len(torchx['bare_s'])})"
    ]
    for place, measured in record["ranks_ready"].items():
        counts = [key for key in measured if key.isdecimal()]
        later = ", ".join(f"{count} ranks {measured[count]['later_median_s']:.3f} s" for count in counts)
        lines.append(f"ranks ready in a {place}: {later}; the first, with its server, {measured['first_s']:.2f} s")
    for name, bar in record["bars"].items():
        lines.append(f"{name}: {bar['median']:.3f}, bar {bar['bar']}: {'holds' if bar['holds'] else 'MISSED'}")
    return "\n".join(lines)


def _alternating(pairs: int, log: Callable[[str], None]) -> dict[str, Any]:
    bare, torchx = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(pairs + 1):
            log(f"torchx job and bare torch.distributed.run, pair {number} of {pairs}")
            bare.append(_bare_s(_run(Path(folder))))
            torchx.append(_torchx_s(_run(Path(folder))))
    bare, torchx = bare[1:], torchx[1:]  # the first ones warm the disk
    overhead = [job - command for job, command in zip(torchx, bare, strict=True)]
    return {
        "torchx_s": torchx,
        "bare_s": bare,
        "overhead_s": overhead,
        "torchx_median_s": statistics.median(torchx),
        "bare_median_s": statistics.median(bare),
        "overhead_median_s": statistics.median(overhead),
    }


def _run(folder: Path, ranks: int = RANKS) -> RunDirectory:
    return RunDirectory.create(folder, "trivial", RunSpec(layout={"cp": ranks}))


def _torchx_s(run: RunDirectory) -> float:
    begin = time.perf_counter()
    job = jobs.start([run], RANKS, Placement("cpu"), project=run.path, worker=TRIVIAL)
    _wait(job, begin)
    return _ended(run, begin, job.poll() == "succeeded")


def _bare_s(run: RunDirectory) -> float:
    ranks = ["-m", TRIVIAL, str(run.path), "--project", str(run.path)]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nnodes=1",
        f"--nproc-per-node={RANKS}",
        "--max-restarts=0",
        *ranks,
    ]
    with (run.path / "ranks" / "agent.log").open("wb") as log:
        begin = time.perf_counter()
        agent = subprocess.Popen(
            command,
            env=os.environ | environment_of(Placement("cpu")),
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = agent.wait(_GIVE_UP_S)
        finally:
            agent.kill()
            agent.wait()
    return _ended(run, begin, code == 0)


def _ready_s(folder: Path, ranks: int) -> float:
    run = _run(folder, ranks)
    begin, begin_ns = time.perf_counter(), time.time_ns()
    job = processes.start([run], ranks, Placement("cpu"), project=folder, worker=READY)
    _wait(job, begin)
    _ended(run, begin, job.poll() == "succeeded", ranks)
    return (max(int((run.path / f"ready{rank}").read_text()) for rank in range(ranks)) - begin_ns) / 1e9


def _wait(job: jobs.Job, begin: float) -> None:
    while job.poll() == "running":
        if time.perf_counter() - begin > _GIVE_UP_S:
            job.cancel()
        time.sleep(_POLL_S)


def _ended(run: RunDirectory, begin: float, well: bool, ranks: int = RANKS) -> float:
    seconds = time.perf_counter() - begin
    ready = [rank for rank in range(ranks) if (run.path / f"ready{rank}").exists()]
    if not well or len(ready) != ranks:
        logs = [*run.path.glob("ranks/*.log"), *run.path.glob("torchx/*/*/trainer/0/stderr.log")]
        lines = [line.strip() for log in logs for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or "No module" in line] or lines
        raise LaunchError(
            f"measure {ranks} ranks that only join and leave",
            found=" | ".join(errors[-3:]) or "no output",
            rule="all ranks become ready and exit without an error",
            fix="see `workbench doctor`",
        )
    return seconds


def _in_a_kernel(later: int) -> dict[str, Any]:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell(
                "import json, sys\n"
                f"sys.path.insert(0, {str(project_root())!r})\n"
                "from experiments.benchmarks.launch_overhead import ranks_ready"
            ),
            nbformat.v4.new_code_cell(f"measured = ranks_ready(later={later})"),
            nbformat.v4.new_code_cell("print(json.dumps(measured))"),
        ]
    )
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    return json.loads(notebook.cells[-1].outputs[0]["text"])
