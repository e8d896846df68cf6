"""One rank's part of the output head, the checks of its arguments, and its outputs per token.

With hidden state h, head row w_v, bias b_v:
    a_v = logit_scale * (h . w_v + b_v)
    a'_v = soft_cap * tanh(a_v / soft_cap)          without a soft cap a'_v = a_v
    z_v = a'_v / temperature                        what enters the softmax

Letters: T tokens | A rows that are computed | V vocabulary (this rank's rows of the head) | D model dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from workbench.errors import ShapeError, SpecError
from workbench.policy.logprobs.host import HostCopy
from workbench.shapes import check_shapes
from workbench.sharding.collectives import all_sum
from workbench.sharding.mesh import Axis

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Of the operands of the head's GEMM, or of logits."""

OUTPUTS = ("entropy", "logsumexp", "mean_squared_logit", "mean_logit")
"""Optional outputs besides the log-probability; each is a field of `TokenLogprobs`."""

FIELDS = 1 + len(OUTPUTS)
"""Leading fields of `TokenLogprobs`: the log-probability and `OUTPUTS`; those of truncated supports come after."""

_TEMPERATURE_RULE = "a temperature divides logits: it is positive and finite, also on padding and masked tokens"
_TEMPERATURE_FIX = (
    "give padding and masked tokens 1.0; greedy sampling has no temperature with meaningful log-probabilities"
)


class TokenLogprobs(NamedTuple):
    """Outputs of the head per token, in nats; every field is differentiable, None if not requested.

    With z the logits as they enter the softmax (scaled, capped, over the temperature) and p = softmax(z):

    Attributes:
        logprobs_T: [T] log-probability of the target.
        entropy_T: [T] entropy of the distribution.
        logsumexp_T: [T] log of the normaliser, log sum exp z.
        mean_squared_logit_T: [T] mean of z^2 over the vocabulary, for a squared-logit penalty; -inf counts as 0.
        mean_logit_T: [T] mean of z over the vocabulary, for label smoothing: less `logsumexp_T` it is the mean of the
            log-probabilities. Padding is not counted: rows of a head beyond `Head.valid`, given logits of -inf.
        support_logprobs_T: [T] log-probability of the target within the truncated support.
        support_entropy_T: [T] entropy of the distribution over the truncated support.
    """

    logprobs_T: Tensor
    entropy_T: Tensor | None = None
    logsumexp_T: Tensor | None = None
    mean_squared_logit_T: Tensor | None = None
    mean_logit_T: Tensor | None = None
    support_logprobs_T: Tensor | None = None
    support_entropy_T: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> TokenLogprobs:
        """Apply a function to every requested field."""
        others = (None if values_T is None else function(values_T) for values_T in self[1:])
        return TokenLogprobs(function(self.logprobs_T), *others)

    def within_support(self) -> tuple[TokenLogprobs, Tensor | None]:
        """Return outputs whose log-probabilities are those within the truncated supports, and the mass of each support.

        The entropy stays that of the whole vocabulary. Unchanged, and None, without supports.

        Formula:  mass = p / q of the target, for its probability p over the vocabulary and q within the support: the
                  probability of the support under this policy.
        Shapes:   [T] each.
        Backward: none through the mass.
        """
        if self.support_logprobs_T is None:
            return self, None
        mass_T = (self.logprobs_T.detach() - self.support_logprobs_T.detach()).exp()
        return self._replace(logprobs_T=self.support_logprobs_T, support_logprobs_T=None), mass_T


