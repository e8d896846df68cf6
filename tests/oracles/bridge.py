"""Tokens of each rank on both sides of a bridge, cut from global tensors by plain loops.

A layout is (tp, cp, dp), tp fastest. `X` [B, S, H] is what the source's ranks hold parts of, `G` [B, S, H] the whole
gradient. Samples are dealt in order, the first dp ranks get one more where they do not divide; over cp a source's
sequence is dealt in contiguous pieces, a destination's in zigzag.
"""

from __future__ import annotations

import itertools

import torch


def factors(ranks):
    """Every (tp, cp, dp) of so many ranks."""
    return [
        (tp, cp, ranks // tp // cp)
        for tp in range(1, ranks + 1)
        for cp in range(1, ranks + 1)
        if ranks % (tp * cp) == 0
    ]


def places(layout):
    """(dp, cp, tp) of each rank: tp fastest, dp slowest."""
    tp, cp, dp = layout
    return list(itertools.product(range(dp), range(cp), range(tp)))


def counts(samples, parts):
    """Return the number of samples of each part."""
    dealt = [0] * parts
    for number in range(samples):
        dealt[number % parts] += 1
    return dealt


def dealt(samples, parts):
    """The samples of each part."""
    everyone = iter(range(samples))
    return [[next(everyone) for _ in range(count)] for count in counts(samples, parts)]


def piece(tokens, cp, rank):
    """Return the tokens of the rank-th of cp pieces."""
    return [token for token in range(tokens) if token * cp // tokens == rank]


def zigzag(tokens, cp, rank):
    """The tokens of a rank in zigzag: of 2 cp chunks the rank-th from the front and the rank-th from the back."""
    if cp == 1:
        return list(range(tokens))
    chunk = [token * 2 * cp // tokens for token in range(tokens)]
    return [token for token in range(tokens) if chunk[token] in (rank, 2 * cp - 1 - rank)]


def stretch(tokens, tp, rank):
    """The rank-th of tp equal stretches."""
    return tokens[rank * len(tokens) // tp : (rank + 1) * len(tokens) // tp]


def cut(tensor, samples, tokens):
    """Some samples and some tokens of a global tensor."""
    return tensor[torch.tensor(samples, dtype=torch.int64)][:, torch.tensor(tokens, dtype=torch.int64)]


def source_parts(tensor, layout):
    """Return each source rank's part of a global tensor: its activation, and the gradient that it should get."""
    _, cp, dp = layout
    samples = dealt(tensor.shape[0], dp)
    return [cut(tensor, samples[d], piece(tensor.shape[1], cp, c)) for d, c, _ in places(layout)]


def destination_parts(tensor, layout, *, sharded, over_tp=False):
    """Return each destination rank's part of a global tensor."""
    tp, cp, dp = layout
    samples, result = dealt(tensor.shape[0], dp), []
    for d, c, t in places(layout):
        tokens = zigzag(tensor.shape[1], cp, c) if sharded else list(range(tensor.shape[1]))
        result.append(cut(tensor, samples[d], stretch(tokens, tp, t) if over_tp else tokens))
    return result


def cotangents(tensor, layout):
    """Return each destination rank's gradient of its whole sequences: zero at other cp ranks' tokens."""
    _, cp, dp = layout
    samples, result = dealt(tensor.shape[0], dp), []
    for d, c, _ in places(layout):
        own = cut(tensor, samples[d], list(range(tensor.shape[1])))
        others = set(range(tensor.shape[1])) - set(zigzag(tensor.shape[1], cp, c))
        own[:, sorted(others)] = 0
        result.append(own)
    return result


def crossed(source_tokens, destination_tokens, values, gradients, consumers, answers=None):
    """Rows by token number, and their gradients, one row at a time.

    Args:
        source_tokens: for each rank, the tokens that it holds; below 0 for none.
        destination_tokens: for each rank, the tokens that it gets; below 0 for none.
        values: for each rank, its rows at the source.
        gradients: for each rank, its rows at the destination.
        consumers: for each rank, a label; ranks of one label are counted once.
        answers: for each rank, whether each row's gradient counts; None: all do.
    """
    row_of, total = {}, {}
    for tokens, rows in zip(source_tokens, values, strict=True):
        for token, row in zip(tokens, rows, strict=True):
            if token >= 0:
                row_of[token], total[token] = row, torch.zeros_like(row)
    seen = set()
    for rank, (tokens, rows) in enumerate(zip(destination_tokens, gradients, strict=True)):
        if consumers[rank] in seen:
            continue
        seen.add(consumers[rank])
        for place, (token, row) in enumerate(zip(tokens, rows, strict=True)):
            if token >= 0 and (answers is None or answers[rank][place]):
                total[token] = total[token] + row
    width = values[0].shape[1:]
    none = torch.zeros(width, dtype=values[0].dtype)

    def rows_of(tokens, named):
        rows = [named[token] if token >= 0 else none for token in tokens]
        return torch.stack(rows) if rows else torch.zeros(0, *width, dtype=none.dtype)

    return (
        [rows_of(tokens, row_of) for tokens in destination_tokens],
        [rows_of(tokens, total) for tokens in source_tokens],
    )
