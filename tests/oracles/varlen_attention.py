"""A variable-length attention operator, segment by segment, with the arguments and the rules of torch's own.

`aten::_flash_attention_forward` and `_backward` of torch 2.11 to 2.13: rows of all segments behind each other, a causal
mask aligned to the last query and the last key of its segment, a window given as keys before and after that diagonal
(-1: all). Rows that belong to no query come out NaN. Log-normalisers are float32, whatever computes them.
"""

import torch


def allowed(queries, keys, causal, before, after):
    """[queries, keys] bool."""
    diagonal = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)[None]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal or after >= 0:
        seen &= key <= diagonal + (0 if causal else after)
    if before >= 0:
        seen &= key >= diagonal - before
    return seen


def segments(query_starts, key_starts, longest_query, longest_key):
    """Slices of the rows of every segment that has queries."""
    assert query_starts.dtype == key_starts.dtype == torch.int32
    rows = [starts.tolist() for starts in (query_starts, key_starts)]
    for first, end, first_key, end_key in zip(rows[0][:-1], rows[0][1:], rows[1][:-1], rows[1][1:], strict=True):
        assert end - first <= longest_query
        assert end_key - first_key <= longest_key
        if end > first:
            yield slice(first, end), slice(first_key, end_key)


def forward(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale,
    window_size_left,
    window_size_right,
):
    """Output [q, Hq, d] and log-normaliser [Hq, q]."""
    assert max_q > 1, "torch reads the rows in another way where every segment has one query"
    assert (dropout_p, return_debug_mask) == (0.0, False)
    assert (int(cum_seq_q[-1]), int(cum_seq_k[-1])) == (len(query), len(key))
    share = query.shape[1] // key.shape[1]
    out = torch.full_like(query, torch.nan)
    lse = query.new_full((query.shape[1], len(query)), torch.nan)
    for rows, keys in segments(cum_seq_q, cum_seq_k, max_q, max_k):
        scores = scale * torch.einsum("qhd,khd->hqk", query[rows], key[keys].repeat_interleave(share, 1))
        seen = allowed(scores.shape[1], scores.shape[2], is_causal, window_size_left, window_size_right)
        scores = scores.masked_fill(~seen, -torch.inf)
        lse[:, rows] = scores.logsumexp(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[keys].repeat_interleave(share, 1))
    return out, lse.float(), None, None, None


def backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    rng_state,
    unused,
    *,
    scale,
    window_size_left,
    window_size_right,
):
    """Gradients of query, key and value, with probabilities from the log-normaliser that is given."""
    assert max_q > 1
    assert (dropout_p, logsumexp.dtype) == (0.0, torch.float32)
    assert logsumexp.is_contiguous()
    share = query.shape[1] // key.shape[1]
    d_query = torch.full_like(query, torch.nan)
    d_key, d_value = torch.zeros_like(key), torch.zeros_like(value)
    for rows, keys in segments(cum_seq_q, cum_seq_k, max_q, max_k):
        own_key, own_value = (x[keys].repeat_interleave(share, 1) for x in (key, value))
        scores = scale * torch.einsum("qhd,khd->hqk", query[rows], own_key)
        seen = allowed(scores.shape[1], scores.shape[2], is_causal, window_size_left, window_size_right)
        p = (scores.masked_fill(~seen, -torch.inf) - logsumexp[:, rows, None]).exp()
        delta = (grad_out[rows] * out[rows]).sum(-1).T[..., None]
        d_scores = p * (torch.einsum("qhd,khd->hqk", grad_out[rows], own_value) - delta) * scale
        d_query[rows] = torch.einsum("hqk,khd->qhd", d_scores, own_key)
        d_key[keys] = torch.einsum("hqk,qhd->khd", d_scores, query[rows]).unflatten(1, (-1, share)).sum(2)
        d_value[keys] = torch.einsum("hqk,qhd->khd", p, grad_out[rows]).unflatten(1, (-1, share)).sum(2)
    return d_query, d_key, d_value
