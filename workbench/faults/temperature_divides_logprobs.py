"""The temperature divides log-probabilities instead of logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from workbench.faults import Fault
from workbench.policy.logprobs import TokenLogprobs
from workbench.policy.model import Policy


def _broken(token_logprobs: Callable[..., TokenLogprobs]) -> Callable[..., TokenLogprobs]:
    def divided_afterwards(
        self: Policy, hidden_TD: Tensor, targets_T: Tensor, temperature_T: Tensor | None = None, **how: object
    ) -> TokenLogprobs:
        said = token_logprobs(replace(self, temperature=1.0), hidden_TD, targets_T, **how)
        divisor = self.temperature if temperature_T is None else temperature_T
        return said._replace(logprobs_T=said.logprobs_T / divisor)

    return divided_afterwards


FAULT = Fault(
    family="G",
    what="what the fused head returns is taken for logits: log p of temperature 1 is divided by the temperature",
    origin="NVIDIA-NeMo/RL, use_fused_linear_logprobs (7ea279ab: read, not run)",
    signature="numbers that are no log-probabilities, those of temperature 1 over the temperature; the gradient is "
    "that of the softmax of temperature 1. Where old ones are made the same way every ratio starts at 1",
    seam="workbench.policy.model:Policy.token_logprobs",
    broken=_broken,
    shows_in={"policy": {"temperature": 0.7}},
    hidden_in={"policy": {"temperature": 1.0}},
)
