"""Adversarial documents for a loss: tiny, unequal, with holes in their masks, in groups, near the policy.

They have every field that a loss may read, so that no setting is left untried for a missing field. They are plain
data, so that a counterexample can be shrunk, compared and printed.

Letters: T packed tokens | N documents.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from workbench.losses.corrections import CORRECTION_WEIGHTS
from workbench.policy.model import Policy
from workbench.rollouts.batch import Extension, RolloutBatch
from workbench.specs.run import RunSpec
from workbench.train import step as flow

VOCABULARY = 19
"""Of the model of all proofs; a prime, so that nothing divides it."""

LENGTHS = (1, 2, 3, 5, 7, 9, 13, 16)
SPREAD = 0.15
"""Distance of old, sampler and reference log-probabilities from the policy's, in nats: large enough that some tokens
are clipped, small enough that a document-level ratio stays finite."""
NEAR = 1e-5
"""The same for some documents, whose ratio is then within any clip and any gate."""
REAL = ("advantages", "old_logprobs", "sampler_logprobs", "ref_logprobs")
"""Fields of a `Document` that a batch holds as real numbers, one a token."""


@dataclass(frozen=True)
class Document:
    """One document as plain numbers, each list as long as ``tokens``.

    Attributes:
        tokens: vocabulary ids.
        loss_mask: True for trained tokens; never the first.
        advantages: reward units.
        old_logprobs: nats.
        sampler_logprobs: nats.
        ref_logprobs: nats.
        weights: sampler corrections that were computed elsewhere.
        reward: reward units.
        group_id: of its prompt.
        rollout_id: of its sample.
        truncated: True if the sampler truncated it.
    """

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    advantages: tuple[float, ...]
    old_logprobs: tuple[float, ...]
    sampler_logprobs: tuple[float, ...]
    ref_logprobs: tuple[float, ...]
    weights: tuple[float, ...]
    reward: float
    group_id: int
    rollout_id: int
    truncated: bool = False

    @property
    def trained(self) -> int:
        """Number of trained tokens."""
        return sum(self.loss_mask)

    def cut(self, length: int) -> Document:
        """The document's first tokens."""
        listed: dict[str, Any] = {
            name: value[:length] for name, value in self.__dict__.items() if isinstance(value, tuple)
        }
        return replace(self, **listed)

    def silent(self) -> Document:
        """The same document without trained tokens."""
        return replace(self, loss_mask=(False,) * len(self.tokens))

    def __str__(self) -> str:
        drawn = "".join("#" if counts else "." for counts in self.loss_mask)
        return f"{len(self.tokens)} token(s) {drawn}, group {self.group_id}, reward {self.reward:g}"


