"""A trace of a step: fingerprints of what every module made, and of its gradient, a block of tokens at a time.

Two traces say in which module, and for which tokens, two runs part; `workbench.compare.bisect` reads them. A *station*
is a tensor on the way through the decoder: what a module made, or what it was given where no module made that
(attention, a residual sum, a product of two branches). Stations stand in ``traces/step0000.json`` in the order of the
forward pass, from the tokens to the log-probabilities; the gradients that came back to them in the other order.

A station's fingerprint for a block is a sum over its tokens, wherever they lie: ranks add theirs up, and no layout
changes it. Padding counts nothing. Hooks look and touch nothing; every module has to be called as one.

Letters: T tokens of a row | t tokens of this rank | F features of a token | B blocks of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workbench.atomic import from_json
from workbench.errors import RecordError, SpecError
from workbench.records.directory import RunDirectory
from workbench.reproducible.fingerprints import row_fingerprints
from workbench.rollouts.batch import PADDING
from workbench.sharding.collectives import all_max, all_sum
from workbench.sharding.mesh import Axis
from workbench.sharding.tensor_parallel import ParameterShard

if TYPE_CHECKING:
    from workbench.policy.model import Policy
    from workbench.train.step import LocalRow

TOKENS, LOGPROBS = "tokens", "logprobs"
"""The first station, and the last."""

INPUT = " (input)"
"""What follows a module's name where the station is what it was given."""

Blocks = dict[str, list[list[str]]]


@dataclass(frozen=True)
class Trace:
    """What came by each station.

    Attributes:
        block_tokens: tokens of a block.
        forward: station -> row of the step -> block -> sixteen hexadecimal digits, in the order of the forward pass.
        backward: the same of gradients, in the other order.
    """

    block_tokens: int
    forward: Blocks
    backward: Blocks


