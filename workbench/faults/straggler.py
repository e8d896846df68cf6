"""One rank comes late."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from workbench.faults import Fault
from workbench.sharding.mesh import Mesh

LATE_S = 25.0
_CALL, _RANK = 2, 1


def _broken(sum_gradients: Callable) -> Callable:
    calls: Counter[tuple[int, ...]] = Counter()  # simulated ranks share it

    def sum_late(model: object, shards: object, mesh: Mesh) -> None:
        place = tuple(mesh.coordinates.values())
        calls[place] += 1
        if calls[place] == _CALL and mesh["dp_cp"].rank == _RANK:
            time.sleep(LATE_S)
        sum_gradients(model, shards, mesh)

    return sum_late


FAULT = Fault(
    family="F",
    what=f"in the second step the second rank of dp x cp comes {LATE_S:.0f} s late to the sum of gradients",
    origin="a slow disk, a compiler, a throttled device",
    signature="no wrong number: the others wait, and the rank is named as the one that they wait for",
    seam="sum_gradients",
    broken=_broken,
    shows_in={"layout": {"cp": 2}},
    detected_by="tests/parity/test_hangs.py::test_the_straggler_comes_late_once",
    changes_gradient=False,
    changes_metrics=False,
)
