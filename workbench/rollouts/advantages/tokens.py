"""Advantages of tokens: token rewards, discounted returns, generalised advantage estimation, whitening.

Only trained tokens are steps. Where the mask of a document is interrupted (a tool's output), the next trained token
is the next step: nothing is reset or discounted in between.

Letters: T packed tokens | N documents.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import torch
from torch import Tensor

from workbench.errors import ShapeError, SpecError
from workbench.shapes import check_shapes


def token_rewards(
    rewards_N: Tensor,
    document_ids_T: Tensor,
    loss_mask_T: Tensor,
    penalties_T: Tensor | None = None,
    *,
    elsewhere: Literal["zero", "as_given"] = "zero",
) -> Tensor:
    """Put each document's reward on its last trained token, and subtract a penalty from every trained token.

    Formula: ``reward_t = [t is the last trained token of its document] * R - penalty_t``. Where nothing counts: 0; or,
             as given, minus the given penalty, and a document without a trained token has its reward on its last token.
    Shapes:  rewards_N [N], the others [T] -> [T] float64. With zero, a document without a trained token loses its
             reward.
    Raises:  ShapeError: shapes that disagree, or a document id that has no reward.
    Source:  the penalty as part of the reward: InstructGPT, arXiv 2203.02155, equation 2;
             `workbench.losses.kl.kl_in_reward` computes it; as given: OpenRLHF compute_reward.
    """
    tokens = {"document_ids_T": document_ids_T, "loss_mask_T": loss_mask_T, "penalties_T": penalties_T}
    check_shapes("token_rewards", rewards_N=rewards_N, **tokens)
    trained = torch.nonzero(loss_mask_T).squeeze(1)
    ids = document_ids_T[trained]
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(rewards_N):
        raise ShapeError(
            "token_rewards: document_ids_T",
            found=f"{int(ids.min())} to {int(ids.max())} on trained tokens",
            rule=f"0 <= document < {len(rewards_N)}, the rewards given",
            fix="pass one reward for every document, in the order of their ids",
        )
    rewards_T = torch.zeros(document_ids_T.shape, dtype=torch.float64, device=rewards_N.device)
    if penalties_T is not None:
        rewards_T = -penalties_T.double()
        rewards_T = rewards_T if elsewhere == "as_given" else torch.where(loss_mask_T, rewards_T, 0.0)
    last = torch.full((len(rewards_N),), -1, device=ids.device).scatter_reduce(0, ids, trained, "amax")
    if elsewhere == "as_given":
        real = torch.nonzero(document_ids_T >= 0).squeeze(1)
        end = torch.full_like(last, -1).scatter_reduce(0, document_ids_T[real], real, "amax")
        last = torch.where(last >= 0, last, end)
    has_token = last >= 0
    rewards_T[last[has_token]] += rewards_N.double()[has_token]
    return rewards_T


def spread_rewards(rewards_N: Tensor, document_ids_T: Tensor, penalties_T: Tensor | None = None) -> Tensor:
    """Give every token the whole reward of its document, minus the token's own penalty.

    Formula: ``R - penalty_t``; 0 on padding.
    Shapes:  rewards_N [N], the others [T] -> [T] float64.
    Source:  NeMo-RL's REINFORCE++, which is undiscounted: a token's return does not include the penalties of later
             tokens.
    """
    check_shapes("spread_rewards", rewards_N=rewards_N, document_ids_T=document_ids_T, penalties_T=penalties_T)
    real_T = document_ids_T >= 0
    rewards_T = torch.where(real_T, rewards_N.double()[document_ids_T.clamp_min(0)], 0.0)
    return rewards_T if penalties_T is None else torch.where(real_T, rewards_T - penalties_T.double(), 0.0)


def discounted_returns(
    token_rewards_T: Tensor, document_ids_T: Tensor, loss_mask_T: Tensor, *, discount: float = 1.0
) -> Tensor:
    """Discounted return of each trained token.

    Formula: ``G_t = reward_t + discount * G_next``, next: the next trained token of the document; 0 elsewhere.
    Shapes:  [T] -> [T] float64.
    Raises:  ShapeError: shapes that disagree; SpecError: a discount outside 0 to 1.
    """
    check_shapes(
        "discounted_returns", token_rewards_T=token_rewards_T, document_ids_T=document_ids_T, loss_mask_T=loss_mask_T
    )
    _refuse_outside("discounted_returns", discount=discount)
    returns_T = torch.zeros(token_rewards_T.shape, dtype=torch.float64)
    rewards, documents = token_rewards_T.double().tolist(), document_ids_T.tolist()
    to_come: dict[int, float] = {}
    for t in reversed(torch.nonzero(loss_mask_T).squeeze(1).tolist()):
        to_come[documents[t]] = rewards[t] + discount * to_come.get(documents[t], 0.0)
        returns_T[t] = to_come[documents[t]]
    return returns_T.to(token_rewards_T.device)


def gae(
    token_rewards_T: Tensor,
    values_T: Tensor,
    document_ids_T: Tensor,
    loss_mask_T: Tensor,
    *,
    discount: float = 1.0,
    policy_lambda: float = 0.95,
    value_lambda: float | None = None,
    length_adaptive_alpha: float | None = None,
    elsewhere: Literal["zero", "carry"] = "zero",
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: advantages for the policy, returns for the critic.

    Formula: over the trained tokens of a document, L of them,
             ``delta_t = reward_t + discount * V_next - V_t``,  ``A_t = delta_t + discount * lambda * A_next``,
             next: the next trained token; V and A after the last one are 0. Advantages take the policy's lambda,
             returns are V_t + A_t with the critic's.
             Length-adaptive: the policy's lambda is ``max(0, 1 - 1 / (alpha * L))``, 0 up to 1 / alpha tokens.

    ``values_T`` are the critic's values of the state *before* the token. A ``value_lambda`` of None is the policy's
    (plain GAE), of 1 makes the returns unbiased (decoupled GAE). ``elsewhere`` decides the tokens of a document that do
    not count: 0, or the advantage of the next token that counts (0 after the last), and that plus its own value as
    return.

    Shapes: [T] each -> advantages_T [T], returns_T [T], float64.
    Raises: ShapeError: shapes that disagree; SpecError: a lambda or discount outside 0 to 1, an alpha that is not
        positive, or an alpha without a value_lambda.
    Source: GAE, arXiv 1506.02438, equations 11 and 16; decoupled: VC-PPO, arXiv 2503.01491; length-adaptive:
        VAPO, arXiv 2504.05118, section 4.2, which does not define alpha * L < 1: 0 here. carry: NeMo-RL and verl, whose
        returns are not masked.
    """
    tokens = {"values_T": values_T, "document_ids_T": document_ids_T, "loss_mask_T": loss_mask_T}
    check_shapes("gae", token_rewards_T=token_rewards_T, **tokens)
    if length_adaptive_alpha is not None and (length_adaptive_alpha <= 0 or value_lambda is None):
        raise SpecError(
            f"gae(length_adaptive_alpha={length_adaptive_alpha}, value_lambda={value_lambda})",
            rule="alpha is positive, and the critic has a lambda of its own",
            fix="VAPO: length_adaptive_alpha=0.05, value_lambda=1.0",
        )
    critic_lambda = policy_lambda if value_lambda is None else value_lambda
    _refuse_outside("gae", discount=discount, policy_lambda=policy_lambda, value_lambda=critic_lambda)
    rewards, values = token_rewards_T.double().tolist(), values_T.double().tolist()
    documents = document_ids_T.tolist()
    trained = torch.nonzero(loss_mask_T).squeeze(1).tolist()
    lengths = Counter(documents[t] for t in trained)
    advantages_T, returns_T = torch.zeros(2, len(documents), dtype=torch.float64)
    after: dict[int, tuple[float, float, float]] = {}
    counts = set(trained)
    for t in reversed(range(len(documents)) if elsewhere == "carry" else trained):
        document = documents[t]
        if t not in counts:
            if document >= 0:
                _, advantages_T[t], critic = after.get(document, (0.0, 0.0, 0.0))
                returns_T[t] = values[t] + critic
            continue
        next_value, next_advantage, next_critic = after.get(document, (0.0, 0.0, 0.0))
        own_lambda = policy_lambda
        if length_adaptive_alpha is not None:
            own_lambda = max(0.0, 1.0 - 1.0 / (length_adaptive_alpha * lengths[document]))
        delta = rewards[t] + discount * next_value - values[t]
        advantage = delta + discount * own_lambda * next_advantage
        critic = delta + discount * critic_lambda * next_critic
        after[document] = values[t], advantage, critic
        advantages_T[t], returns_T[t] = advantage, values[t] + critic
    return advantages_T.to(values_T.device), returns_T.to(values_T.device)


