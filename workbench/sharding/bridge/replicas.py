"""Whether replicas hold the same, measured: a projection of each, in one small collective.

A share's replicas are believed to be equal everywhere else; a gradient that is still partial over tp, or dropout that
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

BAR = 1e-3
"""Of the norm. Kernels whose sums have no order differ by rounding; a part is off by about 1."""


def hold_replicas(values_tD: Tensor, side: Side, axis: Axis, *, what: str) -> None:
    """Refuse replicas that differ, and values where the side says that none come from. Collective.

    Raises:
        ShardingError: the same on every rank, with the ranks that differ.
    """
    share = side.share_of[axis.rank]
    width = values_tD.shape[1:].numel()
    flat = values_tD.detach().reshape(len(values_tD), width).double()
    weights = torch.linspace(0.5, 1.5, flat.numel(), dtype=torch.float64, device=flat.device).view_as(flat)
    stray = flat[((share.tokens_t != PADDING) & ~share.answered_t).to(flat.device)]
    kind = flat.new_tensor([width, torch.finfo(values_tD.dtype).eps])
    mine = torch.cat([torch.stack([(flat * weights).sum(), flat.norm(), stray.norm()]), kind])
    everyone = gather_equal(mine, axis).tolist()
    kinds = {(int(wide), eps) for *_, wide, eps in everyone}
    if len(kinds) > 1:
        raise ShardingError(
            f"bridge: {what}",
            found=f"rows of {' and '.join(str(wide) for wide, _ in sorted(kinds))} "
            f"numbers, in {len({eps for _, eps in kinds})} precision(s)",
            rule="all ranks bring rows of one width and dtype",
            fix="cast before the bridge",
        )
    if astray := [rank for rank, (_, norm, stray_norm, *_) in enumerate(everyone) if stray_norm > 0]:
        raise ShardingError(
            f"bridge: {what}",
            found=f"something other than zero on rank(s) {astray} in rows that are another cp rank's",
            rule="where a plan says who uses a token, nobody else does",
            fix="give connect no order, and every rank's gradient is summed",
        )
    for one in side.shares:
        first, largest = everyone[one.ranks[0]][0], max(everyone[rank][1] for rank in one.ranks)
        if differ := [rank for rank in one.ranks if not abs(everyone[rank][0] - first) <= BAR * largest]:
            raise ShardingError(
                f"bridge: {what}",
                found=f"rank(s) {differ} differ from rank {one.ranks[0]} by more than {BAR:g} of the norm",
                rule=f"ranks {', '.join(map(str, one.ranks))} hold the same",
                fix="complete sums over tp before the bridge: the gradient at the "
                "input of the destination, the output of the source",
            )
