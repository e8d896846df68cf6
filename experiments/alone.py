"""Time and memory of single ranks of a plan on one GPU, one after another, with collectives that move nothing.

`python -m experiments.alone PLAN [WORKLOAD/LAYOUT ...]` with a plan of `experiments.gpu_layouts` or
`experiments.reproducible`, such as `gpu_layouts/four_gpus_8b`. This process is one rank after another, in a job of
torch's fake backend: a rank has its own tokens, its own part of the parameters and the buffers of its collectives, so
memory is that of the rank, and time is that of the rank without communication. Gathered values are copies of its own,
sums are its own parts: losses, gradients and weights are those of no run, and none is recorded. Layouts are left out in
which values decide what a rank does: tp, whose sharded weights are checked when they are loaded, pp, whose stages send
each other shapes and results, and experts on several ranks, whose tokens come from others.

Next to the plan: `PLAN.alone.json`, which the pages of real measurements reject.

Units: milliseconds of forward, backward, buckets of the reduction, clipping and optimizer; GiB at the peak of a rank.

Letters: D ranks of dp | R ranks of cp.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist

from experiments.gpu_layouts import measure as layouts
from experiments.reproducible import measure as reproducible
from workbench.atomic import to_json, write_whole
from workbench.errors import SpecError
from workbench.policy.model import DTYPES
from workbench.records.provenance import project_root, provenance
from workbench.rollouts.files import load, save
from workbench.specs.groups import LayoutSpec
from workbench.specs.run import RunSpec
from workbench.train import step as flow

EXPERIMENTS = Path(__file__).parent
BENCHMARK = "ranks alone"
VALUES = (
    "Values are not those of a run; nothing but time and memory is. Each rank ran alone, with collectives that move "
    "nothing: time is without communication and without waiting for other ranks."
)
SAMPLES = 3
WARM = 2
"""Steps that are not timed, in which kernels are compiled."""
MINUTES = 4.0
"""No further rank is started after this time; the record names those that are not reached."""


class Subject(Protocol):
    """What is measured of a plan."""

    plan: Any
    variants: tuple[str, ...]
    """What is measured one after the other on the same weights."""

    def entries(self) -> list[str]:
        """Workload and layout of each measurement."""
        ...

    def spec(self, entry: str, variant: str) -> RunSpec:
        """The run of an entry."""
        ...

    def prepare(self) -> None:
        """Write weights and rollouts."""
        ...

    def measure(self, entry: str) -> dict[str, dict[str, Any]]:
        """Measure an entry on the rank that this process is; variant -> results."""
        ...


class Layouts:
    """A plan of `experiments.gpu_layouts`."""

    variants = ("fast",)

    def __init__(self, folder: Path, device: torch.device, samples: int) -> None:
        self._rank = layouts.Rank(folder, device, samples)
        self.plan = self._rank.plan

    def entries(self) -> list[str]:
        """Workload and layout of each measurement."""
        return [f"{name}/{layout}" for name in self.plan.workloads for layout in self.plan.of(name)]

    def spec(self, entry: str, variant: str) -> RunSpec:
        """The run of an entry."""
        workload, layout = entry.split("/")
        micro_batches = self.plan.micro_batches.get(layout, 0)
        return self._rank.spec(self.plan.workloads[workload], self.plan.layouts[layout], micro_batches=micro_batches)

    def prepare(self) -> None:
        """Write weights and rollouts, with log-probabilities of a uniform old policy: no truth is needed."""
        precisions = {workload.precision for workload in self.plan.workloads.values()}
        dtype = DTYPES[precisions.pop()] if len(precisions) == 1 else torch.float32  # few bytes: every rank reads them
        layouts.save_model(self.plan, self._rank.folder / "model", dtype)
        for name, workload in self.plan.workloads.items():
            drawn = layouts.draw_rollouts(workload, self.plan)
            uniform_S = torch.full((drawn.num_tokens,), -math.log(int(drawn.tokens_T.max()) + 1))
            save(replace(drawn, old_logprobs_T=uniform_S), self._rank.folder / name)

    def measure(self, entry: str) -> dict[str, dict[str, Any]]:
        """Measure an entry on the rank that this process is."""
        spec, mesh = self.spec(entry, "fast"), self._rank.mesh(self.plan.layouts[entry.split("/")[1]])
        policy, optimizer = self._rank.policy(spec, mesh)
        rows, totals = flow.prepare_rows(load(self._rank.folder / entry.split("/")[0]), spec, mesh)
        return {"fast": self._rank.timed(policy, optimizer, rows, totals, spec, warm=WARM)}


class Modes:
    """The timed workloads of a plan of `experiments.reproducible`, in both modes."""

    variants = reproducible.MODES

    def __init__(self, folder: Path, device: torch.device, samples: int) -> None:
        self._rank = reproducible.Rank(folder, device, samples)
        plan = self._rank.plan
        self.plan = self._rank.plan = plan.chosen([name for name, one in plan.workloads.items() if one.timed])

    def entries(self) -> list[str]:
        """Workload and layout of each measurement."""
        return [f"{name}/{layout}" for name in self.plan.workloads for layout in self.plan.of(name)]

    def spec(self, entry: str, variant: str) -> RunSpec:
        """The run of an entry in one of the modes."""
        workload, layout = entry.split("/")
        return self._rank.spec(self.plan.workloads[workload], self.plan.layouts[layout], variant)

    def prepare(self) -> None:
        """Write the weights of each model, and the rollouts of each workload."""
        self._rank.prepare()

    def measure(self, entry: str) -> dict[str, dict[str, Any]]:
        """Measure an entry in both modes on the rank that this process is."""
        name, layout = entry.split("/")
        workload, spec = self.plan.workloads[name], self.plan.layouts[layout]
        mesh, batch, results = self._rank.mesh(spec), load(self._rank.folder / name), {}
        for mode in self.variants:
            with self._rank.in_mode(workload, spec, mesh, mode) as (policy, run):
                results[mode] = self._rank.timed(name, policy, run, batch, mesh)
        return results


KINDS: dict[str, Callable[[Path, torch.device, int], Subject]] = {"gpu_layouts": Layouts, "reproducible": Modes}


def measure(
    plan_name: str,
    entries: Sequence[str] = (),
    *,
    ranks: Sequence[int] = (),
    samples: int = SAMPLES,
    minutes: float = MINUTES,
    report_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure ranks of a plan, each alone on this machine's first GPU (else its CPU), and return a record.

    Args:
        plan_name: folder and name of a plan, without its suffix.
        entries: workloads and layouts; none: all.
        ranks: of every layout that has them; none: the first, and the one with most work, if that is another.
        samples: timed steps of each rank.
        minutes: no further rank is started after this time.
        report_progress: called with progress messages.

    Raises:
        SpecError: no such plan or entry; a process that is in a job already.
    """
    if dist.is_initialized():
        raise SpecError(
            "ranks alone",
            found="a process that has joined a job",
            rule="this process is one rank after another of jobs of its own",
            fix="start it without torchrun",
        )
    folder_name, _, name = plan_name.partition("/")
    source = EXPERIMENTS / f"{plan_name}.yaml"
    if folder_name not in KINDS or not name or not source.exists():
        raise SpecError(
            f"plan {plan_name!r}",
            found="no such plan",
            rule=f"a plan in one of the folders {', '.join(KINDS)} of experiments, without .yaml",
            fix="name one such as gpu_layouts/four_gpus_8b",
        )
    start = time.time()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # gigabytes of weights, read by every rank
    with tempfile.TemporaryDirectory(dir=in_memory) as temporary:
        folder = Path(temporary)
        (folder / "plan.yaml").write_text(source.read_text())

        def subject() -> Subject:
            return KINDS[folder_name](folder, device, samples)

        first = subject()
        chosen = _chosen(first.entries(), entries)
        first.prepare()
        results: dict[str, Any] = {}
        for entry in chosen:
            layout = first.spec(entry, first.variants[0]).layout
            some = [rank for rank in ranks if rank < layout.world_size] or _extremes(folder, entry, first)
            of_ranks = {}
            for rank in some:
                if time.time() - start > 60 * minutes:
                    of_ranks[str(rank)] = {"left_out": "not reached"}
                    continue
                of_ranks[str(rank)] = measured = _measured(subject, entry, layout, rank)
                report_progress(f"{time.time() - start:.0f} s: {entry}, rank {rank}: {_line(measured)}")
            results[entry] = {"layout": str(layout), "ranks": layout.world_size, "alone": of_ranks}
    _compare(results, first.variants)
    return {
        "benchmark": BENCHMARK,
        "values": VALUES,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "plan_name": plan_name,
        "plan": first.plan.model_dump(mode="json"),
        "entries": results,
        "minutes": (time.time() - start) / 60,
        "provenance": provenance(project_root(), seed=first.plan.seed),
    }