class Tracer:
    """Notes what comes by on this rank between entering and leaving.

    Args:
        policy: whose modules are looked at.
        rows: this rank's micro-batches, in the order in which they go through.
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
        self._policy, self._block_tokens, self._lies = policy, block_tokens, _Lies(policy)
        self._rows = [_Row(local, block_tokens, policy.mesh["tp"]) for local in rows]
        self._numbers = itertools.cycle(range(len(rows)))  # a step that is tried again goes through all of them again
        self._now: _Row | None = None
        self._hooks: list[Any] = []

    def __enter__(self) -> Tracer:
        base = self._policy.model.base_model
        self._hooks = [base.register_forward_pre_hook(self._begin), base.register_forward_hook(self._end)]
        for name, module in self._policy.model.named_modules():
            if module is not base:
                self._hooks += [
                    module.register_forward_pre_hook(self._given(name), with_kwargs=True),
                    module.register_forward_hook(self._made(name)),
                ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def finish(self, logprobs_S: Tensor) -> Trace:
        """Add up what the ranks noted. Collective; the same on every rank.

        Args:
            logprobs_S: [S] of the step, in the order of the recording.
        """
        mesh, each = self._policy.mesh, len(self._rows)
        for row in self._rows:
            row.note_logprobs(logprobs_S)
        stations = list(self._rows[0].forward)
        longest = torch.tensor(max(row.blocks for row in self._rows), device=mesh.device)
        noted = torch.zeros(
            2,
            len(stations),
            mesh["dp"].size * each,
            int(all_max(longest, mesh["dp_cp"])),
            dtype=torch.long,
            device=mesh.device,
        )
        for number, row in enumerate(self._rows, mesh["dp"].rank * each):
            for way, notes in enumerate((row.forward, row.backward)):
                for place, station in enumerate(stations):
                    if station in notes:
                        noted[way, place, number, : row.blocks] = notes[station]
        for axis in ("dp_cp", "tp"):
            noted = all_sum(noted, mesh[axis])
        forward, backward = (dict(zip(stations, _written(way), strict=True)) for way in noted)
        back = [station for station in reversed(stations) if station in self._rows[0].backward]
        return Trace(self._block_tokens, forward, {station: backward[station] for station in back})

    def _begin(self, *_: object) -> None:
        self._now = self._rows[next(self._numbers)]
        self._now.begin()

    def _end(self, *_: object) -> None:
        self._now = None  # a layer that is computed again in backward is not looked at

    def _given(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            for value in self._activations((*inputs, named.get("hidden_states"))):
                if self._now is not None and not self._now.knows(value):
                    self._note(f"{name}{INPUT}", value, self._lies.given(name, value))

        return hook

    def _made(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, made: Any) -> None:
            for value in self._activations(made if isinstance(made, tuple) else (made,)):
                if self._now is not None:
                    self._note(name, value, self._lies.made(name, value))

        return hook

    def _activations(self, values: Sequence[Any]) -> list[Tensor]:
        """The first of them that holds something of each token of this rank, if there is one."""
        if self._now is None:
            return []
        counts = (self._now.tokens, self._now.tokens // self._policy.mesh["tp"].size)
        return [
            value
            for value in values
            if isinstance(value, Tensor)
            and value.is_floating_point()
            and value.dim() > 2
            and value.shape[0] == 1
            and value.shape[1] in counts
        ][:1]

    def _note(self, station: str, value: Tensor, shard: ParameterShard | None) -> None:
        row = self._now
        assert row is not None
        station = row.remember(station, value)
        row.forward[station] = row.said(value, shard)
        if value.requires_grad:
            value.register_hook(lambda gradient: row.backward.update({station: row.said(gradient, shard)}))


class _Row:
    """What this rank notes of a row."""

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
        """Forget what an earlier attempt noted."""
        self.forward, self.backward, self._alive = {}, {}, {}
        self.forward[TOKENS] = self.said(self._row.tokens_T[None, :, None], None)

    def note_logprobs(self, logprobs_S: Tensor) -> None:
        """The row is over: its predictions, and nothing need stay alive."""
        source_t, self._alive = self._row.source_T, {}
        said_t = logprobs_S.to(source_t.device)[source_t.clamp_min(0)].masked_fill(source_t == PADDING, 0)
        self.forward[LOGPROBS] = self.said(said_t[None, :, None], None)

    def knows(self, value: Tensor) -> bool:
        """Whether this tensor, or one that it is a view of, came by already."""
        return value.untyped_storage().data_ptr() in self._alive

    def remember(self, station: str, value: Tensor) -> str:
        """Keep a tensor alive, so that its place in memory is its own; returns the station's name in this row."""
        self._alive[value.untyped_storage().data_ptr()] = value
        again = sum(known.partition(" #")[0] == station for known in self.forward)
        return f"{station} #{again + 1}" if again else station

    def said(self, values: Tensor, shard: ParameterShard | None) -> Tensor:
        """[B] fingerprints of the blocks, as far as this rank's tokens and features go. values: [1, t, ...]."""
        said_B = torch.zeros(self.blocks, dtype=torch.long, device=values.device)
        places_t, counts_t = self._places_t, self._counts_t
        if len(places_t) != values.shape[1]:  # between blocks of sequence parallelism a tp rank holds a part of them
            places_t, counts_t = (each_t.split(values.shape[1])[self._tp.rank] for each_t in (places_t, counts_t))
        elif shard is None and self._tp.rank:
            return said_B  # every rank of tp holds the same, and the first one counts
        held = values[0].detach().reshape(values.shape[1], -1)
        columns_F, features = _columns(held, shard, self._tp)
        said_t = row_fingerprints(held, places_t * features, columns_F)
        return said_B.index_add_(0, places_t // self.block_tokens, said_t * counts_t)


def _columns(held: Tensor, shard: ParameterShard | None, tp: Axis) -> tuple[Tensor, int]:
    """Where this rank's features of a token stand among all, [F], and how many those are."""
    count = held.shape[1]
    columns_F = torch.arange(count, device=held.device)
    if shard is None:
        return columns_F, count
    if not shard.parts:
        return columns_F + tp.rank * count, count * tp.size
    firsts = [sum(shard.parts[:number]) + tp.rank * part // tp.size for number, part in enumerate(shard.parts)]
    return torch.cat(
        [
            torch.arange(first, first + part // tp.size, device=held.device)
            for first, part in zip(firsts, shard.parts, strict=True)
        ]
    ), count * tp.size


class _Lies:
    """How what modules read and make lies over tp: whole, or this rank's heads or features of it.

    Inside a block (a module with a row-cut layer among its children) everything is this rank's part, but for what goes
    into column-cut layers and what comes out of row-cut ones.
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
                    rule="layers cut over tp are torch's own Linear",
                    fix="use tp=1 for a trace of this model",
                )
        self._blocks = tuple(
            f"{name.rpartition('.')[0]}." for name, (shard, _) in self._layers.items() if shard.dim == 1
        )

    def given(self, name: str, value: Tensor) -> ParameterShard | None:
        """How the input of a module lies; None if whole."""
        shard, layer = self._layers.get(name, (None, None))
        if shard is not None:
            return ParameterShard(0) if shard.dim == 1 and value.shape[-1] == layer.weight.shape[1] else None
        return ParameterShard(0) if name.startswith(self._blocks) else None

    def made(self, name: str, value: Tensor) -> ParameterShard | None:
        """How what a module makes lies; None if whole."""
        shard, layer = self._layers.get(name, (None, None))
        if shard is not None:
            return shard if shard.dim == 0 and value.shape[-1] == layer.weight.shape[0] else None
        return ParameterShard(0) if name.startswith(self._blocks) else None


def _written(rows: Tensor) -> list[list[list[str]]]:
    """[stations, rows, blocks] integers, as text."""
    return [[[f"{block & (1 << 64) - 1:016x}" for block in row] for row in station] for station in rows.tolist()]


def write_trace(run: RunDirectory, number: int, trace: Trace) -> None:
    """Write the trace of a step, before its line in the record."""
    run.write_json(_file(number), asdict(trace))


def read_trace(run: RunDirectory, number: int) -> Trace | None:
    """The trace of a step; None where none was asked for.

    Raises:
        RecordError: damaged.
    """
    path = run.path / _file(number)
    try:
        read: Mapping[str, Any] = from_json(path.read_bytes())
        return Trace(int(read["block_tokens"]), dict(read["forward"]), dict(read["backward"]))
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
