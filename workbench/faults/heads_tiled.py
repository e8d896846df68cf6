"""Key heads are repeated as a whole, a b a b, where each should stand by itself, a a b b."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from workbench.faults import Fault


def _broken(repeated: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
    def tiled(heads: Tensor, copies: int) -> Tensor:
        return heads.repeat(1, copies, 1, 1)

    return tiled


FAULT = Fault(
    family="S",
    what="grouped key and value heads are tiled for ranks that exchange heads: some query heads meet the keys of "
    "another group",
    origin="apple/axlearn#842 (after #837)",
    signature="log-probabilities of all tokens wrong, in every document from its first on, and with them loss and "
    "gradients (cosine 0.01 here); nothing where the ranks are no more than the key heads",
    seam="workbench.sharding.attention.ulysses:repeated",
    broken=_broken,
    shows_in={"layout": {"cp": 4, "attention": "ulysses"}},
    hidden_in={"layout": {"cp": 2}},
    detected_by="tests/faults/test_unseen.py::test_tiled_heads_move_every_token",
)
