"""Checks of planned runs before a process starts: every mistake of every run in one error, without torch or a model.

The rules are those that the ranks apply (`workbench.sharding.divisibility`, `workbench.policy.sizes`), on sizes from
config.json and manifest.json. What only a built model can tell is left to the ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from workbench.errors import LaunchError, SpecError, WorkbenchError, listed
from workbench.launch import resume
from workbench.launch.ablation import PlannedRun
from workbench.launch.devices import cores, place
from workbench.launch.rollout_checks import read_documents, rollout_checks
from workbench.policy import sizes as policy_sizes
from workbench.policy.decoder import check_tied
from workbench.records.damage import CLUSTER_RANKS
from workbench.records.states import CLUSTERS
from workbench.rollouts.task import task_file
from workbench.sharding import divisibility
from workbench.specs.lora import read_settings
from workbench.specs.losses.own import OwnLoss
from workbench.specs.run import RunSpec
from workbench.untrusted import parse_json
from workbench.user_file import check_function, find_file

RANK_BYTES = 400 << 20
"""Memory of a rank before its model: 424 MiB resident with torch and transformers loaded (torch 2.13, 2026-11-23)."""
CPU_KERNELS = ("auto", "plain")
"""Attention kernels that take tensors on a CPU; a test holds this to `workbench.sharding.attention.kernels`."""


def check_runs(planned: Sequence[PlannedRun], project: Path, *, where: str, gpus: Sequence[str] = ()) -> None:
    """Raise if a run could not work: its layout, model, rollouts, task, or this machine.

    Args:
        planned: the runs.
        project: folder that paths in specs are relative to.
        where: what launches the ranks, see `workbench.launch.run.Where`.
        gpus: ids of this machine's GPUs.

    Raises:
        WorkbenchError: every mistake, each once with the runs that it concerns; of its own kind if it is the only one.
    """
    problems: dict[tuple[str, ...], tuple[WorkbenchError, list[str]]] = {}
    inputs = _Inputs(project)
    for plan in planned:
        for check in _checks(plan, inputs, where, gpus):
            try:
                check()
            except WorkbenchError as error:
                parts = [text.replace(f"run {plan.name} ", "run ") for text in error.parts.values()]  # of `place`
                key = (type(error).__name__, *parts)
                problems.setdefault(key, (error, []))[1].append(plan.name)
    if len(problems) == 1:
        only, names = next(iter(problems.values()))
        if len(planned) > 1:
            only.add_note(f"in {_runs(names, planned)}")
        raise only
    if problems:
        lines = [f"- {_runs(names, planned)}: {_line(each)}" for each, names in problems.values()]
        raise SpecError(
            f"launch {len(planned)} run{'s' if len(planned) > 1 else ''}",
            found=f"{len(problems)} mistakes\n    " + listed(lines, 7, separator="\n    ", rest="correct these first"),
            rule="everything that settings and files tell is checked before a process starts",
            fix="correct them; nothing was started",
        )


def _runs(names: Sequence[str], planned: Sequence[PlannedRun]) -> str:
    return "every run" if len(names) == len(planned) > 1 else listed(names, 4)


def _line(error: WorkbenchError) -> str:
    parts = [error.parts["requested"], error.parts["found"]]
    return ": ".join(filter(None, parts)) + (f" (do: {error.parts['fix']})" if error.parts["fix"] else "")


def _checks(plan: PlannedRun, inputs: _Inputs, where: str, gpus: Sequence[str]) -> Iterator[Callable[[], Any]]:
    """Yield the checks of a run; each raises at most one error."""
    spec, layout, data = plan.spec, plan.spec.layout, plan.spec.data
    yield lambda: check_ranks(layout.world_size, where, len(gpus))
    if where not in CLUSTERS:
        yield lambda: place(plan.name, spec, gpus)
    if spec.device == "cpu" or (where not in CLUSTERS and len(gpus) < layout.world_size and spec.device == "auto"):
        yield lambda: _check_cpu(spec)
    yield lambda: inputs.check_source(spec.model.source)
    yield lambda: check_tied(spec.model.source, spec.model.tied)
    if (adapter := spec.lora.source) is not None:
        yield lambda: read_settings(inputs.project / adapter, spec.lora)
    yield lambda: policy_sizes.check_whole_vocabulary(spec.policy.logprobs, layout.tp)
    yield lambda: inputs.check_layout(spec)
    yield lambda: divisibility.check_row_multiple(data, layout, spec.reproducible)
    loss, task = spec.loss.surrogate, spec.online.task
    if isinstance(loss, OwnLoss):
        yield lambda: _check_own_loss(loss, inputs.project)
    if task is None:
        yield lambda: inputs.check_dataset(data.path)
        if (documents := read_documents(inputs.project / data.path)) is not None:
            yield from rollout_checks(spec, documents, inputs.vocabulary(spec.model.source))
    elif task != "arithmetic":
        yield lambda: task_file(task, inputs.project)
    available = spec.online.documents if spec.online.on else inputs.documents(data.path)
    if available is not None:
        per_step = data.documents_per_step
        if not spec.online.on:
            yield lambda: divisibility.check_documents_per_step(per_step, available, data.path)
        rows = (layout.dp, data.micro_batches)
        yield lambda: divisibility.check_documents_over_dp(min(per_step or available, available), *rows)


def _check_own_loss(loss: OwnLoss, project: Path) -> None:
    """Raise if the text of a user's loss shows that it cannot be called; the file is executed by the ranks only."""
    file, name = find_file(loss.function, project, setting="loss.name"), loss.function.rpartition(":")[2]
    form = (
        "correct loss.settings or the function; a per-token function takes (inputs), a trainer's (batch, outputs, "
        "totals), with loss.engine sum or mean"
    )
    check_function(file, name, loss.settings, 1 if loss.engine is None else 3, setting="loss.name", fix=form)


