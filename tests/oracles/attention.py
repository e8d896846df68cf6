"""Attention, token by token: which keys a query sees is written out, and the softmax is over those alone."""

import torch


def sees(at, key, documents, window):
    """Return whether the token at one position sees another: documents by position; None for padding."""
    return key <= at and documents[at] == documents[key] and (window is None or at - key < window)


def attention(query, key, value, documents, *, scale, window=None, sinks=None):
    """Output [Hq, T, d] of queries [Hq, T, d] over keys and values [Hk, T, d]; autograd does the gradient.

    ``documents`` has for each place the number of its document; padding that stands apart has numbers of its own.
    ``sinks`` [Hq] are one more score of each query of a head, without a value.
    """
    share = query.shape[0] // key.shape[0]
    heads = []
    for head in range(query.shape[0]):
        k, v = key[head // share], value[head // share]
        rows = []
        for at in range(query.shape[1]):
            seen = [other for other in range(len(documents)) if sees(at, other, documents, window)]
            scores = scale * (k[seen] @ query[head, at])
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1]])
            weights = torch.softmax(scores, 0)
            rows.append(weights[: len(seen)] @ v[seen])
        heads.append(torch.stack(rows))
    return torch.stack(heads)


def normaliser(query, key, documents, *, scale, window=None):
    """log sum exp of the scores that each query sees, [Hq, T]."""
    share = query.shape[0] // key.shape[0]
    return torch.stack(
        [
            torch.stack(
                [
                    torch.logsumexp(
                        scale
                        * (
                            key[head // share][
                                [other for other in range(len(documents)) if sees(at, other, documents, window)]
                            ]
                            @ query[head, at]
                        ),
                        0,
                    )
                    for at in range(query.shape[1])
                ]
            )
            for head in range(query.shape[0])
        ]
    )