def draw_documents(seed: str, policy: Policy, *, pairs: bool = False) -> tuple[Document, ...]:
    """Documents of very unequal lengths and masks, whose recorded log-probabilities are near a policy's.

    Among them one of a single token, one that trains all possible tokens, one without trained tokens, one whose mask
    has holes. Groups have one to three documents.

    Args:
        seed: of the random draws.
        policy: one rank's.
        pairs: True if every group is a preference pair, both of it trained or both not.
    """
    rng = random.Random(seed)
    lengths = [*LENGTHS, *(rng.randint(2, 12) for _ in range(2))]
    groups = [number // 2 if pairs else min(number // 3, 3) for number in range(len(lengths))]
    kinds = ["some", "all", "holes", "some", "none", "some", "holes", "some", "all", "some"]
    if pairs:
        lengths[0], kinds[5] = 2, "none"
    rng.shuffle(lengths)
    documents = [_drawn(rng, length, kind, group) for length, kind, group in zip(lengths, kinds, groups, strict=True)]
    rng.shuffle(documents)
    return _near(policy, documents, rng)


def silent_documents(seed: str, number: int, *, group_id: int) -> tuple[Document, ...]:
    """Documents without trained tokens, in groups of two per prompt."""
    rng = random.Random(seed)
    return tuple(_drawn(rng, rng.randint(1, 5), "none", group_id + at // 2) for at in range(number))


def to_batch(documents: Sequence[Document]) -> RolloutBatch:
    """The documents end to end, with every field that a loss may read; real numbers in float64."""

    def exact(values: tuple[float, ...]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    batch = RolloutBatch.from_documents(
        [
            {
                "tokens": list(d.tokens),
                "loss_mask": list(map(int, d.loss_mask)),
                **{name: exact(getattr(d, name)) for name in REAL},
                "reward": torch.tensor(d.reward, dtype=torch.float64),
                "group_id": d.group_id,
            }
            for d in documents
        ]
    )
    weights_T = torch.cat([exact(d.weights) for d in documents])
    truncated_T = torch.cat([torch.full((len(d.tokens),), float(d.truncated)).double() for d in documents])
    return replace(
        batch,
        extensions={
            "rollout_ids": Extension(
                torch.tensor([d.rollout_id for d in documents]), "document", "rollout index", "Whose sample."
            ),
            CORRECTION_WEIGHTS: Extension(weights_T, "token", "ratio", "Sampler corrections made elsewhere.", pad=1.0),
            "truncated": Extension(truncated_T, "token", "1 or 0", "The sampler cut the document off."),
        },
    )


def _drawn(rng: random.Random, length: int, kind: str, group: int) -> Document:
    start = max(1, length // 3)
    mask = {
        "all": [t > 0 for t in range(length)],
        "some": [t >= start for t in range(length)],
        "holes": [t >= start and t % 3 != 2 for t in range(length)],
        "none": [False] * length,
    }[kind]
    advantage = round(rng.choice((-1, 1)) * rng.uniform(0.2, 2.0), 3)
    drift = [round(rng.uniform(0.9, 1.1), 3) for _ in range(length)]
    zeros = (0.0,) * length
    return Document(
        tuple(rng.randrange(VOCABULARY) for _ in range(length)),
        tuple(mask),
        tuple(advantage * each for each in drift),
        zeros,
        zeros,
        zeros,
        tuple(round(rng.uniform(0.6, 1.6), 3) for _ in range(length)),
        round(rng.uniform(-1.0, 1.0), 3),
        group,
        group * 2 + rng.randrange(2),
        rng.random() < 0.2,
    )


def _near(policy: Policy, documents: Sequence[Document], rng: random.Random) -> tuple[Document, ...]:
    """The documents with log-probabilities near those of the policy."""
    (local,), _ = flow.prepare_rows(
        to_batch(documents), RunSpec(precision="float64"), policy.mesh, [range(len(documents))]
    )
    row = local.row
    with torch.no_grad():
        hidden_TD = policy.hidden_states(row.tokens_T, row.positions_T, local.attention)
        logprobs = policy.token_logprobs(hidden_TD, row.targets_T).logprobs_T.roll(1).tolist()

    def around(begin: int, length: int, spread: float) -> tuple[float, ...]:
        return (
            0.0,
            *(round(min(-1e-3, value + rng.gauss(0, spread)), 9) for value in logprobs[begin + 1 : begin + length]),
        )

    longest = max(documents, key=lambda document: document.trained)
    placed, begin = [], 0
    for number, document in enumerate(documents):
        length = len(document.tokens)
        near = document is longest or number % 3 == 1  # so that no clip zeroes its gradient
        old = around(begin, length, NEAR if near else SPREAD)
        sampler, reference = around(begin, length, SPREAD), around(begin, length, SPREAD)
        if number % 3 == 0:  # the narrowest gate lets it pass
            sampler = (0.0, *(value + rng.gauss(0, NEAR) for value in old[1:]))
        placed.append(replace(document, old_logprobs=old, sampler_logprobs=sampler, ref_logprobs=reference))
        begin += length
    return tuple(placed)