def whiten(
    values_T: Tensor,
    loss_mask_T: Tensor,
    *,
    ddof: int = 1,
    epsilon: float = 1e-8,
    epsilon_form: Literal["add", "floor"] = "add",
    count_epsilon: float = 0.0,
    elsewhere: Literal["zero", "whiten"] = "zero",
) -> Tensor:
    """Centre and scale the values of all trained tokens of the step, once over all of them.

    Values that are all equal, or no more than ddof of them, become exactly 0; so do values elsewhere, unless they are
    whitened with the variance 0 of equal values and an epsilon. A count_epsilon shifts the mean away from equal values.

    Formula: ``(x - mean) / sqrt(var + epsilon)``, var = sum (x - mean)^2 / (count - ddof); for "floor" the root of
             ``max(var, epsilon)``. count_epsilon is added to the count under both means. Where nothing counts: 0, or
             the value there with the same centre and scale.
    Shapes:  [T], [T] bool -> [T] float64.
    Raises:  ShapeError: shapes that disagree; SpecError: an unknown form, or a ddof or epsilon below 0.
    Source:  REINFORCE++, arXiv 2501.03262, section 3.2. "add" with ddof 1 is verl's, "floor" with ddof 0 NeMo-RL's,
             both of which whiten elsewhere; count_epsilon 1e-8: NeMo-RL's GAE.
    """
    check_shapes("whiten", values_T=values_T, loss_mask_T=loss_mask_T)
    if epsilon_form not in ("add", "floor") or elsewhere not in ("zero", "whiten") or min(ddof, epsilon) < 0:
        raise SpecError(
            f"whiten(ddof={ddof}, epsilon={epsilon}, epsilon_form={epsilon_form!r}, elsewhere={elsewhere!r})",
            rule="epsilon_form is add or floor, elsewhere zero or whiten; ddof and epsilon are not negative",
            fix="correct the call",
        )
    whitened_T = torch.zeros(values_T.shape, dtype=torch.float64, device=values_T.device)
    trained = values_T[loss_mask_T].double()
    if len(trained) <= ddof:
        return whitened_T
    equal = count_epsilon == 0 and bool(trained.amax() == trained.amin())
    if equal and (elsewhere == "zero" or epsilon == 0):
        return whitened_T
    count = len(trained) + count_epsilon
    mean = trained[0] if equal else trained.sum() / count
    variance = (trained - mean).square().sum() / count * (len(trained) / (len(trained) - ddof))
    scale = (variance + epsilon if epsilon_form == "add" else variance.clamp(min=epsilon)).sqrt()
    if elsewhere == "whiten":
        return (values_T.double() - mean) / scale
    whitened_T[loss_mask_T] = (trained - mean) / scale
    return whitened_T


