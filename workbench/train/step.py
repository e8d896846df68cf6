"""READ THIS FIRST: the whole workbench on one page.

One optimizer step of a policy loss, in any layout:

    pack -> shift targets -> weights (of the whole step) -> split over cp -> hidden states -> token log-probabilities
    -> per-token loss -> weighted sum -> backward -> sum gradients over dp x cp -> metrics -> optimizer

Everything that depends on several tokens happens before the split; everything after it is a plain sum over the
tokens of a rank. The one exception is a quantity of a whole document *and* the current policy (a sequence ratio): a
loss gets it from `LocalRow.sums`, whose documents may straddle cp ranks. A fused or a reproducible step differs in the
functions of a `StepStrategy` alone. The functions of this module are also the seams at which `workbench.faults` plants
known bugs.

Letters: T packed tokens | t tokens of this rank | S tokens of the source batch | D model dimension.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from workbench.losses.build import build_loss as build_loss
from workbench.losses.build import prepare_inputs
from workbench.losses.document_sums import pair_signs
from workbench.losses.own import TrainerLoss
from workbench.losses.terms import Loss
from workbench.metrics.definitions import Level
from workbench.metrics.evidence import GradientTokens, count_evidence, split_evidence
from workbench.metrics.policy import policy_metrics
from workbench.metrics.step import gradient_group_norms
from workbench.metrics.values import Value, finish_metrics
from workbench.policy.logprobs import TokenLogprobs
from workbench.policy.model import DTYPES, Policy
from workbench.policy.routers import Routes
from workbench.reduction.evaluate import Evaluated, evaluate_loss, loss_inputs
from workbench.reduction.partial import Scalar
from workbench.reduction.weights import StepLayout, StepTotals, compute_advantages, step_weights
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.support import for_policy
from workbench.rollouts.targets import shift_targets
from workbench.sharding import gradients
from workbench.sharding.early_sums import EarlySums
from workbench.sharding.gradients import full_gradients, gradient_norms, scale_gradients, sum_gradients
from workbench.sharding.mesh import Mesh
from workbench.sharding.pipeline import share_json, share_tensors
from workbench.specs.mixtures import PredictionSpec, RoutingSpec
from workbench.specs.run import LossSpec, RunSpec
from workbench.train import exact
from workbench.train.fused import fused_head, fused_row_loss
from workbench.train.own import evaluate_trainer_loss, step_totals
from workbench.train.pipeline import run_stages, run_stages_forward
from workbench.train.prediction import Predicted, prediction_terms, with_prediction_terms, with_predictions
from workbench.train.routes import StepRoutes, check_routes, routing_totals, with_input_source
from workbench.train.rows import (
    LocalRow,
    WholeRow,
    at_targets,
    in_source_order,
    number_documents,
    pack_step,
    plan_row,
    recorded_values,
    row_numbers,
    split_row,
)
from workbench.train.strategy import Reduced, StepStrategy, loss_after


@dataclass(frozen=True)
class StepResult:
    """The results of one step; the same on every rank.

    Attributes:
        loss: complete scalars, one per term and "total".
        metrics: final values by key.
        norms: L2 norm of every parameter's full gradient.
        gradients: every parameter's full gradient; empty unless requested.
        tokens: per-token values in the order of the source batch, [S]; empty unless requested.
        totals: tokens and documents of the whole step.
        fallbacks: why this rank's fused rows took more than three GEMMs with the head.
        range: in the reproducible mode: fractional bits of the gradient sums, the fewest of them that the largest
            partial gradient of any parameter uses, the power of two by which the loss was multiplied, retries.
        evidence: counts of trained tokens and documents to which the loss sends a gradient.
        loads: [mixtures, experts] routes of the step by expert, with routing settings.
        routes: [S, mixtures, experts of a token] that were taken, if they are recorded.
    """

    loss: Mapping[str, Scalar]
    metrics: Mapping[str, float]
    norms: Mapping[str, float]
    gradients: Mapping[str, Tensor]
    tokens: Mapping[str, Tensor]
    totals: StepTotals
    fallbacks: tuple[str, ...] = ()
    range: Mapping[str, float] = field(default_factory=dict)
    evidence: Mapping[str, float] = field(default_factory=dict)
    loads: Tensor | None = None
    routes: Tensor | None = None


@dataclass
class StepLoss:
    """The loss of a step, as a function of some of a rank's tokens and their head outputs.

    Attributes:
        loss: pure per-token loss.
        totals: of the whole step.
        spec: the settings of the loss; None: a loss without settings.
        frozen_clip_S: [S] bool, clip decisions of another run.
        mesh, micro_batches: the axes, and micro-batches of each rank, which a trainer's function knows.
        dtype: to which log-probabilities, advantages and entropies are rounded before; None: none.
        gradient_tokens: of the last evaluation with a gradient, which covers all tokens of a row.
    """

    loss: Loss
    totals: StepTotals
    spec: LossSpec | None = None
    frozen_clip_S: Tensor | None = None
    mesh: Mesh | None = None
    micro_batches: int = 1
    dtype: torch.dtype | None = None
    gradient_tokens: GradientTokens | None = None

    @property
    def outputs(self) -> tuple[str, ...]:
        """Head outputs besides log-probabilities."""
        return (self.spec or LossSpec()).head_outputs

    def __call__(self, local: LocalRow, head_output: TokenLogprobs) -> Evaluated:
        """Evaluate the per-token terms and their weighted sums."""
        row = local.row
        head_output, mass_T = head_output.within_support()
        inputs = loss_inputs(row, head_output, self.totals, local.sums, at_targets(self.frozen_clip_S, row))
        if mass_T is not None:
            inputs = replace(inputs, support_mass_T=mass_T)
        if self.dtype is not None:
            inputs = inputs.rounded(self.dtype)
        of_trainer = isinstance(self.loss, TrainerLoss)
        if torch.is_grad_enabled():  # a trainer's function masks by itself, so its gradient is that of all tokens
            seen = replace(inputs, policy_logprobs_T=head_output.logprobs_T) if of_trainer else inputs
            self.gradient_tokens = GradientTokens(row, seen)
        if isinstance(self.loss, TrainerLoss):
            assert self.mesh is not None, "given by `run_step`"
            known = step_totals(self.totals, local, self.mesh, self.micro_batches)
            return Evaluated(inputs, {}, evaluate_trainer_loss(self.loss, local.row, head_output, known))
        return evaluate_loss(self.loss, inputs, local.weights, row.loss_mask_T)


def prepare_rows(
    batch: RolloutBatch, spec: RunSpec, mesh: Mesh, document_rows: Sequence[Sequence[int]] | None = None
) -> tuple[list[LocalRow], StepTotals]:
    """Split the documents of one optimizer step into this rank's micro-batches.

    Every rank sees the whole step here, so the weights need no collective and cannot be local: all micro-batches of
    all ranks, however many the step has, are divided by the same counts. For ``document_rows`` see `pack_step`.

    Raises:
        SpecError: a loss on preference pairs with a group that is not a pair; advantages that the batch does not allow.
    """
    strategy, layout = choose_strategy(reproducible=spec.reproducible.on), spec.layout
    dtype = DTYPES["float64" if spec.dtypes.compute == "float64" else "float32"]
    batch = for_policy(compute_advantages(batch, spec), spec.policy.support)
    if spec.routing.replays:
        check_routes(batch)
    packed = [
        (with_input_source(row) if spec.routing.on else shift_targets(row)).to(torch.device("cpu"), dtype)
        for row in pack_step(batch, spec, document_rows)
    ]
    whole = strategy.weighed(packed)
    if spec.loss.needs_pairs:
        for row in whole:  # raises here, on every rank: an error on one rank alone would hang the others
            pair_signs(row.document_ids_T, row.group_ids_T, row.rewards_T, row.loss_mask_T)
    # On all rows, before the split: no denominator is local (DECISIONS.md, row 2).
    weights, totals = step_weights(whole, spec.loss, step_layout=StepLayout(layout.dp, layout.cp))
    if spec.prediction.on:
        packed = with_predictions(packed, spec.prediction)
    if spec.routing.on:
        totals = replace(totals, routing=routing_totals(whole, spec.routing))
    documents, numbers, per_rank, rows = number_documents(whole), row_numbers(whole), len(whole) // layout.dp, []
    for at in range(mesh["dp"].rank * per_rank, (mesh["dp"].rank + 1) * per_rank):
        row, plan = packed[at].to(mesh.device, dtype), plan_row(packed[at].document_ids_T, layout)
        in_dtype = {name: pair.map(lambda values_T: values_T.to(dtype)) for name, pair in weights[at].items()}
        whole_row = WholeRow(numbers[at], whole[at], in_dtype, documents[at], plan, mesh["cp"])
        by_name, slots, evaluated_on = strategy.to_split(whole_row)
        by_name = {name: pair.map(lambda values_T: values_T.to(mesh.device)) for name, pair in by_name.items()}
        local = split_row(row, by_name, slots, plan, mesh, layout)
        trained = int(packed[at].loss_mask_T[plan.positions(mesh["cp"].rank)].sum())
        rows.append(replace(local, whole=evaluated_on, sampling=batch.sampling, trained=trained))
    return rows, strategy.scaled(totals, whole, weights)


@exact.within_range
def run_step(
    policy: Policy,
    loss: Loss,
    rows: Sequence[LocalRow],
    totals: StepTotals,
    *,
    num_source: int = 0,
    frozen_clip_S: Tensor | None = None,
    keep_gradients: bool = False,
    level: Level = "basic",
    loss_spec: LossSpec | None = None,
    fused: bool = False,
    routing: RoutingSpec | None = None,
    prediction: PredictionSpec | None = None,
) -> StepResult:
    """Compute loss, gradients and metrics of one optimizer step; gradients stay in ``parameter.grad``.

    Args:
        policy: this rank's shard of the model.
        loss: pure per-token loss.
        rows: this rank's micro-batches, from `prepare_rows`.
        totals: of the whole step, from `prepare_rows`.
        num_source: S; if not 0, per-token values are gathered in the order of the source batch.
        frozen_clip_S: [S] bool, clip decisions of another run.
        keep_gradients: gather every parameter's full gradient.
        level: which metrics are computed: none, basic or full.
        loss_spec: the settings of the loss, for metrics of its bounds; None: these metrics are left out.
        fused: compute loss and gradient in one pass over the head, with a policy that was loaded for it; see
            `workbench.train.fused`.
        routing: the settings of the routers of a mixture of experts, with a policy that was loaded for them.
        prediction: the settings of layers that predict further tokens, with a policy that was loaded for them.
    """
    mesh, strategy = policy.mesh, choose_strategy(reproducible=policy.exact is not None, fused=fused)
    loss_dtype = policy.dtypes.loss and DTYPES[policy.dtypes.loss]
    step_loss = StepLoss(loss, totals, loss_spec, frozen_clip_S, mesh, len(rows), loss_dtype)
    parts, metrics, per_token, fallbacks = [], [], [], []
    routers = StepRoutes(policy, rows, routing, totals) if routing is not None and routing.on else None

    def row_loss(local: LocalRow, hidden_TD: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Evaluate the loss of a row; return it, and a function that measures the row after its backward."""
        step_loss.gradient_tokens = None
        local, (inputs, terms, scalars), fallback = strategy.row_loss(policy, hidden_TD, local, step_loss)
        further = Predicted({}, {}, {})
        if prediction is not None and prediction.on:
            further = prediction_terms(policy, hidden_TD, local, prediction)
            scalars = with_prediction_terms(scalars, further.terms)
        reached = step_loss.gradient_tokens
        # here and not after backward, which may shard the head again
        inputs = local.with_support_measures(inputs, policy, hidden_TD, level)

        def measure() -> None:
            parts.append({name: scalar.detach() for name, scalar in scalars.items()})
            measured = inputs if loss_spec is None else prepare_inputs(inputs, loss_spec)
            metrics.append(
                policy_metrics(measured, terms, local.row.loss_mask_T, level, loss_spec, local.documents)
                | count_evidence(inputs, terms, local.row, local.documents, reached)
                | further.counts
            )
            per_token.append(recorded_values(loss, inputs, terms, local.row) | further.tokens if num_source else {})
            fallbacks.append(fallback)

        return totals.scale * policy.loss_scale * scalars["total"].value, measure

    def pass_row(number: int, local: LocalRow) -> None:
        """Pass a row forward and backward. Its graph is freed on return: later, the device would wait for that."""
        routes = None if routers is None else routers.begin(number)
        hidden_TD = local.hidden_states(policy, routes)
        # Entered before the loss: after it, where the device may be idle, its hooks on all parameters delay backward.
        with contextlib.nullcontext() if early is None else early.during(last=number + 1 == len(rows)):
            scaled, measure = row_loss(local, hidden_TD)
            del hidden_TD
            of_routers = [] if routers is None or routes is None else routers.finish(number, routes)
            torch.autograd.backward([scaled, *of_routers])
        measure()

    policy.reshard()
    policy.model.zero_grad(set_to_none=True)
    early = strategy.early_sums(policy)
    with policy.in_compute_dtype():
        if routers is not None:
            routers.count(functools.partial(_pass_forward, policy, rows))
        if policy.stages is not None:
            run_stages(policy, rows, row_loss, routers)
        for number, local in enumerate(rows if policy.stages is None else ()):
            pass_row(number, local)
    norms, whole_loss, numbers = strategy.reduce(policy, rows, parts, metrics, early)
    numbers, evidence = split_evidence(numbers)
    loads_LE = None if routers is None else routers.loads()
    if routers is not None and loads_LE is not None:
        whole_loss, numbers = with_router_losses(whole_loss, routers), numbers | routers.metrics(loads_LE)
    return StepResult(
        loss=whole_loss,
        metrics=numbers | gradient_group_norms(norms, level),
        norms=norms,
        gradients=full_gradients(policy.model, policy.shards, mesh) if keep_gradients else {},
        tokens=in_source_order(per_token, mesh, num_source) if num_source else {},
        totals=totals,
        fallbacks=tuple(dict.fromkeys(filter(None, itertools.chain(*share_json(fallbacks, mesh))))),
        evidence=evidence,
        loads=loads_LE,
        routes=None if routers is None else routers.in_source_order(num_source),
    )