@dataclass(frozen=True)
class Head:
    """Map from hidden states to logits: the same weights and settings for every row.

    Attributes:
        weight_VD: rows ``first_token ...`` of the head.
        vocabulary: tokens that exist, over all tp ranks.
        valid: number of leading local rows that exist; the others are padding, with probability 0 and gradient 0.
        bias_V: of the local rows.
        logit_scale: multiplies logits, bias included.
        soft_cap: bounds logits by c tanh(a / c); None: no bound.
        axis: tensor-parallel axis; None, or an axis of size 1: the whole vocabulary is here.
        first_token: vocabulary id of the first local row.
    """

    weight_VD: Tensor
    vocabulary: int
    valid: int
    bias_V: Tensor | None = None
    logit_scale: float = 1.0
    soft_cap: float | None = None
    axis: Axis | None = None
    first_token: int = 0

    @property
    def wide(self) -> torch.dtype:
        """Dtype of everything between two GEMMs: float32, or float64 if the head is float64."""
        return torch.promote_types(self.weight_VD.dtype, torch.float32)

    @property
    def is_split(self) -> bool:
        """True if other ranks hold other rows."""
        return self.axis is not None and self.axis.group is not None

    def logits_(self, dots: Tensor, bias: Tensor | None, divisor: float | Tensor) -> Tensor:
        """Turn dot products h . w_v, in `wide`, into the logits z_v that enter the softmax, in place.

        Bias (of the same rows of the head) and divisor (the temperature) broadcast.
        """
        if bias is not None:
            dots += bias
        if self.logit_scale != 1.0:
            dots *= self.logit_scale
        if self.soft_cap is not None:
            dots.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        if isinstance(divisor, Tensor) or divisor != 1.0:
            dots /= divisor
        return dots

    def back_(self, gradient: Tensor, logits: Tensor, divisor: float | Tensor) -> Tensor:
        """Adjoint of `logits_`: turn the gradient of z into that of h . w_v and of the bias, in place.

        Formula:  logit_scale / temperature * (1 - (a'_v / soft_cap)^2) * dz_v,   a'_v = temperature * z_v
        """
        if self.soft_cap is not None:
            gradient *= 1 - (logits * divisor / self.soft_cap).square()
        if isinstance(divisor, Tensor) or divisor != 1.0:
            gradient /= divisor
        if self.logit_scale != 1.0:
            gradient *= self.logit_scale
        return gradient


def make_head(
    weight_VD: Tensor,
    *,
    bias_V: Tensor | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    valid: int | None = None,
    axis: Axis | None = None,
    first_token: int = 0,
) -> Head:
    """Return a head with validated settings; collective over tp, to check that the ranks' slices tile the vocabulary.

    Raises:
        ShapeError: sizes disagree, or columns that do not tile the vocabulary.
        SpecError: a scale or cap that is 0, infinite or NaN, or a cap that is negative.
    """
    check_shapes("token_logprobs", weight_VD=weight_VD, bias_V=bias_V)
    check_dtype("token_logprobs: weight", weight_VD)
    rows = weight_VD.shape[0]
    local_valid = rows if valid is None else valid
    if not 0 <= local_valid <= rows:
        raise ShapeError(
            f"token_logprobs: valid = {valid}",
            found=f"{rows} local rows of the head",
            rule="valid counts the local rows that exist; rows beyond are padding",
            fix="pass the vocabulary size minus first_token, clamped to between 0 and the local rows",
        )
    if not (logit_scale and abs(logit_scale) < float("inf")):
        raise SpecError(
            f"token_logprobs: logit_scale = {logit_scale}",
            rule="finite and not 0: it multiplies logits",
            fix="leave it at 1.0 for a model without one",
        )
    if soft_cap is not None and not 0 < soft_cap < float("inf"):
        raise SpecError(
            f"token_logprobs: soft_cap = {soft_cap}",
            rule="positive and finite: logits stay below it",
            fix="pass None for a model without one",
        )
    return Head(
        weight_VD,
        tiled_vocabulary_size(first_token, local_valid, axis, weight_VD.device),
        local_valid,
        bias_V,
        logit_scale,
        soft_cap,
        axis,
        first_token,
    )


def upcast(tensor: Tensor) -> Tensor:
    """Cast to float32 at least; the gradient has the original dtype."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def local_columns(local_T: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Local column of each target, counted from this rank's first; 0 if another rank has it. True if it is local."""
    is_local_T = (local_T >= 0) & (local_T < columns)
    return local_T.masked_fill(~is_local_T, 0), is_local_T


