"""Options of a scheduler, torchx's own (of the installed version) and ours; and the runner that knows them.

Works around: a runner created on the main thread replaces the signal handlers of a notebook kernel.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.errors import LaunchError

if TYPE_CHECKING:
    from torchx.runner import Runner

LOCAL, SLURM, KUBERNETES = "local_cwd", "slurm", "kubernetes"

SBATCH = "sbatch"
"""Slurm without torchx, see `workbench.launch.sbatch`."""

SCHEDULERS = (LOCAL, SLURM, KUBERNETES)
"""torchx's names of the supported schedulers."""

_RESERVED = (
    "log_dir",
    "job_dir",
    "prepend_cwd",
    "auto_set_cuda_visible_devices",
    "validate_spec",
    "workspace_type",
    "image_repo",
    "quiet",
)
"""Settings of torchx that users may not set: logs go to the run directory, GPUs are assigned here, and no image is
built."""


@dataclass(frozen=True)
class Cluster:
    """Settings of a job on another machine.

    Attributes:
        python: the interpreter there; "" for this one, by its path, which is also that of a virtual environment.
        memory_mb: host memory for each rank; None takes `MEMORY_MB`, 0 requests none.
        image: the container image; "" without containers.
        mounts: mounts of the container, as torchx's `parse_mounts` reads them.
        tasks: the scheduler itself starts an agent on each node of a job.
    """

    python: str = ""
    memory_mb: int | None = None
    image: str = ""
    mounts: Sequence[str] = ()
    tasks: bool = False


def checked(scheduler: str, options: Mapping[str, str]) -> tuple[dict[str, Any], Cluster | None]:
    """Split the options of a scheduler into torchx's settings and ours."""
    torchx_options, known = _torchx_options(scheduler), options_of(scheduler)
    if unknown := sorted(set(options) - set(known)):
        raise LaunchError(
            f"options of {scheduler}: {', '.join(unknown)}",
            found="not options of this scheduler",
            rule=f"it takes {', '.join(sorted(known)) or 'none'}",
            fix="correct the name; Slurm reads options that torchx does not pass on from SBATCH_... variables"
            if scheduler == SLURM
            else "correct the name, or leave it out",
        )
    needed = [name for name, option in torchx_options.items() if option.is_required]
    needed += ["image"] if scheduler == KUBERNETES else []
    if missing := [name for name in needed if not options.get(name)]:
        raise LaunchError(
            f"a {scheduler} job without {' and '.join(missing)}",
            found=", ".join(f"{key}={value}" for key, value in options.items()) or "no options",
            rule="; ".join(f"{name}: {known[name]}" for name in missing),
            fix=f"give --scheduler {' '.join(f'{name}=...' for name in missing)}, in Python options=...",
        )
    settings = {
        name: _value(name, options[name], option.opt_type) for name, option in torchx_options.items() if name in options
    }
    if scheduler == LOCAL:
        return settings, None
    return settings, Cluster(
        python=options.get("python") or ("python" if scheduler == KUBERNETES else ""),
        memory_mb=_value("memory_mb", options["memory_mb"], int) if "memory_mb" in options else None,
        image=options.get("image", ""),
        mounts=options["mounts"].split(",") if options.get("mounts") else (),
        tasks=scheduler == SLURM,
    )


def _torchx_options(scheduler: str) -> dict[str, Any]:
    if scheduler not in SCHEDULERS:
        raise LaunchError(
            f"a job for scheduler {scheduler!r}",
            found=repr(scheduler),
            rule=f"one of {', '.join(SCHEDULERS)}",
            fix="choose one of them",
        )
    if scheduler == KUBERNETES and importlib.util.find_spec("kubernetes") is None:
        raise LaunchError(
            "a job for Kubernetes",
            found="the package kubernetes is not installed",
            rule="torchx talks to Kubernetes through it",
            fix="pip install kubernetes",
        )
    return {name: option for name, option in runner().scheduler_run_opts(scheduler) if name not in _RESERVED}


def _value(name: str, text: str, kind: Any) -> Any:
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text) if kind in (int, float) else text
    except (KeyError, ValueError):
        raise LaunchError(
            f"option {name} = {text!r}",
            found=repr(text),
            fix="correct the value",
            rule="true or false" if kind is bool else "a number",
        ) from None


def options_of(scheduler: str) -> dict[str, str]:
    """Options of a scheduler, torchx's own (of the installed version) and ours: name -> meaning, marked if needed.

    Raises:
        LaunchError: no such scheduler.
    """
    meanings = {
        name: " ".join(option.help.split()) + (" (needed)" if option.is_required else "")
        for name, option in _torchx_options(scheduler).items()
    }
    if scheduler != LOCAL:
        meanings |= {
            "python": "The interpreter on the cluster ("
            + ("python, of the image)" if scheduler == KUBERNETES else "this one, by its path)"),
            "memory_mb": "Memory of the host for each rank; 0 asks for none",
        }
    if scheduler == KUBERNETES:
        meanings |= {
            "image": "The container image, with the workbench's requirements in it (needed)",
            "mounts": "type=volume,src=<claim>,dst=<folder>: where the pod sees run directory and project",
        }
    return meanings


@contextlib.contextmanager
def quietly() -> Any:
    """Suppress the warnings of torchx, which users cannot fix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@functools.cache
def runner() -> Runner:
    """The runner of this process, created in a thread that ends at once, so that no signal handler is replaced."""

    def create() -> Runner:
        from torchx.runner import get_runner

        created = get_runner()
        created.scheduler_run_opts(LOCAL)  # creates the scheduler, which installs the handlers
        slurm = created._scheduler(SLURM)
        if hasattr(slurm, "_partition_memmb"):  # runs sinfo to leave --mem out; memory_mb=0 does so instead
            slurm._partition_memmb = lambda partition: None
        return created

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(create).result()


def message(error: Exception) -> str:
    """One-line message of an error of torchx."""
    return f"{type(error).__name__}: {error}"
