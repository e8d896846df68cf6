"""Outputs of a model's calls, and their gradients: trained tokens, targets, weights, temperature, by row.

The gradient of a likelihood with respect to the logits of one prediction is c (softmax(z / T) - onehot(y)) / T. So
logits and their gradient alone tell whether a prediction trains, its target y (the largest element, and the only one of
its sign), the weight c / T, and the temperature: log |g_v| grows with z_v by 1 / T for v other than y. No note is
needed. Like every other evidence it explains numbers that differ, and is no difference by itself.

    observed["outputs"]  rows         one list a call, of one `ROW` for each row of its batch in which anything trains
                         every        1, or n if only each n-th prediction was read, see `MOST`
                         likelihoods  share of the trained predictions whose gradient has that form, or next to it an
                                      entropy's
                         slope        median of 1 / T over them; null if there are none
                         slopes       their quartiles: one temperature has one, and a term beside it moves some
                         bonus        median coefficient of an entropy in the others, where its gradient explains what
                                      a likelihood's leaves; null if there are none
                         normaliser   median coefficient of the squared normaliser, a z-loss, in the others; null
                         after        clear targets, and those among them that are the id of the prediction itself, the
                                      next, and the one after: of a shift too few, right, and one too many
                         values       of a second output with one number a prediction, a critic's: `VALUES`

Letters: B rows | T predictions of a row | V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.records.inputs import mixed
from workbench.sharding.data_parallel import is_shard

ROW = ("trained", "positive", "places", "targets", "weight", "size", "square", "logprob", "entropy", "clear")
"""Of a row: trained predictions; those with a positive weight; sums of mixed places and targets, as 16 digits; sums of
weights, of their absolute values and squares, of log-probabilities and entropies (T = 1); predictions whose gradient is
a likelihood's, so that their targets are what they seem."""
VALUES = ("trained", "value", "gradient", "size")
"""Of a critic's numbers: those with a gradient, their sum, and the sums of gradients and of their absolute values."""
MOST = 2**24
"""Numbers of one call's logits that are read: 64 MiB of float32, so 0.1 ms of traffic a pass on current devices."""
MOST_ROWS = 512
"""Rows of a step that are kept one by one; of more, those of a call are added up."""
VOCABULARY = 8
"""An output with fewer numbers a prediction is a score or a value."""
ONE_SIDED = 0.98
"""Share of a gradient's other elements that have the sign opposite to the target's: in bfloat16 each is right to 2^-9,
and an entropy bonus or a penalty of the size of a hundredth of the weight turns none."""
LARGEST = 3
"""Elements of a gradient among which a target next to an entropy is looked for: of a likelihood it is the first."""
UNBALANCED = 0.02
"""Sum of a gradient over the sum of its absolute values, up to which it is that of normalized logits, for which it is
0 but for rounding, in bfloat16 2^-9 at most. Hidden states have about 1 / sqrt(their number), losses of tokens 1."""
_INTEGERS, _FLOATS = 5, 5
_QUARTILES = torch.tensor([0.25, 0.75], dtype=torch.float64)


