"""The KL penalty in the reward is added to it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from workbench.faults import Fault


def _broken(kl_in_reward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def with_other_sign(*args: object) -> Tensor:
        return -kl_in_reward(*args)

    return with_other_sign


FAULT = Fault(
    family="I",
    what="the distance from the reference is taken with the other sign, so that leaving it is rewarded",
    origin="nebuly-ai/optimate#298 (Chatllama)",
    signature="right log-probabilities; advantages move the other way with the distance from the reference, the more "
    "the greater the coefficient; the policy term alone is wrong; nothing without a penalty",
    seam="kl_in_reward",
    broken=_broken,
    shows_in={
        "data": {"advantages": {"name": "reinforce_plus_plus"}},
        "loss": {"kl": {"coefficient": 0.5, "estimator": "k1", "placement": "reward"}},
    },
    hidden_in={"loss": {"kl": {"coefficient": 0.0}}},
    detected_by="tests/faults/test_unseen.py::test_a_penalty_of_the_other_sign_moves_advantages_alone",
)
