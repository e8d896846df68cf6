"""The weight of the head is divided by the temperature in bfloat16."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from workbench.faults import Fault
from workbench.policy.logprobs import TokenLogprobs


def _broken(token_logprobs: Callable[..., TokenLogprobs]) -> Callable[..., TokenLogprobs]:
    def with_divided_weight(
        hidden_TD: Tensor, *, weight_VD: Tensor, temperature: float | Tensor = 1.0, **options: object
    ) -> TokenLogprobs:
        if isinstance(temperature, Tensor) or temperature == 1.0:
            return token_logprobs(hidden_TD, weight_VD=weight_VD, temperature=temperature, **options)
        rounded_VD = (weight_VD / temperature).bfloat16().to(weight_VD.dtype)
        return token_logprobs(hidden_TD, weight_VD=rounded_VD, temperature=1.0, **options)

    return with_divided_weight


FAULT = Fault(
    family="J",
    what="the temperature is divided into the weight instead of the logits, and the quotient is kept in bfloat16",
    origin="NovaSky-AI/SkyRL, its fused head (read, not run)",
    signature="log-probabilities of every token off by some 1e-3 nats to either side and all gradients by some 1e-3 "
    "of themselves; nothing at temperature 1",
    seam="workbench.policy.model:token_logprobs",
    broken=_broken,
    shows_in={"policy": {"temperature": 0.7}},
    hidden_in={"policy": {"temperature": 1.0}},
    detected_by="tests/faults/test_unseen_at_first.py::test_eight_bits_of_a_head_move_every_log_probability_by_thousandths",
)
