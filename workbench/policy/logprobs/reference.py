"""Token log-probabilities, slow and simple: every logit, one log-softmax, one lookup.

Letters: T tokens | V vocabulary | D model dimension.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from workbench.policy.logprobs.head import TokenLogprobs, check_rows, computed_rows, logit_divisor, make_head, upcast
from workbench.policy.logprobs.truncated_support import TruncatedSupport, check_support
from workbench.shapes import check_shapes


def token_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    bias_V: Tensor | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    valid: int | None = None,
    active_T: Tensor | None = None,
    support: TruncatedSupport | None = None,
    outputs: Iterable[str] = ("entropy", "logsumexp"),
    fp32_head: bool = False,
) -> TokenLogprobs:
    """Compute the head's outputs per token from all logits; arguments as in `logprobs.token_logprobs`.

    Shapes:   hidden_TD [T, D], weight_VD [V, D], targets_T [T], bias_V [V] -> [T] each.
    Units:    nats.
    Backward: ordinary autograd, through all results.
    Raises:   ShapeError, SpecError: see `head` and `truncated_support`.
    """
    outputs = frozenset(outputs)
    if fp32_head:
        hidden_TD, weight_VD = upcast(hidden_TD), upcast(weight_VD)
    head = make_head(weight_VD, bias_V=bias_V, logit_scale=logit_scale, soft_cap=soft_cap, valid=valid)
    check_rows(head, hidden_TD, targets_T, temperature=temperature, active_T=active_T, outputs=outputs)
    active_T = computed_rows(targets_T, active_T)
    logits_TV = hidden_TD.where(active_T[:, None], 0.0) @ weight_VD.T
    if bias_V is not None:
        logits_TV = logits_TV + bias_V
    # Half precision is widened after the GEMM; float64 stays.
    logits_TV = logits_TV.to(head.wide) * logit_scale
    if soft_cap is not None:
        logits_TV = soft_cap * torch.tanh(logits_TV / soft_cap)
    logits_TV = logits_TV[:, : head.valid]
    targets_T = targets_T.where(active_T, 0)
    head_output = _outputs(logits_TV / logit_divisor(temperature, targets_T, head.wide), targets_T, outputs)
    if support is not None:
        check_support(support, targets_T, head)
        # Outside its support a token has no logit.
        logits_TV = logits_TV.masked_fill(active_T[:, None] & ~_is_kept(support, targets_T, head.valid), -torch.inf)
        truncated = _outputs(logits_TV / logit_divisor(temperature, targets_T, head.wide), targets_T, outputs)
        head_output = head_output._replace(
            support_logprobs_T=truncated.logprobs_T, support_entropy_T=truncated.entropy_T
        )
    return head_output.map(lambda x_T: x_T.where(active_T, 0.0))


def token_logprobs_from_logits(
    logits_TV: Tensor,
    targets_T: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    outputs: Iterable[str] = ("entropy", "logsumexp"),
) -> TokenLogprobs:
    """Compute the same outputs from given logits, for models that return them.

    Shapes:   logits_TV [T, V], targets_T [T] -> [T] each.
    Units:    nats.
    Backward: ordinary autograd, through all results.
    Raises:   ShapeError: sizes disagree, or a temperature that is not positive and finite.
    """
    check_shapes("token_logprobs_from_logits", logits_TV=logits_TV, targets_T=targets_T)
    # Half precision is widened; float64 stays.
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    scaled_TV, requested = logits_TV.to(wide) / logit_divisor(temperature, targets_T, wide), frozenset(outputs)
    output = _outputs(scaled_TV, targets_T, requested)
    if "mean_logit" not in requested:
        return output
    exists_TV = scaled_TV != -torch.inf
    return output._replace(mean_logit_T=scaled_TV.where(exists_TV, 0.0).sum(-1) / exists_TV.sum(-1))


def support_logits(logits_TV: Tensor, support_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Logits of a sampler with truncated support: -inf outside of it, the target always inside.

    Shapes:   logits_TV [T, V], support_TV [T, V] bool, targets_T [T] -> [T, V].
    Backward: 1 on the support, 0 elsewhere.
    Source:   top-p and top-k replay, THUDM/slime 624b824a (log_prob_keep_mask).
    """
    check_shapes("support_logits", logits_TV=logits_TV, support_TV=support_TV, targets_T=targets_T)
    return logits_TV.masked_fill(~support_TV.scatter(1, targets_T[:, None], True), -torch.inf)


def _outputs(scaled_TV: Tensor, targets_T: Tensor, requested: frozenset[str]) -> TokenLogprobs:
    logprobs_TV = torch.log_softmax(scaled_TV, dim=-1)
    chosen_T = logprobs_TV.gather(-1, targets_T[:, None]).squeeze(-1)
    exists_TV = scaled_TV != -torch.inf
    surprise_TV = logprobs_TV.exp() * logprobs_TV.where(exists_TV, 0.0)
    return TokenLogprobs(
        chosen_T,
        -surprise_TV.sum(-1) if "entropy" in requested else None,
        torch.logsumexp(scaled_TV, dim=-1) if "logsumexp" in requested else None,
        scaled_TV.where(exists_TV, 0.0).square().mean(-1) if "mean_squared_logit" in requested else None,
        scaled_TV.mean(-1) if "mean_logit" in requested else None,
    )


def _is_kept(support: TruncatedSupport, targets_T: Tensor, vocabulary: int) -> Tensor:
    """[T, V]: True if in the token's truncated support; an empty set means all, any other includes the target."""
    is_kept_TV = torch.zeros(len(targets_T), vocabulary, dtype=torch.bool, device=targets_T.device)
    for token, ids in enumerate(support.ids_P.split(support.offsets_S.diff().tolist())):
        is_kept_TV[token, ids if len(ids) else slice(None)] = True
        is_kept_TV[token, targets_T[token]] = True
    return is_kept_TV