def check_outputs(what: str, outputs: Iterable[str], fix: str) -> None:
    """Raise a SpecError unless every requested output is one of `OUTPUTS`."""
    if unknown := sorted(set(outputs) - set(OUTPUTS)):
        requested = f"{what}: outputs = {', '.join(map(repr, unknown))}"
        raise SpecError(requested, rule=f"any of {', '.join(OUTPUTS)}", fix=fix)


def check_dtype(what: str, operand: Tensor) -> None:
    """Raise a ShapeError unless an operand has one of `DTYPES`."""
    if operand.dtype not in DTYPES:
        raise ShapeError(
            what,
            found=str(operand.dtype),
            rule="bfloat16, float16, float32 or float64",
            fix="cast it; a quantized head has to be dequantized first",
        )


def check_targets(what: str, targets_T: Tensor) -> None:
    """Raise a ShapeError unless targets are integers."""
    if targets_T.dtype not in (torch.int64, torch.int32):
        raise ShapeError(
            f"{what}: targets",
            found=str(targets_T.dtype),
            rule="vocabulary ids: int64, or int32",
            fix="pass ids, not masks, one-hot rows or probabilities",
        )


def check_expected_rows(what: str, expected_rows: int | None, targets_T: Tensor) -> None:
    """Raise a ShapeError unless an expected number of computed rows, if there is one, is possible."""
    if expected_rows is not None and not 0 <= expected_rows <= len(targets_T):
        raise ShapeError(
            f"{what}: expected_rows = {expected_rows}",
            found=f"{len(targets_T)} tokens",
            rule="the number of tokens that are computed",
            fix="count active targets on the host, or leave it out: then a copy of the targets is counted",
        )


def check_temperature(temperature: float | Tensor, targets_T: Tensor) -> None:
    """Check a number, or the shape of one value per token, without waiting for its device.

    Raises:   ShapeError: a number that is not positive and finite, not one value per target, or requires_grad.
    """
    if not isinstance(temperature, Tensor):
        if not 0 < temperature < float("inf"):
            raise ShapeError(
                f"token_logprobs: temperature = {temperature}", rule=_TEMPERATURE_RULE, fix=_TEMPERATURE_FIX
            )
        return
    check_shapes("token_logprobs", targets_T=targets_T, temperature_T=temperature)
    if temperature.requires_grad:
        raise ShapeError(
            "token_logprobs: temperature_T",
            found="requires_grad = True",
            rule="a temperature is given, not trained: no implementation has a gradient for it",
            fix="pass temperature_T.detach()",
        )


@overload
def logit_divisor(temperature: float, targets_T: Tensor, dtype: torch.dtype) -> float: ...
@overload
def logit_divisor(temperature: Tensor, targets_T: Tensor, dtype: torch.dtype) -> Tensor: ...
def logit_divisor(temperature: float | Tensor, targets_T: Tensor, dtype: torch.dtype) -> float | Tensor:
    """Divisor of the logits: a number unchanged, one value per token as a column in the logits' dtype.

    Shapes:   [T] -> [T, 1].
    Raises:   ShapeError: see `check_temperature`, and a value per token that is not positive and finite.
    """
    check_temperature(temperature, targets_T)
    if not isinstance(temperature, Tensor):
        return temperature
    if at := torch.nonzero(~((temperature > 0) & torch.isfinite(temperature)))[:5, 0].tolist():
        found = f"{temperature[at].tolist()} at {at}"
        raise ShapeError("token_logprobs: temperature_T", found=found, rule=_TEMPERATURE_RULE, fix=_TEMPERATURE_FIX)
    return temperature.to(dtype)[:, None]


def tiled_vocabulary_size(first_token: int, here: int, axis: Axis | None, device: torch.device) -> int:
    """Return the size of the vocabulary; check that the ranks' columns tile it exactly once. Collective over tp.

    Raises:   ShapeError: they do not.
    """
    pieces = [[first_token, here]]
    if axis is not None and axis.size > 1:
        table = torch.zeros(axis.size, 2, dtype=torch.int64, device=device)
        table[axis.rank] = torch.tensor(pieces[0])
        pieces = all_sum(table, axis).tolist()
    end = 0
    for first, count in pieces:
        if count and first != end:
            break
        end += count
    else:
        if end:
            return end
    raise ShapeError(
        "token_logprobs: the ranks' columns of the vocabulary",
        found=", ".join(f"{first} to {first + count}" for first, count in pieces),
        rule="they follow each other from 0, each token once, and there is at least one",
        fix="pass each rank's own first_token, and axis if tp shards the head",
    )


