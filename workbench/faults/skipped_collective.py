"""One rank leaves out one collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from torch import nn

from workbench.errors import SpecError
from workbench.faults import Fault
from workbench.sharding.mesh import Mesh
from workbench.sharding.tensor_parallel import ParameterShard

_CALL, _RANK = 2, 1
_WITHOUT_PARAMETERS = nn.Module()


def _broken(sum_gradients: Callable) -> Callable:
    calls: Counter[tuple[int, ...]] = Counter()  # simulated ranks share it

    def sum_without_one(model: nn.Module, shards: Mapping[str, ParameterShard], mesh: Mesh) -> None:
        place = tuple(mesh.coordinates.values())
        calls[place] += 1
        if any(shard.over_dp_cp for shard in shards.values()):
            raise SpecError(
                "fault 'skipped_collective' with layout.shard_parameters",
                found="gradients that backward has summed over dp x cp",
                rule="the fault leaves out a sum that comes after backward",
                fix="leave out shard_parameters, or the fault",
            )
        skips = calls[place] == _CALL and mesh["dp_cp"].rank == _RANK
        sum_gradients(_WITHOUT_PARAMETERS if skips else model, shards, mesh)

    return sum_without_one


FAULT = Fault(
    family="F",
    what="in the second step the second rank of dp x cp leaves its gradients out of the sum, one collective where they "
    "fit into a bucket",
    origin="THUDM/slime#393 (whitening not entered by all ranks), THUDM/slime#2123 (a rank without tokens skips the "
    "backward)",
    signature="no wrong number: the ranks wait for each other until a time-out, or the backend aborts one of them",
    seam="sum_gradients",
    broken=_broken,
    shows_in={"layout": {"cp": 2}},
    detected_by="tests/parity/test_hangs.py::test_the_rank_that_skipped_a_collective_is_named",
    changes_gradient=False,
    changes_metrics=False,
)
