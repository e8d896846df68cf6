"""`workbench doctor`: check the environment, and tell how to fix what is missing."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from workbench.cli.terminal import answered, print_lines, safe, size, width
from workbench.columns import columns
from workbench.errors import WorkbenchError
from workbench.launch.rendezvous import check_rendezvous
from workbench.records.lookup import experiments, runs_of
from workbench.records.provenance import project_root
from workbench.report.exporters import TRACKERS

OK, NOTE, PROBLEM = "ok", "note", "problem"

NEEDED = (
    "transformers",
    "torchx",
    "safetensors",
    "pydantic",
    "tyro",
    "rich",
    "pandas",
    "pyarrow",
    "psutil",
    "matplotlib",
    "jupyterlab",
    "ipywidgets",
    "nbclient",
    "nbformat",
)
"""Required packages, besides torch."""

BROWSERS = ("chromium", "chromium-browser", "google-chrome")

_GIB, _MIB = 2**30, 2**20
_DISK_NOTE, _DISK_PROBLEM = 5 * _GIB, _GIB // 2  # the default ablation takes some 200 MiB
_MEMORY_NOTE = 4 * _GIB  # a rank of the default ablation takes 0.5 GiB
_SHARED_NOTE = 128 * _MIB  # twice Docker's default, which NCCL's manual says to raise
_FILES_NOTE, _FILES_PROBLEM = 1024, 256  # usual limits of Linux and macOS; every rank opens a socket to each other
_PROCESSES_NOTE = 512  # chosen, not measured; each rank brings threads of its own
_WRITTEN = 16 * _MIB  # chosen: bytes of the write whose speed is measured


@dataclass(frozen=True)
class Finding:
    """Result of one check: "ok", "note" or "problem" (runs fail, or records are lost), and how to fix it."""

    about: str
    verdict: str
    says: str
    fix: str = ""


def _judge(about: str, says: str, *rules: tuple[bool, str, str]) -> Finding:
    """Return the finding of the first rule (it applies, verdict, fix) that applies; "ok" if none does."""
    verdict, fix = next(((verdict, fix) for applies, verdict, fix in rules if applies), (OK, ""))
    return Finding(about, verdict, says, fix)


def examine(project: Path | None = None) -> list[Finding]:
    """Check this machine and this project; takes some seconds, because two ranks meet.

    No finding names a host or a user, so that the result can be shared.

    Args:
        project: the folder that holds ``experiments``; None takes `project_root`.
    """
    return list(_findings(project or project_root()))


def _findings(project: Path) -> Iterator[Finding]:
    checks: tuple[Callable[[], Finding | Iterator[Finding]], ...] = (
        _python,
        _packages,
        _torch_and_rendezvous,
        _triton,
        _processors,
        _memory,
        _gpus,
        lambda: _project(project),
        lambda: _disk(project),
        _shared_memory,
        _limits,
        _browser,
        _widgets,
        _schedulers,
        _extras,
        lambda: _runs(project),
    )
    for check in checks:
        try:
            result = check()
            yield from [result] if isinstance(result, Finding) else result
        except Exception as error:  # a check that breaks must not hide the others
            about = getattr(check, "__name__", "check").strip("_<>")
            yield Finding(about, PROBLEM, f"the check failed: {type(error).__name__}: {error}")


# ---- software ------------------------------------------------------------------------------------------


def _python() -> Finding:
    version, release = platform.python_version(), sys.version_info[:2]
    other = not (3, 11) <= release <= (3, 13)  # those of CI
    return _judge("python", version, (other, PROBLEM, "use Python 3.11, 3.12 or 3.13: make PYTHON=python3.12"))


def _packages() -> Finding:
    versions = {name: _version(name) for name in NEEDED}
    says = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    return _judge("packages", says, (not all(versions.values()), PROBLEM, "install the project: pip install -e ."))


def _torch_and_rendezvous() -> Iterator[Finding]:
    if not _version("torch"):
        yield Finding("torch", PROBLEM, "missing", "install the project: pip install -e .")
        return
    try:
        facts = check_rendezvous()
    except WorkbenchError as error:
        yield Finding("torch", NOTE, f"{_version('torch')}; not checked further, as its ranks did not meet")
        yield Finding("rendezvous", PROBLEM, error.parts["found"], error.parts["fix"])
        return
    cuda = f"CUDA {facts['cuda']}" if facts["cuda"] else "for CPU only"
    nccl = f"NCCL {facts['nccl']}" if facts["nccl"] else "no NCCL"
    says = f"{facts['torch']} ({cuda}, {nccl}, {'gloo' if facts['gloo'] else 'no gloo'})"
    fix = "install a build of torch with gloo: CPU ranks cannot talk without it"
    yield _judge("torch", says, (not facts["gloo"], PROBLEM, fix))
    met = f"2 ranks met through gloo in {facts['met_s'] * 1e3:.0f} ms"
    yield Finding("rendezvous", OK, f"{met}, after {facts['loaded_s']:.1f} s of loading torch")
    yield from _gpus_of_torch(facts)


def _gpus_of_torch(facts: dict[str, Any]) -> Iterator[Finding]:
    present = len(_smi("name"))
    if facts["gpus"]:
        yield Finding("CUDA", OK, ", ".join(facts["gpus"]))
        if not facts["nccl"] and len(facts["gpus"]) > 1:
            yield Finding("NCCL", PROBLEM, "missing, and there are several GPUs", "install a build of torch with NCCL")
    elif present:
        verdict, why = NOTE, "this torch is built for CPU"
        if facts["cuda"]:
            verdict, why = PROBLEM, "torch sees none; the driver may be too old"
        fix = "install a torch that fits the driver: make TORCH_INDEX=<address of CUDA builds>"
        yield Finding("CUDA", verdict, f"{present} GPUs, and {why}", fix)


def _triton() -> Finding:
    version = _version("triton")
    return _judge("triton", version or "not installed", (not version, NOTE, "only GPU kernels need it"))


def _browser() -> Finding:
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    says = Path(executable).name if executable else "no Chromium: its tests are skipped"
    return _judge("browser", says, (not executable, NOTE, "apt-get install chromium"))


def _widgets() -> Finding:
    manager = _version("jupyterlab_widgets")
    missing = bool(_version("jupyterlab") and _version("ipywidgets") and not manager)
    blank = "JupyterLab's part of ipywidgets is missing: panels stay blank"
    fix = "pip install jupyterlab_widgets, in the environment that starts JupyterLab"
    return _judge("widgets", blank if missing else f"jupyterlab_widgets {manager}", (missing, PROBLEM, fix))


def _schedulers() -> Finding:
    clusters = [name for name, command in (("Slurm", "sbatch"), ("Kubernetes", "kubectl")) if shutil.which(command)]
    return Finding("schedulers", OK, ", ".join(["this machine", *clusters]))


def _extras() -> Finding:
    packages = {name: tracker.package for name, tracker in TRACKERS.items()} | {
        "kubernetes": "kubernetes",
        "mcp": "mcp",
    }
    here = {name: _version(f"{package}-skinny") or _version(package) for name, package in packages.items()}
    missing = [name for name, version in here.items() if not version]
    says = ", ".join(f"{name} {version}" if version else f"{name} not installed" for name, version in here.items())
    fix = f"if you need them: pip install 'workbench[{','.join(missing)}]'" if missing else ""
    return Finding("extras", OK, says, fix)


def _version(package: str) -> str:
    """Return its version; "" if it cannot be imported."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    spec = find_spec(package) if package.isidentifier() else None
    return "of unknown version" if spec is not None and spec.origin else ""


