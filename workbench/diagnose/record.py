"""Record of one training run: context, and the measurements of each step. Any part may be missing.

Our runs and those of other trainers have the same form: `Record.of` reads a run directory, `Record.load` a folder that
a recorder wrote (`workbench.records.trainer_files` owns its format):

    record.json                                  {"context": {...}}
    steps.jsonl                                  {"step", "loss", "metrics", "gradient_norms", "counts"} a line, and
                                                 "evidence" and "weight_norms" where a run of the workbench has them
    tensors/step0000.gradients.safetensors       whole gradients, by parameter
    tensors/step0000.tokens.safetensors          per-token values in source order, [S] each

Context names: dp, cp, tp, micro_batches, accumulation, order, temperature, learning_rate, precision, and anything else
a trainer records. Count names: documents (that train), masked_documents, trained_tokens, all_tokens,
padded_tokens, micro_batches, kept_mass. Token names: policy_logprobs, old_logprobs, ref_logprobs, sampler_logprobs,
entropy_nats, ratios, trained (bool), documents, positions, and where each token was predicted: rows (micro-batches, of
the first dp rank first), places in them, shards (cp rank), slices (of cp and tp, with sequence parallelism); losses,
each token's value before weighting; prediction_k_logprobs of the token that depth k predicts, 0 where it predicts none.

A record contains measurements only, not the planted fault or the intention.

Letters: S tokens of the source batch | T tokens of a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.diagnose.metric_names import MetricNames
from workbench.errors import RecordError, WorkbenchError, check_kind
from workbench.losses.build import build_loss
from workbench.metrics.evidence import PREFIX
from workbench.policy.logprobs import TokenLogprobs
from workbench.records import trainer_files as files
from workbench.records.certificate import Certificate, read_certificate
from workbench.records.directory import RunDirectory
from workbench.records.provenance import project_root
from workbench.reduction.evaluate import evaluate_loss, loss_inputs, token_values
from workbench.reduction.weights import step_weights
from workbench.rollouts.batch import PADDING, RolloutBatch
from workbench.rollouts.files import load
from workbench.rollouts.targets import shift_targets
from workbench.sharding.plan import ShardPlan
from workbench.specs.precision import CHANGES
from workbench.specs.run import RunSpec
from workbench.train.old_pass import with_advantages
from workbench.train.step import compute_advantages, pack_step, plan_row

_NOT_METRICS = ("time/", "memory/", "loss/total/", "gradient/clip/", PREFIX)
_MEASURED_TOKENS = ("policy_logprobs", "old_logprobs", "entropy_nats", "trained", "clipped")
_OF_DEPTHS = re.compile(r"prediction_\d+_logprobs$")


OTHER_NAMES = {
    "dp": ("dp_size", "data_parallel", "data_parallel_size", "world_size", "num_processes"),
    "cp": ("cp_size", "context_parallel", "context_parallel_size", "sp", "sp_size", "ulysses_sp_size", "ulysses"),
    "tp": ("tp_size", "tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size"),
    "micro_batches": ("gradient_accumulation_steps", "accumulate_grad_batches", "accumulation_steps", "grad_accum"),
}
"""Axis -> its names in torchtitan, DeepSpeed, Accelerate, Lightning, Megatron-LM, NeMo-RL and verl."""


class LazyTensors(Mapping[str, Tensor]):
    """Tensors of one file, read at each access and not kept; {} if there is no such file."""

    def __init__(self, read: Callable[[], Mapping[str, Tensor] | None]) -> None:
        self._read = read

    def whole(self) -> Mapping[str, Tensor]:
        """All tensors of the file."""
        return self._read() or {}

    def __getitem__(self, name: str) -> Tensor:
        return self.whole()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole())

    def __len__(self) -> int:
        return len(self.whole())


def whole(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """All tensors of a record's part, read at once if they are on disk."""
    return tensors.whole() if isinstance(tensors, LazyTensors) else tensors


@dataclass(frozen=True)
class RecordedStep:
    """One optimizer step as it was recorded.

    Attributes:
        number: from 0.
        loss: the total; None if unknown.
        metrics: by key.
        gradient_norms: L2 norm of each parameter's whole gradient.
        counts: of the whole step, over all ranks and micro-batches.
        gradients: whole, by parameter.
        tokens: per-token values in source order, [S].
        evidence: counts of tokens and documents with a gradient, by the keys of `workbench.metrics.evidence`.
        certificate: of the step, if a run has one.
        observed: what a recorder saw by itself, see `workbench.records.observed`.
        partial_metrics: names of metrics that are of parts of the step, such as its last micro-batch.
        weight_norms: L2 norm of each whole parameter before the step; of the first step of a run of the workbench.
    """

    number: int
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    gradient_norms: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    evidence: Mapping[str, float] = field(default_factory=dict)
    certificate: Certificate | None = None
    observed: Mapping[str, Any] = field(default_factory=dict)
    partial_metrics: Sequence[str] = ()
    weight_norms: Mapping[str, float] = field(default_factory=dict)


