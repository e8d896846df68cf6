"""The optimizer of a run, and dynamic loss scaling.

The optimizer is torch's, or, where moments have another dtype than the weights or these are rounded at random, `AdamW`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.policy.model import DTYPES, Policy
from workbench.sharding.gradients import copy_local_part, local_values
from workbench.specs.precision import Dtypes
from workbench.specs.run import RunSpec

GROWTH, BACKOFF = 2.0, 0.5
"""Factors of a dynamic loss scale: the defaults of ``torch.amp.GradScaler``."""


def build_optimizer(policy: Policy, spec: RunSpec) -> torch.optim.Optimizer:
    """Build the optimizer of this rank's trained parameter shards; elementwise, so shards need no special case.

    On a GPU torch's AdamW is its fused kernel: computed in float32 and rounded once, where the others round after each
    operation.
    """
    settings, dtypes = spec.optimizer, spec.dtypes
    own = dtypes.moments != dtypes.weights or dtypes.stochastic_rounding
    kind: Any = torch.optim.SGD if settings.name == "sgd" else torch.optim.AdamW
    if own and settings.name == "adamw":
        names = [name for name, parameter in policy.model.named_parameters() if parameter.requires_grad]
        noise = functools.partial(_noise, policy, spec.seed, names) if dtypes.stochastic_rounding else None
        moments = eight_bit_moments() if dtypes.moments == "8bit" else DTYPES[dtypes.moments]
        kind = functools.partial(AdamW, moments=moments, noise=noise)
    elif settings.name == "adamw" and policy.mesh.device.type == "cuda":
        kind = functools.partial(FusedAdamW, fused=True)
    trained = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    # As a group, which may be empty: that of a pipeline stage without adapters.
    return kind([{"params": trained}], lr=settings.learning_rate, weight_decay=settings.weight_decay)


class FusedAdamW(torch.optim.AdamW):
    """torch's AdamW whose kernels get this rank's shards as plain tensors.

    Torch's host code unwraps and wraps DTensors one by one, while a GPU that has just told it the gradient's norm has
    nothing to do: 7 to 12 ms for 0.6 B parameters on an H200. What is plain is passed on as it is, for the same reason.
    """

    def _init_group(self, group: dict[str, Any], *tensors: list[Any]) -> Any:
        """Collect parameters, gradients and moments of a group into lists, as torch 2.11 to 2.13 name it."""
        has_complex = super()._init_group(group, *tensors)
        for some in tensors:
            some[:] = [getattr(value, "_local_tensor", value) for value in some]  # to_local makes a view: 2 us each
        return has_complex


Noise = Callable[[Tensor, int, int], Tensor]
"""Parameter, its number, step -> a random integer in [0, 2^16) for each element of its local shard."""


EightBit = Any
"""torchao's tensor of 8-bit numbers in blocks of 256 with one scale each."""
LEAST_EIGHT_BIT, BLOCK = 4096, 256
"""Numbers of a parameter from which its moments have 8 bits, and of a block: those of torchao's ``AdamW8bit``."""


def eight_bit_moments() -> EightBit:
    """Return torchao's 8-bit state.

    Source: Dettmers et al., arXiv 2110.02861; torchao.optim.subclass_8bit, block size 256.
    """
    try:
        state = importlib.import_module("torchao.optim.subclass_8bit").OptimState8bit
    except ImportError as error:
        raise SpecError(
            "mixed_precision.moments = '8bit'",
            found=str(error),
            rule="the package torchao, which has the 8-bit numbers",
            fix="pip install 'workbench[eight_bit]', or moments: bfloat16",
        ) from None
    return state


def dense_state(value: Tensor, parameter: Tensor) -> Tensor:
    """A state of the optimizer in plain numbers, laid out as its parameter; 8-bit moments in float32."""
    if not hasattr(value, "codes"):
        return value
    dense = torch.zeros_like(parameter, dtype=torch.float32)
    local_values(dense).copy_(value.dequantize())
    return dense


