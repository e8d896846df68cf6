"""A trainer's step in plain torch, right or with a mistake, and its dump; imports nothing of `workbench`.

A mistake is a dict of parts that the wrong trainer has of its own (`WRONG`). What it dumps is what it has in its hands;
settings, estimator and layout are those of the right one.

Letters: T tokens, also of padding | N documents.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

WRONG = (
    "values",
    "advantages",
    "weights",
    "penalty_weights",
    "policy",
    "kl",
    "factor",
    "reported",
    "gradients",
    "counts",
)
WRONG += ("reported_of",)
"""Parts of a mistake: functions of the step, and factors of gradient and reported numbers."""


@dataclass(frozen=True)
class Kind:
    """A kind of step: sizes, loss and what is dumped."""

    lengths: tuple[int, ...]
    groups: tuple[int, ...]
    loss: str = "ppo"
    denominator: str = "token"
    clip: tuple[float, float] = (0.2, 0.2)
    kl: float = 0.0
    correction: float = 0.0
    estimator: str = "grpo"
    dtype: str = "float32"
    dp: int = 1
    micro_batches: int = 1
    cp: int = 1
    padded: bool = False
    tools: bool = False
    temperature: float = 1.0
    records: tuple[str, ...] = ("coefficients", "losses")
    constant: float = 0.0
    silent: tuple[int, ...] = ()
    flat: tuple[int, ...] = ()
    spread: float = 0.15
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """What a trainer has: values of tokens [T], of documents [N], and its kind."""

    kind: Kind
    ids_T: Tensor
    tokens: dict[str, Tensor]
    documents: dict[str, Tensor]
    wrong: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mask_T(self) -> Tensor:
        return self.tokens["loss_mask"]

    @property
    def lengths_N(self) -> Tensor:
        return torch.bincount(self.ids_T[self.mask_T], minlength=len(self.documents["rewards"])).double()

    def of_rows(self, by: str) -> Tensor:
        """[N] micro-batch or rank of each document."""
        rows_N = self.documents["rows"]
        return rows_N if by == "micro_batch" else rows_N // self.kind.micro_batches


def draw(kind: Kind) -> Step:
    """Draw the inputs of a step."""
    g = torch.Generator().manual_seed(kind.seed)
    number, lengths_N = len(kind.lengths), torch.tensor(kind.lengths)
    width = int(lengths_N.max()) + 1
    padded_N = torch.full_like(lengths_N, width) if kind.padded else lengths_N
    ids_T = torch.arange(number).repeat_interleave(padded_N)
    at_T = torch.cat([torch.arange(int(width_of)) for width_of in padded_N])
    there_T = at_T < lengths_N[ids_T]
    mask_T = there_T.clone()
    if kind.tools:
        mask_T &= ~((at_T >= 2) & (at_T < 2 + ids_T % 3))
    mask_T &= ~torch.isin(ids_T, torch.tensor(kind.silent, dtype=torch.long))

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(len(ids_T), generator=g, dtype=torch.float64)

    old_T = -0.05 - normal(1.2).abs()
    values = {"policy_logprobs": old_T + normal(kind.spread), "old_logprobs": old_T}
    if kind.kl:
        values["ref_logprobs"] = old_T + normal(0.25)
    if kind.correction:
        values["sampler_logprobs"] = old_T + normal(0.2)
    stored = {name: torch.where(there_T, v.clamp(max=-1e-3), 0.0).to(_dtype(kind)) for name, v in values.items()}
    tokens = {"loss_mask": mask_T, "token_mask": there_T, **stored}
    rewards_N = torch.rand(number, generator=g, dtype=torch.float64).mul(8).round().div(8)
    groups_N = torch.tensor(kind.groups)
    rewards_N[torch.isin(groups_N, torch.tensor(kind.flat, dtype=torch.long))] = 1.0
    rows_N = torch.arange(number) * kind.dp * kind.micro_batches // number
    return Step(kind, ids_T, tokens, {"rewards": rewards_N, "group_ids": groups_N, "rows": rows_N})


def _dtype(kind: Kind) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[kind.dtype]


def advantages(
    step: Step, groups_N: Tensor | None = None, rewards_N: Tensor | None = None, how: str = "", **more: Any
) -> Tensor:
    """[N] advantages of rewards in groups."""
    how = how or step.kind.estimator
    groups_N = step.documents["group_ids"] if groups_N is None else groups_N
    rewards_N = step.documents["rewards"] if rewards_N is None else rewards_N
    trained_N = step.lengths_N > 0 if not more.get("masked") else torch.ones_like(step.lengths_N, dtype=torch.bool)
    out_N = torch.zeros_like(rewards_N)
    for group in groups_N.unique():
        own_N = (groups_N == group) & trained_N
        own = rewards_N[own_N]
        if how == "rloo":
            out_N[own_N] = (own - own.mean()) * len(own) / max(len(own) - 1, 1)
            continue
        deviation = own.std(correction=more.get("ddof", 1)) if len(own) > 1 else torch.tensor(0.0).double()
        if how == "grpo":
            out_N[own_N] = (own - own.mean()) / (deviation + more.get("epsilon", 1e-4))
        elif how == "dr_grpo":
            out_N[own_N] = own - own.mean()
        elif how == "missing parentheses":
            out_N[own_N] = own - own.mean() / (deviation + 1e-4)
    return out_N


def weights(step: Step, denominator: str = "") -> Tensor:
    """[T] 1 / divisor of each trained token."""
    kind, lengths_N, ids_T = step.kind, step.lengths_N, step.ids_T
    documents = float((lengths_N > 0).sum())
    divisor_N = {
        "token": torch.full_like(lengths_N, float(lengths_N.sum())),
        "document": documents * lengths_N,
        "document_sum": torch.full_like(lengths_N, documents),
        "constant": torch.full_like(lengths_N, documents * kind.constant),
    }[denominator or kind.denominator]
    return torch.where(step.mask_T, (1 / divisor_N.clamp_min(1e-9))[ids_T], 0.0)


def mean(values_T: Tensor, step: Step) -> Tensor:
    """[T] mean over the trained tokens of the token's document."""
    sums_N = values_T.new_zeros(len(step.lengths_N)).index_add(0, step.ids_T, torch.where(step.mask_T, values_T, 0.0))
    return (sums_N / step.lengths_N.clamp_min(1).to(sums_N))[step.ids_T]


