"""A step in pipeline stages: each rank takes the actions of its schedule, for `workbench.train.step`.

A stage back-propagates each micro-batch from the gradient of its output to the gradient of its input, and sends that
to the stage before. Gradients of parameters add up over micro-batches, whose sizes may differ: nothing is divided, as
the weights of the loss are those of the whole step. The last stage has the head and evaluates the loss.

Letters: t tokens of this rank | D model dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workbench.policy.model import Policy
from workbench.policy.routers import Routes
from workbench.sharding.pipeline import start_receive, start_send
from workbench.train.routes import StepRoutes
from workbench.train.rows import LocalRow

RowLoss = Callable[[LocalRow, Tensor], tuple[Tensor, Callable[[], None]]]
"""A row and its hidden states [t, D] -> its loss, and a function to call after its backward."""

Place = tuple[int, int]
"""Stage and micro-batch."""


def run_stages_forward(policy: Policy, rows: Sequence[LocalRow], begin: Callable[[int], Routes]) -> None:
    """Pass the micro-batches of a step forward through this rank's stages, with the routes that ``begin`` gives each.

    Call without gradients. Collective over pp, and in the stages over the other axes.
    """
    stages, axis = policy.stages, policy.mesh["pp"]
    assert stages is not None, "of a policy in stages"
    outputs: dict[Place, Tensor] = {}
    arriving: dict[Place, Callable[[], Tensor]] = {}
    sent: list[Callable[[], None]] = []
    for action in stages.actions(len(rows)):
        kind, place = action.kind, (action.stage, action.micro_batch)
        if kind == "forward":
            input_TD = None if place[0] == 0 else arriving.pop(place)()
            outputs[place] = rows[place[1]].stage_output(policy, place[0], input_TD, begin(place[1]))
        elif kind == "send activation":
            sent.append(start_send(outputs[place], action, axis))
        elif kind == "receive activation":
            arriving[place] = start_receive(policy.stage_input(rows[place[1]].row.tokens_T), action, axis)
    for wait in sent:
        wait()


def run_stages(policy: Policy, rows: Sequence[LocalRow], row_loss: RowLoss, routing: StepRoutes | None = None) -> None:
    """Pass the micro-batches of a step forward and backward through this rank's stages; gradients stay in ``grad``.

    ``row_loss`` is called on ranks with the last stage alone, once for each micro-batch. Each stage back-propagates the
    losses of its own routers (``routing``). Collective over pp, and in the stages over the other axes.

    Backward: from ``row_loss`` to the embedding, over the ranks of pp; sums over micro-batches.
    """
    stages, axis = policy.stages, policy.mesh["pp"]
    assert stages is not None, "of a policy in stages"
    inputs: dict[Place, Tensor | None] = {}
    outputs: dict[Place, Tensor] = {}
    arriving: dict[Place, Callable[[], Tensor]] = {}
    after: dict[Place, Callable[[], None]] = {}
    gradients: dict[Place, Tensor] = {}
    passed: dict[Place, Routes] = {}
    sent: list[Callable[[], None]] = []

    def forward(place: Place) -> None:
        stage, local = place[0], rows[place[1]]
        inputs[place] = None if stage == 0 else arriving.pop(place)().requires_grad_()
        if routing is not None:
            passed[place] = routing.begin(place[1])
        outputs[place] = local.stage_output(policy, stage, inputs[place], passed.get(place))
        if stage == stages.last:
            outputs[place], after[place] = row_loss(local, outputs[place])

    def backward(place: Place) -> None:
        gradient = None if place[0] == stages.last else arriving.pop(place)()
        of_routers = [] if routing is None else routing.finish(place[1], passed.pop(place))
        torch.autograd.backward([outputs.pop(place), *of_routers], [gradient, *(None for _ in of_routers)])
        input_TD = inputs.pop(place)
        if input_TD is not None:
            assert input_TD.grad is not None, "every stage reads its input"
            gradients[place] = input_TD.grad
        if place in after:
            after.pop(place)()

    for action in stages.actions(len(rows)):
        kind, place = action.kind, (action.stage, action.micro_batch)
        if kind == "forward":
            forward(place)
        elif kind == "backward":
            backward(place)
        elif kind == "send activation":
            sent.append(start_send(outputs[place], action, axis))
        elif kind == "send gradient":
            sent.append(start_send(gradients.pop(place), action, axis))
        else:
            arriving[place] = start_receive(policy.stage_input(rows[place[1]].row.tokens_T), action, axis)
    for wait in sent:
        wait()
    policy.reshard()