def check_rows(
    head: Head,
    hidden_TD: Tensor,
    targets_T: Tensor,
    *,
    temperature: float | Tensor,
    active_T: Tensor | None,
    outputs: Iterable[str],
) -> int:
    """Check rows and requested outputs against the head; return the number of computed rows.

    Waits for the device once.

    Raises:   see `queue_row_checks`.
    """
    return queue_row_checks(head, hidden_TD, targets_T, temperature=temperature, active_T=active_T, outputs=outputs)()


def queue_row_checks(
    head: Head,
    hidden_TD: Tensor,
    targets_T: Tensor,
    *,
    temperature: float | Tensor,
    active_T: Tensor | None,
    outputs: Iterable[str],
) -> Callable[[], int]:
    """Check rows and requested outputs against the head; queue what needs the device.

    Returns a function that waits for it and returns the number of computed rows.

    Raises:
        ShapeError: sizes or dtypes disagree, a computed target is not in the vocabulary, or a temperature is not
            positive and finite.
        SpecError: an unknown output is requested.
    """
    check_shapes(
        "token_logprobs", hidden_TD=hidden_TD, weight_VD=head.weight_VD, targets_T=targets_T, active_T=active_T
    )
    check_outputs("token_logprobs", outputs, "request only those, in a tuple; support=... adds its own outputs")
    if hidden_TD.dtype != head.weight_VD.dtype:
        raise ShapeError(
            "token_logprobs: dtypes",
            found=f"hidden {hidden_TD.dtype}, weight {head.weight_VD.dtype}",
            rule="hidden states and head have one dtype",
            fix="cast one of them, or pass fp32_head=True, which casts both to float32",
        )
    check_targets("token_logprobs", targets_T)
    if active_T is not None and active_T.dtype != torch.bool:
        raise ShapeError(
            "token_logprobs: active_T",
            found=str(active_T.dtype),
            rule="bool: which rows are computed",
            fix="compare first, such as active_T = weights_T != 0",
        )
    check_temperature(temperature, targets_T)
    # copied, not counted on the device: a copy takes less of its time than the launches of a count
    given = [targets_T, *([] if active_T is None else [active_T])]
    copy = HostCopy(*given, *([temperature] if isinstance(temperature, Tensor) else []))

    def wait() -> int:
        targets, *others = copy.wait()
        if isinstance(temperature, Tensor):
            logit_divisor(others[-1], targets, head.wide)
        ids = targets.numpy()  # torch's operators take four times as long (by hand), and the device may wait
        computed = ids >= 0
        if active_T is not None:
            computed &= others[0].numpy()
        outside = np.flatnonzero(computed & (ids >= head.vocabulary))[:5]
        if len(outside):
            raise ShapeError(
                "token_logprobs: targets",
                found=f"ids {ids[outside].tolist()} at {outside.tolist()}",
                rule=f"0 <= id < {head.vocabulary}, the whole vocabulary; a negative id is ignored",
                fix="replace ids that are not trained by -100, or leave their rows out of active_T",
            )
        return int(np.count_nonzero(computed))

    return wait


def active_rows(targets_T: Tensor, active_T: Tensor | None, count: int) -> Tensor | None:
    """[A] indices of the computed rows, in order; None: all rows.

    Their number, from `check_rows`, avoids a device synchronization.
    """
    if count == len(targets_T):
        return None
    return torch.sort((~computed_rows(targets_T, active_T)).to(torch.uint8), stable=True).indices[:count]


def computed_rows(targets_T: Tensor, active_T: Tensor | None) -> Tensor:
    """[T] bool: active (None: all are), with a target that is not negative."""
    return targets_T >= 0 if active_T is None else (targets_T >= 0) & active_T
