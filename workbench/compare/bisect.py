"""First divergence of two runs: the first module and block of tokens whose bits differ, in the first step that differs.

The comparison is bitwise, so two layouts of the ordinary mode diverge at the first GEMM whose shape differs; two in the
reproducible mode never diverge, or there is a bug. The summation order of a real backend does not show on simulated
ranks: run both on that backend with ``record: {certificate: true, trace_tokens: 64}`` and pass the run directories.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

from workbench.compare.certificates import (
    CertificateComparison,
    compare_certificates,
    first_not_finite,
    nothing_trained,
)
from workbench.errors import RecordError, SpecError
from workbench.metrics.evidence import Evidence, weaker
from workbench.records.directory import RunDirectory
from workbench.records.lookup import look_up
from workbench.records.provenance import project_root
from workbench.specs.run import RunSpec, load_run_spec
from workbench.train.trace import INPUT, LOGPROBS, TOKENS, Trace, read_trace
from workbench.train.worker import run_here

BLOCK_TOKENS = 64
"""Tokens of a block where neither run sets a block size."""

Way = Literal["forward", "loss", "backward", "gradients", "weights"]

Pass = Mapping[str, list[list[str]]]
"""One pass through the decoder: tensor -> fingerprints of each block of each row."""

_NOTHING = f"{0:016x}"


@dataclass(frozen=True)
class Divergence:
    """The first tensor in which two runs differ: everything computed before it is bitwise identical.

    Attributes:
        step: from 0.
        way: forward or backward through the decoder; the loss; the sums of parameters' gradients; weights.
        tensor: name of the module (with `workbench.train.trace.INPUT` for its input), loss term or parameter.
        row: of the step, as the first run numbers them; None (like the next two) where no tokens can be named.
        block: the first of the row that differs.
        tokens: (begin, end) of it in the row.
        blocks: number of blocks of this tensor that differ, over all rows.
        of: total number of blocks.
        before: the tensor that was computed before it.
    """

    step: int
    way: Way
    tensor: str
    row: int | None = None
    block: int | None = None
    tokens: tuple[int, int] | None = None
    blocks: int = 0
    of: int = 0
    before: str = ""

    @property
    def description(self) -> str:
        """One-sentence description."""
        name = self.tensor.removesuffix(INPUT)
        activation = "the log-probabilities" if name == LOGPROBS else f"the output of {name}"
        if name != self.tensor:
            activation = f"the input of {name} (from attention, a sum or a product before it)"
        quantity = {
            "forward": activation,
            "loss": f"the loss ({name})",
            "backward": f"the gradient of {activation}",
            "gradients": f"the gradient of {name}, whose pieces were the same",
            "weights": f"{name} after the optimizer's step, whose gradient was the same",
        }[self.way]
        text = f"step {self.step}, {self.way}: {quantity}"
        if self.tokens is not None:
            text += (
                f", row {self.row}, tokens {self.tokens[0]} to {self.tokens[1] - 1} (block {self.block}); "
                f"{self.blocks} of its {self.of} blocks differ"
            )
        return text + (f"; the same until {self.before}" if self.before else "")


@dataclass(frozen=True)
class Bisection:
    """Result of comparing two traced runs.

    Attributes:
        a, b: names of the runs.
        divergence: None if there is none.
        steps: number of steps compared.
        stations: tensors compared in the forward pass through the decoder.
        changes: settings changed in a run, by its name, so that both have the same rows.
        evidence: of the run with fewer tokens that have a gradient; None for records without counts.
        vacuous: reason why equal bits prove nothing; "" if they prove something.
        not_finite: the first loss or gradient norm of the first run that is not finite; "" if all are.
    """

    a: str
    b: str
    divergence: Divergence | None
    steps: int
    stations: int
    changes: Mapping[str, Mapping[str, Any]]
    evidence: Evidence | None = None
    vacuous: str = ""
    not_finite: str = ""

    @property
    def verdict(self) -> str:
        """One of "equal", "different", "vacuous" (nothing was trained) and "unsound baseline" (NaN in both)."""
        if self.divergence is not None:
            return "different"
        if self.not_finite:
            return "unsound baseline"
        return "vacuous" if self.vacuous else "equal"

    @property
    def equal(self) -> bool:
        """True if they never diverge, and there was something to compare."""
        return self.verdict == "equal"

    def __str__(self) -> str:
        """The two names and the first divergence."""
        steps = f"{self.steps} step{'s' * (self.steps != 1)}"
        reason = "" if self.verdict == "equal" else f"{self.verdict}, {self.not_finite or self.vacuous}: "
        result = (
            self.divergence.description
            if self.divergence
            else f"{reason}the same bits in {steps}: {self.stations} tensors on the way, the loss, every gradient and "
            "weight"
        )
        changed = [
            f"  {name} was run with {', '.join(f'{key} = {value}' for key, value in changes.items())}, so that "
            "both have the same rows"
            for name, changes in self.changes.items()
        ]
        lines = [f"{self.a} and {self.b}: {result}", *changed]
        if self.evidence is not None:
            lines.append(f"  could have seen: {self.evidence.summary()}")
            lines += [f"  warning: {warning}" for warning in self.evidence.warnings]
        return "\n".join(lines)

    __repr__ = __str__


def bisect(
    a: RunSpec | RunDirectory | Path | str,
    b: RunSpec | RunDirectory | Path | str,
    *,
    names: tuple[str, str] = ("", ""),
    block_tokens: int | None = None,
    steps: int | None = None,
    project: Path | None = None,
) -> Bisection:
    """Run two specs again and name the first tensor and block of tokens in which they differ.

    Args:
        a: a spec, a YAML file with one, a run directory, or a name for `workbench.records.lookup.look_up`. A run that
            has a trace already is not run again, if the other has one of the same blocks.
        b: likewise.
        names: display names; a run directory has its own name.
        block_tokens: tokens of a block; None: those of the reproducible mode, or `BLOCK_TOKENS`.
        steps: maximum number; None: as many as both take, up to the first whose certificates differ.
        project: root of relative paths in specs; None takes `project_root`.

    Raises:
        RecordError: rows of other tokens, or models without a module in common.
        SpecError: a spec that cannot be run, or not with simulated ranks.

    Example:
        >>> bisect(RunSpec(), RunSpec(layout={"cp": 2}))  # doctest: +SKIP
        a and b: step 0, forward: the input of model.layers.0.self_attn.o_proj (from attention, a sum or a product
        before it), row 0, tokens 0 to 63 (block 0); 25 of its 25 blocks differ; the same until
        model.layers.0.self_attn.v_proj
    """
    project = project or project_root()
    sources = [_resolved(source, project) for source in (a, b)]
    labels = [
        run.name if isinstance(run, RunDirectory) else name or letter
        for run, name, letter in zip(sources, names, "ab", strict=True)
    ]
    if labels[0] == labels[1]:
        labels = [f"{label}-{letter}" for label, letter in zip(labels, "ab", strict=True)]
    if _both_traced(sources, block_tokens):
        return _bisection(labels, sources, {})
    specs = [run.spec if isinstance(run, RunDirectory) else run for run in sources]
    for label, spec in zip(labels, specs, strict=True):
        _refuse_stages(label, spec)
    block = block_tokens or specs[0].reproducible.block_tokens or specs[1].reproducible.block_tokens or BLOCK_TOKENS
    most, changes = _steps(sources, [spec.steps for spec in specs] + ([steps] if steps else [])), _same_rows(specs)
    changed_settings = {
        name: {f"data.{key}": value for key, value in change.items()}
        for name, change in zip(labels, changes, strict=True)
        if change
    }
    record = {"certificate": True, "trace_tokens": block, "tokens": True, "gradients": "norms"}
    bisection = None
    for taken in sorted({1, most}):  # most runs that diverge do so in the first step
        with tempfile.TemporaryDirectory() as folder:
            runs = []
            for letter, run, spec, change in zip("ab", sources, specs, changes, strict=True):
                traced_spec = spec.merged({"data": change, "steps": taken, "record": record})
                runs.append(RunDirectory.create(Path(folder) / letter, letter, traced_spec))
                _bring_frozen_clip(run, runs[-1])
                run_here(runs[-1], project)
            bisection = _bisection(labels, runs, changed_settings)
        if bisection.divergence is not None:
            break
    assert bisection is not None
    return bisection


# ---- inputs ----------------------------------------------------------------------------------------------


def _resolved(source: RunSpec | RunDirectory | Path | str, project: Path) -> RunSpec | RunDirectory:
    if isinstance(source, RunSpec | RunDirectory):
        return source
    if Path(source).suffix in (".yaml", ".yml"):
        return load_run_spec(Path(source))
    runs = look_up(source, project).opened()
    if len(runs) != 1:
        raise RecordError(
            f"bisect {source}",
            found=f"an experiment of {len(runs)} runs",
            rule="one run, or one spec",
            fix=f"name a run of it, such as {runs[0].path.parent.parent.name}/{runs[0].name}",
        )
    return runs[0]


def _refuse_stages(name: str, spec: RunSpec) -> None:
    if spec.layout.pp > 1:
        raise SpecError(
            f"bisect {name}",
            found=f"layout.pp = {spec.layout.pp}",
            rule="a trace has the values of every module in order, and a rank of a pipeline those of its own stages",
            fix="take pp: 1 here; `workbench diagnose` compares runs of any layouts",
        )


def _both_traced(
    sources: Sequence[RunSpec | RunDirectory], block_tokens: int | None
) -> TypeGuard[Sequence[RunDirectory]]:
    runs = [run for run in sources if isinstance(run, RunDirectory)]
    sizes = {run.spec.record.trace_tokens for run in runs}
    if len(runs) < 2 or None in sizes or len(sizes) > 1 or block_tokens not in (None, *sizes):
        return False
    return all(run.status == "succeeded" and run.spec.certified for run in runs)


def _same_rows(specs: Sequence[RunSpec]) -> list[dict[str, int | str]]:
    """Data settings that give both the same rows; {} for no change, or for micro_batch_tokens."""
    if any(spec.data.micro_batch_tokens for spec in specs):
        return [{}, {}]
    rows = math.lcm(*(spec.layout.dp * spec.data.micro_batches for spec in specs))
    changes: list[dict[str, int | str]] = []
    for spec in specs:
        same = {"micro_batches": rows // spec.layout.dp, "balance": specs[0].data.balance}
        changes.append({name: value for name, value in same.items() if getattr(spec.data, name) != value})
    return changes


def _steps(sources: Sequence[RunSpec | RunDirectory], bounds: Sequence[int]) -> int:
    """Number of steps to take: none after the first that is known to differ."""
    runs = [run for run in sources if isinstance(run, RunDirectory)]
    known = compare_certificates(runs[0], runs[1]) if len(runs) == 2 else None
    return min([*bounds, *([known.step + 1] if known and known.step is not None else [])])


def _bring_frozen_clip(run: RunSpec | RunDirectory, again: RunDirectory) -> None:
    """Link the run that provides the frozen clip decisions next to the run that uses them."""
    if isinstance(run, RunDirectory) and run.spec.frozen_clip:
        for other in RunDirectory.find(run.path.parent, run.spec.frozen_clip):
            (again.path.parent / other.path.name).symlink_to(other.path.resolve())


# ---- comparison of traces --------------------------------------------------------------------------------


def _bisection(
    names: Sequence[str], runs: Sequence[RunDirectory], changes: Mapping[str, Mapping[str, Any]]
) -> Bisection:
    certified = compare_certificates(runs[0], runs[1])
    steps, stations, parting = min(len(run.steps()) for run in runs), 0, None
    for step in range(steps):
        traces = [_trace(run, step) for run in runs]
        forward, backward = [trace.forward for trace in traces], [trace.backward for trace in traces]
        pairs, stations = _pairs(traces, names), len([station for station in forward[0] if station in forward[1]])
        block = traces[0].block_tokens
        parting = _first_difference(step, "forward", forward, pairs, block)
        if certified is not None and certified.step == step:
            parting = parting or _of_certificate(certified, "loss")
            parting = parting or _first_difference(step, "backward", backward, pairs, block)
            parting = parting or _of_certificate(certified, "gradient") or _of_certificate(certified, "weight")
        if parting is not None:
            steps = step + 1
            break
    lines = [run.steps()[:steps] for run in runs]
    return Bisection(
        names[0],
        names[1],
        parting,
        steps,
        stations,
        changes,
        evidence=weaker(*map(Evidence.of_steps, lines)),
        vacuous=next(filter(None, map(nothing_trained, lines)), ""),
        not_finite=first_not_finite(lines[0]),
    )


def _trace(run: RunDirectory, step: int) -> Trace:
    trace = read_trace(run, step)
    if trace is None:
        raise RecordError(
            f"bisect {run.name}",
            found=f"no trace of step {step}",
            rule="a run with record.trace_tokens has one of each step",
            fix="run it again",
        )
    return trace


def _pairs(traces: Sequence[Trace], names: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of rows with the same tokens, in the order of the first run."""
    rows, others = ([_trimmed(row) for row in trace.forward[TOKENS]] for trace in traces)
    if sorted(rows) != sorted(others):
        raise RecordError(
            f"bisect {names[0]} and {names[1]}",
            found=f"rows of other tokens ({len(rows)} and {len(others)} rows)",
            rule="both have the same documents in the same rows, padded alike",
            fix="give both the same data.path, data.documents_per_step, dp * data.micro_batches and "
            "data.balance, and an order that does not pad inside a row",
        )
    left: list[list[str] | None] = list(others)
    pairs = []
    for number, row in enumerate(rows):
        pairs.append((number, left.index(row)))
        left[pairs[-1][1]] = None
    return pairs


