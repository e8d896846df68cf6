"""Other ways to compute the advantages of a step, each by the name of a mistake.

Letters: T tokens | N documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workbench.check.alternatives import Alternative, group_size, permutations
from workbench.check.reading import Reading
from workbench.dumps.step import StepDump

_SCALES = {
    "none": "not divided by a deviation",
    "std": "divided by the deviation of the group",
    "batch_std": "divided by the deviation of the batch",
}
_NAMES = {
    "grpo": "reward minus the group's mean, over the group's deviation",
    "dr_grpo": "reward minus the group's mean",
    "rloo": "reward minus the mean of the others",
    "leave_one_out": "reward minus the mean of the others, over their deviation",
    "opo": "reward minus the length-weighted mean of the group",
    "reinforce_plus_plus": "returns, whitened over the batch",
    "reinforce_plus_plus_baseline": "reward minus the group's mean, whitened over the batch",
    "grpo_whitened": "advantages of groups, whitened over the batch",
    "gpg": "reward minus the group's mean, scaled up for groups of equal rewards",
}


def advantage_alternatives(reading: Reading) -> Iterator[Alternative]:
    """Yield the mistakes that change the advantages of a step."""
    if reading.estimator is None:
        return
    name, settings = reading.estimator
    for kind, text, other, changes in _estimators(name, settings):
        yield Alternative(kind, text, replace(reading, estimator=(other, changes)))
    for kind, text, change in _changes(reading.dump):
        yield Alternative(kind, text, replace(reading, of_advantages=change))
    dump = reading.dump
    for text, groups_N in _groupings(dump).items():
        yield Alternative("group", text, reading.with_documents(group_ids=groups_N))
    if "rewards" in dump.documents:
        rewards_N = dump.documents["rewards"]
        for text, order_N in permutations(dump).items():
            moved = reading.with_documents(rewards=rewards_N[order_N])
            yield Alternative("order", f"rewards of other documents ({text})", moved)
            if "group_ids" in dump.documents:
                both = moved.with_documents(group_ids=dump.documents["group_ids"][order_N])
                yield Alternative("order", f"advantages of other documents ({text})", both)
                moved_N = dump.documents["group_ids"][order_N]
                yield Alternative(
                    "group", f"groups of other documents ({text})", reading.with_documents(group_ids=moved_N)
                )
        yield Alternative("factor", "the sign of the rewards is reversed", reading.with_documents(rewards=-rewards_N))
        for dtype in (torch.bfloat16, torch.float16):
            text = f"rewards rounded to {str(dtype).removeprefix('torch.')}"
            rounded_N = rewards_N.to(dtype).double()
            yield Alternative("rounded", text, reading.with_documents(rewards=rounded_N))
    if "token_rewards" in dump.tokens:
        reversed_T = -dump.tokens["token_rewards"]
        text = "the sign of the rewards is reversed"
        yield Alternative("factor", text, reading.with_tokens(token_rewards=reversed_T))


Change = Callable[[StepDump, Tensor], Tensor]


def _changes(dump: StepDump) -> Iterator[tuple[str, str, Change]]:
    """Yield (kind, description, change) of mistakes after or in the place of the estimator."""
    yield "estimator", "advantages are whitened over the tokens of the batch, after the estimator", _whitened
    yield "estimator", "advantages are whitened over the documents of the batch, after the estimator", _standardised
    if (rows_N := dump.documents.get("rows")) is not None:
        for one, size in (("rank", dump.size("micro_batches")), ("micro-batch", 1)):
            text = f"advantages are whitened over the tokens of their {one}, after the estimator"
            yield "estimator", text, _whitened_in(rows_N // size)
    yield "estimator", "the batch's mean is subtracted, after the estimator", _centred
    yield "estimator", "advantages are divided by the length of their document", _by_length(-1)
    yield "estimator", "advantages are multiplied by the length of their document", _by_length(1)
    yield "estimator", "advantages enter by their size alone: |A|", lambda dump, A_T: A_T.abs()
    yield "estimator", "negative advantages are 0", lambda dump, A_T: A_T.clamp_min(0)
    yield "estimator", "advantages are clamped to -1 and 1", lambda dump, A_T: A_T.clamp(-1, 1)
    yield "estimator", "advantages are clamped to -5 and 5", lambda dump, A_T: A_T.clamp(-5, 5)
    for dtype in (torch.bfloat16, torch.float16):
        text = f"advantages rounded to {str(dtype).removeprefix('torch.')}"
        yield "rounded", text, _rounded(dtype)
    if "rewards" not in dump.documents:
        return
    yield "estimator", "rewards are the advantages: no baseline is subtracted", _of_groups(lambda r, m, s: r)
    yield (
        "estimator",
        "reward minus mean / deviation: parentheses are missing",
        _of_groups(lambda r, m, s: r - m / (s + 1e-4)),
    )
    yield (
        "estimator",
        "reward / deviation of the group: no baseline is subtracted",
        _of_groups(lambda r, m, s: r / (s + 1e-4)),
    )
    yield "estimator", "the variance divides, not the deviation", _of_groups(lambda r, m, s: (r - m) / (s * s + 1e-4))
    yield (
        "estimator",
        "the mean of the group divides, not the deviation",
        _of_groups(lambda r, m, s: (r - m) / (m + 1e-4)),
    )
    yield (
        "estimator",
        "the root of the variance + 1e-4 divides",
        _of_groups(lambda r, m, s: (r - m) / (s * s + 1e-4).sqrt()),
    )
    yield (
        "estimator",
        "the baseline is the mean of the batch, over the deviation of the group",
        _of_groups(lambda r, m, s: (r - r.mean()) / (s + 1e-4)),
    )
    yield "estimator", "the greatest reward of the group is its baseline", _greatest
    yield "estimator", "the reward minus the mean of the others, of which it is one: times n / (n - 1)", _of_others


def _rounded(dtype: torch.dtype) -> Change:
    return lambda dump, A_T: A_T.to(dtype).double()


def _trained(dump: StepDump) -> Tensor:
    return torch.bincount(dump.document_ids_T[dump.loss_mask_T], minlength=dump.num_documents) > 0


def _whitened(dump: StepDump, A_T: Tensor) -> Tensor:
    own_T = A_T[dump.loss_mask_T]
    return (A_T - own_T.mean()) / (own_T.var() + 1e-8).sqrt() if len(own_T) > 1 else A_T


def _whitened_in(pieces_N: Tensor) -> Change:
    def change(dump: StepDump, A_T: Tensor) -> Tensor:
        out_T, piece_T = A_T.clone(), pieces_N[dump.document_ids_T]
        for piece in pieces_N.unique():
            own_T = A_T[dump.loss_mask_T & (piece_T == piece)]
            if len(own_T) > 1:
                out_T = torch.where(piece_T == piece, (A_T - own_T.mean()) / (own_T.var() + 1e-8).sqrt(), out_T)
        return out_T

    return change


def _standardised(dump: StepDump, A_T: Tensor) -> Tensor:
    own_N = torch.zeros(dump.num_documents, dtype=A_T.dtype)
    own_N[dump.document_ids_T[dump.loss_mask_T]] = A_T[dump.loss_mask_T]
    own_N = own_N[_trained(dump)]
    return (A_T - own_N.mean()) / (own_N.std() + 1e-8) if len(own_N) > 1 else A_T


def _centred(dump: StepDump, A_T: Tensor) -> Tensor:
    own_T = A_T[dump.loss_mask_T]
    return A_T - own_T.mean() if len(own_T) else A_T


def _by_length(power: int) -> Change:
    def change(dump: StepDump, A_T: Tensor) -> Tensor:
        lengths_N = torch.bincount(dump.document_ids_T[dump.loss_mask_T], minlength=dump.num_documents)
        return A_T * lengths_N.clamp_min(1).double()[dump.document_ids_T] ** power

    return change


def _of_groups(formula: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Change:
    """Advantages as a formula of a reward, and of the mean and the deviation over n - 1 of its group."""

    def change(dump: StepDump, A_T: Tensor) -> Tensor:
        rewards_N, trained_N = dump.documents["rewards"].double(), _trained(dump).double()
        groups_N = dump.documents.get("group_ids", torch.arange(dump.num_documents))
        _, groups_N = groups_N.unique(return_inverse=True)

        def added(values_N: Tensor) -> Tensor:
            return values_N.new_zeros(dump.num_documents).index_add(0, groups_N, values_N * trained_N)[groups_N]

        count_N = added(torch.ones_like(rewards_N))
        mean_N = added(rewards_N) / count_N.clamp_min(1)
        deviation_N = (added((rewards_N - mean_N).square()) / (count_N - 1).clamp_min(1)).sqrt()
        return formula(rewards_N, mean_N, deviation_N)[dump.document_ids_T]

    return change


def _greatest(dump: StepDump, A_T: Tensor) -> Tensor:
    rewards_N = dump.documents["rewards"].double()
    groups_N = dump.documents.get("group_ids", torch.arange(dump.num_documents)).unique(return_inverse=True)[1]
    greatest_N = rewards_N.new_full((dump.num_documents,), -torch.inf).scatter_reduce(0, groups_N, rewards_N, "amax")
    return (rewards_N - greatest_N[groups_N])[dump.document_ids_T]


def _of_others(dump: StepDump, A_T: Tensor) -> Tensor:
    groups_N = dump.documents.get("group_ids", torch.arange(dump.num_documents)).unique(return_inverse=True)[1]
    sizes_N = torch.bincount(groups_N[_trained(dump)], minlength=dump.num_documents).double()[groups_N]
    return A_T * (sizes_N / (sizes_N - 1).clamp_min(1))[dump.document_ids_T]


def _estimators(name: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Yield (kind, description, estimator, settings)."""
    known = dict(settings)
    if name == "grpo":
        for scale, text in _SCALES.items():
            if scale != known.get("scale", "std"):
                yield "estimator", f"advantages are {text}", name, {**known, "scale": scale}
        ddof = 0 if known.get("ddof", 1) else 1
        text = f"the deviation divides by n{' - 1' * ddof}"
        yield "estimator", text, name, {**known, "ddof": ddof}
        for epsilon in (1e-6, 1e-8, 1e-5, 1e-4, 1e-3, 1e-2, 1.0, 0.0):
            if epsilon != known.get("epsilon"):
                yield "estimator", f"{epsilon:g} is added to the deviation", name, {**known, "epsilon": epsilon}
        text = "the only completion of its prompt has its reward as advantage, not 0"
        yield "estimator", text, name, {**known, "singleton": "reward"}
    masked = not known.get("masked_in_baseline", False)
    text = f"documents without a trained token {'count' if masked else 'do not count'} in their group"
    yield "mask", text, name, {**known, "masked_in_baseline": masked}
    for other, text in _NAMES.items():
        if other != name:
            yield "estimator", f"advantages are {text} ({other})", other, {}


