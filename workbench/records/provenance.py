"""Origin of a run: project folder, software, machine and process."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import workbench

_ABSOLUTE = re.compile(r"(?<![\w./:~*-])/(?:[\w.@+-]+/)+[\w.@+-]+")
_LIBRARY = re.compile(r".*/(?:site-packages|dist-packages|lib/python3\.\d+)/")


PACKAGED = Path(workbench.__file__).resolve().parent / "_project"
"""Notebooks, rollout dataset and ablations in an installed wheel; a checkout has its own and no such folder."""


def project_root(start: Path | None = None) -> Path:
    """The folder that paths in specs (``data/...``, ``experiments/...``) are relative to.

    That is the starting folder (by default the current one) if its folder `data` holds a rollout dataset (a
    ``manifest.json`` up to two levels below), and otherwise the source tree of this package, or what an installed
    wheel has of it. Any other folder of the name `data`, which many projects have, moves nothing.
    """
    candidates = [(start or Path.cwd()).resolve(), _source_root(), PACKAGED]
    return next((folder for folder in candidates if _has_rollouts(folder / "data")), _source_root())


def _has_rollouts(data: Path) -> bool:
    # `workbench notebooks` and a checkout have data/arithmetic/rollouts; `workbench rollouts` may write data/mine
    return any(any(data.glob(f"{depth}manifest.json")) for depth in ("*/", "*/*/"))


def python_path() -> str:
    """PYTHONPATH of a child process: this source tree first, so that it need not be installed."""
    here = str(_source_root())
    rest = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != here]
    return os.pathsep.join([here, *rest])


def _source_root() -> Path:
    return Path(workbench.__file__).resolve().parent.parent


def without_machine_paths(text: str, project: Path | None = None) -> str:
    """Make absolute paths relative to the project; elsewhere keep only the part that identifies the file.

    Example:
        >>> without_machine_paths('File "/home/me/lib/python3.12/site-packages/torch/nn/init.py", line 3')
        'File ".../torch/nn/init.py", line 3'
    """
    roots = {str(project or project_root()), str(_source_root())}
    for root in sorted(roots, key=len, reverse=True):
        text = text.replace(f"{root}/", "")
    return _ABSOLUTE.sub(_shortened, text)


def _shortened(path: re.Match[str]) -> str:
    inside_library = _LIBRARY.sub("", path[0])
    return f".../{Path(path[0]).name if inside_library == path[0] else inside_library}"


def versions() -> dict[str, str]:
    """Installed versions of the packages that numbers or records depend on."""
    return {"workbench": workbench.__version__, "python": platform.python_version()} | {
        name: _version(name) for name in ("torch", "transformers", "triton", "torchx", "safetensors")
    }


def provenance(project: Path, *, seed: int | None = None) -> dict[str, Any]:
    """Provenance of a run's numbers: versions, git state, command, machine.

    It has no host name and no path outside the project, because reports are shared. A GPU is named only if
    torch is already loaded: importing torch would cost two seconds.
    """
    torch = sys.modules.get("torch")
    gpus = []
    if torch is not None and torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "git": _git_state(project),
        # A loaded torch names its build too (+cpu, +cu130), which the package metadata lacks.
        "versions": versions() | ({} if torch is None else {"torch": str(torch.__version__)}),
        "argv": [without_machine_paths(argument, project) for argument in sys.argv],
        "seed": seed,
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "gpus": gpus,
        "system": f"{platform.system()} {platform.machine()}",
        "written_ns": time.time_ns(),
    }


def _git_state(project: Path) -> dict[str, Any]:
    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(project), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain")
    return {"commit": commit or "unknown", "dirty": "unknown" if changes is None else bool(changes)}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


# ---- processes -----------------------------------------------------------------------------------------


def this_process() -> dict[str, Any]:
    """Identity of this process for a state; a pid alone may be reused by tomorrow.

    Units: ``create_time`` is psutil's, in seconds; ``host`` and ``boot`` are hashes, and reveal nothing by themselves.
    """
    return own_process() | _machine()


def own_process() -> dict[str, Any]:
    """Identity of this process among those of this machine, for `process_alive`."""
    return {"pid": os.getpid(), "create_time": psutil.Process().create_time()}


def process_alive(pid: int, create_time: float) -> bool:
    """True if a process of this machine is alive, and is not a later one with the same pid."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - create_time) < 0.01 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def is_process_alive(process: Mapping[str, Any]) -> bool:
    """True if a process described by `this_process` is alive, or on another machine, where it cannot be checked."""
    if not is_of_this_machine(process):
        return True
    boot = _machine()["boot"]
    return process.get("boot", boot) == boot and process_alive(process["pid"], process["create_time"])


def is_of_this_machine(process: Mapping[str, Any]) -> bool:
    """True if a process described by `this_process` belongs to this machine, so that its pid is valid here."""
    return process.get("host", _machine()["host"]) == _machine()["host"]


@functools.cache
def _machine() -> dict[str, str]:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf8")
    except OSError:
        boot = f"{psutil.boot_time():.0f}"
    return {
        "host": hashlib.sha256(platform.node().encode()).hexdigest()[:8],
        "boot": hashlib.sha256(boot.encode()).hexdigest()[:8],
    }