def _first_difference(
    step: int, way: Way, passes: Sequence[Pass], pairs: Sequence[tuple[int, int]], block_tokens: int
) -> Divergence | None:
    """The first tensor and block that differ in one pass of both runs; None if none does."""
    first, second = passes
    before = ""
    for station in (station for station in first if station in second):
        apart = [
            (row, block)
            for row, other in pairs
            for block, (a, b) in enumerate(
                itertools.zip_longest(first[station][row], second[station][other], fillvalue=_NOTHING)
            )
            if a != b
        ]
        if apart:
            (row, block), of = apart[0], sum(len(_trimmed(first[station][row])) for row, _ in pairs)
            tokens = (block * block_tokens, (block + 1) * block_tokens)
            return Divergence(step, way, station, row, block, tokens, len(apart), of, before)
        before = station
    return None


def _trimmed(blocks: list[str]) -> list[str]:
    """The blocks without the padding at their end."""
    return blocks[: max((number for number, block in enumerate(blocks, 1) if block != _NOTHING), default=0)]


def _of_certificate(certified: CertificateComparison, kind: str) -> Divergence | None:
    """The first tensor of a kind that differs; no tokens can be named."""
    name = next((name for name in certified.differing if name.startswith(f"{kind}/")), None)
    if name is None or certified.step is None:
        return None
    ways: dict[str, Way] = {"loss": "loss", "gradient": "gradients", "weight": "weights"}
    return Divergence(certified.step, ways[kind], name.removeprefix(f"{kind}/").removesuffix("/sum"))
