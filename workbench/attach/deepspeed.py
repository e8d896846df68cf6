"""A recorder of a DeepSpeed engine, with ZeRO 0 to 3.

    engine, *_ = deepspeed.initialize(...)
    recorder = EngineRecorder("records/mine", engine)            # each engine.step() that updates writes a step

Source: DeepSpeed 0.19.8: `DeepSpeedEngine.backward` divides the loss by gradient_accumulation_steps, `step` clips and
        updates at the end of an accumulation; `safe_get_full_grad` has the mean over ranks, before clipping;
        `ds_tensor` is this rank's partition under ZeRO 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

from workbench.errors import SpecError
from workbench.records.recorder import Recorder
from workbench.sharding.given_parameters import GivenParameters, Part


class EngineParameters(GivenParameters):
    """Parameters whose gradients are in buffers of the engine, as under ZeRO 1, 2 and 3, and in bf16."""

    optimizer_has_copies = True

    def weights(self, parameter: nn.Parameter) -> Any:
        """The parameter, or this rank's partition of it under ZeRO 3."""
        partition = getattr(parameter, "ds_tensor", None)
        return parameter if partition is None else Part(partition.detach(), parameter.ds_shape)  # type: ignore[attr-defined]

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """True: at the end of an accumulation the buffers have a gradient of every parameter, 0 for an unused one."""
        return True

    def norms(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, float]:
        """L2 norm of every parameter's global gradient. Gradients are gathered singly: all may not fit.

        Units: squares are summed in float64.
        """
        return {name: float(self.whole_gradient(value).double().norm()) for name, value in parameters.items()}

    def whole_gradient(self, parameter: nn.Parameter) -> Tensor:
        """The mean of the ranks' gradients, before clipping. Collective."""
        return safe_get_full_grad(parameter).detach()


class EngineRecorder(Recorder):
    """Records the updates of an engine, from now on until it is closed.

    A step has the mean of the losses that were given to ``engine.backward``, gradients before clipping, and the bound
    of the clip. Each gradient is gathered once a step, and a second time with ``gradients="full"``.

    Args:
        folder: of the record; it must not have one yet.
        engine: of `deepspeed.initialize`, with an optimizer.
        options: of `wb.Recorder`, such as ``gradients="full"``.

    Raises:
        SpecError: an engine that scales losses (fp16), whose caller ends its accumulations
            (``managed_gradient_accumulation: false``), or without an optimizer.
    """

    def __init__(self, folder: Path | str, engine: Any, **options: Any) -> None:
        _refuse_unsupported(engine)
        plain = isinstance(engine.optimizer, torch.optim.Optimizer)  # else it holds copies, as ZeRO's and that of bf16
        optimizer = engine.optimizer if plain else engine.optimizer.optimizer
        context = {
            "dp": engine.dp_world_size,
            "micro_batches": engine.gradient_accumulation_steps(),
            "max_grad_norm": engine.gradient_clipping() or None,
            "zero_stage": int(engine.zero_optimization_stage()),
        }
        known = {name: value for name, value in context.items() if value is not None}
        options["context"] = known | (options.get("context") or {})
        shards = None if plain else EngineParameters()
        super().__init__(folder, engine.module, optimizer, shards=shards, manual=True, **options)
        self._engine, self._step_of_engine = engine, engine.step
        engine.step = self._recorded_step

    def close(self) -> None:
        """Remove the hooks, and give the engine its own step back."""
        super().close()
        self._engine.step = self._step_of_engine

    def _recorded_step(self, *given: Any, **named: Any) -> Any:
        if self._engine.is_gradient_accumulation_boundary():
            self.take_gradients(max_norm=self._engine.gradient_clipping() or None)
            self.step()
        return self._step_of_engine(*given, **named)


def _refuse_unsupported(engine: Any) -> None:
    problems = {
        "no optimizer": not hasattr(engine.optimizer, "param_groups"),
        "a scaled loss": engine.fp16_enabled() or getattr(engine, "torch_autocast_z0_gradscaler", None) is not None,
        "managed_gradient_accumulation: false": not engine.managed_gradient_accumulation(),
    }
    if problem := next((name for name, here in problems.items() if here), None):
        raise SpecError(
            "record a DeepSpeed engine",
            found=problem,
            rule="the engine ends its accumulations itself, and its buffers hold gradients of the loss",
            fix="give it an optimizer, train in bf16 or fp32, and leave managed_gradient_accumulation out",
        )