def _pass_forward(policy: Policy, rows: Sequence[LocalRow], begin: Callable[[int], Routes]) -> None:
    """Pass all rows through the policy, without gradients, to count the routes of the step."""
    if policy.stages is not None:
        run_stages_forward(policy, rows, begin)
    else:
        for number, local in enumerate(rows):
            local.hidden_states(policy, begin(number))
    policy.reshard()


def with_router_losses(loss: Mapping[str, Scalar], routers: StepRoutes) -> dict[str, Scalar]:
    """Add the losses of routers to the loss of a step, term by term and in total. Collective."""
    added = {name: Scalar(value, frozenset()) for name, value in routers.losses().items()}
    total = sum((scalar.value for scalar in added.values()), start=loss["total"].value)
    return {**loss, **added, "total": Scalar(total, frozenset())}


def plain_head(policy: Policy, hidden_TD: Tensor, local: LocalRow, loss: StepLoss) -> tuple[LocalRow, TokenLogprobs]:
    """Token log-probabilities, and other outputs of the head that the loss uses, of this rank's tokens."""
    return local, local.token_logprobs(policy, hidden_TD, loss.outputs)


def sums_in_backward(policy: Policy) -> EarlySums | None:
    """Sums of gradients that start in the last backward of a step; None: all of them start after it.

    A replacement of `sum_gradients` gets gradients that nothing has summed.
    """
    complete = policy.stages is None and not policy.accumulates_in_copies
    if not complete or policy.dtypes.reduction_order == "ranks" or sum_gradients is not gradients.sum_gradients:
        return None
    return gradients.early_sums(policy.model, policy.shards, policy.mesh, _reduction_dtype(policy))