# ---- machine -------------------------------------------------------------------------------------------


def _processors() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    says = f"{usable} cores of {os.cpu_count()} may be used, load {load:.1f}"
    busy = load > 2 * usable  # chosen
    return _judge("cores", says, (busy, NOTE, "the machine is busy: times in records are unreliable"))


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    says = f"{size(memory.available)} of {size(memory.total)} free"
    fix = "a rank of the default ablation takes 0.5 GiB; run fewer at a time"
    return _judge("memory", says, (memory.available < _MEMORY_NOTE, NOTE, fix))


def _gpus() -> Iterator[Finding]:
    gpus = _smi("index,name,memory.used,memory.total")
    if not gpus:
        yield Finding("GPUs", OK, "none: runs take the CPU and gloo")
        return
    for index, name, used, total in (row[:4] for row in gpus):
        yield Finding(f"GPU {index}", OK, f"{name}, {used} of {total} used")
    busy = _smi("pid,used_memory", what="compute-apps")
    if busy:
        says = ", ".join(f"process {row[0]} ({row[1]})" for row in busy)
        yield Finding("on the GPUs", NOTE, f"computing: {says}", "runs share these GPUs with them")


def _smi(query: str, what: str = "gpu") -> list[list[str]]:
    """Return the rows of an nvidia-smi query; [] without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-{what}={query}", "--format=csv,noheader"]
    try:
        # without persistence mode each call starts the driver, which takes seconds; 30 only ends what hangs
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _disk(project: Path) -> Finding:
    folder = project / "experiments"
    folder = folder if folder.is_dir() else project
    free = shutil.disk_usage(folder).free
    try:
        speed, flush_ms = _write_speed(folder)
    except OSError as error:
        fix = "make the folder writable, or work in a clone that is yours"
        return Finding("disk", PROBLEM, f"{folder.name} cannot be written: {error.strerror}", fix)
    says = f"{size(free)} free, {speed / _MIB:.0f} MiB/s written, {flush_ms:.1f} ms for a record"
    return _judge(
        "disk",
        says,
        (free < _DISK_PROBLEM, PROBLEM, "free disk space: a run that cannot write its record fails"),
        (free < _DISK_NOTE, NOTE, "the default ablation takes some 200 MiB; remove old runs/"),
        (flush_ms > 100, NOTE, "each step waits for its record; keep experiments on a local disk"),  # chosen
    )


def _write_speed(folder: Path) -> tuple[float, float]:
    """Return the bytes per second of a large flushed write, and the milliseconds of a small one."""
    with tempfile.NamedTemporaryFile(prefix=".doctor-", dir=folder) as file:
        times = []
        for content in [os.urandom(_MIB) * (_WRITTEN // _MIB), *[b"x" * 2048] * 5]:
            began = time.perf_counter()
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - began)
    large, *small = times
    return _WRITTEN / large, 1e3 * statistics.median(small)


def _shared_memory() -> Finding:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return Finding("shared memory", OK, "not used on this system")
    usage = shutil.disk_usage(shared)
    says = f"{size(usage.free)} of {size(usage.total)} free"
    fix = "NCCL needs some; give a container more: --shm-size=1g"
    return _judge("shared memory", says, (usage.free < _SHARED_NOTE, NOTE, fix))


def _limits() -> Finding:
    soft = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    files, processes = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in soft)
    says = ", ".join(
        f"{'any number of' if limit == math.inf else limit} {what}"
        for limit, what in ((files, "open files"), (processes, "processes"))
    )
    return _judge(
        "limits",
        says,
        (files < _FILES_PROBLEM, PROBLEM, "ulimit -n 4096: every rank opens a socket to each other"),
        (files < _FILES_NOTE, NOTE, "ulimit -n 4096"),
        (processes < _PROCESSES_NOTE, NOTE, "ulimit -u 4096: each rank brings threads of its own"),
    )


# ---- project -------------------------------------------------------------------------------------------


def _project(project: Path) -> Finding:
    shown = str(project)
    home = str(Path.home())
    if home != "/" and (shown == home or shown.startswith(f"{home}/")):
        shown = f"~{shown[len(home) :]}"
    missing = [name for name in ("data", "experiments") if not (project / name).is_dir()]
    says = f"{shown}, without a folder {' and '.join(missing)}" if missing else shown
    fix = "change to a clone of the project, or run files by their path"
    return _judge("project", says, (bool(missing), NOTE, fix))


def _runs(project: Path) -> Finding:
    entries = [run for folder in experiments(project) for run in runs_of(folder, every=True)]
    broken = [f"{run.experiment_dir.name}/{run.path.name}" for run in entries if run.run is None]
    lost = [f"{run.experiment_dir.name}/{run.path.name}" for run in entries if run.run and run.run.status == "lost"]
    says = f"{len(entries)} under experiments"
    if lost:
        says += f"; {len(lost)} lost: {_some(lost)}"
    if broken:
        says += f"; {len(broken)} unreadable: {_some(broken)}"
    fix = "run the ablation again to finish the missing runs" if lost else ""
    return Finding("runs", NOTE if lost or broken else OK, says, fix)


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# ---- the verb ------------------------------------------------------------------------------------------


def lines_of(finding: Finding) -> list[str]:
    """Return a finding as lines of text."""
    rows = [(finding.verdict, finding.about, finding.says), *([("", "", f"do: {finding.fix}")] if finding.fix else [])]
    return columns([tuple(map(safe, row)) for row in rows], width=width(), least=(7, 13))  # "problem", "shared memory"


def doctor() -> int:
    """Check the environment, and tell how to fix what is missing.

    Exit code 1 if there is a problem.
    """
    findings = []
    for finding in _findings(project_root()):
        findings.append(finding)
        print_lines(lines_of(finding))
        sys.stdout.flush()
    answered(lambda: [asdict(finding) for finding in findings])
    return 1 if any(finding.verdict == PROBLEM for finding in findings) else 0
