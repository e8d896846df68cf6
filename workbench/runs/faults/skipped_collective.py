"""One rank leaves out one collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from workbench.runs.faults import Fault

_CALL, _RANK, _PARAMETER = 2, 1, 2


class _WithoutOneParameter:
    """A model as `sum_gradients` sees it, without its third parameter."""

    def __init__(self, model: object) -> None:
        self.model = model

    def named_parameters(self) -> Iterator[tuple[str, object]]:
        for index, named in enumerate(self.model.named_parameters()):
            if index != _PARAMETER:
                yield named


def _broken(sum_gradients: Callable) -> Callable:
    calls = 0

    def sum_without_one(model: object, shards: object, mesh: object) -> None:
        nonlocal calls
        calls += 1
        skips = calls == _CALL and mesh["dp_cp"].rank == _RANK
        sum_gradients(_WithoutOneParameter(model) if skips else model, shards, mesh)

    return sum_without_one


FAULT = Fault(
    what="in the second step the second rank of dp x cp leaves the gradient of one parameter out of the sum",
    origin="THUDM/slime#393 (whitening not entered by all ranks), THUDM/slime#2123 (a rank without tokens skips the "
           "backward)",
    signature="no wrong number: the ranks wait for each other until a time-out, or the backend aborts one of them",
    seam="sum_gradients",
    broken=_broken,
    changes_numbers=False,
)
