"""Attention mask of some queries and some keys, from their positions and documents.

The mask depends only on *global* positions and document ids, so it is correct for every token order: a block never
guesses document boundaries, and never uses a top-left causal mask on a subset of rows. Derived data (a mask on a
device, the calls of a kernel) is computed once per block: one block serves all layers, forward and backward.

Letters: q queries | k keys.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Block:
    """Some queries and some keys of a row, in the order of their tensors.

    Query i sees key j iff both are of one document, j is not later in the row, and j is among the last ``window``
    tokens up to i.

    Attributes:
        query_positions_q: [q] int64 positions in the row, on the host.
        key_positions_k: [k] the same of the keys.
        query_documents_q: [q] int64 document numbers; each document is one run of the row.
        key_documents_k: [k] the same of the keys.
        window: maximum number of tokens that a query sees, itself included; None: its whole document.
    """

    query_positions_q: Tensor
    key_positions_k: Tensor
    query_documents_q: Tensor
    key_documents_k: Tensor
    window: int | None = None
    _cache: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        """(q, k)."""
        return self.query_positions_q.shape[0], self.key_positions_k.shape[0]

    @cached_property
    def allowed_qk(self) -> Tensor:
        """[q, k] bool, on the host: query may see key. The reference for all other descriptions of a block."""
        return self.allowed_on("cpu")

    def allowed_on(self, device: torch.device | str, queries: slice = slice(None)) -> Tensor:
        """`allowed_qk` of some of the queries, computed on a device."""
        query_q, key_k = self.query_positions_q[queries].to(device)[:, None], self.key_positions_k.to(device)
        documents_q = self.query_documents_q[queries].to(device)[:, None]
        allowed_qk = (documents_q == self.key_documents_k.to(device)) & (query_q >= key_k)
        return allowed_qk if self.window is None else allowed_qk & (query_q - key_k < self.window)

    @cached_property
    def sees_q(self) -> Tensor:
        """[q] bool, on the host: the query sees any key. Builds no mask."""
        if 0 in self.shape:
            return torch.zeros(self.shape[0], dtype=torch.bool)
        # Documents are contiguous in the row: a query that sees any key sees the last one that is not after it.
        sorted_k, order_k = self.key_positions_k.sort()
        last_q = torch.searchsorted(sorted_k, self.query_positions_q, right=True) - 1
        nearest_q = order_k[last_q.clamp_min(0)]
        sees_q = (last_q >= 0) & (self.key_documents_k[nearest_q] == self.query_documents_q)
        if self.window is not None:
            sees_q &= self.query_positions_q - self.key_positions_k[nearest_q] < self.window
        return sees_q

    @cached_property
    def is_empty(self) -> bool:
        """True if no query sees any key."""
        return not bool(self.sees_q.any())

    @cached_property
    def every_query_sees(self) -> bool:
        """True if every query sees a key."""
        return bool(self.sees_q.all())

    def once(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of ``make``, computed at the first call under this name and cached."""
        if name not in self._cache:
            self._cache[name] = make()
        return self._cache[name]
