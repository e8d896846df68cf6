"""The part of a driver script that all have: read cases, run each, write what it showed.

from workbench.engines.driver import serve

def run(case):                       # EngineCase -> EngineStep, on every rank
    ...

serve(run)                           # python my_driver.py FOLDER [OPTION ...]
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from workbench.atomic import read_tensors
from workbench.engines.case import EngineCase, EngineStep, read_cases, write_step
from workbench.errors import SpecError


class Refused(Exception):
    """Raised by a driver for a case that its engine does not offer; the message is the reason."""


def rank() -> int:
    """Return this process's rank, as launchers set it."""
    return int(os.environ.get("RANK", "0"))


def options() -> dict[str, str]:
    """Return the script's options after the folder, each NAME=VALUE."""
    return dict(option.split("=", 1) for option in sys.argv[2:])


def serve(run: Callable[[EngineCase], EngineStep]) -> None:
    """Run the cases of the folder in the first argument, in order, on every rank; the first rank writes the steps."""
    folder = Path(sys.argv[1])
    for number, case in enumerate(read_cases(folder)):
        try:
            step = run(case)
        except Refused as reason:
            step = EngineStep(refused=str(reason))
        except Exception as error:  # the case failed, and others may not
            traceback.print_exc()
            if case.ranks > 1:
                raise  # other ranks wait in a collective
            step = EngineStep(error=f"{type(error).__name__}: {str(error)[:300]}")
        if rank() == 0:
            write_step(folder, number, step)


def load_weights(model: nn.Module, case: EngineCase) -> None:
    """Copy the case's initial weights into a whole model, if it names any.

    Raises:
        SpecError: they are of another model.
    """
    if not case.weights:
        return
    tensors = read_tensors(Path(case.weights), requested="initial weights of a case", fix="measure again")
    parameters = dict(model.named_parameters())
    if set(parameters) != set(tensors):
        raise SpecError(
            "initial weights of a case",
            found=f"{sorted(set(parameters) ^ set(tensors))[:4]}",
            rule="names of the whole model's parameters",
            fix="report `before` by the names of the plain model",
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def snapshot(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return copies of whole parameters by name; DTensors are gathered, a collective."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().float().cpu().clone()
        for name, value in parameters
    }


def plain_norm(parameters: Iterable[Tensor]) -> float:
    """Return the norm of gradients that are whole on this rank."""
    return float(sum(p.grad.double().square().sum() for p in parameters if p.grad is not None)) ** 0.5
