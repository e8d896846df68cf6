"""Subject of a proof: it takes one optimizer step on every rank of a mesh.

A trainer's loss function gets one micro-batch of one rank and returns one number, divided by the trainer itself. There
weights are not data, so every invariant can break. The returned number is back-propagated as it is; the engine then
adds gradients over micro-batches, and adds or averages them over dp x cp. A correct function makes the engine's result
the gradient of the step, for every layout.

Functions are evaluated in float64 even where they cast to narrower floats (`InFloat64`): the proof is about their
arithmetic, not their rounding. Recomputation in backward (`torch.utils.checkpoint`) is not covered: there casts keep
their dtype, and torch raises on the mismatch.

Letters: T tokens of a micro-batch on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from workbench.errors import SpecError
from workbench.losses.terms import Loss
from workbench.policy.model import Policy
from workbench.reduction.partial import Scalar
from workbench.reduction.weights import StepTotals
from workbench.rollouts.targets import TrainingRow
from workbench.sharding.gradients import full_gradients, gradient_norms, scale_gradients, sum_gradients
from workbench.sharding.mesh import Mesh
from workbench.specs.run import RunSpec
from workbench.train import step as flow
from workbench.train.step import LocalRow, StepResult


class Subject(Protocol):
    """A step whose invariants are checked."""

    @property
    def title(self) -> str:
        """Display name."""
        ...

    @property
    def run_spec(self) -> RunSpec:
        """Spec that its rows are prepared with; invariants change layout, packing and head."""
        ...

    @property
    def declared(self) -> tuple[str, ...]:
        """Declared breaks, as entries of `LossSpec.breaks`."""
        ...

    def step(self, policy: Policy, rows: Sequence[LocalRow], totals: StepTotals) -> StepResult:
        """One step on one rank, from rows of `workbench.train.step.prepare_rows`. Collective over all axes."""
        ...


@dataclass(frozen=True)
class WorkbenchSubject:
    """A loss whose weights are data of the step, for `workbench.train.step.run_step`.

    Attributes:
        run_spec: its ``loss`` gives the weights and the declared breaks.
        from_spec: True if ``loss`` is the one that the spec describes; a user function need not have the spec's
            clip, and has no clip metrics.
    """

    title: str
    run_spec: RunSpec
    loss: Loss
    from_spec: bool = True

    @property
    def declared(self) -> tuple[str, ...]:
        """Breaks that the spec declares."""
        return self.run_spec.loss.breaks

    def step(self, policy: Policy, rows: Sequence[LocalRow], totals: StepTotals) -> StepResult:
        """See `workbench.train.step.run_step`; every metric is measured."""
        return flow.run_step(
            policy,
            self.loss,
            rows,
            totals,
            keep_gradients=True,
            level="full",
            loss_spec=self.run_spec.loss if self.from_spec else None,
            fused=self.run_spec.policy.fused_loss,
        )


NARROW = (torch.float32, torch.float16, torch.bfloat16)
CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)
FACTORIES = (torch.zeros, torch.ones, torch.empty, torch.full, torch.tensor, torch.as_tensor, torch.linspace, torch.eye)
"""Functions that create float32 tensors if no dtype is given."""


class InFloat64(TorchFunctionMode):
    """Mode in which a cast to a narrower float gives float64, and so does a new tensor of one.

    Example:
        >>> with InFloat64():
        ...     torch.ones(1).float().dtype, torch.ones(1).to(torch.bfloat16).dtype, torch.ones(1).int().dtype
        (torch.float64, torch.float64, torch.int32)
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function, with float64 in place of each narrower dtype."""
        if func in CASTS:
            return args[0].double()
        named = {name: _wide(value) for name, value in (kwargs or {}).items()}
        result = func(*map(_wide, args), **named)
        if func in FACTORIES and "dtype" not in named and result.dtype in NARROW:
            return func(*args, **named, dtype=torch.float64)
        return result


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


Engine = Literal["sum", "mean"]
"""Reduction of gradients over dp x cp. Over micro-batches they are added, as `backward` does."""


@dataclass(frozen=True)
class Outputs:
    """The policy's outputs for each of this rank's tokens; both carry a gradient.

    They are not masked: untrained tokens and padding have values too.

    Attributes:
        policy_logprobs_T: [T] nats, of the target.
        entropy_T: [T] nats, of the distribution.
    """

    policy_logprobs_T: Tensor
    entropy_T: Tensor


@dataclass(frozen=True)
class Totals:
    """Totals that a trainer knows apart from its micro-batch: counts of the whole optimizer step, layout, and mesh.

    Attributes:
        tokens: trained targets of the step, over all ranks and micro-batches.
        documents: documents of the step with at least one such target.
        all_documents: documents of the step, including those without trained tokens.
        micro_batches: of each rank, in the step.
        dp: data-parallel ranks.
        cp: context-parallel ranks that share the tokens of a micro-batch.
        tp: tensor-parallel ranks that compute the same.
        mesh: the axes, for the functions of `workbench.sharding.collectives`, each of which states its adjoint:
            ``sum_sum(value, totals.mesh["cp"])``. On one rank each is the identity.
    """

    tokens: int
    documents: int
    all_documents: int
    micro_batches: int
    dp: int
    cp: int
    tp: int
    mesh: Mesh


MicrobatchLoss = Callable[[TrainingRow, Outputs, Totals], Tensor]
"""A trainer's loss: ``microbatch_loss(batch, outputs, totals) -> scalar``.

