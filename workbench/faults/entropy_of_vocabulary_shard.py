"""Each tensor-parallel rank reports the entropy over its own part of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workbench.faults import Fault
from workbench.policy.logprobs import TokenLogprobs


def _broken(token_logprobs: Callable) -> Callable:
    def entropy_of_local_logits(hidden_TD: Tensor, **options: Any) -> TokenLogprobs:
        said = token_logprobs(hidden_TD, **options)
        if said.entropy_T is None or options["axis"].size == 1:
            return said
        local = {
            "implementation": "reference",
            "axis": None,
            "first_token": 0,
            "wanted": ("entropy",),
            "targets_T": torch.zeros_like(options["targets_T"]),
        }
        with torch.no_grad():
            alone = token_logprobs(hidden_TD, **(options | local))
        return said._replace(entropy_T=alone.entropy_T)

    return entropy_of_local_logits


FAULT = Fault(
    family="D",
    what="the softmax of the entropy is normalised over the local logits, without the collective over tp",
    origin="ServiceNow/Fast-LLM#520",
    signature="gradient, loss and log-probabilities right, unless the loss has an entropy bonus; the entropy "
    "about log(tp) nats too small where the distribution is flat",
    seam="workbench.policy.model:token_logprobs",
    broken=_broken,
    shows_in={"layout": {"tp": 2}},
    hidden_in={"layout": {"tp": 1}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_the_entropy_of_a_shard_is_smaller_by_log_tp",
    changes_gradient=False,
)
