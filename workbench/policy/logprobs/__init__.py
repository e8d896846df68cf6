"""Hidden states to token log-probabilities: one definition, several implementations by name.

`token_logprobs` is the public API. It dispatches to a slow and simple reference, its vocabulary-parallel twin, or a
driver (`driver`) that never holds the logits of more than a chunk, over an engine: `chunked` (torch) or `triton`.

Letters: T tokens | V vocabulary (this rank's rows of the head) | D model dimension.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.policy.logprobs.head import Head, TokenLogprobs

if TYPE_CHECKING:
    from workbench.policy.logprobs.engine import Engine
    from workbench.policy.logprobs.truncated_support import TruncatedSupport
    from workbench.sharding.mesh import Axis

IMPLEMENTATIONS = ("reference", "vocabulary_parallel", "chunked", "triton")


class _Options(TypedDict):
    """Arguments that every implementation takes."""

    temperature: float | Tensor
    bias_V: Tensor | None
    logit_scale: float
    soft_cap: float | None
    valid: int | None
    active_T: Tensor | None
    support: TruncatedSupport | None
    outputs: Iterable[str]
    fp32_head: bool


def token_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    implementation: str = "auto",
    temperature: float | Tensor = 1.0,
    bias_V: Tensor | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    valid: int | None = None,
    active_T: Tensor | None = None,
    support: TruncatedSupport | None = None,
    outputs: Iterable[str] = ("entropy", "logsumexp"),
    expected_rows: int | None = None,
    fp32_head: bool = False,
    axis: Axis | None = None,
    first_token: int = 0,
    chunk_tokens: int | None = None,
    keep_bytes: int = 0,
) -> TokenLogprobs:
    """Log-probability of each target under the output head, and further statistics of its distribution.

    Formula:  a_v = logit_scale (h . w_v + b_v),   z_v = soft_cap tanh(a_v / soft_cap) / temperature
              logprob = z_target - log sum_v exp z_v

    Args:
        hidden_TD: hidden states, the same on every tp rank.
        weight_VD: the output head, or this rank's rows of it; may be the embedding too. Of the dtype of hidden.
        targets_T: ids in the whole vocabulary. A token whose id is negative is ignored.
        implementation: one of `IMPLEMENTATIONS`, or auto: triton where it can run, chunked elsewhere.
        temperature: divides logits, never log-probabilities; one number, or [T], one for each token.
        bias_V: of the rows of the head.
        logit_scale: multiplies logits, bias included.
        soft_cap: bounds logits, before the temperature; None: no bound.
        valid: number of local rows that exist; the others are padding with probability 0. None: all.
        active_T: [T] bool: the tokens that are computed; None: all. The others return 0 without gradient, at no cost.
        support: each token's truncated support in the sampler; None: not truncated.
        outputs: any of entropy, logsumexp, mean_squared_logit, mean_logit. With ``support``, entropy is also that of
            the support. Triton has no mean_logit of logits with a soft cap.
        expected_rows: number of tokens that are computed, if the caller knows it: the host then does not wait for a
            copy of the targets to count them. Only speed depends on it: a wrong number costs a second pass; for chunked
            and triton.
        fp32_head: cast hidden states and head to float32 first. Gradients have the dtypes of the originals.
        axis: the tensor-parallel axis, where ranks hold different rows of the head, any number each.
        first_token: vocabulary id of the first local row.
        chunk_tokens: rows whose logits exist at a time, for chunked and triton. None: 4,096, or with a vocabulary
            smaller than Qwen3's as many rows as have the same number of logits.
        keep_bytes: how much may be saved for backward. A saved chunk costs 3 GEMMs with the head, forward and
            backward together; a recomputed one 4; for chunked and triton.

    Shapes:   hidden_TD [T, D], weight_VD [V, D], targets_T [T] -> [T] each, float32 (float64 for float64).
    Units:    nats.
    Backward: through every result, to hidden, weight and bias. Hidden: summed over tp, once; weight and bias: local.
              The incoming gradients must be the same on every tp rank.
    Raises:   ShapeError: sizes or dtypes disagree, ids outside the vocabulary, a temperature that is not positive.
              SpecError: an invalid setting, or an implementation that cannot run here.
    """
    options: _Options = {
        "temperature": temperature,
        "bias_V": bias_V,
        "logit_scale": logit_scale,
        "soft_cap": soft_cap,
        "valid": valid,
        "active_T": active_T,
        "support": support,
        "outputs": tuple(outputs),
        "fp32_head": fp32_head,
    }
    if implementation == "auto":
        dtype = torch.promote_types(weight_VD.dtype, torch.float32) if fp32_head else weight_VD.dtype
        implementation = fastest(dtype, weight_VD.device)
    match implementation:
        case "reference":
            from workbench.policy.logprobs import reference

            if first_token or (axis is not None and axis.size > 1):
                raise SpecError(
                    "token_logprobs: implementation = 'reference'",
                    found=f"tp = {1 if axis is None else axis.size}, first_token = {first_token}",
                    rule="reference needs the whole vocabulary: tp = 1, from token 0",
                    fix="use auto, or vocabulary_parallel",
                )
            return reference.token_logprobs(hidden_TD, weight_VD, targets_T, **options)
        case "vocabulary_parallel":
            from workbench.policy.logprobs import vocabulary_parallel
            from workbench.sharding.mesh import Axis

            return vocabulary_parallel.token_logprobs(
                hidden_TD, weight_VD, targets_T, axis=axis or Axis("tp"), first_token=first_token, **options
            )
        case "chunked":
            from workbench.policy.logprobs.chunked import ChunkedEngine

            engine: Callable[[Head], Engine] = ChunkedEngine
        case "triton":
            from workbench.policy.logprobs.exp_epilogue.engine import ExpEpilogueEngine

            engine = ExpEpilogueEngine
        case _:
            raise SpecError(
                f"token_logprobs: implementation = {implementation!r}",
                rule=f"one of auto, {', '.join(IMPLEMENTATIONS)}",
                fix="use auto",
            )
    from workbench.policy.logprobs import driver

    return driver.token_logprobs(
        hidden_TD,
        weight_VD,
        targets_T,
        engine=engine,
        axis=axis,
        first_token=first_token,
        expected_rows=expected_rows,
        chunk_tokens=chunk_tokens,
        keep_bytes=keep_bytes,
        **options,
    )


@functools.cache
def triton_unsupported_reason(dtype: torch.dtype, device: torch.device) -> str | None:
    """Reason why the Triton engine cannot take operands of this dtype on this device; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    from workbench.policy.logprobs.exp_epilogue.kernels import unsupported_reason

    return unsupported_reason(dtype, device)


def fastest(dtype: torch.dtype, device: torch.device) -> str:
    """Return the fastest implementation without full logits for operands of this dtype on this device."""
    return "triton" if device.type == "cuda" and triton_unsupported_reason(dtype, device) is None else "chunked"