def format_record(record: Mapping[str, Any]) -> str:
    """Format a record as lines of text."""
    lines = [f"ranks of {record['plan_name']}, each alone on {record['device']}. {record['values']}"]
    for entry, result in record["entries"].items():
        lines += [f"{entry}, rank {rank}: {_line(measured)}" for rank, measured in result["alone"].items()]
        lines += [
            f"{entry}, {variant}: slowest rank measured {slowest['step_ms']:.1f} ms"
            + (f", efficiency at most {slowest['efficiency_bound']:.3f}" if "efficiency_bound" in slowest else "")
            for variant, slowest in result["slowest"].items()
        ]
        if "memory" in result:
            lines.append(f"{entry}: memory {result['memory']:.3f}, time {result['time']:.3f} of the fast mode's")
    return "\n".join(lines)


def record_file(plan_name: str) -> Path:
    """Path of the record of a plan: never that of its real measurement."""
    return EXPERIMENTS / f"{plan_name}.alone.json"


@contextlib.contextmanager
def one_rank_of(ranks: int, rank: int) -> Iterator[None]:
    """Let this process be one rank of a job whose collectives move nothing; no job if it has one rank."""
    if ranks == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with _own_values():
            yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _own_values() -> Iterator[None]:
    """Let exchanges and rotations return what the rank sends.

    The backend leaves unset what a rank receives (`FakeProcessGroup::recv` of torch 2.13), and rows of the head that
    are not finite take its exact engine, and more time than in a run.
    """
    exchange, transfer = dist.all_to_all_single, dist.batch_isend_irecv

    def own_exchange(output: torch.Tensor, sent: torch.Tensor, **named: Any) -> Any:
        work = exchange(output, sent, **named)
        output.copy_(sent.view_as(output))
        return work

    def own_transfer(operations: list[dist.P2POp]) -> Any:
        works = transfer(operations)
        sent, received = ([one.tensor for one in operations if one.op is op] for op in (dist.isend, dist.irecv))
        for value, into in zip(sent, received, strict=True):
            into.copy_(value)
        return works

    with mock.patch.multiple(dist, all_to_all_single=own_exchange, batch_isend_irecv=own_transfer):
        yield


