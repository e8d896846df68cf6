"""Facts that faults need of a layout, a model and the number of steps and rows."""

from __future__ import annotations

from workbench.sensitivity.facts import Facts, RowFacts, StepFacts
from workbench.sensitivity.need import Need

CP = Need("one cp rank", lambda f: f.spec.layout.cp > 1, "two cp ranks")
TP = Need("one tp rank", lambda f: f.spec.layout.tp > 1, "two tp ranks")
DP = Need("one dp rank", lambda f: f.spec.layout.dp > 1, "two dp ranks")
EP = Need("experts on one rank, or none", lambda f: f.spec.layout.ep > 1)
NO_REPLICAS_OF_EXPERTS = Need(
    "several ranks with the same experts",
    lambda f: f.spec.layout.ep == f.spec.layout.dp * f.spec.layout.cp,
)
PP = Need("one pipeline stage", lambda f: f.spec.layout.pp > 1)
RANKS = Need("one rank of dp x cp", lambda f: f.spec.layout.dp * f.spec.layout.cp > 1, "two dp ranks")
SEVERAL_RANKS = Need("one rank", lambda f: f.spec.layout.world_size > 1, "two dp ranks")
MICRO_BATCHES = Need(
    "one micro-batch", lambda f: f.any_step(lambda s: len(s.rows) > f.spec.layout.dp), "three micro-batches"
)
ROWS = Need("one row in the step", lambda f: f.any_step(lambda s: len(s.rows) > 1), "three micro-batches")
ROWS_OR_UNTRAINED = Need(
    "one row, in which every document trains",
    lambda f: f.any_step(lambda s: len(s.rows) > 1 or s.untrained > 0),
    "three micro-batches",
)
PIECES = Need(
    "one row on one rank, and a mean over tokens",
    lambda f: f.spec.layout.cp > 1 or f.spec.loss.denominator != "token" or ROWS.holds(f),
    "two cp ranks",
)
TRAINED_PIECES = Need(
    "the trained tokens are one document's on one rank, in a mean over tokens or documents",
    lambda f: (
        f.spec.loss.denominator not in ("token", "document")
        or f.any_step(
            lambda s: (
                sum(tokens > 0 for row in s.rows for tokens in row.shard_tokens) > 1
                or (f.spec.loss.denominator == "document" and sum(row.trained_documents for row in s.rows) > 1)
            )
        )
    ),
)
ADAPTERS = Need("no adapters", lambda f: f.spec.lora.on)
WHOLE_MODEL = Need("adapters, while the weight itself is frozen", lambda f: not f.spec.lora.on)
TIED = Need("a head with a weight of its own", lambda f: f.tied)
RANK_2 = Need("adapters of rank 1", lambda f: (f.spec.lora.r or 2) > 1)
SINKS = Need("a model without attention sinks", lambda f: f.sinks)
CHECKPOINTING = Need("activations that are not recomputed", lambda f: f.spec.layout.checkpointing)
PADDED = Need("no row has padding", lambda f: f.any_row(lambda r: r.padding > 0))
ROUTER = Need("a model without experts", lambda f: f.experts > 0)
REPLAYED_ROUTES = Need("routes are not replayed", lambda f: f.spec.routing.replays)
BALANCED = Need("no load-balancing loss", lambda f: bool(f.spec.routing.balance))
ROUTER_LOSS = Need("no loss of routers", lambda f: bool(f.spec.routing.balance or f.spec.routing.z))
SEQUENCE_PARALLEL = Need("no sequence parallelism", lambda f: f.spec.layout.sequence_parallel)
NO_SEQUENCE_PARALLEL = Need(
    "sequence parallelism, where all replicated weights need that sum", lambda f: not f.spec.layout.sequence_parallel
)
NOT_CONTIGUOUS = Need("contiguous shards", lambda f: f.spec.layout.order != "contiguous", "zigzag shards")
NOT_ZIGZAG = Need("zigzag shards, which is what the fault assumes", lambda f: f.spec.layout.order != "zigzag")
HEAD_COPIES = Need("no more ranks than key heads", lambda f: f.spec.layout.cp > f.key_heads)
STEPS_2 = Need("one step", lambda f: f.spec.steps >= 2, "four steps")
STEPS_3 = Need("fewer than three steps", lambda f: f.spec.steps >= 3, "four steps")


def _rank_rows(facts: Facts, step: StepFacts) -> list[tuple[RowFacts, ...]]:
    """Rows of each dp rank, in their order; those of the first rank are packed first."""
    each = len(step.rows) // facts.spec.layout.dp
    return [step.rows[at : at + each] for at in range(0, len(step.rows), each)] if each else []


TRAINED_EARLY = Need(
    "only the last micro-batch of each rank trains",
    lambda f: f.any_step(lambda s: any(row.tokens for rows in _rank_rows(f, s) for row in rows[:-1])),
)
TRAINED_LATE_ELSEWHERE = Need(
    "no rank but the first trains after its first micro-batch",
    lambda f: f.any_step(
        lambda s: any(
            sum(row.shard_tokens[0 if rank else 1 :]) for rank, rows in enumerate(_rank_rows(f, s)) for row in rows[1:]
        )
    ),
)
NO_EVIDENCE = Need(
    "changes reported numbers only, and they count trained tokens in a step",
    lambda f: all(not any(rows[-1].tokens for rows in _rank_rows(f, step)) for step in f.steps),
)
SPLIT_LATER = Need(
    "no trained document lies on several cp ranks behind the first forward pass",
    lambda f: (
        (f.spec.steps >= 2 and any(row.split_documents for step in f.steps[1:] or f.steps for row in step.rows))
        or f.any_step(lambda s: any(row.split_documents for rows in _rank_rows(f, s) for row in rows[1:]))
    ),
    "three micro-batches",
)
TRAINED_ROWS = Need(
    "one row trains", lambda f: f.any_step(lambda s: sum(row.tokens > 0 for row in s.rows) > 1), "three micro-batches"
)
SUMMED_OVER_RANKS = Need(
    "one rank of dp x cp x tp", lambda f: f.spec.layout.dp * f.spec.layout.cp * f.spec.layout.tp > 1, "two dp ranks"
)
