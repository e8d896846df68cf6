"""Token log-probabilities, slow and obvious: every logit, one log-softmax, one lookup.

Letters: T tokens | V vocabulary | D model dimension.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from workbench.policy.logprobs import TokenLogprobs, logit_divisor
from workbench.shapes import check_shapes


def token_logprobs(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, *, temperature: float | Tensor = 1.0,
                   bias_V: Tensor | None = None) -> TokenLogprobs:
    """Log-probability of each target under softmax(hidden @ weight.T / temperature), entropy and log-normaliser.

    Args:
        hidden_TD: hidden states.
        weight_VD: the output head.
        targets_T: vocabulary ids.
        temperature: divides the logits; one number, or [T], one for each token.
        bias_V: of the head.

    Shapes:   hidden_TD [T, D], weight_VD [V, D], targets_T [T], bias_V [V] -> three of [T].
    Units:    nats.
    Backward: ordinary autograd, through all results.
    Raises:   ShapeError: sizes disagree, or a temperature that is not positive and finite.
    """
    check_shapes("token_logprobs", hidden_TD=hidden_TD, weight_VD=weight_VD, targets_T=targets_T, bias_V=bias_V)
    logits_TV = hidden_TD @ weight_VD.T
    if bias_V is not None:
        logits_TV = logits_TV + bias_V
    return token_logprobs_from_logits(logits_TV, targets_T, temperature=temperature)


def token_logprobs_from_logits(logits_TV: Tensor, targets_T: Tensor, *, temperature: float | Tensor = 1.0,
                               wanted: Iterable[str] = ("entropy", "logsumexp")) -> TokenLogprobs:
    """The same from logits that are there already: for models that return them.

    Args:
        logits_TV: of each token.
        targets_T: vocabulary ids.
        temperature: divides the logits; one number, or [T], one for each token.
        wanted: mean_squared_logit, if it is; entropy and logsumexp are always there.

    Shapes:   logits_TV [T, V], targets_T [T] -> three of [T], or four.
    Units:    nats.
    Backward: ordinary autograd, through all results.
    Raises:   ShapeError: sizes disagree, or a temperature that is not positive and finite.
    """
    check_shapes("token_logprobs_from_logits", logits_TV=logits_TV, targets_T=targets_T)
    # Half precision is widened after the product; float64 stays.
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    scaled_TV = logits_TV.to(wide) / logit_divisor(temperature, targets_T, wide)
    logprobs_TV = torch.log_softmax(scaled_TV, dim=-1)
    chosen_T = logprobs_TV.gather(-1, targets_T[:, None]).squeeze(-1)
    return TokenLogprobs(chosen_T, -(logprobs_TV.exp() * logprobs_TV).sum(-1), torch.logsumexp(scaled_TV, dim=-1),
                         scaled_TV.square().mean(-1) if "mean_squared_logit" in wanted else None)


def kept_logits(logits_TV: Tensor, kept_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Logits of a sampler that draws among some tokens only: -inf on the others, the target always kept.

    Shapes:   logits_TV [T, V], kept_TV [T, V] bool, targets_T [T] -> [T, V].
    Backward: 1 on what is kept, 0 elsewhere.
    Source:   top-p and top-k replay, THUDM/slime 624b824a (log_prob_keep_mask).
    """
    check_shapes("kept_logits", logits_TV=logits_TV, kept_TV=kept_TV, targets_T=targets_T)
    return logits_TV.masked_fill(~kept_TV.scatter(1, targets_T[:, None], True), -torch.inf)
