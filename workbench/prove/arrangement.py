"""Arrangement of the documents of a step over ranks, and the outcome of a subject's step in it.

All ranks are simulated in this process, in float64, on a decoder of toy size: a loss's divisor does not depend on the
size of the model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from workbench.faults import planted
from workbench.policy.model import Policy, load_policy
from workbench.prove.documents import Document, to_batch
from workbench.prove.subject import Subject
from workbench.sharding.mesh import Mesh
from workbench.sharding.simulated import simulate
from workbench.specs.run import DataSpec, LayoutSpec, PolicySpec, RunSpec
from workbench.train import step as flow
from workbench.train.step import StepResult

TIMEOUT_S = 60.0
BLOCK_TOKENS = 2
"""Block size of the balanced order: rows here are short."""


@dataclass(frozen=True)
class Arrangement:
    """Documents of one optimizer step, and the place of each.

    Attributes:
        documents: of the whole step.
        rows: numbers of the documents of each row, in their order there: the micro-batches of the first dp rank, then
            those of the second, ...
        dp: data-parallel ranks.
        cp: context-parallel ranks.
        tp: tensor-parallel ranks.
        order: token order, which deals a row's tokens to cp ranks.
        attention: exchange of keys and values between cp ranks.
        sequence_parallel: True if tp ranks shard tokens between tensor-parallel layers.
        multiple_of: rows are padded to a multiple of this; None: of the layout's requirement.
        chunk_tokens: tokens whose logits exist at a time; None: all.
        fused: True to compute loss and gradient in one pass over the head, where that is possible.
    """

    documents: tuple[Document, ...]
    rows: tuple[tuple[int, ...], ...]
    dp: int = 1
    cp: int = 1
    tp: int = 1
    order: str = "contiguous"
    attention: str = "gathered"
    sequence_parallel: bool = False
    multiple_of: int | None = None
    chunk_tokens: int | None = None
    fused: bool = False

    @property
    def micro_batches(self) -> int:
        """Number of rows of each dp rank."""
        return len(self.rows) // self.dp

    @property
    def layout(self) -> LayoutSpec:
        """Layout of the ranks."""
        return LayoutSpec.model_validate(
            {
                "dp": self.dp,
                "cp": self.cp,
                "tp": self.tp,
                "order": self.order,
                "block_tokens": BLOCK_TOKENS,
                "attention": self.attention,
                "sequence_parallel": self.sequence_parallel,
            }
        )

    @property
    def tokens(self) -> int:
        """Tokens of all rows, with the padding that ``multiple_of`` adds."""
        each = self.multiple_of or 1
        lengths = [sum(len(self.documents[number].tokens) for number in row) for row in self.rows]
        return sum(max(1, -(-length // each)) * each for length in lengths)

    def spec(self, base: RunSpec) -> RunSpec:
        """A spec with this layout, packing and head, and the loss and the advantages of another."""
        policy = PolicySpec(temperature=base.policy.temperature)
        if self.chunk_tokens is not None:
            policy = PolicySpec(
                temperature=base.policy.temperature,
                logprobs="chunked",
                fused_loss=self.fused,
                chunk_tokens=self.chunk_tokens,
            )
        return RunSpec(
            loss=base.loss,
            layout=self.layout,
            policy=policy,
            precision="float64",
            faults=base.faults,
            data=DataSpec(
                advantages=base.data.advantages, keep_groups=base.data.keep_groups, multiple_of=self.multiple_of
            ),
        )

    def __str__(self) -> str:
        """Short description."""
        parts = [str(self.layout)]
        parts += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        if len(self.rows) > 1 or self.rows[0] != tuple(range(len(self.documents))):
            parts.append("documents " + " | ".join(" ".join(map(str, row)) or "none" for row in self.rows))
        padded = self.multiple_of is not None and self.tokens > sum(len(d.tokens) for d in self.documents)
        parts += [f"padded to {self.tokens} tokens"] if padded else []
        if self.chunk_tokens is not None:
            tokens = "1 token" if self.chunk_tokens == 1 else f"{self.chunk_tokens} tokens"
            parts.append(f"head {tokens} at a time{', fused' if self.fused else ''}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Outcome:
    """Result of a step in an arrangement, or the exception it raised.

    Attributes:
        loss: the total.
        gradients: whole, by parameter.
        metrics: by key, including the terms of the loss.
        idle: True if some rank had a micro-batch in which none of its tokens counts.
        error: exception, if one was raised.
    """

    loss: float = math.nan
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    idle: bool = False
    error: BaseException | None = None

    @property
    def norm(self) -> float:
        """Norm of the whole gradient."""
        return norm_of(self.gradients)


def norm_of(gradients: Mapping[str, Tensor]) -> float:
    """L2 norm of a whole gradient."""
    return math.sqrt(sum(float(values.square().sum()) for values in gradients.values()))


def perform(subject: Subject, arrangement: Arrangement) -> Outcome:
    """Take the step on every rank of an arrangement. An exception of a rank is part of the outcome."""
    spec = arrangement.spec(subject.run_spec)
    batch = to_batch(arrangement.documents)
    chosen: Any = replace(subject, run_spec=spec)  # type: ignore[type-var]

    idle = []

    def rank(mesh: Mesh) -> StepResult:
        rows, totals = flow.prepare_rows(batch, spec, mesh, arrangement.rows)
        idle.append(any(not bool(local.row.loss_mask_T.any()) for local in rows))
        return chosen.step(_policy(mesh, spec), rows, totals)

    try:
        with planted(spec.faults):
            result = simulate(rank, dp=arrangement.dp, cp=arrangement.cp, tp=arrangement.tp, timeout_s=TIMEOUT_S)[0]
    except Exception as error:
        return Outcome(idle=any(idle), error=error)
    terms = {f"loss/{name}": float(scalar) for name, scalar in result.loss.items() if name != "total"}
    return Outcome(float(result.loss["total"]), result.gradients, {**terms, **result.metrics}, any(idle))


def one_rank_policy() -> Policy:
    """The decoder of all proofs, unsharded."""
    return _copies(1)[0]


def one_row(documents: Sequence[Document], **settings: Any) -> Arrangement:
    """All documents in one row of one rank, unless settings override that."""
    return Arrangement(tuple(documents), (tuple(range(len(documents))),), **settings)


def _policy(mesh: Mesh, spec: RunSpec) -> Policy:
    """The decoder as sharded on one rank of a mesh. Ranks of one mesh have separate copies of the weights."""
    settings = spec.policy
    temperature = settings.temperature or 1.0
    if mesh["tp"].size > 1:
        implementation = "auto" if settings.logprobs == "reference" else settings.logprobs
        return load_policy(
            "tiny-qwen3",
            mesh=mesh,
            precision="float64",
            temperature=temperature,
            implementation=implementation,
            chunk_tokens=settings.chunk_tokens,
            sequence_parallel=spec.layout.sequence_parallel,
        )
    number = mesh["dp_cp"].rank
    whole = _copies(mesh["dp_cp"].size)[number]
    implementation = whole.implementation if settings.logprobs == "auto" else settings.logprobs
    return replace(
        whole, mesh=mesh, temperature=temperature, implementation=implementation, chunk_tokens=settings.chunk_tokens
    )


@functools.cache
def _copy(number: int) -> Policy:
    return load_policy("tiny-qwen3", precision="float64")


def _copies(number: int) -> list[Policy]:
    return [_copy(each) for each in range(number)]
