"""Single changes of settings or data, each of which makes one fact hold that faults need, and a dataset of all of them.

A change of settings is merged into the spec; one of data is a function of the rollout dataset. The list is short and
declared: it is what is tried on a fault that survives, and nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.rollouts.batch import Extension, RolloutBatch
from workbench.rollouts.places import places_of_each
from workbench.specs.reading import merge, parse_spec
from workbench.specs.run import RunSpec

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "two cp ranks": {"layout": {"cp": 2}},
    "two dp ranks": {"layout": {"dp": 2}},
    "two tp ranks": {"layout": {"tp": 2}},
    "zigzag shards": {"layout": {"order": "zigzag"}},
    "three micro-batches": {"data": {"micro_batches": 3}},
    "four steps": {"steps": 4},
    "temperature 0.7": {"policy": {"temperature": 0.7}},
    "a chunked head": {"policy": {"logprobs": "chunked"}},
    "adamw": {"optimizer": {"name": "adamw"}},
    "a clip of the gradient norm": {"optimizer": {"max_grad_norm": 0.01}},
    "a mean over tokens": {"loss": {"denominator": "token"}},
    "a mean over documents": {"loss": {"denominator": "document"}},
    "a mean of sums over documents": {"loss": {"denominator": "document_sum"}},
    "a mean over rollouts": {"loss": {"denominator": "rollout"}},
    "a constant denominator": {"loss": {"denominator": "constant", "denominator_constant": 16.0}},
    "one ratio for each document": {"loss": {"name": "gspo"}},
    "loss luspo": {"loss": {"name": "luspo"}},
    "loss gmpo": {"loss": {"name": "gmpo"}},
    "loss vapo": {"loss": {"name": "vapo"}},
    "an auxiliary loss": {"loss": {"squared_logit_coefficient": 0.01}},
    "a KL penalty": {"loss": {"kl": {"coefficient": 0.3}}},
    "a penalty with its score": {"loss": {"kl": {"estimator": "k1", "gradient": "score"}}},
    "a clamped penalty": {"loss": {"kl": {"importance": "old", "input_clamp": 0.1}}},
    "truncated importance sampling": {"loss": {"correction": {"kind": "tis"}}},
    "a mean over documents in the correction": {"loss": {"correction": {"kind": "sequence_tis_mean"}}},
    "icepop with narrow bounds": {
        "loss": {"correction": {"kind": "icepop", "denominator": "survivors", "ratio_low": 0.9, "ratio_high": 1.1}}
    },
    "advantages grpo": {"data": {"advantages": {"name": "grpo"}}},
    "advantages rloo": {"data": {"advantages": {"name": "rloo"}}},
    "advantages reinforce_plus_plus": {"data": {"advantages": {"name": "reinforce_plus_plus"}}},
}
"""Name -> changed settings, from the ``shows_in`` of faults."""


def changed(spec: RunSpec, settings: Mapping[str, Any]) -> RunSpec:
    """Return a spec with changed settings; another loss by name brings its own surrogate and denominator."""
    loss = spec.loss.overrides()
    if "name" in settings.get("loss", {}):
        loss = {key: value for key, value in loss.items() if key not in ("name", "surrogate", "denominator")}
    return parse_spec(RunSpec, merge(spec.model_dump(mode="json") | {"loss": loss}, settings), where="settings")


def mask_document(batch: RolloutBatch) -> RolloutBatch:
    """Mask the first document that trains and shares its prompt with another: none of its tokens trains."""
    groups = batch.group_ids_N
    trained = [number for number, places in enumerate(_trained(batch)) if places]
    shared = [n for n in trained if groups is None or int((groups == groups[n]).sum()) > 1] or trained
    return replace(batch, loss_mask_T=batch.loss_mask_T & (batch.document_ids_T != shared[0]))


def cut_hole(batch: RolloutBatch) -> RolloutBatch:
    """Mask one token in the middle of the first document with three trained tokens, as the output of a tool."""
    trained = _trained(batch)
    places = next((places for places in trained if len(places) >= 3), max(trained, key=len))
    mask_T = batch.loss_mask_T.clone()
    mask_T[places[len(places) // 2]] = False
    return replace(batch, loss_mask_T=mask_T)


def mix_groups(batch: RolloutBatch) -> RolloutBatch:
    """Move the first document to the end, so that groups are not one after another."""
    return batch.select([*range(1, batch.num_documents), 0]).as_source() if batch.num_documents > 1 else batch


def move_old_logprobs(batch: RolloutBatch) -> RolloutBatch:
    """Move old log-probabilities by 0.5 nats to either side: ratios of 0.6 and 1.6, outside every usual clip."""
    return replace(batch, old_logprobs_T=_moved(batch, batch.old_logprobs_T, 0.5))


def move_reference(batch: RolloutBatch) -> RolloutBatch:
    """Move the reference's log-probabilities by 0.2 nats to either side."""
    if batch.ref_logprobs_T is None:
        return batch
    return replace(batch, ref_logprobs_T=_moved(batch, batch.ref_logprobs_T, 0.2))


