"""The verdict on two losses, by their canonical form or a small seeded batch that tells them apart.

The batches are hard for a loss:
documents of unequal lengths, one without a trained token and one with a single one, prompts and holes in the mask,
advantages of both signs that vary inside a document or not, ratios beyond every clip, a sampler and a reference that
disagree, and every other field that a loss may read. Log ratios stay within 20.

Letters: T packed tokens | N documents | V vocabulary.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from workbench.losses.build import build_loss
from workbench.losses.canonical import canonical, canonical_gradient
from workbench.policy.logprobs import TokenLogprobs
from workbench.policy.logprobs.reference import token_logprobs_from_logits
from workbench.reduction.evaluate import CORRECTION_WEIGHTS, evaluate_loss, loss_inputs
from workbench.reduction.weights import step_weights
from workbench.rollouts.targets import TrainingRow
from workbench.specs.losses import LossSpec

SEEDS = range(24)
"""Batches that are searched for one that tells two losses apart."""
TOLERANCE = 1e-7
"""Relative difference above which a batch tells two losses apart: far above rounding, and above the effect of an
epsilon in a count."""
Verdict = Literal["same", "different", "cannot say"]
"""Of two losses."""
LENGTHS = ((5, 1, 7, 3, 4, 2), (6, 9, 1, 4), (3, 3, 8, 1, 2, 5, 4))
"""Lengths of a batch's documents, cycled by seed; no token of the second document trains."""
SPREADS = (0.2, 0.6, 1.5, 0.02)
"""Standard deviation of log ratios, cycled by seed."""


@dataclass(frozen=True)
class Counterexample:
    """A batch on which two losses differ."""

    seed: int
    """Of `adversarial_row`."""
    losses: tuple[float, float]
    gradient_norms: tuple[float, float]
    """L2, of the derivatives by the head output."""
    relative: tuple[float, float]
    """Relative distance of the losses, and of the gradients' worst element."""


@dataclass(frozen=True)
class Outcome:
    """Loss and gradient of a batch."""

    loss: float
    gradient_S: Tensor
    """By log-probabilities, entropies, log normalisers and mean squared logits, [4 T]; or by logits, [T V]."""

    @property
    def gradient_norm(self) -> float:
        """L2 norm of the gradient."""
        return float(self.gradient_S.norm())


def adversarial_row(seed: int) -> tuple[TrainingRow, TokenLogprobs]:
    """Return a batch and the head output of a policy on it, in float64.

    Every third seed has one advantage per document, the others one per token; of every eight seeds, 4 and 6 move the
    document with the most trained tokens 12 nats from the old policy, up and down, and 5 from the reference.
    """
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(LENGTHS[seed % len(LENGTHS)])
    ids_T = torch.arange(len(lengths)).repeat_interleave(lengths)
    number = len(ids_T)

    def normal(size: int = number) -> Tensor:
        return torch.randn(size, generator=draw, dtype=torch.float64)

    spread = SPREADS[seed % len(SPREADS)]
    loss_mask_T = (torch.rand(number, generator=draw) < 0.8) & (ids_T != 1)
    loss_mask_T[0] = True
    moved_T, from_ref_T = spread * normal(), spread * normal()
    longest = int(torch.bincount(ids_T[loss_mask_T]).argmax())
    # 12 nats: beyond every clip, and within the 20 at which systems clamp log ratios against overflow.
    if seed % 8 in (4, 6):
        moved_T = torch.where(ids_T == longest, (12 if seed % 8 == 4 else -12) + moved_T, moved_T)
    if seed % 8 == 5:
        from_ref_T = torch.where(ids_T == longest, -12 + from_ref_T, from_ref_T)
    # keep log-probabilities below 0 for any ratio: the largest of the four lies between -2 and 0
    towards_sampler_T = 0.5 * spread * normal()
    offsets_4T = torch.stack([moved_T, torch.zeros_like(moved_T), towards_sampler_T, moved_T + from_ref_T])
    top_T = -2 * torch.rand(number, generator=draw, dtype=torch.float64) - 1e-3
    policy_T, old_T, sampler_T, ref_T = (offsets_4T - offsets_4T.amax(0) + top_T).unbind()
    advantages_T = normal(len(lengths))[ids_T] if seed % 3 == 0 else normal()
    rewards_N = torch.where(torch.rand(len(lengths), generator=draw) < 0.5, 1.0, -0.5).double()
    group_T = ids_T // 2
    row = TrainingRow(
        tokens_T=torch.zeros_like(ids_T),
        positions_T=torch.zeros_like(ids_T),
        document_ids_T=ids_T,
        targets_T=torch.zeros_like(ids_T),
        loss_mask_T=loss_mask_T,
        advantages_T=advantages_T,
        old_logprobs_T=old_T,
        sampler_logprobs_T=sampler_T,
        ref_logprobs_T=ref_T,
        source_T=torch.arange(number),
        lengths_T=torch.bincount(ids_T, weights=loss_mask_T.double())[ids_T].clamp_min(1),
        rewards_T=rewards_N[ids_T],
        group_ids_T=group_T,
        rollout_ids_T=ids_T,
        extensions={
            CORRECTION_WEIGHTS: (0.5 * normal()).exp(),
            "truncated": (ids_T == 2).double(),
            "group_tokens": torch.bincount(group_T).double()[group_T],
        },
    )
    head_output = TokenLogprobs(policy_T, 1 + normal().abs(), normal())
    return row, head_output._replace(mean_squared_logit_T=normal().square(), mean_logit_T=normal())