def check_ranks(ranks: int, where: str, gpus: int) -> None:
    """Raise if a job has more processes than a machine, or any cluster, can hold.

    Several ranks may share a core: a run of more ranks than cores is slow and right, so memory is the limit.
    """
    if where in CLUSTERS:
        limit, reason = CLUSTER_RANKS, "no published training job has more"
    else:
        memory = psutil.virtual_memory().total
        limit = max(len(cores()), gpus, memory // RANK_BYTES)
        reason = (
            f"a rank is a process of about {RANK_BYTES >> 20} MiB before its model, and this machine has "
            f"{memory / 2**30:.0f} GiB and {len(cores())} cores"
        )
    if ranks > limit:
        raise LaunchError(
            f"a layout of {ranks} ranks",
            found=f"at most {limit} ranks {'in a job' if where in CLUSTERS else 'on this machine'}",
            rule=f"pp * dp * cp * tp processes; {reason}",
            fix="use a smaller layout" + ("" if where in CLUSTERS else ", or a cluster (where='slurm')"),
        )


def _check_cpu(spec: RunSpec) -> None:
    """Raise if a run on the CPU names an implementation that needs a GPU."""
    kernel, logprobs = spec.layout.kernel, spec.policy.logprobs
    needs = [f"layout.kernel = {kernel!r}"] * (kernel not in CPU_KERNELS)
    needs += ["policy.logprobs = 'triton'"] * (logprobs == "triton")
    needs += [f"kernels.{part} = 'liger'" for part, name in spec.kernels if name == "liger"]
    if needs:
        raise SpecError(
            " and ".join(needs),
            found="a run on the CPU",
            rule="these compute on a GPU only",
            fix="use auto, or set device: cuda on a machine with a GPU for each rank",
        )


class _Inputs:
    """Sizes of models and rollout datasets, each read once."""

    def __init__(self, project: Path) -> None:
        self.project = project
        self._sizes = functools.cache(lambda source: policy_sizes.read_sizes(source, project))
        self.documents = functools.cache(self._documents)
        self.check_dataset = functools.cache(lambda path: resume.find_dataset(path, project))
        self.check_source = functools.cache(lambda source: resume.find_checkpoint(source, project))

    def check_layout(self, spec: RunSpec) -> None:
        """Raise if the layout cannot split the model."""
        layout = spec.layout
        if (sizes := self._sizes(spec.model.source)) is not None:
            dealt = {"ulysses": layout.cp, "hybrid": layout.ulysses}.get(layout.attention, 1)
            chunks = spec.reproducible.weight_chunks if spec.reproducible.on else 1
            policy_sizes.check_layout(
                sizes,
                tp=layout.tp,
                dealt=dealt,
                weight_chunks=chunks,
                ep=layout.ep,
                pp=layout.pp,
                stages_per_rank=layout.stages_per_rank,
                stage_layers=layout.stage_layers,
            )

    def vocabulary(self, source: str) -> int | None:
        """Rows of the embedding; None if they are unknown before the model is built, or its source is a mistake."""
        with contextlib.suppress(SpecError):
            sizes = self._sizes(source)
            return sizes.vocabulary if sizes is not None else None
        return None

    def _documents(self, path: str) -> int | None:
        """Documents of a rollout dataset; None if its manifest is missing or damaged, which has an error of its own."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            manifest = parse_json((self.project / path / resume.MANIFEST).read_text(encoding="utf8"))
            return int(manifest["counts"]["documents"])
        return None