class AdamW(torch.optim.Optimizer):
    """AdamW with moments of a dtype of their own, or 8 bits, and weights rounded to theirs to the nearest or at random.

    An update is computed in float32 (float64 for float64 weights), from the stored moments, which are rounded
    afterwards. With ``noise``, a bfloat16 weight is rounded up with a probability equal to the share of the gap between
    its neighbours that the update has crossed, so that updates below half a gap are not lost on average.

    Formula:  w <- (1 - lr wd) w - lr m_hat / (sqrt(v_hat) + eps)
    Source:   Loshchilov and Hutter, arXiv 1711.05101, algorithm 2; stochastic rounding of bfloat16 weights: Zamirai et
              al., arXiv 2010.06192.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        *,
        lr: float,
        weight_decay: float,
        moments: torch.dtype | EightBit,
        noise: Noise | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})
        self.moments, self.noise = moments, noise

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch overloads it for closures
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self._update(parameter, number, group)

    def _update(self, parameter: Any, number: int, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            dtype = self.moments if isinstance(self.moments, torch.dtype) else torch.float32
            state |= {key: torch.zeros_like(parameter, dtype=dtype) for key in ("exp_avg", "exp_avg_sq")}
        state["step"] += 1
        step, (first, second) = float(state["step"]), group["betas"]
        wide = torch.promote_types(parameter.dtype, torch.float32)
        weight, gradient, mean, square = (
            local_values(dense_state(each, parameter)).to(wide)
            for each in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        )
        mean = mean.lerp(gradient, 1 - first)
        square = (second * square).addcmul(gradient, gradient, value=1 - second)
        denominator = (square.sqrt() / math.sqrt(1 - second**step)).add_(group["eps"])
        weight = weight * (1 - group["lr"] * group["weight_decay"])
        weight = weight.addcdiv(mean, denominator, value=-group["lr"] / (1 - first**step))
        for key, moment in (("exp_avg", mean), ("exp_avg_sq", square)):
            self._store(state, key, moment)
        if self.noise is not None:
            weight = round_at_random(weight, self.noise(parameter, number, int(step)))
        local_values(parameter).copy_(weight)

    def _store(self, state: dict[str, Any], key: str, moment: Tensor) -> None:
        """Round a moment. Whether a shard has 8-bit moments depends on its own size, as where its blocks begin."""
        size = moment.numel()
        if isinstance(self.moments, torch.dtype) or size < LEAST_EIGHT_BIT or size % BLOCK:
            local_values(state[key]).copy_(moment)
        else:
            rounded = self.moments.zeros(moment.shape, signed=key == "exp_avg", block_size=BLOCK, device=moment.device)
            state[key] = rounded.copy_(moment.float())


def round_at_random(values: Tensor, noise: Tensor) -> Tensor:
    """Round float32 to bfloat16, up or down with the probability of the distance from the other neighbour.

    ``noise`` holds integers in [0, 2^16): added to the 16 bits that bfloat16 lacks, they carry into the ones that it
    has. Values that are not finite stay.

    Shapes:  both [...] -> [...] bfloat16.
    """
    bits = (values.view(torch.int32) + noise.to(torch.int32)) & -0x10000
    return torch.where(values.isfinite(), bits.view(torch.float32), values).to(torch.bfloat16)


def _noise(policy: Policy, seed: int, names: list[str], parameter: Any, number: int, step: int) -> Tensor:
    """Return this rank's part of the noise of a whole weight: on one kind of device the same in every layout."""
    name = names[number]  # of this pipeline stage's parameters
    digest = hashlib.sha256(f"{seed} {step} {name}".encode()).digest()
    device = local_values(parameter).device
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    whole = torch.randint(0, 2**16, policy.shapes[name], generator=generator, dtype=torch.int32, device=device)
    noise = torch.zeros_like(parameter, dtype=torch.int32)
    copy_local_part(noise, whole, policy.shards[name], policy.mesh)
    return local_values(noise)


@dataclass
class LossScale:
    """Dynamic scaling of the loss: halved by a gradient that is not finite, doubled after some steps that are.

    The gradient's global norm decides, which is the same on every rank.

    Source: Micikevicius et al., arXiv 1710.03740, section 3.2; factors as in ``torch.amp.GradScaler``.
    """

    value: float = 1.0
    interval: int | None = None
    good_steps: int = 0

    @classmethod
    def of(cls, dtypes: Dtypes) -> LossScale:
        """Return the scale with which a run starts; without a setting 1, which never changes and skips no step."""
        return cls() if dtypes.loss_scale is None else cls(dtypes.loss_scale, dtypes.loss_scale_interval)

    def accepts(self, norm: float) -> bool:
        """Update the scale after a step with a gradient of this norm; False if the step is to be skipped."""
        if self.interval is None:
            return True
        if not math.isfinite(norm):
            self.value, self.good_steps = self.value * BACKOFF, 0
            return False
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.value, self.good_steps = self.value * GROWTH, 0
        return True