def shared_tokens(a: RecordedStep, b: RecordedStep) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Per-token values of both, cut to the shorter one: a record may end with the last token that it saw."""
    recorded = [whole(step.tokens) for step in (a, b)]
    end = min((len(values_S) for tokens in recorded for values_S in tokens.values()), default=0)
    trusted, suspect = ({name: values_S[:end] for name, values_S in tokens.items()} for tokens in recorded)
    return trusted, suspect


def trained_in_both(
    tokens: tuple[Mapping[str, Tensor], Mapping[str, Tensor]], name: str
) -> tuple[Tensor, Tensor] | None:
    """A value of the tokens that train in both, of each; None if one lacks it."""
    if any(not {name, "trained"} <= set(each) for each in tokens):
        return None
    both_S = tokens[0]["trained"].bool() & tokens[1]["trained"].bool()
    return tokens[0][name][both_S], tokens[1][name][both_S]


@dataclass(frozen=True)
class Record:
    """Record of one training run.

    Attributes:
        context: layout and settings, by name.
        steps: in order.
        name: display name.

    Example:
        >>> record = Record({"cp": 2}, (RecordedStep(0, loss=0.25, gradient_norms={"w": 1.0}),), name="mine")
        >>> record
        Record(mine: 1 step; cp=2; loss, gradient_norms)
    """

    context: Mapping[str, Any]
    steps: Sequence[RecordedStep]
    name: str = ""

    @classmethod
    def of(cls, what: Record | RunDirectory | Path | str) -> Record:
        """Return a record from a record, a run directory, or the folder of either.

        Raises:
            RecordError: a folder that is neither, or a run without steps.
        """
        if isinstance(what, Record):
            return what
        if isinstance(what, RunDirectory):
            return _of_run(what)
        check_kind("read a record", what, (str, Path), "pass a Record, a RunDirectory, or the folder of either")
        folder = Path(what)
        if files.is_record(folder):
            return cls.load(folder)
        if (folder / "config.json").is_file():
            return _of_run(RunDirectory.open(folder))
        raise RecordError(
            f"read a record from {folder}",
            found="neither record.json nor config.json",
            rule="a folder that a recorder wrote, or a run directory",
            fix="check the path",
        )

    @classmethod
    def load(cls, folder: Path | str) -> Record:
        """Read a folder that a recorder or `save` wrote.

        Raises:
            RecordError: missing, damaged, or of another version.
        """
        folder = Path(folder)
        context = dict(files.read_context(folder))
        name = str(context.pop("name", folder.name))
        lines = files.read_steps(folder)
        names = MetricNames.of(context)
        steps = tuple(_loaded(folder, line, names) for line in lines)
        cast = next((step.observed["autocast"] for step in steps if "autocast" in step.observed), None)
        if cast is not None and context.get("precision") == "float32":  # that of the weights
            context["precision"] = {"bfloat16": "bf16_mixed", "float16": "fp16_amp"}.get(cast, cast)
        context = _sizes_by_other_names(context) | context
        noted = max((int(line.get("micro_batches") or 1) for line in lines), default=1)
        return cls({"micro_batches": noted} | context if noted > 1 else context, steps, name)

    def save(self, folder: Path | str) -> Path:
        """Write the record in a recorder's format.

        Raises:
            RecordError: the folder has a record already.
        """
        folder = Path(folder)
        if files.is_record(folder):
            raise RecordError(
                f"save a record to {folder}",
                found="a record",
                rule="records are never replaced",
                fix="choose another folder, or delete that one",
            )
        files.write_record(folder, {**self.context, "name": self.name})
        for step in self.steps:
            stored: dict[files.Kind, Mapping[str, Tensor]] = {"gradients": step.gradients, "tokens": step.tokens}
            for kind, tensors in stored.items():
                if tensors:
                    files.write_tensors(folder, step.number, kind, dict(whole(tensors)))
            files.append_step(
                folder,
                {"step": step.number, "loss": step.loss}
                | {name: dict(getattr(step, name)) for name in ("metrics", "gradient_norms", "counts")}
                | ({"evidence": dict(step.evidence)} if step.evidence else {})
                | ({"observed": dict(step.observed)} if step.observed else {})
                | ({"weight_norms": dict(step.weight_norms)} if step.weight_norms else {})
                | ({"partial_metrics": list(step.partial_metrics)} if step.partial_metrics else {}),
            )
        return folder

    @property
    def of_workbench(self) -> bool:
        """True for a run of the workbench, whose inputs of the loss follow from its settings and its rollouts."""
        return "denominator" in self.context and "observed" not in self.context

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts that its first step has."""
        first = self.steps[0] if self.steps else RecordedStep(0)
        names = ("loss", "metrics", "gradient_norms", "counts", "gradients", "tokens")
        values = {name: getattr(first, name) for name in names}
        return tuple(name for name, value in values.items() if (len(value) if name != "loss" else value is not None))

    def __repr__(self) -> str:
        """One-line summary."""
        sizes = ", ".join(
            f"{name}={self.context[name]}"
            for name in ("dp", "cp", "tp", "micro_batches", "precision")
            if self.context.get(name) not in (None, 1)
        )
        steps = f"{len(self.steps)} step{'s' * (len(self.steps) != 1)}"
        return f"Record({'; '.join(part for part in (f'{self.name}: {steps}', sizes, ', '.join(self.parts)) if part)})"


