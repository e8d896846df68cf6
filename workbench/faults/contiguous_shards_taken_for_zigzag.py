"""Data is cut into stretches, and attention puts it together as if it were cut zigzag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.faults import Fault
from workbench.sharding.plan import ShardPlan


def _broken(make: Callable) -> Callable:
    def make_as_zigzag(cls: type, plan: ShardPlan, *args: Any, **how: Any) -> Any:
        if plan.cp > 1:
            plan = ShardPlan.make("zigzag", num_tokens=plan.num_tokens, cp=plan.cp)
        return make(cls, plan, *args, **how)

    return make_as_zigzag


FAULT = Fault(
    family="S",
    what="a new way to cut rows, into stretches, does not reach attention, which goes on to order gathered shards as "
    "zigzag ones",
    origin="THUDM/slime#1871",
    signature="shapes fit and nothing complains: tokens of the later half of each shard stand elsewhere in the row, "
    "see other documents and not their own; log-probabilities, loss and gradients wrong",
    seam="workbench.sharding.attention.shard:AttentionShard.make",
    broken=_broken,
    shows_in={"layout": {"cp": 2}, "data": {"multiple_of": 4}},
    hidden_in={"layout": {"order": "zigzag"}},
    detected_by="tests/faults/test_unseen.py::test_shards_in_another_order_spare_what_comes_before_the_first_cut",
)