def _reduction_dtype(policy: Policy) -> torch.dtype | None:
    return None if policy.dtypes.single else DTYPES[policy.dtypes.reduction]


def sum_over_ranks(
    policy: Policy,
    rows: Sequence[LocalRow],
    parts: Sequence[Mapping[str, Scalar]],
    metrics: Sequence[Mapping[str, Value]],
    early: EarlySums | None,
) -> Reduced:
    """Complete the gradients; return their norms, the loss term by term, and the final metrics."""
    mesh = policy.mesh
    # Summed, never averaged: the weights are divided by counts of the whole step already (DECISIONS.md, row 3).
    in_rank_order = policy.dtypes.reduction_order == "ranks"
    sum_gradients(policy.model, policy.shards, mesh, _reduction_dtype(policy), in_rank_order, early)
    if policy.loss_scale != 1.0:
        scale_gradients(policy.model, policy.shards, 1 / policy.loss_scale)
    # Queued before the norms, which the host waits for. Of a pipeline, the last stage alone evaluates the loss.
    names = parts[0] if parts else ()
    loss = {name: functools.reduce(Scalar.__add__, [p[name] for p in parts]).complete(mesh) for name in names}
    norms = gradient_norms(policy.model, policy.shards, mesh)
    return norms, *_of_last_stage(loss, finish_metrics(metrics, mesh["dp_cp"]) if parts else {}, mesh)