def _sizes_by_other_names(context: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of axes that a context has under the name of another trainer."""
    found = {}
    for axis, names in OTHER_NAMES.items():
        sizes = [context[name] for name in names if isinstance(context.get(name), int) and context[name] is not True]
        if sizes and axis not in context:
            found[axis] = int(sizes[0])
    return found


def _loaded(folder: Path, step: Mapping[str, Any], names: MetricNames) -> RecordedStep:
    number = int(step["step"])

    def of_kind(kind: files.Kind) -> LazyTensors:
        return LazyTensors(lambda: files.read_tensors(folder, number, kind))

    measured: dict[str, Any] = {
        name: step.get(name) or {} for name in ("gradient_norms", "counts", "evidence", "observed", "weight_norms")
    }
    tensors: dict[str, Any] = {kind: of_kind(kind) for kind in ("gradients", "tokens")}
    metrics, partial = names.renamed(step.get("metrics") or {}, step.get("partial_metrics") or ())
    return RecordedStep(number, step.get("loss"), metrics, **measured, **tensors, partial_metrics=partial)


# ---- run directories -------------------------------------------------------------------------------------


def _of_run(run: RunDirectory) -> Record:
    spec = run.spec
    written = run.steps()
    if not written:
        raise RecordError(
            f"read a record from {run.path.name}",
            found=f"no step; the run is {run.status}",
            rule="at least one step",
            fix="run it first",
        )
    online, counted = spec.online.on, with_advantages(spec) if spec.online.on else spec
    rollouts = None if online else _rollouts(project_root() / spec.data.path)
    steps = []
    for line in written:
        number = int(line["step"])
        tokens = _run_tokens(run, number, "tokens")
        counts: dict[str, float] = {}
        places: dict[str, Tensor] = {}
        since = number % spec.online.updates if online else number
        batch = _rollouts(run.path / "rollouts" / f"step{number - since:04d}") if online else rollouts
        if batch is not None:
            counts, places = placed(counted, batch, _documents_of_step(spec, batch, since), tokens)
        steps.append(
            RecordedStep(
                number,
                line.get("loss/total/sum"),
                {
                    key: float(value)
                    for key, value in line.items()
                    if "/" in key and isinstance(value, int | float) and not key.startswith(_NOT_METRICS)
                },
                line.get("gradient_norms") or {},
                counts,
                LazyTensors(partial(_run_tokens, run, number, "gradients")),
                {name: tokens[name] for name in tokens if name in _MEASURED_TOKENS or _OF_DEPTHS.match(name)} | places,
                {key: float(value) for key, value in line.items() if key.startswith(PREFIX)},
                read_certificate(run, number) if "certificate" in line else None,
                weight_norms=line.get("weight_norms") or {},
            )
        )
    return Record(context_of(spec, rollouts), tuple(steps), run.name)


def _run_tokens(run: RunDirectory, number: int, kind: str) -> dict[str, Tensor]:
    name = f"step{number:04d}.{kind}"
    return run.read_tensors(name) if run.has_tensors(name) else {}


def _rollouts(folder: Path) -> RolloutBatch | None:
    """The rollouts of a run, or of a step of a run that sampled them; None if they no longer exist."""
    try:
        return load(folder)
    except (OSError, WorkbenchError):
        return None


def context_of(spec: RunSpec, batch: RolloutBatch | None = None) -> dict[str, Any]:
    """Context of a run of this spec; the temperature is that of the rollouts if the spec has none."""
    layout, data = spec.layout, spec.data
    sampled = spec.online.temperature if spec.online.on else None if batch is None else batch.temperature
    context = {
        **{name: getattr(layout, name) for name in ("dp", "cp", "tp", "order", "attention", "sequence_parallel")},
        "micro_batches": data.micro_batches,
        "temperature": spec.policy.temperature or sampled,
        "learning_rate": spec.optimizer.learning_rate,
        "max_grad_norm": spec.optimizer.max_grad_norm,
        "optimizer": spec.optimizer.name,
        "denominator": spec.loss.denominator,
        "precision": spec.precision,
        **({"label_smoothing": spec.loss.label_smoothing} if spec.loss.label_smoothing else {}),
        **{name: size for name in ("ep", "pp") if (size := getattr(layout, name)) > 1},
        **({"checkpointing": True} if layout.checkpointing else {}),
        **{f"{CHANGES}{name}": getattr(spec.mixed_precision, name) for name in spec.mixed_precision.changed},
    }
    return {name: value for name, value in context.items() if value is not None}


def placed(
    spec: RunSpec, batch: RolloutBatch, documents: Sequence[int], tokens: Mapping[str, Tensor]
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Counts of a step, and the place and loss value of each of its tokens.

    They follow from the spec and the rollouts, computed whole on one rank; of the run only its log-probabilities enter.
    If ``tokens``, its recorded values, is empty, only the counts are computed.
    """
    chosen = compute_advantages(batch.select(documents), spec)
    rows = pack_step(chosen, spec)
    real = sum(int((row.document_ids_T != PADDING).sum()) for row in rows)
    masked = len(documents) - len(chosen.document_ids_T[chosen.loss_mask_T].unique())
    counts = {
        "documents": len(documents) - masked,
        "masked_documents": masked,
        "all_tokens": real,
        "trained_tokens": chosen.num_trained_tokens,
        "padded_tokens": sum(row.num_tokens for row in rows),
        "micro_batches": len(rows) // spec.layout.dp,
    }
    located = _places(spec, rows, batch, tokens) if tokens else {}
    return {name: float(value) for name, value in counts.items()}, located


def _documents_of_step(spec: RunSpec, batch: RolloutBatch, number: int) -> list[int]:
    each = spec.data.documents_per_step
    if each is None:
        return list(range(batch.num_documents))
    return [(number * each + place) % batch.num_documents for place in range(each)]


def _slices(plan: ShardPlan, tp: int) -> Tensor:
    """[T] number of the slice of each position of a row by sequence parallelism, over ranks of cp and then of tp."""
    slices_T = torch.empty(plan.num_tokens, dtype=torch.int64)
    for rank in range(plan.cp):
        positions_t = plan.positions(rank)
        slices_T[positions_t] = rank * tp + torch.arange(len(positions_t)) * tp // len(positions_t)
    return slices_T


def _places(
    spec: RunSpec, rows: Sequence[RolloutBatch], batch: RolloutBatch, tokens: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    values = {
        "documents": batch.document_ids_T.clone(),
        **{name: torch.full((batch.num_tokens,), -1) for name in ("rows", "shards", "places")},
        "positions": batch.positions_T.clone(),
    }
    if spec.layout.sequence_parallel and spec.layout.tp > 1:
        values["slices"] = torch.full((batch.num_tokens,), -1)
    penalties = spec.loss.squared_logit_coefficient, spec.loss.mean_squared_logit_coefficient
    if not any((*penalties, spec.loss.label_smoothing)):  # these need logits
        values["losses"] = torch.zeros(batch.num_tokens, dtype=torch.float64)
    lined_up = [
        shift_targets(row).map(lambda values_T: values_T.double() if values_T.is_floating_point() else values_T)
        for row in rows
    ]
    weights, totals = step_weights(lined_up, spec.loss)
    loss = build_loss(spec.loss)
    for number, (row, named) in enumerate(zip(lined_up, weights, strict=True)):
        known_T = row.source_T != PADDING
        source = row.source_T[known_T]
        values["rows"][source] = number
        values["places"][source] = torch.arange(row.tokens_T.shape[0])[known_T]
        plan = plan_row(row.document_ids_T, spec.layout)
        values["shards"][source] = plan.owners_T[known_T]
        if "slices" in values:
            values["slices"][source] = _slices(plan, spec.layout.tp)[known_T]
        if "losses" not in values:
            continue
        head_output = TokenLogprobs(
            *(tokens[name].double()[row.source_T.clamp_min(0)] for name in ("policy_logprobs", "entropy_nats"))
        )
        terms = evaluate_loss(loss, loss_inputs(row, head_output, totals), named, row.loss_mask_T).terms
        values["losses"][source] = token_values(terms).detach()[known_T]
    return values
