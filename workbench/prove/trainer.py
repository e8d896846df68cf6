"""A trainer's loss function: one micro-batch of one rank in, one number out, divided by the trainer itself.

Here weights are not data, so every invariant can break. The returned number is back-propagated as it is; the engine
then adds gradients over micro-batches, and adds or averages them over dp x cp. A correct function makes the engine's
result the gradient of the step, for every layout. Its casts to float32 and below give float64 here
(`workbench.prove.exact`): the proof is about its arithmetic, not its rounding.

Letters: T tokens of a micro-batch on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from workbench.errors import SpecError
from workbench.policy.model import Policy
from workbench.prove.exact import InFloat64
from workbench.reduction.partial import Scalar
from workbench.reduction.weights import StepTotals
from workbench.rollouts.targets import TrainingRow
from workbench.sharding.gradients import full_gradients, gradient_norms, scale_gradients, sum_gradients
from workbench.sharding.mesh import Mesh
from workbench.specs.run import RunSpec
from workbench.train.step import LocalRow, StepResult

Engine = Literal["sum", "mean"]
"""Reduction of gradients over dp x cp. Over micro-batches they are added, as `backward` does."""

ENGINES: tuple[Engine, ...] = ("sum", "mean")


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

    @classmethod
    def of(cls, rows: Sequence[LocalRow], totals: StepTotals, mesh: Mesh) -> Totals:
        """Totals from the outputs of `workbench.train.step.prepare_rows`."""
        return cls(
            totals.tokens,
            totals.documents,
            rows[0].documents.number,
            len(rows),
            mesh["dp"].size,
            mesh["cp"].size,
            mesh["tp"].size,
            mesh,
        )


MicrobatchLoss = Callable[[TrainingRow, Outputs, Totals], Tensor]
"""A trainer's loss: ``microbatch_loss(batch, outputs, totals) -> scalar``.

The batch is this rank's part of the micro-batch: mask, advantages, old, sampler and reference log-probabilities,
rewards and groups, all aligned with their token. Its ``document_ids_T`` number the documents of the whole
micro-batch and are below ``totals.all_documents``; padding has -1. Its ``lengths_T`` are those of whole documents.
"""


def trainer_step(
    policy: Policy, microbatch_loss: MicrobatchLoss, rows: Sequence[LocalRow], totals: StepTotals, *, engine: Engine
) -> StepResult:
    """One optimizer step of a trainer's loss on this rank: forward, backward, and the engine's gradient reduction.

    Args:
        policy: the model as sharded on this rank; gradients stay in ``parameter.grad``.
        microbatch_loss: see `MicrobatchLoss`.
        rows: this rank's micro-batches, from `workbench.train.step.prepare_rows`.
        totals: of the whole step, from the same.
        engine: "sum" or "mean" of gradients over dp x cp.

    Returns:
        The whole loss, which is the engine's sum or mean of the returned values, and the whole gradients.

    Raises:
        SpecError: the returned value is no number with a gradient.
    """
    mesh = policy.mesh
    known = Totals.of(rows, totals, mesh)
    divisor = mesh["dp_cp"].size if engine == "mean" else 1
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
            loss = _checked(microbatch_loss(row, Outputs(head.logprobs_T, head.entropy_T), known), mesh)
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


@dataclass(frozen=True)
class TrainerSubject:
    """A trainer's loss as the subject of a proof.

    Attributes:
        microbatch_loss: see `MicrobatchLoss`.
        engine: "sum" or "mean".
        run_spec: that rows are prepared with; its loss is ignored.
    """

    microbatch_loss: MicrobatchLoss
    engine: Engine
    run_spec: RunSpec = field(default_factory=RunSpec)

    def __post_init__(self) -> None:
        check_engine(self.engine)

    @property
    def title(self) -> str:
        """The function's name, and its engine."""
        return f"{getattr(self.microbatch_loss, '__name__', 'microbatch_loss')} (engine {self.engine})"

    @property
    def declared(self) -> tuple[str, ...]:
        """Empty: a function cannot declare breaks."""
        return ()

    def step(self, policy: Policy, rows: Sequence[LocalRow], totals: StepTotals) -> StepResult:
        """See `trainer_step`."""
        return trainer_step(policy, self.microbatch_loss, rows, totals, engine=self.engine)


def check_engine(engine: str) -> None:
    """Raise for an unknown engine.

    Raises:
        SpecError: the engine is neither "sum" nor "mean".
    """
    if engine not in ENGINES:
        raise SpecError(
            f"engine = {engine!r}",
            rule="what your engine does to gradients over dp x cp: sum or mean",
            fix="mean for DDP and FSDP as they are; sum where the averaging is switched off or undone",
        )


def _checked(returned: Any, mesh: Mesh) -> Tensor:
    """The returned loss; raises unless it is a scalar tensor with a gradient."""
    where = ", ".join(f"{axis}={place}" for axis, place in mesh.coordinates.items())
    if not isinstance(returned, Tensor) or returned.dim():
        value = f"a tensor of shape {list(returned.shape)}" if isinstance(returned, Tensor) else repr(returned)
        raise SpecError(
            "microbatch_loss(batch, outputs, totals)",
            found=f"{value}, on rank {where}",
            rule="it returns one number: a tensor without dimensions",
            fix="sum over the tokens",
        )
    if not returned.requires_grad:
        raise SpecError(
            "microbatch_loss(batch, outputs, totals)",
            found=f"a constant, on rank {where}",
            rule="every rank runs backward on every micro-batch, even if it has nothing to train: "
            "the others wait for it in their collectives",
            fix="return outputs.policy_logprobs_T.sum() * 0 there, or sum over no token",
        )
    return returned
