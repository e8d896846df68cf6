"""A simulated step of a trainer: every rank, every micro-batch, every factor and every mean of its engine.

A contract is a mapping with the names of the settings; nothing is multiplied together beforehand. Source of what each
means: the definitions of data parallelism (each rank has its own rows), context parallelism (ranks share a row), and of
an engine that adds or averages gradients over ranks and accumulated micro-batches.
"""

from __future__ import annotations

from collections import defaultdict


def token_weights(lengths, contract, *, cp, divide):
    """The weight with which each token's gradient reaches the optimizer.

    Args:
        lengths: lengths[dp rank][micro-batch] is the list of trained tokens of its documents.
        contract: counts, multiplied_by, divided_by, replicated, engine_multiplies, engine_divides.
        cp: ranks that share a row; token t of a row lies on rank t % cp.
        divide: "token" (sum over tokens / tokens) or "document" (mean of document means).

    Returns:
        (dp rank, micro-batch, document, token) -> weight.
    """
    dp, micro_batches = len(lengths), len(lengths[0])
    size = {"dp": dp, "cp": cp, "dp_cp": dp * cp, "micro_batches": micro_batches}

    def population(rank, number):
        if contract["counts"] == "step":
            return [n for per_rank in lengths for row in per_rank for n in row]
        if contract["counts"] == "pass":
            return [n for per_rank in lengths for n in per_rank[number]]
        return lengths[rank][number]

    gradient = defaultdict(float)
    for rank in range(dp):
        for number in range(micro_batches):
            counted = population(rank, number)
            for shard in range(cp):
                place = 0
                for document, tokens in enumerate(lengths[rank][number]):
                    for token in range(tokens):
                        mine, place = place % cp == shard, place + 1
                        if not (mine or contract["replicated"]):
                            continue
                        weight = 1 / sum(counted) if divide == "token" else 1 / (len(counted) * tokens)
                        for name in contract["multiplied_by"]:
                            weight *= size[name]
                        for name in contract["divided_by"]:
                            weight /= size[name]
                        for name in contract["engine_multiplies"]:
                            weight *= size[name]
                        for name in contract["engine_divides"]:
                            weight /= size[name]
                        # the token's own rank, and through the gather's backward every rank that used it
                        gradient[rank, number, document, token] += weight
    return dict(gradient)