def policy_values(step: Step, x_T: Tensor, v: Mapping[str, Tensor], **more: Any) -> Tensor:
    """[T] values of the policy term, times the correction."""
    kind, A_T = step.kind, v["advantages"]
    low, high = more.get("clip", kind.clip)
    old_T, loss = v["old_logprobs"], more.get("loss", kind.loss)
    log_T = x_T - old_T
    if loss == "gspo":
        log_T = mean(log_T, step)
    ratio_T = log_T.exp()
    clipped_T = ratio_T.clamp(1 - low, 1 + high)
    if loss in ("ppo", "gspo"):
        pick = torch.maximum if not more.get("optimistic") else torch.minimum
        value_T = pick(-ratio_T * A_T, -clipped_T * A_T)
        if more.get("dual"):
            value_T = torch.where(A_T < 0, torch.minimum(value_T, -more["dual"] * A_T), value_T)
    elif loss == "cispo":
        value_T = -clipped_T.detach() * A_T * x_T
    elif loss == "reinforce":
        value_T = -A_T * x_T
    else:
        value_T = -ratio_T * A_T
    return value_T * correction(step, v, **more) if kind.correction else value_T


def correction(step: Step, v: Mapping[str, Tensor], *, mu_T: Tensor | None = None, **more: Any) -> Tensor:
    """[T] truncated weight old / sampler."""
    mu_T = v["old_logprobs"] - v["sampler_logprobs"] if mu_T is None else mu_T
    weight_T = mu_T.exp()
    if "correction" in more:
        return more["correction"](weight_T)
    return weight_T.clamp(max=step.kind.correction)


def kl_values(step: Step, x_T: Tensor, v: Mapping[str, Tensor], estimator: str = "k3") -> Tensor:
    """[T] values of the penalty, without its coefficient."""
    d_T = v["ref_logprobs"] - x_T
    return {"k1": -d_T, "k2": 0.5 * d_T.square(), "k3": d_T.exp() - 1 - d_T}[estimator]