def standardize(
    values: Tensor,
    mask: Tensor | None = None,
    *,
    dims: int | list[int] | tuple[int, ...] | None = None,
    ddof: int = 0,
    epsilon: float = 1e-5,
) -> Tensor:
    """Centre and scale a rectangle of values along some of its dims; a masked value becomes the standardized 0.

    Unlike `whiten` this gives a nonzero number where nothing counts, and epsilon is added to the deviation.

    Formula:  ``(x m - mean) / (sqrt(var) + epsilon)``, mean and var of x where m is 1,
              var = sum m (x - mean)^2 / (count - ddof)
    Shapes:   any, mask alike -> float64 of the same. NaN where no more than ddof values of a slice count.
    Raises:   ShapeError: shapes that disagree; SpecError: a ddof or epsilon below 0.
    Source:   AReaL cbff54d6, masked_normalization, which takes var from E[x^2] - E[x]^2.
    """
    if ddof < 0 or epsilon < 0:
        raise SpecError(
            f"standardize(ddof={ddof}, epsilon={epsilon})", rule="neither is negative", fix="correct the call"
        )
    if mask is not None and mask.shape != values.shape:
        raise ShapeError(
            "standardize: mask",
            found=f"shape {tuple(mask.shape)}, values {tuple(values.shape)}",
            rule="one flag per value",
            fix="pass a mask of the values' shape",
        )
    reduced_dims = list(range(values.dim())) if dims is None else dims
    counts = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    masked = torch.where(counts, values.double(), 0.0)
    count = counts.double().sum(reduced_dims, keepdim=True)
    mean = masked.sum(reduced_dims, keepdim=True) / count
    variance = torch.where(counts, masked - mean, 0.0).square().sum(reduced_dims, keepdim=True) / (count - ddof)
    return (masked - mean) / (variance.sqrt() + epsilon)


def _refuse_outside(where: str, **numbers: float) -> None:
    if bad := [f"{name}={value}" for name, value in numbers.items() if not 0 <= value <= 1]:
        raise SpecError(
            f"{where}({', '.join(bad)})",
            rule="discount and lambda lie between 0 and 1",
            fix="correct the setting",
        )
