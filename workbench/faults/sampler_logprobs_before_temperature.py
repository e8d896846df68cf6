"""The sampler says its log-probabilities as they were before it divided by the temperature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workbench.faults import Fault
from workbench.policy.model import Policy


def without_temperature(policy: Policy, local: Any) -> Tensor:
    """[t] nats: what a policy says of a row's targets at temperature 1, less what it says at its own."""
    row = local.row
    with torch.no_grad():
        hidden_TD = policy.hidden_states(row.tokens_T, row.positions_T, local.attention)
        raw, own = (
            asked.token_logprobs(hidden_TD, row.targets_T, wanted=()).logprobs_T
            for asked in (replace(policy, temperature=1.0), policy)
        )
    return torch.where(row.loss_mask_T, raw - own, 0.0)


def _broken(run_step: Callable) -> Callable:
    def run_with_raw(policy: Policy, loss: object, rows: list, *more: object, **how: object) -> object:
        rows = [
            replace(
                local,
                row=replace(
                    local.row, sampler_logprobs_T=local.row.sampler_logprobs_T + without_temperature(policy, local)
                ),
            )
            for local in rows
        ]
        return run_step(policy, loss, rows, *more, **how)

    return run_with_raw


FAULT = Fault(
    family="G",
    what="a sampler returns the log-probabilities of its raw logits, and drew from those over the temperature",
    origin="huggingface/trl#4159 (mended in #4163), allenai/open-instruct#1678, vllm-project/vime#64",
    signature="weights against the sampler wrong by the token's p at its temperature over p at 1, most of them too big "
    "for tokens that were drawn below 1; the policy term with them; log-probabilities of the policy, ratios "
    "against the old one and the penalty right",
    seam="run_step",
    broken=_broken,
    shows_in={"policy": {"temperature": 0.7}, "loss": {"correction": {"kind": "tis"}}},
    hidden_in={"policy": {"temperature": 1.0}},
    detected_by="tests/faults/test_unseen.py::test_other_logprobs_of_the_sampler_move_weights_and_the_policy_term",
)