def _groupings(dump: StepDump) -> dict[str, Tensor]:
    """Wrong groups, by description."""
    number, size = dump.num_documents, group_size(dump)
    numbers_N = torch.arange(number)
    groups = {"all documents are one group": torch.zeros_like(numbers_N)}
    sizes = {size} if size > 1 else set[int]()
    if (given_N := dump.documents.get("group_ids")) is not None and size == 1:
        counts_P = given_N.unique(return_counts=True)[1]
        likely = {int(counts_P.max()), int(counts_P.median()), round(number / len(counts_P)), 2, 3, 4, 8}
        sizes = {one for one in likely if 1 < one < number}
    for size in sorted(sizes):
        count = max(1, number // size)
        groups[f"a group is {size} consecutive documents"] = numbers_N // size
        groups[f"a group is every {count}. document"] = numbers_N % count
        groups[f"groups of {size} begin one document too late"] = (numbers_N + size - 1) // size
        groups[f"groups of {size} begin one document too early"] = (numbers_N + 1) // size
    for name in ("dp", "micro_batches"):
        if "rows" in dump.documents and dump.size(name) > 1:
            rows_N = dump.documents["rows"]
            own_N = rows_N if name == "micro_batches" else rows_N // dump.size("micro_batches")
            one = "micro-batch" if name == "micro_batches" else "rank"
            if (given_N := dump.documents.get("group_ids")) is not None:
                groups[f"a group is its documents of one {one}"] = given_N * (int(own_N.max()) + 1) + own_N
            groups[f"all documents of one {one} are one group"] = own_N
    return groups
