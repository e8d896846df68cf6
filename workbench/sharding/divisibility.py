"""Rules of divisibility that sharded code checks on every rank, and a launcher before processes start.

No torch: numbers in, nothing or an error out. Code that splits heads, features, vocabulary or rows calls the rule here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from workbench.errors import ShardingError, SpecError

if TYPE_CHECKING:  # the recorder, which uses the rules, runs where pydantic is missing
    from workbench.specs.groups import DataSpec, LayoutSpec, ReproducibleSpec

ROW_MULTIPLES = {"contiguous": 1, "zigzag": 2, "striped": 1, "document_zigzag": 2, "whole_documents": 2, "balanced": 1}
"""Token order -> multiple of cp (balanced: of blocks times cp) to which it pads rows."""


@dataclass(frozen=True)
class Multiples:
    """Padding multiples: of the tokens of a row (``row``) and of each document in it (``document``)."""

    row: int = 1
    document: int = 1


# ---- heads, features, vocabulary -------------------------------------------------------------------------


def check_heads(heads: Mapping[str, int], tp: int) -> None:
    """Raise if tp does not divide the heads, and name each kind of head that does not divide."""
    if indivisible := {name: count for name, count in heads.items() if count % tp}:
        raise ShardingError(
            f"tensor parallelism over tp={tp}",
            found=", ".join(f"{count} {name} heads" for name, count in indivisible.items()),
            rule="tp divides the query heads and the key/value heads",
            fix=f"choose tp among the common divisors of {sorted(set(heads.values()))}",
        )


def check_dealt_heads(queries: int, keys: int, ranks: int, axis: str) -> int:
    """Return how often each key head must be repeated so that the ranks divide the heads.

    Raises:
        ShardingError: query heads that the ranks do not divide, or key heads that neither divide the ranks nor are
            divided by them.
    """
    if queries % ranks or (keys % ranks and ranks % keys):
        raise ShardingError(
            f"attention over heads dealt to {ranks} ranks of {axis}",
            found=f"{queries} query heads and {keys} key/value heads on a rank",
            rule="the ranks divide the query heads, and divide the key/value heads or are divided by "
            "them; both are counted after the split over tp",
            fix="use attention ring or gathered, which do not split heads, or hybrid with fewer inner ranks",
        )
    return max(ranks // keys, 1)


def check_features(what: str, each: int, tp: int) -> None:
    """Raise if tp does not divide the features of a sharded layer."""
    if each % tp:
        raise ShardingError(
            f"tensor parallelism of {what} over tp={tp}",
            found=f"{each} features",
            rule="tp divides the features of every sharded layer",
            fix="choose a tp that divides them",
        )


def check_experts(what: str, experts: int, ep: int) -> None:
    """Raise if ep does not divide the experts of a mixture, or there are none."""
    if experts and not experts % ep:
        return
    raise ShardingError(
        f"layout.ep = {ep}",
        found=f"{experts} experts in {what}" if experts else f"no mixture of experts in {what}",
        rule="ep divides the experts of a mixture, the first dimension of the parameters of a module with num_experts",
        fix="choose a divisor of them"
        if experts
        else "leave layout.ep out; its ranks are those of dp x cp, so their number does not change",
    )


def check_stages(layers: int, pp: int, stages_per_rank: int, stage_layers: Sequence[int] = ()) -> None:
    """Raise if a decoder has too few layers for its pipeline stages, or the stages do not have all layers.

    Stages: pp * stages_per_rank. The last one may have the norm and the head alone.
    """
    if stage_layers and (sum(stage_layers) != layers or min(stage_layers[:-1]) < 1):
        raise ShardingError(
            f"pipeline stages of {', '.join(map(str, stage_layers))} layers",
            found=f"{sum(stage_layers)} layers in all; the decoder has {layers}",
            rule="every layer is in one stage, and every stage but the last has a layer",
            fix=f"give layout.stage_layers whose sum is {layers}, or leave it out for equal runs",
        )
    stages = pp * stages_per_rank
    if stages > layers + 1:
        each = f" x stages_per_rank={stages_per_rank}" if stages_per_rank > 1 else ""
        raise ShardingError(
            f"pipeline of pp={pp}{each} = {stages} stages",
            found=f"{layers} layers",
            rule="every stage but the last has a layer",
            fix=f"use at most {layers + 1} stages",
        )


def check_pieces(what: str, size: int, tp: int) -> int:
    """Return the ceil-sized piece of ``size`` items on a rank; raise if a rank would be empty."""
    piece = -(-size // tp)
    if piece * (tp - 1) >= size:
        raise ShardingError(
            f"{what}: {size} over tp={tp}",
            found=f"pieces of {piece} leave a rank empty",
            rule="every tp rank holds at least one",
            fix="use fewer tp ranks",
        )
    return piece


def check_weight_chunks(chunks: int, counts: Mapping[str, int], vocabulary: int, tp: int) -> None:
    """Raise if the pieces in which the reproducible mode computes a weight do not divide a model, or tp them."""
    wrong = [f"{count} {name}" for name, count in counts.items() if count % chunks]
    width = -(-vocabulary // chunks)
    if width * (chunks - 1) >= vocabulary or any(
        width * (chunks // 2**power) != -(-vocabulary // 2**power) for power in range(1, chunks.bit_length())
    ):
        wrong.append(f"{vocabulary} tokens of a vocabulary")
    if chunks % tp:
        wrong.append(f"tp={tp}")
    if wrong:
        raise SpecError(
            f"weight_chunks = {chunks}",
            found=", ".join(wrong),
            rule="it divides heads, key/value heads, features and the vocabulary (of which the last piece "
            "may be short, if tp shards it at the same rows), and tp divides it",
            fix="choose a smaller power of two, not below tp",
        )


# ---- rows ------------------------------------------------------------------------------------------------


def check_order(order: str) -> None:
    """Raise if the order is unknown."""
    if order not in ROW_MULTIPLES:
        raise ShardingError(
            f"shard plan with order {order!r}", rule=f"one of {', '.join(ROW_MULTIPLES)}", fix="correct layout.order"
        )


def padding_rule(order: str, cp: int, *, block_tokens: int = 128, tp: int = 1) -> Multiples:
    """Return the multiples to which rows and documents are padded; tp is 1 without sequence parallelism.

    Formula: row = lcm(order's own, cp tp), the order's own being cp (contiguous, striped), 2 cp (zigzag,
             document_zigzag, whole_documents) or block_tokens cp (balanced); document = 2 cp for the two by documents,
             else 1.

    Raises:
        ShardingError: unknown order, or a number below 1.

    Example:
        >>> padding_rule("document_zigzag", 4)
        Multiples(row=8, document=8)
    """
    check_order(order)
    if min(cp, block_tokens, tp) < 1:
        raise ShardingError(
            f"{order} order with cp={cp}, block_tokens={block_tokens}, tp={tp}",
            rule="all are at least 1",
            fix="correct the layout",
        )
    own = ROW_MULTIPLES[order] * cp * (block_tokens if order == "balanced" else 1)
    return Multiples(math.lcm(own, cp * tp), 2 * cp if order in ("document_zigzag", "whole_documents") else 1)


def multiples(layout: LayoutSpec, reproducible: ReproducibleSpec | None = None) -> Multiples:
    """Return the multiples to which rows and documents are padded; rows in the reproducible mode to whole blocks."""
    order = layout.order if layout.cp > 1 else "contiguous"  # on one rank all orders coincide
    rule = padding_rule(
        order, layout.cp, block_tokens=layout.block_tokens, tp=layout.tp if layout.sequence_parallel else 1
    )
    if (
        reproducible is None or reproducible.block_tokens is None or order == "balanced"
    ):  # "balanced" pads to whole blocks already
        return rule
    return replace(rule, row=rule.row * reproducible.block_tokens)


def check_row_multiple(data: DataSpec, layout: LayoutSpec, reproducible: ReproducibleSpec) -> int:
    """Return the multiple of tokens to which rows are padded.

    Raises:
        SpecError: one is given that the layout cannot split, or a capacity of rows that depends on the layout.
    """
    needed = multiples(layout, reproducible)
    if data.multiple_of is not None and data.multiple_of % needed.row:
        smaller = ", or a smaller layout.block_tokens" if layout.order == "balanced" else ""
        raise SpecError(
            f"data.multiple_of = {data.multiple_of}",
            found=f"layout {layout}",
            rule=f"rows of this layout are multiples of {needed.row} tokens in every step",
            fix=f"leave data.multiple_of out, or take a multiple of {needed.row}{smaller}",
        )
    multiple_of = data.multiple_of or needed.row
    if reproducible.on and data.micro_batch_tokens is not None and data.micro_batch_tokens % multiple_of:
        raise SpecError(
            f"data.micro_batch_tokens = {data.micro_batch_tokens} in the reproducible mode",
            found=f"layout {layout}",
            rule=f"rows of this layout are multiples of {multiple_of} "
            "tokens; with another multiple the capacity of a row, and so its documents, depend on the layout",
            fix=f"take a multiple of {multiple_of}, the same in every run that is to agree",
        )
    return multiple_of


# ---- documents -------------------------------------------------------------------------------------------


def check_documents_per_step(per_step: int | None, documents: int, path: str) -> None:
    """Raise if a step needs more documents than the rollout dataset has."""
    if per_step is not None and per_step > documents:
        raise SpecError(
            f"data.documents_per_step = {per_step}",
            found=f"{documents} documents in {path}",
            rule="a step takes each document at most once",
            fix="leave it out to take all of them",
        )


def check_documents_over_dp(documents: int, dp: int, micro_batches: int = 1) -> None:
    """Raise if a dp rank would have no document in any step; rows are dealt to the first rank first.

    A rank without tokens is legal (it enters every collective), so ranks do not refuse it: only a launcher does, for
    processes that never train anything.
    """
    rows = dp * micro_batches
    if documents <= (dp - 1) * micro_batches:
        raise ShardingError(
            f"{documents} documents a step over dp={dp}" + (f" x {micro_batches} micro-batches" * (micro_batches > 1)),
            found=f"{rows} rows, of which {rows - documents} are empty in every step, all those of dp rank {dp - 1}",
            rule="every dp rank has a document in each step",
            fix="use fewer dp ranks or micro-batches, or more documents per step",
        )