class Outputs:
    """Outputs of a model's calls since the last step."""

    def __init__(self) -> None:
        self._calls: list[dict[str, Tensor] | None] = []
        self._values: list[Tensor] = []
        self._every = 1

    def see(self, output: Any, positions: Tensor | None = None, ids: Tensor | None = None) -> None:
        """Add the output of a call for these vocabulary ids; without a gradient it is none of training.

        Where ``positions``, [B, T] or [T], that the model was given begin again, so does a row of the evidence.
        """
        logits, values = _found(output)
        if logits is None:
            return
        at = len(self._calls)
        self._calls.append(None)
        wide = logits.shape[-1]
        flat = logits.detach().reshape(-1, wide)
        every = max(1, math.ceil(flat.numel() / MOST))
        self._every = max(self._every, every)
        kept = flat[::every].clone()
        rows, after = _rows_of(logits, positions), _after(logits, ids)[:, ::every]
        reached: list[bool] = []

        def back(gradient: Tensor) -> None:
            second = bool(reached)  # a second backward through one call: neither is the whole
            if second or is_shard(gradient) or not _of_logits(gradient.reshape(-1, wide)[::every]):
                self._calls[at] = None
                return
            reached.append(True)
            self._calls[at] = _of_call(kept, gradient.reshape(-1, wide)[::every], rows[:, ::every], after)

        logits.register_hook(back)
        if values is not None:
            copied = values.detach().clone()
            values.register_hook(lambda gradient: self._values.append(_of_values(copied, gradient)))

    def finish(self) -> dict[str, Any]:
        """The outputs of this rank; {} if there were none, or one of them is not known."""
        if not self._calls or any(call is None for call in self._calls):
            return {}
        calls = [call for call in self._calls if call is not None]
        slopes = torch.cat([call["slopes"] for call in calls])
        bonuses, normalisers = (torch.cat([call[name] for call in calls]) for name in ("bonuses", "normalisers"))
        trained = sum(int(call["integers"][:, 0].sum()) for call in calls)
        rows = [
            _rows(call, together=sum(int((each["integers"][:, 0] > 0).sum()) for each in calls) > MOST_ROWS)
            for call in calls
        ]
        seen: dict[str, Any] = {"rows": rows, "every": self._every, "likelihoods": len(slopes) / max(trained, 1)}
        for name, each in (("slope", slopes), ("bonus", bonuses), ("normaliser", normalisers)):
            seen[name] = float(each.median()) if len(each) else None
        if len(slopes):
            seen["slopes"] = [float(each) for each in slopes.double().quantile(_QUARTILES)]
        seen["after"] = torch.stack([call["after"] for call in calls]).sum(0).tolist()
        if self._values:
            seen["values"] = torch.stack(self._values).sum(0).tolist()
        return seen


def of_all_ranks(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The calls of all ranks, one after another; {} if one is not known."""
    if not all(by_rank):
        return {}
    trained = [sum(row[0] for call in rank["rows"] for row in call) for rank in by_rank]
    share = sum(rank["likelihoods"] * number for rank, number in zip(by_rank, trained, strict=True))
    seen: dict[str, Any] = {
        "rows": [call for rank in by_rank for call in rank["rows"]],
        "every": max(rank["every"] for rank in by_rank),
        "likelihoods": share / max(sum(trained), 1),
    }
    for name in ("slope", "bonus", "normaliser"):
        known = sorted(rank[name] for rank in by_rank if rank[name] is not None)
        seen[name] = known[len(known) // 2] if known else None
    seen["after"] = [sum(column) for column in zip(*(rank["after"] for rank in by_rank), strict=True)]
    if quartiles := [rank["slopes"] for rank in by_rank if "slopes" in rank]:
        seen["slopes"] = [min(low for low, _ in quartiles), max(high for _, high in quartiles)]
    values = [rank["values"] for rank in by_rank if "values" in rank]
    return seen | ({"values": [math.fsum(column) for column in zip(*values, strict=True)]} if values else {})


def _found(output: Any) -> tuple[Tensor | None, Tensor | None]:
    """Logits and a critic's values among what a model returns; None where there are none with a gradient."""
    known = [value for value in _tensors(output) if value.is_floating_point() and value.requires_grad]
    known = [value for value in known if not is_shard(value) and value.numel()]
    logits = next((value for value in known if value.dim() > 1 and value.shape[-1] >= VOCABULARY), None)
    if logits is None:
        return None, None
    shapes = (logits.shape[:-1], (*logits.shape[:-1], 1))
    return logits, next((value for value in known if value.shape in shapes), None)


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif (logits := getattr(output, "logits", None)) is not None:  # transformers' outputs: the logits, not the loss
        yield from _tensors(logits)
        yield from _tensors(getattr(output, "value", None))
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value) if isinstance(value, Tensor) else ()
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors(value) if isinstance(value, Tensor) else ()


@torch.no_grad()
def _of_logits(gradient: Tensor) -> bool:
    """True if the gradients of most predictions, [predictions, V], may be those of logits.

    They sum to 0 if a loss normalizes the logits; with a squared normaliser next to it, one element is against all
    others. Hidden states and losses of tokens have neither.
    """
    gradient = gradient[gradient.ne(0).any(1)].float()
    size, total = gradient.abs().sum(1), gradient.sum(1)
    of_target = gradient.gather(1, gradient.abs().argmax(1, keepdim=True))[:, 0]
    against = -of_target.sign() * (total - of_target)
    fits = (total.abs() <= UNBALANCED * size) | (against > ONE_SIDED * (size - of_target.abs()))
    return not len(fits) or 2 * int(fits.sum()) > len(fits)