The batch is this rank's part of the micro-batch: mask, advantages, old, sampler and reference log-probabilities,
rewards and groups, all aligned with their token. Its ``document_ids_T`` number the documents of the whole
micro-batch and are below ``totals.all_documents``; padding has -1. Its ``lengths_T`` are those of whole documents.
"""


@dataclass(frozen=True)
class TrainerSubject:
    """A trainer's loss, and its engine's reduction of gradients.

    Attributes:
        run_spec: that rows are prepared with; its loss is ignored.
    """

    microbatch_loss: MicrobatchLoss
    engine: Engine
    run_spec: RunSpec = field(default_factory=RunSpec)

    def __post_init__(self) -> None:
        if self.engine not in get_args(Engine):
            raise SpecError(
                f"engine = {self.engine!r}",
                rule="what your engine does to gradients over dp x cp: sum or mean",
                fix="mean for DDP and FSDP as they are; sum where the averaging is switched off or undone",
            )

    @property
    def title(self) -> str:
        """The function's name, and its engine."""
        return f"{getattr(self.microbatch_loss, '__name__', 'microbatch_loss')} (engine {self.engine})"

    @property
    def declared(self) -> tuple[str, ...]:
        """Empty: a function cannot declare breaks."""
        return ()

    def step(self, policy: Policy, rows: Sequence[LocalRow], totals: StepTotals) -> StepResult:
        """One optimizer step on this rank: forward, backward, and the engine's gradient reduction.

        Returns:
            The whole loss, which is the engine's sum or mean of the returned values, and the whole gradients, which
            stay in ``parameter.grad``.

        Raises:
            SpecError: the returned value is no number with a gradient.
        """
        mesh = policy.mesh
        dp, cp, tp = (mesh[axis].size for axis in ("dp", "cp", "tp"))
        known = Totals(totals.tokens, totals.documents, rows[0].documents.number, len(rows), dp, cp, tp, mesh)
        divisor = mesh["dp_cp"].size if self.engine == "mean" else 1
        policy.model.zero_grad(set_to_none=True)
        parts = []
        for local in rows:
            row = local.row
            hidden_TD = policy.hidden_states(row.tokens_T, row.positions_T, local.attention)
            head = policy.token_logprobs(
                hidden_TD, row.targets_T, row.extensions.get("temperature_T"), outputs=("entropy",)
            )
            assert head.entropy_T is not None, "it was requested"
            with InFloat64():
                loss = _checked(self.microbatch_loss(row, Outputs(head.logprobs_T, head.entropy_T), known), mesh)
            loss.backward()
            parts.append(Scalar(loss.detach() / divisor, frozenset({"dp_cp"})))
        sum_gradients(policy.model, policy.shards, mesh)
        scale_gradients(policy.model, policy.shards, 1 / divisor)
        return StepResult(
            loss={"total": sum(parts[1:], start=parts[0]).complete(mesh)},
            metrics={},
            norms=gradient_norms(policy.model, policy.shards, mesh),
            gradients=full_gradients(policy.model, policy.shards, mesh),
            tokens={},
            totals=totals,
        )


def _checked(returned: Any, mesh: Mesh) -> Tensor:
    """The returned loss; raises unless it is a scalar tensor with a gradient."""
    if not isinstance(returned, Tensor) or returned.dim():
        found = f"a tensor of shape {list(returned.shape)}" if isinstance(returned, Tensor) else repr(returned)
        rule, fix = "it returns one number: a tensor without dimensions", "sum over the tokens"
    elif not returned.requires_grad:
        found, fix = "a constant", "return outputs.policy_logprobs_T.sum() * 0 there, or sum over no token"
        rule = (
            "every rank runs backward on every micro-batch, even if it has nothing to train: "
            "the others wait for it in their collectives"
        )
    else:
        return returned
    where = ", ".join(f"{axis}={place}" for axis, place in mesh.coordinates.items())
    raise SpecError("microbatch_loss(batch, outputs, totals)", found=f"{found}, on rank {where}", rule=rule, fix=fix)