def outcome(spec: LossSpec, seed: int, temperature: float | None = None) -> Outcome:
    """Return loss and gradient on the batch of a seed, as one micro-batch of one rank.

    Without a temperature the head output is that of `adversarial_row`. Otherwise the policy starts from logits that
    give the same log-probabilities at temperature 1, and divides them; the gradient is then by logits.
    """
    row, constants = adversarial_row(seed)
    if temperature is None:
        head_output = constants.map(lambda values_T: values_T.clone().requires_grad_())
        leaves = [leaf for leaf in head_output if leaf is not None]
    else:
        leaves = [adversarial_logits(constants.logprobs_T).requires_grad_()]
        head_output = token_logprobs_from_logits(leaves[0], torch.zeros_like(row.targets_T), temperature=temperature)
    (weights,), totals = step_weights([row], spec)
    evaluated = evaluate_loss(build_loss(spec), loss_inputs(row, head_output, totals), weights, row.loss_mask_T)
    total = evaluated.scalars["total"].value
    gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return Outcome(float(total.detach()), torch.cat([gradient.flatten() for gradient in gradients]))


def adversarial_logits(logprobs_T: Tensor) -> Tensor:
    """Return [T, V] logits whose softmax gives token 0 these log-probabilities and splits the rest unevenly, V = 4."""
    others_V = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).log()
    rest_T = torch.log(-torch.expm1(logprobs_T))
    return torch.cat([logprobs_T[:, None], rest_T[:, None] + others_V], dim=1)


def relative_distance(one: Outcome, other: Outcome) -> tuple[float, float]:
    """Return the relative distance of two losses, and of their gradients' worst element; 0 if equal, 1 if unrelated.

    Formula:  |a - b| / max(|a|, |b|), for elements of a gradient with a millionth of its largest one added below
    """
    loss = _relative(torch.tensor([one.loss, other.loss], dtype=torch.float64))
    pair_2S = torch.stack([one.gradient_S, other.gradient_S])
    floor = 1e-6 * float(pair_2S.abs().max())
    return loss, _relative(pair_2S, floor)


def _relative(pair_2S: Tensor, floor: float = 0.0) -> float:
    difference_S = (pair_2S[0] - pair_2S[1]).abs()
    scale_S = pair_2S.abs().amax(0) + floor
    same_S = (pair_2S[0] == pair_2S[1]) | pair_2S.isnan().all(0)
    relative_S = torch.where(same_S, 0.0, difference_S / scale_S)
    return float(torch.nan_to_num(relative_S, nan=1.0, posinf=1.0).max())


# ---- the verdict -------------------------------------------------------------------------------------------------


def compare(
    one: LossSpec, other: LossSpec, temperatures: tuple[float, float] | None = None
) -> tuple[Verdict, bool | None, bool | None, Counterexample | None]:
    """Return the verdict on two specs, on loss and gradient each, and the batch that tells them apart.

    Temperatures are divisors of the same logits; without them both see the same log-probabilities.
    """
    if temperatures is None and canonical(one) == canonical(other):
        return "same", True, True, None
    same_gradient = True if temperatures is None and canonical_gradient(one) == canonical_gradient(other) else None
    heats = temperatures or (None, None)
    first, losses_apart, gradients_apart = None, False, False
    for seed in SEEDS:
        pair = _outcome(one.model_dump_json(), seed, heats[0]), _outcome(other.model_dump_json(), seed, heats[1])
        relative = relative_distance(*pair)
        losses_apart |= relative[0] > TOLERANCE
        gradients_apart |= relative[1] > TOLERANCE
        if first is None and max(relative) > TOLERANCE:
            norms = pair[0].gradient_norm, pair[1].gradient_norm
            first = Counterexample(seed, (pair[0].loss, pair[1].loss), norms, relative)
        if losses_apart and (gradients_apart or same_gradient):
            break
    if first is None:
        return "cannot say", None, same_gradient, None
    return "different", False if losses_apart else None, False if gradients_apart else same_gradient, first


def same_scaling(one: LossSpec, other: LossSpec) -> bool:
    """True if two specs that are the same loss on one micro-batch stay equal when a step is split into several."""
    left, right = one.compat.scaling, other.compat.scaling
    return left.counts == right.counts and left.powers == right.powers and one.breaks == other.breaks


@functools.lru_cache(maxsize=8192)
def _outcome(spec: str, seed: int, temperature: float | None) -> Outcome:
    return outcome(LossSpec.model_validate_json(spec), seed, temperature)