def _chosen(entries: Sequence[str], names: Sequence[str]) -> list[str]:
    """Entries by name; none named: all."""
    if unknown := sorted(set(names) - set(entries)):
        raise SpecError(
            f"entry {', '.join(unknown)}",
            found="no entry of that name",
            rule=f"among {', '.join(entries)}",
            fix="choose from these, or name none for all",
        )
    return [entry for entry in entries if not names or entry in names]


def _measured(subject: Callable[[], Subject], entry: str, layout: LayoutSpec, rank: int) -> dict[str, Any]:
    """Measure an entry as one rank of its layout; a failure leaves out this rank only."""
    try:
        _refuse(layout)
        with one_rank_of(layout.world_size, rank):
            return subject().measure(entry)
    except Exception as error:  # of any kind: the others of a long measurement must not be lost
        return {"left_out": f"{type(error).__name__}: {error}".replace("\n", "; ")}
    finally:
        gc.collect()  # sharded parameters are in reference cycles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if compiler := sys.modules.get("torch._dynamo"):
            compiler.reset()  # graphs of a rank are those of its own shapes


def _refuse(layout: LayoutSpec) -> None:
    if layout.world_size != layout.dp * layout.cp or layout.ep > 1:
        raise SpecError(
            f"one rank of {layout} alone",
            rule="ranks of dp and cp do what they do whatever others send them; those of tp, pp and ep do not",
            fix="measure this layout on as many GPUs",
        )


