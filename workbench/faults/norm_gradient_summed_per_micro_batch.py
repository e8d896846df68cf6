"""Gradients of replicated weights are summed over tp after every micro-batch."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.policy.model import Policy
from workbench.sharding.collectives import all_sum_


def _broken(hidden_states: Callable) -> Callable:
    def sum_before_the_next(policy: Policy, *args: object) -> object:
        partial = [
            parameter.grad
            for name, parameter in policy.model.named_parameters()
            if policy.shards[name].gradient_is_partial and parameter.grad is not None
        ]
        all_sum_(partial, policy.mesh["tp"])
        return hidden_states(policy, *args)

    return sum_before_the_next


FAULT = Fault(
    family="S",
    what="the sum over tp of gradients of weights that are replicated over it runs once a micro-batch, on a buffer "
    "that accumulates",
    origin="no single report: the sum over tp of Megatron-LM's finalize_model_grads, called for every micro-batch",
    signature="only norm weights wrong: of q_norm and k_norm (all norms under sequence parallelism) micro-batch k of K "
    "counts tp^(K-1-k) times; loss and everything else right",
    seam="workbench.policy.model:Policy.hidden_states",
    broken=_broken,
    shows_in={"layout": {"tp": 2}, "data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_unseen_at_first.py::test_norms_summed_once_a_micro_batch_are_the_only_wrong_parameters",
    changes_metrics=False,
)