@torch.no_grad()
def _rows_of(logits: Tensor, positions: Tensor | None) -> Tensor:
    """[2, predictions] row and place in it of each prediction: rows of the batch, and parts of them with own positions.

    Padding, whose positions may all be 0, makes rows in which nothing trains.
    """
    wide = logits.shape[-2]
    place = torch.arange(logits.shape[:-1].numel(), device=logits.device)
    begins = place % wide == 0
    if positions is not None and positions.shape[-1] == wide:
        begins = begins | (positions.to(logits.device) == 0).expand(logits.shape[:-1]).reshape(-1)
    row = begins.long().cumsum(0) - 1
    return torch.stack([row, place - place[begins][row]])


@torch.no_grad()
def _after(logits: Tensor, ids: Tensor | None) -> Tensor:
    """[3, predictions] the vocabulary id at the place of each prediction, the next one, and the one after; -1: none."""
    if ids is None or ids.shape[-1] != logits.shape[-2] or ids.numel() != logits.shape[:-1].numel():
        return torch.full((3, logits.shape[:-1].numel()), -1, device=logits.device)
    wide = torch.nn.functional.pad(ids.to(logits.device), (0, 2), value=-1)
    return torch.stack([wide[..., k : k + ids.shape[-1]].reshape(-1) for k in range(3)])


@torch.no_grad()
def _of_call(logits: Tensor, gradient: Tensor, rows: Tensor, after: Tensor) -> dict[str, Tensor]:
    """Sums over each row, [B, `_INTEGERS`] and [B, `_FLOATS`], and the slopes of single predictions.

    ``rows``, [2, predictions], are the row of each, and its place in the row; ``after``, [3, predictions], of `_after`.
    """
    there = gradient.ne(0).any(1)
    (row, place), after = rows[:, there], after[:, there]
    logits, gradient = logits[there].float(), gradient[there].float()
    target = gradient.abs().argmax(1, keepdim=True)
    of_target = gradient.gather(1, target)[:, 0]
    whole = gradient.abs().sum(1)
    others = whole - of_target.abs()
    against = -of_target.sign() * (gradient.sum(1) - of_target)
    alike = (against > ONE_SIDED * others) & ((others - of_target.abs()).abs() <= (1 - ONE_SIDED) * whole)
    slopes = _slopes(logits, gradient, target)
    logprobs = logits.log_softmax(1)
    scaled = logprobs * torch.where(alike, slopes, torch.ones_like(slopes)).nan_to_num(1.0)[:, None]
    left = -torch.expm1(scaled.gather(1, target)[:, 0] - scaled.logsumexp(1))
    weight = -(of_target / left.clamp_min(1e-6)).double()
    bonuses = normalisers = torch.zeros(0, device=row.device)
    if bool((~alike).any()):
        beside, normalisers, (own_target, own_weight, own_slopes) = _beside_normaliser(logits, gradient, ~alike)
        target[beside, 0], weight[beside], slopes[beside] = own_target, own_weight, own_slopes
        alike = alike | beside
    clear, slopes = alike.clone(), torch.where(alike, slopes, torch.nan)
    if bool((~alike).any()) and len(_beside_entropy(logprobs[~alike], gradient[~alike])[1]):
        explained, bonuses, (own_target, own_weight, own_clear) = _beside_entropy(logprobs, gradient)
        target[explained, 0], weight[explained], clear[explained] = own_target, own_weight, own_clear
        slopes = torch.where(explained, torch.ones_like(slopes), slopes)
    of_token = logprobs.gather(1, target)[:, 0].double()
    entropy = -(logprobs.exp() * logprobs).sum(1).double()
    one, number = torch.ones_like(place), rows.shape[1]
    integers = torch.stack([one, (weight > 0).long(), mixed(place), mixed(target[:, 0]), clear.long()], 1)
    floats = torch.stack([weight, weight.abs(), weight.square(), of_token, entropy], 1)
    return {
        "integers": torch.zeros(number, _INTEGERS, dtype=torch.int64, device=row.device).index_add_(0, row, integers),
        "floats": torch.zeros(number, _FLOATS, dtype=torch.float64, device=row.device).index_add_(0, row, floats),
        "slopes": slopes[slopes.isfinite()],
        "bonuses": bonuses,
        "normalisers": normalisers,
        "after": torch.cat([clear.sum()[None], ((target[:, 0] == after) & clear).sum(1)]),
    }


