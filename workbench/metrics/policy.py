"""What happened to the policy in a step: ratio, clipping, KL, entropy, advantages. Keys: group/name/statistic.

Population of all of them: tokens that count, each with weight 1.

Letters: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from workbench.losses.grpo import kl_k3
from workbench.losses.terms import LossInputs, Term
from workbench.metrics.values import Deviation, Maximum, Mean, Minimum, Sum, Value


def policy_metrics(inputs: LossInputs, terms: Mapping[str, Term], loss_mask_T: Tensor) -> dict[str, Value]:
    """Metrics of one micro-batch on one rank, unfinished. The same keys on every rank, tokens or not."""
    with torch.no_grad():
        ratio_T = torch.exp(inputs.policy_logprobs_T - inputs.old_logprobs_T)
        metrics: dict[str, Value] = {
            "tokens/trained/sum": Sum(loss_mask_T.sum()),
            "ratio/policy_old/mean": Mean.over(ratio_T, loss_mask_T),
            "ratio/policy_old/std": Deviation.over(ratio_T, loss_mask_T, pivot=1.0),
            "ratio/policy_old/min": Minimum.over(ratio_T, loss_mask_T),
            "ratio/policy_old/max": Maximum.over(ratio_T, loss_mask_T),
            "advantage/all/mean": Mean.over(inputs.advantages_T, loss_mask_T),
            "advantage/all/min": Minimum.over(inputs.advantages_T, loss_mask_T),
            "advantage/all/max": Maximum.over(inputs.advantages_T, loss_mask_T),
            "logprob/policy/mean": Mean.over(inputs.policy_logprobs_T, loss_mask_T),
        }
        for name, term in terms.items():
            if term.clipped_T is not None:
                metrics[f"clip/{name}/fraction"] = Mean.over(term.clipped_T, loss_mask_T)
        if inputs.entropy_T is not None:
            metrics["entropy/policy/mean"] = Mean.over(inputs.entropy_T, loss_mask_T)
        for other, logprobs_T in (("ref", inputs.ref_logprobs_T), ("sampler", inputs.sampler_logprobs_T)):
            if logprobs_T is not None:
                k3_T = kl_k3(inputs.policy_logprobs_T, logprobs_T)
                metrics[f"kl/policy_{other}/k3_mean"] = Mean.over(k3_T, loss_mask_T)
    return metrics
