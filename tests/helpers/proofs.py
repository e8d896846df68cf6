"""Synthetic proofs: one invariant holds, one is broken, one is declared, one was not tested."""

from __future__ import annotations

from workbench.prove.documents import Document
from workbench.prove.proof import Counterexample, InvariantResult, Proof

DOCUMENT = Document(
    tokens=(3, 5, 7),
    loss_mask=(False, True, True),
    advantages=(0.0, 0.5, 0.5),
    old_logprobs=(0.0, -1.0, -2.0),
    sampler_logprobs=(0.0, -1.0, -2.0),
    ref_logprobs=(0.0, -1.0, -2.0),
    weights=(1.0, 1.0, 1.0),
    reward=1.0,
    group_id=0,
    rollout_id=0,
)


def counterexample(description="gradient 0.5 times that of one rank: 1 / cp"):
    return Counterexample("one rank", "cp=2 contiguous", (str(DOCUMENT),), description, (DOCUMENT,))


def make_proof(subject="cp_left_out (engine mean)", broken=True):
    cp = InvariantResult(
        "cp_degree",
        "a row may be cut for any number of ranks",
        "broken",
        4,
        0.5,
        ("gradient", "loss"),
        0.5,
        "1 / cp",
        counterexample(),
    )
    order = InvariantResult(
        "packing_order",
        "any document may share a row with any other",
        "declared",
        3,
        0.125,
        ("gradient",),
        None,
        "",
        counterexample("another gradient, no multiple of it"),
    )
    return Proof(
        subject,
        (
            InvariantResult("dp_split", "documents may be dealt to any ranks", "holds", 12, 3e-15),
            *((cp,) if broken else ()),
            order,
            InvariantResult("tp", "any number of ranks", "not tried", why="no time was left"),
        ),
        seed=3,
        seconds=1.25,
    )