def _beside_normaliser(
    logits: Tensor, gradient: Tensor, among: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Predictions whose gradient is a likelihood's and a squared normaliser's: which, its coefficients, and the rest.

    The rest: [R] targets, weights, slopes.

    The gradient of -c log p_y + c k (log sum exp z)^2 is (c + e) p - c onehot(y) with e = 2 c k log sum exp z: of all
    elements but y it is along p, and its sum is e, of the sign of all but y.
    """
    target = (gradient * gradient.sum(1, keepdim=True).sign()).argmin(1, keepdim=True)
    slopes = _slopes(logits, gradient, target)
    scaled = logits * slopes.nan_to_num(1.0)[:, None]
    p = scaled.softmax(1)
    of_target, p_target = gradient.gather(1, target)[:, 0], p.gather(1, target)[:, 0]
    a = (gradient.sum(1) - of_target) / (1 - p_target).clamp_min(1e-6)
    left = (gradient - a[:, None] * p).scatter(1, target, 0.0)
    weights = a * p_target - of_target
    explained = among & (left.abs().sum(1) <= (1 - ONE_SIDED) * gradient.abs().sum(1)) & (weights * a > 0)
    coefficients = (a / weights - 1) / (2 * scaled.logsumexp(1))
    rest = (target[explained, 0], weights[explained].double(), slopes[explained])
    return explained, coefficients[explained].float(), rest


def _beside_entropy(logprobs: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Predictions whose gradient is a likelihood's and an entropy's: which, the entropy's coefficients, and the rest.

    The rest: [R] targets, weights, and where a weight is large enough for its target to be clear.

    The gradient of c log p_y + e H is c (p - onehot(y)) + e p (log p + H), up to the sign: of v other than y linear in
    c and e, which least squares find; y is the element that they leave largest. It is first looked for without the
    `LARGEST` elements, one of which it mostly is, and then again without itself.
    """
    p = logprobs.exp()
    of_entropy = p * (logprobs - (p * logprobs).sum(1, keepdim=True))
    whole, target = gradient.abs().sum(1), gradient.abs().topk(LARGEST).indices
    for _ in range(3):
        a, b, g = (each.scatter(1, target, 0.0).double() for each in (p, of_entropy, gradient))
        aa, ab, bb, ag, bg = (a * a).sum(1), (a * b).sum(1), (b * b).sum(1), (a * g).sum(1), (b * g).sum(1)
        size = (aa * bb - ab * ab).clamp_min(torch.finfo(torch.float32).tiny)
        c, e = (ag * bb - bg * ab) / size, (bg * aa - ag * ab) / size
        left = gradient - c[:, None] * p - e[:, None] * of_entropy
        used, target = target, left.abs().argmax(1, keepdim=True)
    of_target, bar = left.gather(1, used)[:, 0], (1 - ONE_SIDED) * whole
    explained = (left.abs().sum(1) - of_target.abs() <= bar) & ((of_target + c).abs() <= bar)
    rest = (used[explained, 0], c[explained], (c.abs() > bar)[explained])
    return explained, e[explained].float(), rest


def _slopes(logits: Tensor, gradient: Tensor, target: Tensor) -> Tensor:
    """[R] slope of log |g_v| on z_v over the elements v that are not 0 and not the target."""
    used = gradient.ne(0).scatter(1, target, False)
    count = used.sum(1).clamp_min(1)
    x, y = (torch.where(used, each, torch.zeros_like(each)) for each in (logits, gradient.abs().log()))
    x, y = (each - (each.sum(1) / count)[:, None] for each in (x, y))
    x, y = (torch.where(used, each, torch.zeros_like(each)) for each in (x, y))
    return (x * y).sum(1) / x.square().sum(1)


@torch.no_grad()
def _of_values(values: Tensor, gradient: Tensor) -> Tensor:
    """The sums of `VALUES`."""
    there = gradient.ne(0)
    parts = (there, values * there, gradient, gradient.abs())
    return torch.stack([part.sum(dtype=torch.float64) for part in parts])


def _rows(call: Mapping[str, Tensor], *, together: bool) -> list[list[Any]]:
    there = call["integers"][:, 0] > 0
    integers, floats = call["integers"][there], call["floats"][there]
    if together:
        integers, floats = integers.sum(0, keepdim=True), floats.sum(0, keepdim=True)
    return [
        [trained, positive, f"{places % 2**64:016x}", f"{targets % 2**64:016x}", *sums, clear]
        for (trained, positive, places, targets, clear), sums in zip(integers.tolist(), floats.tolist(), strict=True)
    ]
