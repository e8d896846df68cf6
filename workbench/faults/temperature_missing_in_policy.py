"""The policy's logits are not divided by the temperature at which tokens were sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from workbench.faults import Fault
from workbench.policy.logprobs import TokenLogprobs
from workbench.policy.model import Policy


def _broken(token_logprobs: Callable[..., TokenLogprobs]) -> Callable[..., TokenLogprobs]:
    def at_temperature_one(
        self: Policy, hidden_TD: Tensor, targets_T: Tensor, temperature_T: Tensor | None = None, **how: object
    ) -> TokenLogprobs:
        return token_logprobs(replace(self, temperature=1.0), hidden_TD, targets_T, **how)

    return at_temperature_one


FAULT = Fault(
    family="G",
    what="log-probabilities of the policy are those of temperature 1, the recorded ones those of the sampler's",
    origin="NVIDIA-NeMo/RL#660, verl-project/verl#3133, THUDM/slime#557, PrimeIntellect-ai/prime-rl#697, "
    "ServiceNow/Fast-LLM e4d5845a",
    signature="ratios that are not 1 in the first step: at 0.7 a mean of 1.2 here (1.08 where Fast-LLM saw it), "
    "gradient 0.85 of the right one with cosine 0.88; entropy that of another temperature",
    seam="workbench.policy.model:Policy.token_logprobs",
    broken=_broken,
    shows_in={"policy": {"temperature": 0.7}},
    hidden_in={"policy": {"temperature": 1.0}},
)
