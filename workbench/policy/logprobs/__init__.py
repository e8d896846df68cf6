"""Hidden states to token log-probabilities: one meaning, several implementations by name."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from workbench.errors import ShapeError
from workbench.shapes import check_shapes

IMPLEMENTATIONS = ("reference", "vocabulary_parallel")


class TokenLogprobs(NamedTuple):
    """What the output head says about each token, in nats; every field carries a gradient.

    Attributes:
        logprobs_T: [T] log-probability of the target.
        entropy_T: [T] entropy of the distribution.
        logsumexp_T: [T] log of the normaliser of logits over temperature; what a squared-logit penalty holds small.
        mean_squared_logit_T: [T] mean over the vocabulary of the squared logits over temperature; None: not wanted.
    """

    logprobs_T: Tensor
    entropy_T: Tensor
    logsumexp_T: Tensor
    mean_squared_logit_T: Tensor | None = None


def logit_divisor(temperature: float | Tensor, targets_T: Tensor, dtype: torch.dtype) -> float | Tensor:
    """What logits are divided by: a number as it is, one value per token as a column of the logits' dtype.

    Shapes:   [T] -> [T, 1].
    Raises:   ShapeError: not one value per target, or a temperature that is not positive and finite.
    """
    if not isinstance(temperature, Tensor):
        if not 0 < temperature < float("inf"):
            raise ShapeError(f"token_logprobs: temperature = {temperature}", rule=_RULE, fix=_FIX)
        return temperature
    check_shapes("token_logprobs", targets_T=targets_T, temperature_T=temperature)
    if not bool(((temperature > 0) & torch.isfinite(temperature)).all()):
        at = torch.nonzero(~((temperature > 0) & torch.isfinite(temperature)))[:5, 0].tolist()
        raise ShapeError("token_logprobs: temperature_T", found=f"{temperature[at].tolist()} at {at}", rule=_RULE,
                         fix=_FIX)
    return temperature.to(dtype)[:, None]


_RULE = "a temperature divides logits: it is positive and finite, also where nothing counts"
_FIX = "give padding and masked tokens 1.0; greedy sampling has no temperature whose log-probabilities mean anything"