def move_sampler(batch: RolloutBatch) -> RolloutBatch:
    """Move the sampler's log-probabilities by 0.2 nats to either side of the old policy's."""
    return replace(batch, sampler_logprobs_T=_moved(batch, batch.old_logprobs_T, 0.2))


def share_rollout(batch: RolloutBatch) -> RolloutBatch:
    """Declare the first two documents samples of one rollout, and every other document a rollout of its own."""
    ids_N = torch.arange(batch.num_documents)
    ids_N[:2] = 0
    rollouts = Extension(ids_N, "document", "rollout index", "the rollout that a document is a sample of")
    return replace(batch, extensions={**batch.extensions, "rollout_ids": rollouts})


def train_one_document(batch: RolloutBatch) -> RolloutBatch:
    """Mask all documents but the first that trains, so that ranks and rows without any remain."""
    places = next(filter(None, _trained(batch)))
    mask_T = torch.zeros_like(batch.loss_mask_T)
    mask_T[places] = True
    return replace(batch, loss_mask_T=mask_T)


def _trained(batch: RolloutBatch) -> list[list[int]]:
    """Positions of the trained tokens of each document."""
    places = places_of_each(batch.document_ids_T)
    of_documents = (places[number] for number in range(batch.num_documents))
    return [at[batch.loss_mask_T[at]].tolist() for at in of_documents]


def _moved(batch: RolloutBatch, values_T: Tensor, nats: float) -> Tensor:
    """Trained values, every second one up and the others down; no log-probability above that of certainty."""
    signs_T = 1 - 2 * (torch.arange(len(values_T)) % 2)
    return torch.where(batch.loss_mask_T, (values_T + nats * signs_T).clamp_max(-1e-3), values_T)


Edit = Callable[[RolloutBatch], RolloutBatch]
DATA: Mapping[str, Edit] = {
    "a masked document": mask_document,
    "a hole in a mask": cut_hole,
    "mixed-up groups": mix_groups,
    "other old log-probabilities": move_old_logprobs,
    "another reference": move_reference,
    "another sampler": move_sampler,
    "a rollout of two documents": share_rollout,
    "one trained document": train_one_document,
}
"""Name -> the change of a rollout dataset."""

ALONE = ("one trained document",)
"""Changes of data that undo others, and are therefore no part of `small_dataset`."""

MAX_TOKENS = 200
"""Tokens of a generated dataset: fewer than in the smallest batch of the repository's own checks; a convention."""


def small_dataset(batch: RolloutBatch, *, max_tokens: int = MAX_TOKENS) -> RolloutBatch:
    """Return a dataset of fewer tokens, with every property of data that faults need.

    A few documents of the batch, three of each prompt as far as they fit, shortest prompts first, with all changes of
    `DATA` that go together.

    Raises:
        SpecError: fewer than two documents fit.
    """
    groups = [0] * batch.num_documents if batch.group_ids_N is None else batch.group_ids_N.tolist()
    lengths = batch.lengths_N.tolist()
    chosen: list[int] = []
    for group in sorted({*groups}, key=lambda g: min(n for n, of in zip(lengths, groups, strict=True) if of == g)):
        members = [number for number, of in enumerate(groups) if of == group]
        for number in _unlike(batch, members):
            if sum(lengths[each] for each in (*chosen, number)) < max_tokens:
                chosen.append(number)
    if len(chosen) < 2:
        raise SpecError(
            f"a dataset of fewer than {max_tokens} tokens",
            found=f"documents of {min(lengths)} tokens or more",
            rule="at least two documents, one of which trains",
            fix="allow more tokens",
        )
    small = batch.select(sorted(chosen)).as_source()
    for name, edit in DATA.items():
        small = small if name in ALONE else edit(small)
    return small


def _unlike(batch: RolloutBatch, documents: Sequence[int]) -> list[int]:
    """Three documents of a prompt at most, with different advantages as far as there are such."""
    if batch.rewards_N is None:
        return list(documents[:3])
    rewards = batch.rewards_N.tolist()
    firsts = {rewards[number]: number for number in reversed(documents)}
    others = [number for number in documents if number not in firsts.values()]
    return [*firsts.values(), *others][:3]
