"""A recorder for any training loop, which writes a folder for `workbench.diagnose`.

    recorder = wb.Recorder("records/mine", model, optimizer, context={"dp": 2, "micro_batches": 4})
    for micro_batch in step:
        loss = ...
        loss.backward()
        recorder.note(loss, counts={"documents": 8, "trained_tokens": 130})
    recorder.take_gradients()                       # only where gradients are clipped before the optimizer sees them
    optimizer.step()                                # writes the step

With ``shards=TensorShards(model, {"*.qkv.weight": 0, "*.out.weight": 1}, tp_group)`` a record has whole parameters of
a model that is sharded over tp (`workbench.sharding.given_parameters`).

By itself it sees settings of optimizers, dtypes, weights, replicas, dropout, clipping (`workbench.records.observed`).
It only reads: no gradient, weight or random number is changed. The model may be plain, DDP's, Megatron's DDP's
(its ``main_grad`` is read) or made of DTensors (FSDP2); gradients may come from several micro-batches. Every rank has
one and calls it alike; one writes. It needs torch and safetensors only.

A step in which no parameter has a gradient is refused: a record of zeros would look like that of a run. Trained
parameters without a gradient, if others have one, count as 0, and the step's line names them in ``no_gradient``.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from workbench.atomic import from_json, to_json
from workbench.errors import RecordError
from workbench.records import trainer_files as files
from workbench.records.inputs import Inputs, of_all_ranks, positional_names
from workbench.records.notes import Notes, of_parts
from workbench.records.observed import checksums, of_start, of_step
from workbench.records.outputs import Outputs
from workbench.records.outputs import of_all_ranks as outputs_of_all_ranks
from workbench.records.unsupported import cleared_buffers, no_gradient, refuse_unsupported
from workbench.records.watching import watch_clipping, watch_losses, weakly, when_backward_begins
from workbench.sharding.collectives import all_gather
from workbench.sharding.data_parallel import is_shard
from workbench.sharding.given_parameters import GivenParameters
from workbench.sharding.gradients import in_buffers, trained_parameters, whole_value
from workbench.sharding.mesh import Axis, GivenGroup, axis_of, world_axis


class Recorder:
    """Writes a record of a training run, step by step.

    Args:
        folder: of the record; it must not have one yet.
        model: whose gradients are recorded, under the names that its parameters have without wrappers.
        optimizer: whose step ends a step of the record; of several, the last one's, and the gradients of each are read
            at its own step. None: `step` is called manually.
        context: settings of the run, as JSON data: dp, cp, tp, micro_batches, order, temperature,
            max_grad_norm, denominator, ... Learning rate, optimizer and precision are added where they are missing;
            precision is that of the weights, mixed under torch's autocast; give "bfloat16" if the computation is in
            it otherwise.
        gradients: "norms", or "full" to store every gradient of every step.
        ranks: over which documents and tokens are dealt, as a group, a one-dimensional device mesh or an axis; None:
            all ranks of the job. A tp rank has the same tokens as its neighbours: give the group of dp, or dp x cp.
        engine: reduction of the ranks' gradients, "mean" (the default of DDP and FSDP) or "sum".
        scaler: of fp16 training; with it, a step that it skips is counted in ``skipped`` of the next line, and what was
            noted for it is left out.
        shards: how parameters are sharded, where they are neither whole on every rank nor DTensors.
        manual: `step` is called manually, and optimizers are only read, as those that an engine steps.

    Raises:
        RecordError: the folder has a record already; on every rank.
        SpecError: a model under FSDP1, whose flat shards cannot be identified; one that trains nothing.

    Example:
        >>> import tempfile
        >>> model = nn.Linear(2, 1)
        >>> recorder = Recorder(Path(tempfile.mkdtemp()) / "mine", model)
        >>> loss = model(torch.ones(3, 2)).sum()
        >>> loss.backward()
        >>> recorder.step(loss, counts={"documents": 3})
        >>> recorder
        Recorder(mine: 1 step)
    """

    _without: list[str]

    def __init__(
        self,
        folder: Path | str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        context: Mapping[str, Any] | None = None,
        gradients: Literal["norms", "full"] = "norms",
        ranks: GivenGroup | None = None,
        engine: Literal["mean", "sum"] = "mean",
        scaler: Any = None,
        shards: GivenParameters | None = None,
        manual: bool = False,
    ) -> None:
        self.folder, self.number, self._given = Path(folder), 0, shards or GivenParameters()
        self._model, self._parameters, self._keep = model, trained_parameters(model), gradients == "full"
        given = () if optimizer is None else (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        self._optimizers = tuple(map(_inner, given))
        self._scaler, self._scale, self._skipped = scaler, None if scaler is None else scaler.get_scale(), 0
        refuse_unsupported(model, self._parameters, self._given)
        world = world_axis()
        self._ranks = world if ranks is None else axis_of(ranks, "ranks")
        self._job = world if world.size > 1 else self._ranks
        self._share = 1 / self._ranks.size if engine == "mean" else 1.0
        self._reset()
        self._begin(dict(context or {}))
        stepped = () if manual else self._optimizers
        self._hooks = [each.register_step_pre_hook(self._before_step) for each in stepped]
        self._hooks.append(model.register_forward_pre_hook(self._see_call, with_kwargs=True))
        self._hooks.append(model.register_forward_hook(self._see_output))
        reached = when_backward_begins(self._parameters, self._see_gradient_before)
        self._hooks += reached
        self._tells_reach = bool(reached)
        self._undo: list[Callable[[], object]] = []
        self._stop_watching = [watch_losses(weakly(self._see_loss))]
        if self._optimizers:
            self._stop_watching.append(watch_clipping(self._parameters, weakly(self._before_clip)))
        for stop in self._stop_watching:  # one that is not closed watches no longer than it lives
            weakref.finalize(self, stop)

    def note(
        self,
        loss: Tensor | float | None = None,
        *,
        counts: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
        tokens: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Record this rank's micro-batch, or the step. No collective; may be called often, or never.

        Args:
            loss: as it was back-propagated here (divided by micro-batches where the trainer divides; without the factor
                of a GradScaler). Those of a step are summed, and reduced over the ranks as the engine reduces
                gradients: the recorded number is the one whose gradient is recorded. If none is noted in a step, it is
                what ``backward`` was called on.
            counts: of this rank's micro-batch: documents (that train), masked_documents, trained_tokens, all_tokens,
                padded_tokens, ...; summed likewise, over the ranks too.
            metrics: of the step, by key, as the trainer reports them; the last value of the writing rank is recorded.
                One that calls or ranks note with several values is of parts of the step (``partial_metrics``).
            tokens: per-token values of this rank's micro-batch, all of one shape, by the names of
                `trainer_files.TOKENS`; each value lies where its target does (policy_logprobs[t] is of token t). With
                ``source``, each token's place in the step (-1: none), they are put in that order; without it they keep
                their order, rank by rank. ``rows``, the micro-batch of each, are added.

        Raises:
            ShapeError: per-token values of several shapes, unknown names, or others than before in this step.
            RecordError: a metric that is no number.
        """
        self._forget_skipped()
        self._notes.add(loss, counts, metrics, tokens)

    def multiply_losses(self, factor: float) -> None:
        """Multiply the losses that were seen in this step, as an engine multiplied their gradients after backward."""
        self._seen_losses[:] = [value * factor for value in self._seen_losses]

    def take_gradients(self, *, max_norm: float | None = None) -> None:
        """Record gradients as they are now. Collective; without it, they are as the optimizer sees them, clipped.

        Before torch's clipping by norm (`watching.CLIPPING`) it is called by itself. ``max_norm`` is the bound of
        another clipping that follows; None: it is not recorded.

        Raises:
            RecordError: no parameter has a gradient on any rank.
        """
        self._take(self._parameters)
        self._refuse_no_gradient()
        if max_norm is not None:
            self._clips(max_norm)

    def _take(self, parameters: Mapping[str, nn.Parameter]) -> None:
        here = [name for name, parameter in parameters.items() if not self._given.has_gradient(parameter)]
        by_rank = self._gather_json({"none": here, "buffers": in_buffers(parameters)}, self._job)
        without = [name for name in here if all(name in rank["none"] for rank in by_rank)]
        norms = self._given.norms(parameters)
        self._buffers_of_zeros |= all(rank["buffers"] for rank in by_rank) and not any(norms.values())
        self._without = [name for name in self._without if name not in parameters] + without
        self._norms |= norms
        for name, parameter in parameters.items() if self._keep else ():
            gradient = self._given.whole_gradient(parameter)
            if self._writes:
                self._whole[name] = gradient.to("cpu", copy=True)

    def step(self, loss: Tensor | float | None = None, **values: Any) -> None:
        """Write the step, with what `note` takes. Collective; called by the hook of an optimizer that was given."""
        self.note(loss, **values)
        if missing := {name: value for name, value in self._parameters.items() if name not in self._norms}:
            self._take(missing)
        self._refuse_no_gradient()
        norms = {name: self._norms[name] for name in self._parameters}
        if self._buffers_of_zeros:
            self._refuse_cleared_buffers()
        seen = self._observed()
        losses = [float(whole_value(value)) for value in self._notes.losses] or self._seen()
        by_rank = self._gather_json({"losses": losses, **self._notes.as_json()})
        tokens, repeated = self._notes.gather_tokens(by_rank, self._ranks, self._device)
        if self._writes:
            losses = [value for rank in by_rank for value in rank["losses"]]
            counts: Counter[str] = Counter()
            noted = max(len(rank["losses"]) for rank in by_rank)
            for of_batch in (of_batch for rank in by_rank for of_batch in rank["counts"]):
                counts.update(of_batch)
            if self._whole:
                files.write_tensors(self.folder, self.number, "gradients", self._whole)
            if tokens:
                files.write_tensors(self.folder, self.number, "tokens", tokens)
            seen |= {"repeated": repeated} if repeated else {}
            line = {
                "step": self.number,
                "loss": self._share * math.fsum(losses) if losses else None,
                "metrics": self._notes.metrics,
                "gradient_norms": norms,
                "counts": dict(counts),
                "micro_batches": noted,
                "observed": seen,
            }
            partial = of_parts([rank["metrics"] for rank in by_rank], [rank["partial"] for rank in by_rank])
            more = {"no_gradient": self._without, "partial_metrics": partial}
            files.append_step(self.folder, line | {name: value for name, value in more.items() if value})
        self.number += 1
        self._reset()

    def at_close(self, undo: Callable[[], object]) -> None:
        """Call a function when the recorder is closed, as an attachment does that leaves a trainer as it was."""
        self._undo.append(undo)

    def close(self) -> None:
        """Remove the hooks from optimizers and from torch's clipping."""
        while self._undo:
            self._undo.pop()()
        for hook in self._hooks:
            hook.remove()
        for stop in self._stop_watching:
            stop()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Folder and number of recorded steps."""
        return f"Recorder({self.folder.name}: {self.number} step{'s' * (self.number != 1)})"

    # ---- start ---------------------------------------------------------------------------------------

    @property
    def _writes(self) -> bool:
        return self._job.rank == 0

    def _begin(self, context: dict[str, Any]) -> None:
        """Create the record on the rank that writes; its error is raised on every rank."""
        known: dict[str, Any] = {"precision": _name(next(iter(self._parameters.values())).dtype)}
        for optimizer in self._optimizers[:1]:
            known |= {"optimizer": type(optimizer).__name__.lower(), "learning_rate": optimizer.param_groups[0]["lr"]}
        known["observed"] = of_start(self._model, self._parameters, self._optimizers, self._given)
        problem: dict[str, str] = {}
        if self._writes:
            try:
                files.write_record(self.folder, known | context)
            except (RecordError, OSError) as error:
                problem = error.parts if isinstance(error, RecordError) else {"requested": str(error)}
        [writer_problem, *_] = self._gather_json(problem, self._job)
        if writer_problem:
            raise RecordError(**writer_problem)

    def _reset(self) -> None:
        self._notes = Notes()
        self._seen_losses: list[Tensor] = []
        self._reached = False
        self._norms: dict[str, float] = {}
        self._whole: dict[str, Tensor] = {}
        self._without = []
        self._buffers_of_zeros = False
        self._clip: dict[str, float] = {}
        self._clipped_after: int | None = None
        self._handed: dict[str, float] = {}
        self._stepped: set[int] = set()
        self._autocast, self._inputs = "", Inputs(positional_names(self._model))
        self._outputs = Outputs()
        self._met: list[bool | Tensor] = []

    # ---- evidence that needs no note -----------------------------------------------------------------

    def _before_step(self, optimizer: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Read the gradients of an optimizer that is about to step; with a closure, after its first call."""
        closure = options.get("closure", arguments[1] if len(arguments) > 1 else None)
        if closure is None:
            self._ends(optimizer)
            return None
        first = True

        def recorded() -> Any:
            nonlocal first
            loss = closure()
            if first:
                first = False
                if not self._notes.losses and not self._seen_losses and loss is not None:
                    self.note(loss)
                self._ends(optimizer)
            return loss

        return (arguments[0], recorded), {name: value for name, value in options.items() if name != "closure"}

    def _see_call(self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self._forget_skipped()
        if torch.is_autocast_enabled(self._device.type):
            self._autocast = _name(torch.get_autocast_dtype(self._device.type))
        self._inputs.see(arguments, named)

    def _see_output(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        if torch.is_grad_enabled():
            self._outputs.see(output, self._inputs.positions, self._inputs.ids)

    def _see_loss(self, loss: Tensor) -> None:
        """Keep a number that was back-propagated into this model: the loss of a micro-batch, if none is noted."""
        if self._reached or not self._tells_reach:
            self._seen_losses.append(loss.clone())
        self._reached = False

    def _seen(self) -> list[float]:
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        return [float(whole_value(value)) / scale for value in self._seen_losses]

    def _see_gradient_before(self, gradient: Tensor | None) -> None:
        """See the gradient that a parameter has when a backward reaches it."""
        self._reached = True
        self._met.append(False if gradient is None else gradient.detach().any())  # read later: no sync

    def _ends(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) in self._stepped:  # the others have no step of their own here
            self.step()
        self._stepped.add(id(optimizer))
        ids = {id(value) for group in optimizer.param_groups for value in group["params"]}
        own = {name: value for name, value in self._parameters.items() if id(value) in ids}
        if taken := {name: value for name, value in own.items() if name in self._norms}:
            self._handed |= self._given.norms(taken)
        if len(self._stepped) == len(self._optimizers):
            self.step()
        elif left := {name: value for name, value in own.items() if name not in self._norms}:
            self._take(left)

    def _clips(self, max_norm: float) -> None:
        self._clip["max_norm"] = float(max_norm)
        self._clipped_after = len(self._met) if self._clipped_after is None else self._clipped_after

    def _before_clip(self, max_norm: float, clipped: Mapping[str, nn.Parameter]) -> None:
        """Take the gradients of parameters of this model that torch is about to clip."""
        self._clips(max_norm)
        if left := {name: value for name, value in clipped.items() if name not in self._norms}:
            self._take(left)

    def _forget_skipped(self) -> None:
        """Leave out what was noted for a step that the scaler skipped: it lowered its scale since."""
        if self._scaler is None or self._scale == (scale := self._scaler.get_scale()):
            return
        if scale < self._scale and (self._notes or self._seen_losses):
            self._reset()
            self._skipped += 1
        self._scale = scale

    def _observed(self) -> dict[str, Any]:
        """`observed.of_step`, and equality of replicas, clipping and skipped steps. Collective."""
        seen = of_step(self._model, self._parameters, self._optimizers, self._given)
        if self._ranks.size > 1:
            by_rank = self._gather_json(checksums(self._parameters))
            off = [name for name, value in by_rank[0].items() if any(rank.get(name) != value for rank in by_rank)]
            seen["replicas"] = off[:8] or "equal"
        seen["inputs"] = of_all_ranks(self._gather_json(self._inputs.finish()))
        if outputs := outputs_of_all_ranks(self._gather_json(self._outputs.finish())):
            seen["outputs"] = outputs
        if self._met:
            first, *later = map(bool, self._met)
            seen |= {"cleared": not first, "met": [sum(later), len(later)]}
        if self._autocast:
            seen["autocast"] = self._autocast
        if self._clip:
            seen |= {"clip": dict(self._clip), "clipped_after": self._clipped_after}
        if times := [norm / self._norms[name] for name, norm in self._handed.items() if self._norms.get(name)]:
            norm = math.sqrt(math.fsum(value**2 for value in self._handed.values()))
            seen["given"] = {"norm": norm, "times": [min(times), max(times)]}
        if self._scaler is not None:
            seen |= {"scale": self._scale, "skipped": self._skipped}
            self._skipped = 0
        return seen

    def _refuse_no_gradient(self) -> None:
        """Refuse a step in which no parameter has a gradient on any rank, and forget it: it may be taken again."""
        if len(self._without) < len(self._parameters):
            return
        self._norms, self._whole, self._without = {}, {}, []
        raise no_gradient(self.number, list(self._parameters))

    def _refuse_cleared_buffers(self) -> None:
        """Refuse gradients of 0 that are all from ``main_grad``, unless the losses are 0, too.

        A buffer that was cleared before it was read looks like one to which nothing was added. Only a step in which
        nothing trains has both; its losses are exactly 0.
        """
        local = [float(whole_value(value)) for value in self._notes.losses]
        losses = [value for values in self._gather_json(local, self._job) for value in values]
        if not losses or any(losses):
            raise cleared_buffers(self.number, len(self._parameters), losses)

    # ---- collectives ---------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        """Device of the collectives."""
        first: Any = next(iter(self._parameters.values()))
        return torch.device(first.device_mesh.device_type) if is_shard(first) else first.device

    def _gather_json(self, value: Any, axis: Axis | None = None) -> list[Any]:
        """JSON values of all ranks, in rank order; they may differ in form, which collectives of tensors may not."""
        content = torch.frombuffer(bytearray(to_json(value, indent=None)), dtype=torch.uint8).to(self._device)
        return [from_json(bytes(piece.tolist())) for piece in all_gather(content, axis or self._ranks)]


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that steps, below a wrapper that decides when (Accelerate's)."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
