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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.terms import Loss
from workbench.losses.wide import InFloat64 as InFloat64
from workbench.policy.model import Policy
from workbench.reduction.partial import Scalar
from workbench.reduction.weights import StepTotals
from workbench.sharding.gradients import full_gradients, gradient_norms, scale_gradients, sum_gradients
from workbench.sharding.pipeline import share_tensors
from workbench.specs.run import RunSpec
from workbench.train import step as flow
from workbench.train.own import MicrobatchLoss as MicrobatchLoss
from workbench.train.own import Outputs as Outputs
from workbench.train.own import Totals as Totals
from workbench.train.own import checked_number
from workbench.train.pipeline import run_stages
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


Engine = Literal["sum", "mean"]
"""Reduction of gradients over dp x cp. Over micro-batches they are added, as `backward` does."""


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
        parts: list[Scalar] = []

        def row_loss(local: LocalRow, hidden_TD: Tensor) -> tuple[Tensor, Callable[[], None]]:
            row = local.row
            head = policy.token_logprobs(
                hidden_TD, row.targets_T, row.extensions.get("temperature_T"), outputs=("entropy",)
            )
            assert head.entropy_T is not None, "it was requested"
            with InFloat64():
                loss = checked_number(self.microbatch_loss(row, Outputs(head.logprobs_T, head.entropy_T), known), mesh)
            parts.append(Scalar(loss.detach() / divisor, frozenset({"dp_cp"})))
            return loss, lambda: None

        if policy.stages is not None:
            run_stages(policy, rows, row_loss)
        else:
            for local in rows:
                row_loss(local, local.hidden_states(policy))[0].backward()
        sum_gradients(policy.model, policy.shards, mesh)
        scale_gradients(policy.model, policy.shards, 1 / divisor)
        whole = sum(parts[1:], start=parts[0]).complete(mesh).value if parts else None
        last = share_tensors({} if whole is None else {"total": whole}, mesh)  # of a pipeline, the last stage has it
        return StepResult(
            loss={"total": Scalar(last["total"], frozenset())},
            metrics={},
            norms=gradient_norms(policy.model, policy.shards, mesh),
            gradients=full_gradients(policy.model, policy.shards, mesh),
            tokens={},
            totals=totals,
        )
