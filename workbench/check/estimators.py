"""Other ways to compute the advantages of a step, each by the name of a mistake.

Letters: T tokens | N documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workbench.check.alternatives import Alternative, group_size, permutations
from workbench.check.recompute import Reading
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
    dump = reading.dump
    for text, groups_N in _groupings(dump).items():
        yield Alternative("group", text, _with_documents(reading, group_ids=groups_N))
    if "rewards" in dump.documents:
        rewards_N = dump.documents["rewards"]
        for text, order_N in permutations(dump).items():
            moved = _with_documents(reading, rewards=rewards_N[order_N])
            yield Alternative("order", f"rewards of other documents ({text})", moved)
            if "group_ids" in dump.documents:
                both = _with_documents(moved, group_ids=dump.documents["group_ids"][order_N])
                yield Alternative("order", f"advantages of other documents ({text})", both)
        yield Alternative("factor", "the sign of the rewards is reversed", _with_documents(reading, rewards=-rewards_N))
    if "token_rewards" in dump.tokens:
        reversed_T = -dump.tokens["token_rewards"]
        text = "the sign of the rewards is reversed"
        yield Alternative("factor", text, reading.with_tokens(token_rewards=reversed_T))


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
        for epsilon in (0.0, 1e-8, 1e-6, 1e-4, 1e-3):
            if epsilon != known.get("epsilon"):
                yield "estimator", f"{epsilon:g} is added to the deviation", name, {**known, "epsilon": epsilon}
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
    if 1 < size < number:
        count = number // size
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


def _with_documents(reading: Reading, **values: Tensor) -> Reading:
    return replace(reading, dump=replace(reading.dump, documents={**reading.dump.documents, **values}))
