"""A dense attention operator with the arguments and the rules of torch's own of cuDNN.

`aten::_scaled_dot_product_cudnn_attention` and its backward of torch 2.11 to 2.13: [B, H, n, d], a causal mask aligned
to the first query and the first key, the backward with the log-normaliser [B, H, q, 1] that it is given.
"""

import torch


def _probabilities(query, key, is_causal, scale):
    share = query.shape[1] // key.shape[1]
    scores = scale * torch.einsum("bhqd,bhkd->bhqk", query, key.repeat_interleave(share, 1))
    if is_causal:
        q, k = scores.shape[-2:]
        assert q == k, "with other lengths the mask would be aligned to the first key"
        scores = scores.masked_fill(torch.arange(q)[:, None] < torch.arange(k), -torch.inf)
    return scores


def forward(query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask, *, scale):
    """Output [B, H, q, d] and log-normaliser [B, H, q, 1], float32."""
    assert (attn_bias, compute_log_sumexp, dropout_p, return_debug_mask) == (None, True, 0.0, False)
    scores = _probabilities(query, key, is_causal, scale)
    out = torch.einsum(
        "bhqk,bhkd->bhqd", scores.softmax(-1), value.repeat_interleave(query.shape[1] // key.shape[1], 1)
    )
    return out, scores.logsumexp(-1, keepdim=True).float(), None, None, 0, 0, None, None, None


def backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    philox_seed,
    philox_offset,
    attn_bias,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    *,
    scale,
):
    """Gradients of query, key and value."""
    assert (attn_bias, cum_seq_q, cum_seq_k, dropout_p) == (None, None, None, 0.0)
    assert (max_q, max_k) == (query.shape[2], key.shape[2])
    assert logsumexp.is_contiguous()
    assert (logsumexp.shape[-1], logsumexp.dtype) == (1, torch.float32)
    share = query.shape[1] // key.shape[1]
    wide_key, wide_value = (x.repeat_interleave(share, 1) for x in (key, value))
    p = (_probabilities(query, key, is_causal, scale) - logsumexp).exp()
    delta = (grad_out * out).sum(-1, keepdim=True)
    d_scores = p * (torch.einsum("bhqd,bhkd->bhqk", grad_out, wide_value) - delta) * scale
    d_query = torch.einsum("bhqk,bhkd->bhqd", d_scores, wide_key)
    d_key = torch.einsum("bhqk,bhqd->bhkd", d_scores, query).unflatten(1, (-1, share)).sum(2)
    d_value = torch.einsum("bhqk,bhqd->bhkd", p, grad_out).unflatten(1, (-1, share)).sum(2)
    return d_query, d_key, d_value
