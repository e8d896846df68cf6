"""Fingerprints of a step: its trace (every module's output and its gradient, per block of tokens) and its certificate.

Two traces show in which module, and for which tokens, two runs diverge; `workbench.compare.bisect` reads them. A
*station* is a tensor of the decoder's forward pass: the output of a module, or its input if that is no module's output
(attention, a residual sum, a product of two branches). ``traces/step0000.json`` lists stations in the order of the
forward pass, from the tokens to the log-probabilities, and their gradients in the reverse order.

A station's fingerprint for a block is a sum over its tokens on any rank: ranks add their parts, and the layout does not
change it. Padding does not count. Hooks modify nothing; every module must be called through its ``__call__``.

Letters: T tokens of a row | t tokens of this rank | F features of a token | B blocks of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from workbench.atomic import from_json
from workbench.errors import RecordError, SpecError
from workbench.records.certificate import Certificate, label
from workbench.records.directory import RunDirectory
from workbench.reproducible.fingerprints import fingerprint, fingerprints, row_fingerprints
from workbench.rollouts.batch import PADDING
from workbench.sharding.collectives import all_max, all_sum
from workbench.sharding.mesh import Axis
from workbench.sharding.pipeline import share_json
from workbench.sharding.tensor_parallel import ParameterShard
from workbench.train.rows import LocalRow

if TYPE_CHECKING:
    from workbench.policy.model import Policy
    from workbench.train.step import StepResult

TOKENS, LOGPROBS = "tokens", "logprobs"
"""The first station, and the last."""

INPUT = " (input)"
"""Suffix of a module's name for a station that is its input."""

Blocks = dict[str, list[list[str]]]


@dataclass(frozen=True)
class Trace:
    """Fingerprints by station.

    Attributes:
        block_tokens: tokens of a block.
        forward: station -> row of the step -> block -> sixteen hexadecimal digits, in the order of the forward pass.
        backward: the same for gradients, in the reverse order.
    """

    block_tokens: int
    forward: Blocks
    backward: Blocks