def _extremes(folder: Path, entry: str, subject: Subject) -> list[int]:
    """The first rank of dp x cp, and that with most work of attention and head; all have equally many tokens."""
    spec = subject.spec(entry, subject.variants[-1])
    layout, batch = spec.layout, load(folder / entry.split("/")[0])
    packed = flow.pack_step(batch, spec)
    per_pair, per_target = _multiplications(spec.model.source)
    work_DR = torch.zeros(layout.dp, layout.cp, dtype=torch.float64)
    for number, row in enumerate(packed):
        plan = flow.plan_row(row.document_ids_T, layout)
        trained_R = torch.bincount(plan.owners_T[row.loss_mask_T], minlength=layout.cp)
        work_R = per_pair * torch.tensor(plan.balance().pairs_by_rank) + per_target * trained_R
        work_DR[number * layout.dp // len(packed)] += work_R
    return sorted({0, int(work_DR.argmax())})


def _multiplications(model: str) -> tuple[float, float]:
    """Multiplications of a step for a query-key pair, 2 GEMMs forward and 5 backward, and for a target, 3 in all."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    features = config.num_attention_heads * config.head_dim
    return 7.0 * features * config.num_hidden_layers, 3.0 * config.vocab_size * config.hidden_size


def _compare(results: Mapping[str, dict[str, Any]], variants: Sequence[str]) -> None:
    """Add the slowest rank of each entry, the efficiency that it allows, and the cost of the reproducible mode."""
    for entry, result in results.items():
        whole = results.get(f"{entry.split('/')[0]}/one_rank", {"alone": {}})["alone"].get("0", {})
        measured = [one for one in result["alone"].values() if "left_out" not in one]
        result["slowest"] = {}
        for variant in variants if measured else ():
            slowest = max(one[variant]["step_ms"] for one in measured)
            result["slowest"][variant] = {"step_ms": slowest}
            if variant in whole:
                bound = whole[variant]["step_ms"] / (result["ranks"] * slowest)
                result["slowest"][variant]["efficiency_bound"] = bound
        if measured and len(variants) == 2:
            for key, name in (("peak_gib", "memory"), ("step_ms", "time")):
                fast, exact = (max(one[variant][key] for one in measured) for variant in variants)
                result[name] = exact / fast


def _line(measured: Mapping[str, Any]) -> str:
    if "left_out" in measured:
        return f"left out: {measured['left_out']}"
    return "; ".join(
        f"{variant} {timed['step_ms']:.1f} ms, {timed['peak_gib']:.3f} GiB" for variant, timed in measured.items()
    )


def main(arguments: Sequence[str]) -> None:
    """Measure, print and write the record."""
    parser = argparse.ArgumentParser(prog="python -m experiments.alone", description=VALUES)
    parser.add_argument("plan", help="folder and name of a plan, such as gpu_layouts/four_gpus_8b")
    parser.add_argument("entries", nargs="*", help="WORKLOAD/LAYOUT; none: all of the plan")
    parser.add_argument("--ranks", nargs="+", type=int, default=[], help="default: the first, and that with most work")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="timed steps of each rank")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="no further rank is started after this time")
    parser.add_argument("--out", type=Path, help="of the record; default: PLAN.alone.json next to the plan")
    options = parser.parse_args(arguments)
    record = measure(
        options.plan,
        options.entries,
        ranks=options.ranks,
        samples=options.samples,
        minutes=options.minutes,
        report_progress=lambda line: print(line, flush=True),
    )
    write_whole(options.out or record_file(options.plan), to_json(record))
    print(format_record(record))


if __name__ == "__main__":
    main(sys.argv[1:])