def train(step: Step, **wrong: Any) -> Step:
    """Compute the loss and its gradient; with parts of a mistake in place of the right ones (`WRONG`)."""
    assert set(wrong) <= set(WRONG), wrong
    kind, dtype = step.kind, _dtype(step.kind)
    A_N = wrong.get("advantages", advantages)(step).to(dtype)
    taken = {**step.tokens, "advantages": A_N[step.ids_T] if A_N.shape == step.documents["rewards"].shape else A_N}
    given = dict(step.tokens)
    leaf_T = taken["policy_logprobs"].clone().requires_grad_()
    taken["policy_logprobs"] = leaf_T
    if "values" in wrong:
        taken |= wrong["values"](replace(step, tokens={**taken}))
    x_T = taken["policy_logprobs"]
    own = replace(step, tokens={**taken, "loss_mask": taken["loss_mask"]})
    w_T = wrong.get("weights", weights)(own)
    kl_w_T = wrong["penalty_weights"](own) if "penalty_weights" in wrong else w_T
    policy_T = wrong.get("policy", policy_values)(own, x_T, taken)
    mask_T = taken["loss_mask"]
    terms = {"policy": (w_T.to(dtype) * torch.where(mask_T, policy_T, 0)).sum()}
    if kind.kl:
        kl_T = kind.kl * wrong.get("kl", kl_values)(own, x_T, taken)
        terms["kl"] = (kl_w_T.to(dtype) * torch.where(mask_T, kl_T, 0)).sum()
    total = sum(terms.values())
    total.backward()
    gradient_T = torch.zeros_like(leaf_T) if leaf_T.grad is None else leaf_T.grad
    gradient_T = gradient_T * wrong.get("factor", 1.0)
    if "gradients" in wrong:
        gradient_T = wrong["gradients"](step, gradient_T)
    reported = wrong.get("reported", wrong.get("factor", 1.0))
    if "reported_of" in wrong:
        keep_T = mask_T & wrong["reported_of"](own)
        terms["policy"] = (w_T.to(dtype) * torch.where(keep_T, policy_T, 0)).sum()
        terms["kl"] = (kl_w_T.to(dtype) * torch.where(keep_T, kl_T, 0)).sum()
        total = sum(terms.values())
    losses = {"total": float(total.detach()) * reported}
    if kind.kl:
        losses |= {name: float(value.detach()) * reported for name, value in terms.items()}
    log_T = (taken["policy_logprobs"] - taken["old_logprobs"]).detach()
    recorded = {
        "coefficients": gradient_T,
        "ratios": (mean(log_T, own) if kind.loss == "gspo" else log_T).exp(),
        "loss_weights": w_T,
    }
    if kind.correction:
        recorded["correction_weights"] = correction(own, taken).detach()
    counts = wrong.get("counts", lambda own: {"tokens": float(own.mask_T.sum())})(own)
    tokens = {**given, **{name: value for name, value in recorded.items() if name in kind.records}}
    more = {"losses": losses} if "losses" in kind.records else {}
    more |= {"counts": counts} if "counts" in kind.records else {}
    documents = dict(step.documents)
    if A_N.shape == step.documents["rewards"].shape:
        documents["advantages"] = A_N
    else:
        tokens["advantages"] = A_N
    return replace(step, tokens=tokens, documents=documents, wrong=more)


def settings(kind: Kind) -> dict[str, Any]:
    """Settings of the loss that the right trainer computes."""
    name = {"ppo": "ppo", "gspo": "gspo", "cispo": "cispo", "reinforce": "reinforce"}.get(kind.loss, kind.loss)
    out: dict[str, Any] = {"name": name, "denominator": kind.denominator}
    if kind.loss in ("ppo", "gspo", "cispo"):
        out["surrogate"] = {"clip_low": kind.clip[0], "clip_high": kind.clip[1]}
    if kind.kl:
        out["kl"] = {"coefficient": kind.kl, "estimator": "k3"}
    if kind.correction:
        out["correction"] = {"ratio": "token", "ratio_high": kind.correction}
    if kind.denominator == "constant":
        out["denominator_constant"] = kind.constant
    return out


def write(step: Step, folder: Path) -> None:
    """Write a trained step in the interchange format."""
    kind = step.kind
    folder.mkdir(parents=True)
    tensors = dict(step.tokens)
    if kind.padded:
        tensors = {name: value.reshape(len(kind.lengths), -1) for name, value in tensors.items()}
    else:
        tensors["document_ids"] = step.ids_T
    documents = dict(step.documents)
    if kind.dp * kind.micro_batches == 1:
        del documents["rows"]
    tensors |= documents
    save_file(
        {name: value.detach().contiguous().clone() for name, value in tensors.items()}, folder / "step.safetensors"
    )
    layout = {"dp": kind.dp, "cp": kind.cp, "micro_batches": kind.micro_batches}
    about = {"format": "rl step", "version": 1, "files": ["step.safetensors"], "settings": settings(kind)}
    about |= {"advantages": {"name": kind.estimator}, "layout": layout, "dtype": kind.dtype}
    about |= {"temperature": kind.temperature, **step.wrong}
    (folder / "step.json").write_text(json.dumps(about))


Mistake = Callable[[], Mapping[str, Any]]