class Tracer:
    """Context manager that records the stations of this rank.

    Args:
        rows: this rank's micro-batches, in the order of their forward passes.
        block_tokens: tokens of a block.

    Raises:
        SpecError: tensor parallelism of a model whose linear layers hold their weights as [inputs, outputs].

    Example:
        >>> with Tracer(policy, rows, 64) as tracer:               # doctest: +SKIP
        ...     result = run_step(policy, loss, rows, totals, num_source=batch.num_tokens)
        >>> trace = tracer.finish(result.tokens["policy_logprobs"])  # doctest: +SKIP
        >>> trace.forward["model.layers.0.mlp"]                    # doctest: +SKIP
        [['0c9d4f...', '51a0b7...']]
    """

    def __init__(self, policy: Policy, rows: Sequence[LocalRow], block_tokens: int) -> None:
        self._policy, self._block_tokens, self._shards = policy, block_tokens, _ActivationShards(policy)
        self._rows = [_Row(local, block_tokens, policy.mesh["tp"]) for local in rows]
        self._numbers = itertools.cycle(range(len(rows)))  # a repeated step passes through all rows again
        self._current: _Row | None = None
        self._hooks: list[Any] = []

    def __enter__(self) -> Tracer:
        base = self._policy.model.base_model
        self._hooks = [base.register_forward_pre_hook(self._begin), base.register_forward_hook(self._end)]
        for name, module in self._policy.model.named_modules():
            if module is not base:
                self._hooks += [
                    module.register_forward_pre_hook(self._input_hook(name), with_kwargs=True),
                    module.register_forward_hook(self._output_hook(name)),
                ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def finish(self, logprobs_S: Tensor) -> Trace:
        """Sum the records of all ranks. Collective; the same on every rank.

        Args:
            logprobs_S: [S] of the step, in the order of the rollout dataset.
        """
        mesh, per_rank = self._policy.mesh, len(self._rows)
        for row in self._rows:
            row.add_logprobs(logprobs_S)
        stations = list(self._rows[0].forward)
        longest = torch.tensor(max(row.blocks for row in self._rows), device=mesh.device)
        shape = (2, len(stations), mesh["dp"].size * per_rank, int(all_max(longest, mesh["dp_cp"])))
        sums = torch.zeros(shape, dtype=torch.long, device=mesh.device)
        for number, row in enumerate(self._rows, mesh["dp"].rank * per_rank):
            for way, by_station in enumerate((row.forward, row.backward)):
                for place, station in enumerate(stations):
                    if station in by_station:
                        sums[way, place, number, : row.blocks] = by_station[station]
        for axis in ("dp_cp", "tp"):
            sums = all_sum(sums, mesh[axis])
        forward, backward = (dict(zip(stations, _as_text(way), strict=True)) for way in sums)
        back = [station for station in reversed(stations) if station in self._rows[0].backward]
        return Trace(self._block_tokens, forward, {station: backward[station] for station in back})

    def _begin(self, *_: object) -> None:
        self._current = self._rows[next(self._numbers)]
        self._current.begin()

    def _end(self, *_: object) -> None:
        self._current = None  # layers that backward recomputes are not traced

    def _input_hook(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            for row, value in self._activations((*inputs, named.get("hidden_states"))):
                if not row.knows(value):
                    row.record(f"{name}{INPUT}", value, self._shards.of(name, value, 1))

        return hook

    def _output_hook(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            for row, value in self._activations(output if isinstance(output, tuple) else (output,)):
                row.record(name, value, self._shards.of(name, value, 0))

        return hook

    def _activations(self, values: Sequence[Any]) -> list[tuple[_Row, Tensor]]:
        """Return the current row and the first value with an entry for each token of this rank, if there is one."""
        row = self._current
        if row is None:
            return []
        counts = (row.tokens, row.tokens // self._policy.mesh["tp"].size)
        return [
            (row, value)
            for value in values
            if isinstance(value, Tensor)
            and value.is_floating_point()
            and value.dim() > 2
            and value.shape[0] == 1
            and value.shape[1] in counts
        ][:1]


class _Row:
    """This rank's records of a row."""

    def __init__(self, local: LocalRow, block_tokens: int, tp: Axis) -> None:
        shard, self._row = local.attention, local.row
        self.block_tokens, self.tokens, self._tp = block_tokens, len(self._row.tokens_T), tp
        self._places_t = shard.positions_GUt[shard.outer.rank, shard.inner.rank].to(self._row.tokens_T.device)
        self._counts_t = self._row.document_ids_T != PADDING
        self.blocks = -(-shard.positions_GUt.numel() // block_tokens)
        self.forward: dict[str, Tensor] = {}
        self.backward: dict[str, Tensor] = {}
        self._alive: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Discard the records of an earlier attempt."""
        self.forward, self.backward, self._alive = {}, {}, {}
        self.forward[TOKENS] = self.fingerprints(self._row.tokens_T[None, :, None], None)

    def add_logprobs(self, logprobs_S: Tensor) -> None:
        """Record the log-probabilities of the finished row, and release its tensors."""
        source_t, self._alive = self._row.source_T, {}
        logprobs_t = logprobs_S.to(source_t.device)[source_t.clamp_min(0)].masked_fill(source_t == PADDING, 0)
        self.forward[LOGPROBS] = self.fingerprints(logprobs_t[None, :, None], None)

    def knows(self, value: Tensor) -> bool:
        """True if this tensor, or the base of this view, is recorded already."""
        return value.untyped_storage().data_ptr() in self._alive

    def record(self, station: str, value: Tensor, shard: ParameterShard | None) -> None:
        """Record a tensor, and its gradient when backward reaches it."""
        station = self.remember(station, value)
        self.forward[station] = self.fingerprints(value, shard)
        if value.requires_grad:
            value.register_hook(lambda gradient: self.backward.update({station: self.fingerprints(gradient, shard)}))

    def remember(self, station: str, value: Tensor) -> str:
        """Keep a tensor alive, so that its address stays unique; return the station's name in this row."""
        self._alive[value.untyped_storage().data_ptr()] = value
        earlier = sum(known.partition(" #")[0] == station for known in self.forward)
        return f"{station} #{earlier + 1}" if earlier else station

    def fingerprints(self, values: Tensor, shard: ParameterShard | None) -> Tensor:
        """[B] fingerprints of the blocks, from this rank's tokens and features. values: [1, t, ...]."""
        sums_B = torch.zeros(self.blocks, dtype=torch.long, device=values.device)
        places_t, counts_t = self._places_t, self._counts_t
        if len(places_t) != values.shape[1]:  # with sequence parallelism a tp rank holds a part of the tokens
            places_t, counts_t = (each_t.split(values.shape[1])[self._tp.rank] for each_t in (places_t, counts_t))
        elif shard is None and self._tp.rank:
            return sums_B  # replicated over tp: only the first rank counts
        local_tF = values[0].detach().reshape(values.shape[1], -1)
        columns_F, features = _columns(local_tF, shard, self._tp)
        fingerprints_t = row_fingerprints(local_tF, places_t * features, columns_F)
        return sums_B.index_add_(0, places_t // self.block_tokens, fingerprints_t * counts_t)


def _columns(local_tF: Tensor, shard: ParameterShard | None, tp: Axis) -> tuple[Tensor, int]:
    """Return the indices [F] of this rank's features among all features of a token, and the number of all."""
    count = local_tF.shape[1]
    columns_F = torch.arange(count, device=local_tF.device)
    if shard is None:
        return columns_F, count
    if not shard.parts:
        return columns_F + tp.rank * count, count * tp.size
    firsts = [sum(shard.parts[:number]) + tp.rank * part // tp.size for number, part in enumerate(shard.parts)]
    pieces = [columns_F[: part // tp.size] + first for first, part in zip(firsts, shard.parts, strict=True)]
    return torch.cat(pieces), count * tp.size


class _ActivationShards:
    """The sharding of module inputs and outputs over tp: replicated, or this rank's heads or features.

    Inside a block (a module with a row-parallel layer among its children) everything is sharded, except the inputs of
    column-parallel layers and the outputs of row-parallel ones.
    """

    def __init__(self, policy: Policy) -> None:
        self._layers = {}
        for name, shard in policy.shards.items():
            module, _, kind = name.rpartition(".")
            layer = policy.model.get_submodule(module)
            if kind == "weight" and shard.dim is not None and isinstance(layer, nn.Linear):
                self._layers[module] = (shard, layer)
            elif kind == "weight" and shard.dim is not None and hasattr(layer, "nf"):
                raise SpecError(
                    "record.trace_tokens",
                    found=f"tp={policy.mesh['tp'].size} and {module}, which holds its weight as [inputs, outputs]",
                    rule="layers split over tp are torch's own Linear",
                    fix="use tp=1 for a trace of this model",
                )
        self._blocks = tuple(
            f"{name.rpartition('.')[0]}." for name, (shard, _) in self._layers.items() if shard.dim == 1
        )

    def of(self, name: str, value: Tensor, dim: int) -> ParameterShard | None:
        """Return the shard of a module's input (dim 1 of a weight) or output (dim 0); None if replicated."""
        if name not in self._layers:
            return ParameterShard(0) if name.startswith(self._blocks) else None
        shard, layer = self._layers[name]
        if shard.dim != dim or value.shape[-1] != layer.weight.shape[dim]:
            return None
        return shard if dim == 0 else ParameterShard(0)


def _as_text(rows: Tensor) -> list[list[list[str]]]:
    """Format [stations, rows, blocks] integers as hexadecimal text."""
    return [[[f"{block & (1 << 64) - 1:016x}" for block in row] for row in station] for station in rows.tolist()]


def write_trace(run: RunDirectory, number: int, trace: Trace) -> None:
    """Write the trace of a step, before its line in the record."""
    run.write_json(_file(number), asdict(trace))


def read_trace(run: RunDirectory, number: int) -> Trace | None:
    """Return the trace of a step; None if none was recorded.

    Raises:
        RecordError: damaged.
    """
    path = run.path / _file(number)
    try:
        content: Mapping[str, Any] = from_json(path.read_bytes())
        return Trace(int(content["block_tokens"]), dict(content["forward"]), dict(content["backward"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"read {run.path.name}/traces/{path.name}",
            found=f"{type(error).__name__}: {error}",
            rule="a trace as it was written",
            fix="run the configuration again",
        ) from None


def _file(number: int) -> str:
    return f"traces/step{number:04d}.json"


# -- the certificate of a step: one hash for each number that it made --------------------------------------------------


class Marks(NamedTuple):
    """Fingerprints of this job's gradients, or weights, by parameter name; and the parameters whose replicas differ."""

    fingerprints: dict[str, int]
    differing_replicas: tuple[str, ...]


def fingerprint_gradients(policy: Policy) -> Marks:
    """Fingerprint the current gradients. Collective."""
    named = policy.model.named_parameters()
    gradients = {name: parameter.grad for name, parameter in named if parameter.requires_grad}
    return Marks(*fingerprints(gradients, policy.shards, policy.mesh))


def certify(policy: Policy, result: StepResult, gradients: Marks) -> Certificate:
    """Return the certificate of a finished step. Collective.

    Args:
        policy: with the weights after the step.
        result: of the step, with its tokens.
        gradients: from `fingerprint_gradients`, before they were clipped.
    """
    parameters = dict(policy.model.named_parameters())
    weights = Marks(*fingerprints(parameters, policy.shards, policy.mesh))
    logprobs_S = result.tokens["policy_logprobs"]
    labels = {"logprobs": label(logprobs_S.dtype, fingerprint(logprobs_S))}
    for name, scalar in result.loss.items():
        labels[f"loss/{name}/sum"] = label(torch.float64, fingerprint(torch.tensor(float(scalar), dtype=torch.float64)))
    of_stage, unlike, merged = dict[str, str](), list[str](), dict[str, str]()
    for kind, marks in (("gradient", gradients), ("weight", weights)):
        of_stage |= {f"{kind}/{name}": label(parameters[name].dtype, mark) for name, mark in marks.fingerprints.items()}
        unlike += [f"{kind}/{name}" for name in marks.differing_replicas]
    for there, unlike_there in share_json([of_stage, unlike], policy.mesh):  # two stages may share a parameter
        unlike += [*unlike_there, *(name for name, text in there.items() if merged.setdefault(name, text) != text)]
    names = list(parameters if policy.mesh["pp"].size == 1 else policy.shapes)
    labels |= {name: merged[name] for name in (f"gradient/{each}" for each in reversed(names)) if name in merged}
    labels |= {name: merged[name] for name in (f"weight/{each}" for each in names)}
    return Certificate(labels, tuple(dict.fromkeys(unlike)))
