"""Credit that each token of a recorded step gets from a loss, and the fate of the tokens that get none.

The credit of a token is its weight times its gradient coefficient: the derivative of the whole step's loss by the
log-probability of that token, found by autograd. It needs no model: rollouts record log-probabilities. Below 0 the
loss makes the token likelier, above 0 less likely; two losses with equal credits make the same update.

Letters: T tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from workbench.errors import ShapeError, check_kind
from workbench.losses.build import build_loss
from workbench.policy.logprobs import TokenLogprobs
from workbench.reduction.evaluate import evaluate_loss, loss_inputs
from workbench.reduction.weights import step_weights
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.targets import shift_targets
from workbench.specs.losses import LossSpec

FATES = ("untrained", "acts", "clipped", "rejected", "zero advantage", "no gradient")
"""Fate of a token in the policy term; each token has exactly one."""
NEED_LOGITS = ("entropy_coefficient", "squared_logit_coefficient", "mean_squared_logit_coefficient")
"""Terms whose gradient does not go through the token's own log-probability: they are left out."""


@dataclass(frozen=True)
class Credit:
    """Credit of each token of a step. Everything is float64 and in the order of the batch.

    Attributes:
        credit_T: [T] d loss / d log-probability, of all terms together; 0 on tokens that do not count.
        policy_T: [T] the policy term's part of it.
        weights_T: [T] gradient weight of the token in the policy term.
        fates_T: [T] index into `FATES`. "zero advantage": the advantage is 0; "rejected": masked by the correction;
            "clipped": clipped by the surrogate; "no gradient": none of these, and still 0.
        document_ids_T: [T] document of the token.
        loss: reported loss of the whole step.
        extras_T: further outputs of the policy term, by name ("raw_weight", "applied_weight", ...).
    """

    credit_T: Tensor
    policy_T: Tensor
    weights_T: Tensor
    fates_T: Tensor
    document_ids_T: Tensor
    loss: float
    extras_T: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def trained_T(self) -> Tensor:
        """[T] bool: trained tokens."""
        return self.fates_T != FATES.index("untrained")

    def shares(self, by: Literal["token", "weight"] = "token") -> dict[str, float]:
        """Share of each fate in the step; the shares add up to 1 (all 0 if no token is trained).

        Args:
            by: "token" counts trained tokens; "weight" counts each with its weight in the gradient, which gives the
                part of the step that is lost.
        """
        counts_T = self.weights_T if by == "weight" else self.trained_T.double()
        total = float(counts_T.sum())
        return {
            fate: float(counts_T[self.fates_T == number].sum()) / total if total else 0.0
            for number, fate in enumerate(FATES)
            if fate != "untrained"
        }


def token_credit(batch: RolloutBatch, spec: LossSpec | str, policy_logprobs_T: Tensor | None = None) -> Credit:
    """The credit of every token of one optimizer step.

    Formula:  credit_t = sum_k w_kt c_k d lambda_k / d l_t, summed over the values of all tokens that l_t enters (a
              sequence loss has all of its document); w the gradient weight of term k, c its coefficient
    Shapes:   a batch of T tokens -> tensors of [T].
    Backward: none; the result is data.

    Args:
        batch: all documents of the step, in any order, as one micro-batch.
        spec: any loss, or the name of a preset. Its entropy and squared-logit terms (`NEED_LOGITS`) are left out.
        policy_logprobs_T: [T] nats, of the policy being trained, aligned with their tokens; None takes the old
            policy's: the first step after sampling.

    Raises:
        ShapeError: log-probabilities of another length than the batch.
        SpecError: the batch lacks a field that the loss or its denominator reads; no batch, or no loss.

    Example:
        >>> batch = RolloutBatch.from_documents([{"tokens": [5, 7, 2], "loss_mask": [0, 1, 1], "advantages": 0.5,
        ...                                       "old_logprobs": [0, -1.0, -0.3]}])
        >>> token_credit(batch, LossSpec(denominator="token")).credit_T
        tensor([ 0.0000, -0.2500, -0.2500], dtype=torch.float64)
    """
    check_kind("token_credit: batch", batch, RolloutBatch, "load one with workbench.load_rollouts(folder)")
    check_kind("token_credit: spec", spec, (LossSpec, str), "pass a LossSpec, or a preset's name such as 'grpo'")
    spec = LossSpec(name=spec) if isinstance(spec, str) else spec
    row = shift_targets(batch).to(torch.device("cpu"), torch.float64)
    old_T = row.old_logprobs_T
    policy_T = old_T if policy_logprobs_T is None else _at_targets(policy_logprobs_T, batch)
    policy_T = torch.where(row.loss_mask_T, policy_T, old_T).detach().requires_grad_()
    (weights,), totals = step_weights([row], spec)
    loss = build_loss(spec.model_copy(update=dict.fromkeys(NEED_LOGITS, 0.0)))
    # The inputs of a training step, so that every field a loss reads there exists here too.
    _, terms, scalars = evaluate_loss(loss, loss_inputs(row, TokenLogprobs(policy_T), totals), weights, row.loss_mask_T)
    by_term = {name: _gradient(scalars[name].value, policy_T) for name in ("policy", "total")}

    term = terms["policy"]
    false_T = torch.zeros_like(row.loss_mask_T)
    fates_T = torch.full(row.loss_mask_T.shape, FATES.index("no gradient"))
    for fate, where_T in (
        ("clipped", false_T if term.clipped_T is None else term.clipped_T),
        ("rejected", ~term.extras["kept"] if "kept" in term.extras else false_T),
        ("zero advantage", row.advantages_T == 0),
        ("acts", by_term["policy"] != 0),
        ("untrained", ~row.loss_mask_T),
    ):
        fates_T[where_T] = FATES.index(fate)  # the later one wins

    # from targets to tokens: the last position has no target, the first token no prediction
    return Credit(
        by_term["total"].roll(1),
        by_term["policy"].roll(1),
        weights[term.weight].gradient_T.double().roll(1),
        fates_T.roll(1),
        batch.document_ids_T,
        float(scalars["total"].value.detach()),
        {name: values_T.roll(1) for name, values_T in term.extras.items()},
    )


def _at_targets(logprobs_T: Tensor, batch: RolloutBatch) -> Tensor:
    if logprobs_T.shape != batch.tokens_T.shape:
        raise ShapeError(
            "token_credit: policy_logprobs_T",
            found=f"shape {list(logprobs_T.shape)}",
            rule=f"one for each of the {batch.num_tokens} tokens of the batch, prompts included",
            fix="align them with the tokens; where a token does not train any number will do",
        )
    return logprobs_T.roll(-1).double()


def _gradient(total: Tensor, policy_T: Tensor) -> Tensor:
    """[T] gradient of one sum; 0 where it does not depend on the policy."""
    if not total.requires_grad:
        return torch.zeros_like(policy_T)
    return torch.autograd.grad(total, policy_T, retain_graph=True, materialize_grads=True)[0]