def _of_last_stage(
    loss: Mapping[str, Scalar], numbers: Mapping[str, float], mesh: Mesh
) -> tuple[dict[str, Scalar], dict[str, float]]:
    """Loss and metrics of the last pipeline stage, on every rank; unchanged without stages. Collective over pp."""
    shared = share_tensors({name: scalar.value for name, scalar in loss.items()}, mesh)
    return {name: Scalar(value, frozenset()) for name, value in shared.items()}, share_json(dict(numbers), mesh)[-1]


PLAIN = StepStrategy(
    weighed=lambda packed: packed,
    to_split=lambda row: (row.weights, row.documents, None),
    scaled=lambda totals, rows, weights: totals,
    head=plain_head,
    row_loss=loss_after(plain_head),
    early_sums=sums_in_backward,
    reduce=sum_over_ranks,
)
FUSED = replace(PLAIN, head=fused_head, row_loss=fused_row_loss)


def choose_strategy(*, reproducible: bool, fused: bool = False) -> StepStrategy:
    """Return the strategy of a step; the reproducible mode has no fused pass."""
    return exact.REPRODUCIBLE if reproducible else FUSED if fused else PLAIN


@torch.no_grad()
def row_logprobs(
    policy: Policy,
    loss: Loss,
    rows: Sequence[LocalRow],
    totals: StepTotals,
    *,
    num_source: int,
    loss_spec: LossSpec | None = None,
    fused: bool = False,
    noting: StepRoutes | None = None,
) -> Tensor:
    """Log-probabilities of the trained tokens of a step, bitwise equal to `run_step` on the same rows; 0 elsewhere.

    Hidden states, head implementation, temperatures and chunks are the same, so an unchanged policy has ratios of
    exactly 1. Collective; the same on every rank. Arguments: see `run_step`; the chunks of a fused head depend on the
    sums that the loss takes. ``noting`` notes the routes of the pass.

    Shapes:   [S], in the order of the source batch.
    Units:    nats, at the temperature of each token, or of the policy.
    Backward: none.
    """
    strategy, per_token = choose_strategy(reproducible=policy.exact is not None, fused=fused), []
    with policy.in_compute_dtype():
        for number, local in enumerate(rows):
            routes = None if noting is None else noting.begin(number)
            hidden_TD = local.hidden_states(policy, routes)
            if noting is not None and routes is not None:
                noting.finish(number, routes)
            local, head_output = strategy.head(policy, hidden_TD, local, StepLoss(loss, totals, loss_spec))
            policy_logprobs_T = head_output.within_support()[0].logprobs_T
            logprobs_T = torch.where(local.row.loss_mask_T, policy_logprobs_T, 0.0)
            per_token.append({"source": local.row.source_T, "logprobs": logprobs_T})
    policy.reshard()
    return in_source_order(per_token, policy.mesh, num_source)["logprobs"]


def clip_gradients(policy: Policy, norms: Mapping[str, float], max_norm: float | None) -> float:
    """Clip gradients to a global norm, which is the same in every layout; return the norm before clipping."""
    norm = sum(value**2 for value in norms.values()) ** 0.5
    coefficient = clip_coefficient(norm, max_norm)
    if coefficient != 1.0:
        scale_gradients(policy.model, policy.shards, coefficient)
    return norm


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Return the factor that clips gradients of this global norm to ``max_norm``; 1 leaves them unchanged."""
    return max_norm / norm if max_norm is not None and norm > max_norm else 1.0
