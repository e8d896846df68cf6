"""Replica check: compares a projection of each replica's values, in one small collective.

All other code assumes that a share's replicas are equal; a gradient that is still partial over tp, or dropout that
differs by rank, would otherwise only show as a wrong encoder.

Letters: t rows of a rank | R ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import ShardingError
from workbench.rollouts.batch import PADDING
from workbench.sharding.bridge.sides import Side
from workbench.sharding.collectives import gather_equal
from workbench.sharding.mesh import Axis

MAX_RELATIVE_DIFFERENCE = 1e-3
"""Relative to the norm. Nondeterministic kernels differ by rounding; a partial sum differs by about 1."""


def check_replicas(values_tD: Tensor, side: Side, axis: Axis, *, what: str) -> None:
    """Raise if replicas differ, or rows whose gradient must be zero here are nonzero. Collective.

    Raises:
        ShardingError: the same on every rank, with the ranks that differ.
    """
    share = side.share_of[axis.rank]
    width = values_tD.shape[1:].numel()
    flat = values_tD.detach().reshape(len(values_tD), width).double()
    weights = torch.linspace(0.5, 1.5, flat.numel(), dtype=torch.float64, device=flat.device).view_as(flat)
    stray = flat[((share.tokens_t != PADDING) & ~share.gradient_rows_t).to(flat.device)]
    kind = flat.new_tensor([width, torch.finfo(values_tD.dtype).eps])
    local = torch.cat([torch.stack([(flat * weights).sum(), flat.norm(), stray.norm()]), kind])
    gathered = gather_equal(local, axis).tolist()
    kinds = {(int(wide), eps) for *_, wide, eps in gathered}
    if len(kinds) > 1:
        raise ShardingError(
            f"bridge: {what}",
            found=f"rows of {' and '.join(str(wide) for wide, _ in sorted(kinds))} "
            f"numbers, in {len({eps for _, eps in kinds})} precision(s)",
            rule="all ranks pass rows of one width and dtype",
            fix="cast before the bridge",
        )
    if nonzero := [rank for rank, (_, norm, stray_norm, *_) in enumerate(gathered) if stray_norm > 0]:
        raise ShardingError(
            f"bridge: {what}",
            found=f"something other than zero on rank(s) {nonzero} in rows that are another cp rank's",
            rule="with an order, only the rank that owns a token uses it",
            fix="pass connect no order, and every rank's gradient is summed",
        )
    for one in side.shares:
        first, largest = gathered[one.ranks[0]][0], max(gathered[rank][1] for rank in one.ranks)
        if differ := [
            rank for rank in one.ranks if not abs(gathered[rank][0] - first) <= MAX_RELATIVE_DIFFERENCE * largest
        ]:
            raise ShardingError(
                f"bridge: {what}",
                found=f"rank(s) {differ} differ from rank {one.ranks[0]} by more than "
                f"{MAX_RELATIVE_DIFFERENCE:g} of the norm",
                rule=f"ranks {', '.join(map(str, one.ranks))} hold equal values",
                fix="complete sums over tp before the bridge: the gradient at the "
                "input of the destination, the output of the source",
            )
