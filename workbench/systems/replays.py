"""Replays of cases of other systems: `loss_spec`, then the evaluator of a training step.

Differences between systems are data (`System`); the common part is here, one function per kind of case. This layer has
no loss mathematics: a replay reshapes arrays, calls the layers below and names the outputs.

Letters: T packed tokens | V vocabulary | D model dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.auxiliary import value_loss
from workbench.losses.build import build_loss, prepare_inputs
from workbench.losses.kl import kl_term
from workbench.losses.terms import LossInputs, Term
from workbench.metrics.quantities import DocumentSlots
from workbench.policy.logprobs import TokenLogprobs
from workbench.policy.logprobs.reference import token_logprobs, token_logprobs_from_logits
from workbench.reduction.denominators import GivenCounts
from workbench.reduction.evaluate import Evaluated, evaluate_loss, loss_inputs, reduce_terms
from workbench.reduction.weights import TokenWeights, step_weights
from workbench.rollouts.targets import TrainingRow
from workbench.specs.losses import LossSpec
from workbench.systems.case import Case, Options, check_arrays, logprobs_only
from workbench.systems.metrics import PeerSettings, as_named_by
from workbench.systems.registry import Translation, load_system, parse_settings, translate_settings


@dataclass(frozen=True)
class Replayed:
    """Inputs and results of the evaluator, from which a system's metrics and further outputs are read."""

    case: Case
    settings: Any
    translation: Translation
    row: TrainingRow
    head_output: TokenLogprobs
    inputs: LossInputs
    weights: Mapping[str, TokenWeights]
    evaluated: Evaluated

    @property
    def total(self) -> Tensor:
        """The loss."""
        return self.evaluated.scalars["total"].value

    @property
    def slots(self) -> DocumentSlots:
        """Slots of the row's documents, as those of the step."""
        return DocumentSlots(0, int(self.row.document_ids_T.max()) + 1)

    @property
    def detached_inputs(self) -> LossInputs:
        """Inputs of the loss without the policy's gradient."""
        return replace(self.inputs, policy_logprobs_T=self.inputs.policy_logprobs_T.detach())


def replay(
    source: str, kind: str, function: str, config: Mapping[str, Any], inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Replay a function of another system, with its names and conventions.

    Args:
        source: the system, one of `SYSTEMS`.
        kind: of computation: "policy_loss", "policy_loss_packed", "policy_loss_logits", "fused_linear_policy_loss",
            "aggregation", "logprobs", ..., or one of the system's own.
        function: its name in the system; in some systems it selects the loss.
        config: options by the system's names, with the counts that the batch was given.
        inputs: arrays, next-token aligned: [B, T] one row per document, or [T] with ``document_index``.

    Returns:
        The outputs by name ("loss", "grad_logprobs", ...), float64 numpy arrays, or tensors if an input is one, and
        under "metrics" numbers by the system's names. NaN in the system is NaN here: verl and OpenRLHF divide by tokens
        or rows, so the loss (in OpenRLHF also the gradient) is NaN if none counts and no count of the batch is given.

    Raises:
        SpecError: unknown system or kind; an option or an array that the replay does not use; options that cannot be
            expressed.
    """
    case = Case.of(source, kind, function, config, inputs)
    options = Options(case.config)
    case = replace(case, config=options)
    system = load_system(source)
    compute = {**COMMON, **system.replays}.get(kind)
    if compute is None:
        raise SpecError(
            f"replay of {kind!r} of {source}",
            rule=f"one of {', '.join([*COMMON, *system.replays])}",
            fix="choose one of them",
        )
    check_arrays(case)
    outputs = {"metrics": {}, **compute(case)}
    if unused := [name for name in options if name not in options.read]:
        raise SpecError(
            f"replay of {kind} of {source} with the option(s) {', '.join(unused)}",
            found="nothing in this replay reads them: the result would be the same",
            rule=f"options that {function} takes" + (f": {', '.join(sorted(options.read))}" if options.read else ""),
            fix="correct the name, or leave the option out",
        )
    if any(isinstance(value, Tensor) for value in inputs.values()):
        return outputs
    return {name: value.numpy() if isinstance(value, Tensor) else value for name, value in outputs.items()}


def evaluate_case(case: Case, head_output: TokenLogprobs, **row: Any) -> Replayed:
    """Translate the options of a policy loss and evaluate it on the case's tokens; ``row``: see `Case.row`."""
    system, settings = load_system(case.system), policy_settings(case)
    translation = translate_settings(system, settings)
    return evaluate_as(case, head_output, settings, translation, system.counts(settings), **row)


def case_settings(
    source: str, kind: str, function: str, config: Mapping[str, Any], inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of a recorded call of a policy loss, as `loss_spec` and `explain` take them.

    Arguments are those of `replay`. Most options are in ``config``; some follow from the function's name, from which
    arrays are there, or from their width.
    """
    return dict(load_system(source).case_settings(Case.of(source, kind, function, config, inputs)))


def policy_settings(case: Case) -> Any:
    """Return the options of a case of a policy loss."""
    system = load_system(case.system)
    return parse_settings(system.settings, system.case_settings(case), where=case.system)


def evaluate_as(
    case: Case,
    head_output: TokenLogprobs,
    settings: Any,
    translation: Translation,
    given: GivenCounts | None = None,
    **row: Any,
) -> Replayed:
    """Evaluate a spec on the case's tokens, with the counts that it was given; ``row``: see `Case.row`."""
    tokens = case.row(**row)
    if case.get("old_logprobs") is None:
        live_T = head_output.logprobs_T.detach()
        tokens = replace(tokens, old_logprobs_T=torch.where(tokens.loss_mask_T, live_T, torch.zeros_like(live_T)))
    (weights,), totals = step_weights([tokens], translation.spec, given=given)
    inputs = loss_inputs(tokens, head_output, totals)
    evaluated = evaluate_loss(build_loss(translation.spec), inputs, weights, tokens.loss_mask_T)
    prepared = prepare_inputs(inputs, translation.spec)
    return Replayed(case, settings, translation, tokens, head_output, prepared, weights, evaluated)


def back_propagate(total: Tensor, leaves: Mapping[str, Tensor], case: Case | None = None) -> dict[str, Any]:
    """Return the loss and the gradients of leaves, by the names of these outputs.

    Args:
        total: the loss.
        leaves: name of the gradient's output -> tensor that it is the gradient of, in its original shape.
        case: adds to the gradients that it has, from its ``grad_output``; None: there are none.
    """
    scale = None
    if case is not None:
        scale = case.config.get("grad_output")
        for name, leaf in leaves.items():
            before = case.get(f"{name}_in")
            leaf.grad = torch.zeros_like(leaf) if before is None else before.clone()
    total.backward(torch.as_tensor(1.0 if scale is None else scale, dtype=total.dtype))
    return {"loss": total.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def finish(replayed: Replayed, leaves: Mapping[str, Tensor]) -> dict[str, Any]:
    """Back-propagate from the leaves, see `back_propagate`, and add the system's further outputs and metrics."""
    case = replayed.case
    outputs = back_propagate(replayed.total, leaves, case)
    for name, value in load_system(case.system).outputs(replayed).items():
        outputs[name] = case.shaped(value) if value.shape == replayed.row.loss_mask_T.shape else value.detach()
    return {**outputs, "metrics": case_metrics(replayed)}


def case_metrics(replayed: Replayed) -> dict[str, float]:
    """Return all metrics of the case under the system's names."""
    system = load_system(replayed.case.system)
    peer = None if system.peer_settings is None else system.peer_settings(replayed)
    return {**named_metrics(replayed, peer), **system.metrics(replayed)}


def named_metrics(
    replayed: Replayed,
    settings: PeerSettings | None,
    spec: LossSpec | None = None,
    terms: Mapping[str, Term] | None = None,
) -> dict[str, float]:
    """Return metrics by the system's definitions, see `as_named_by`; spec and terms may differ from the case's."""
    values = as_named_by(
        replayed.case.system,
        replayed.detached_inputs,
        replayed.row.loss_mask_T,
        terms=terms or replayed.evaluated.terms,
        loss_spec=spec or replayed.translation.spec,
        slots=replayed.slots,
        settings=settings,
    )
    return {name: value.finish() for name, value in values.items()}


# ---- policy losses ---------------------------------------------------------------------------------------------


def policy_loss(case: Case) -> dict[str, Any]:
    """Replay a policy loss from log-probabilities, rectangular or packed."""
    leaf = case.leaf("logprobs")
    head_output = logprobs_only(leaf.reshape(-1), case.tokens("entropies"))
    return finish(evaluate_case(case, head_output), {"grad_logprobs": leaf})


def policy_loss_logits(case: Case) -> dict[str, Any]:
    """Replay a policy loss from logits."""
    temperature = load_system(case.system).temperature(policy_settings(case))
    leaf = case.leaf("logits")
    head_output = token_logprobs_from_logits(case.counted(leaf), case.targets_T, temperature=temperature)
    outputs = finish(evaluate_case(case, head_output), {"grad_logits": leaf})
    return {**outputs, "logprobs": case.shaped(head_output.logprobs_T)}


def head(case: Case, temperature: float = 1.0) -> tuple[dict[str, Tensor], TokenLogprobs]:
    """Return the leaves of an output head by the names of their gradients, and its output."""
    leaves = {f"grad_{name}": case.leaf(name) for name in ("hidden", "weight", "bias") if case.get(name) is not None}
    hidden_TD, weight_VD = leaves["grad_hidden"].flatten(0, -2), leaves["grad_weight"]
    bias_V = leaves.get("grad_bias")
    return leaves, token_logprobs(hidden_TD, weight_VD, case.targets_T, temperature=temperature, bias_V=bias_V)


def fused_linear_policy_loss(case: Case) -> dict[str, Any]:
    """Replay a policy loss from hidden states and an output head."""
    temperature = load_system(case.system).temperature(policy_settings(case))
    leaves, head_output = head(case, temperature)
    head_output.logprobs_T.retain_grad()
    row = {}
    if case.get("ref_hidden") is not None:
        ref = token_logprobs(
            case["ref_hidden"].flatten(0, -2),
            case["ref_weight"],
            case.targets_T,
            temperature=temperature,
            bias_V=case.get("ref_bias"),
        )
        row["ref_logprobs_T"] = torch.where(case.loss_mask_T, ref.logprobs_T, torch.zeros_like(ref.logprobs_T))
    outputs = finish(evaluate_case(case, head_output, **row), leaves)
    logprobs_T, gradient_T = head_output.logprobs_T, head_output.logprobs_T.grad
    assert gradient_T is not None, "finish back-propagates through the log-probabilities, which retain it"
    return {**outputs, "logprobs": case.shaped(logprobs_T), "grad_logprobs": case.shaped(gradient_T)}


# ---- parts of a loss -------------------------------------------------------------------------------------------


def logprobs(case: Case) -> dict[str, Any]:
    """Replay log-probabilities and entropies of logits, and the gradient of their products with the cotangents."""
    leaf = case.leaf("logits")
    output = token_logprobs_from_logits(
        leaf.reshape(-1, leaf.shape[-1]), case.targets_T, temperature=case.config.get("temperature") or 1.0
    )
    assert output.entropy_T is not None, "the reference returns it by default"
    outputs = [(output.logprobs_T, case.get("cotangent_logprobs")), (output.entropy_T, case.get("cotangent_entropy"))]
    pairs = [(value_T, cotangent.reshape(-1)) for value_T, cotangent in outputs if cotangent is not None]
    values, cotangents = zip(*pairs, strict=True)
    torch.autograd.backward(values, cotangents)
    return {
        "logprobs": case.shaped(output.logprobs_T),
        "entropy": case.shaped(output.entropy_T),
        "grad_logits": leaf.grad,
    }


def aggregation(case: Case, spec: LossSpec, given: GivenCounts | None = None) -> dict[str, Any]:
    """Replay a function that reduces values to one number, by denominator and scaling of a spec."""
    leaf = case.leaf("values")
    (weights,), _ = step_weights([case.row()], spec, given=given)
    total = reduce_terms({"values": Term(leaf.reshape(-1))}, weights, case.loss_mask_T)["total"].value
    return back_propagate(total, {"grad_values": leaf})


def critic_loss(
    case: Case, spec: LossSpec, given: GivenCounts | None = None, *, coefficient: float = 1.0, **options: Any
) -> tuple[dict[str, Any], Term]:
    """Replay a critic's loss by denominator and scaling of a spec, with the options of `value_loss`.

    Returns:
        Its outputs, and its term without the coefficient.
    """
    leaf, counts_T = case.leaf("values"), case.loss_mask_T
    old_T = None if options.get("clip") is None else case["old_values"].reshape(-1)
    term = value_loss(leaf.reshape(-1), case["returns"].reshape(-1), counts_T, old_values_T=old_T, **options)
    (weights,), _ = step_weights([case.row()], spec, given=given)
    total = reduce_terms({"value": replace(term, coefficient=coefficient)}, weights, counts_T)["total"].value
    return back_propagate(total, {"grad_values": leaf}), term


def kl_estimator(case: Case, spec: LossSpec) -> dict[str, Any]:
    """Replay the estimate of KL(policy || ref) of a spec with coefficient 1, on every token.

    Without a cotangent, its sum under the spec's denominator is the loss.
    """
    leaf, everywhere_T = case.leaf("logprobs"), torch.ones_like(case.loss_mask_T)
    old_T, ref_T = leaf.detach().reshape(-1), case["ref_logprobs"].reshape(-1)
    (weights,), totals = step_weights([case.row()], spec)
    row = case.row(loss_mask_T=everywhere_T, old_logprobs_T=old_T, ref_logprobs_T=ref_T)
    term = kl_term(loss_inputs(row, logprobs_only(leaf.reshape(-1)), totals), spec.kl)
    outputs = {"kl": case.shaped(term.values_T)}
    if case.get("cotangent") is None:
        total = reduce_terms({"kl": term}, weights, case.loss_mask_T)["total"].value
        return outputs | back_propagate(total, {"grad_logprobs": leaf})
    term.values_T.backward(case["cotangent"].reshape(-1))
    return {**outputs, "grad_logprobs": leaf.grad}


def evaluate_correction(case: Case, settings: Any, spec: LossSpec) -> Replayed:
    """Evaluate a spec's correction alone: there is no live policy yet, so the old one takes its place."""
    return evaluate_as(case, logprobs_only(case["old_logprobs"].reshape(-1)), settings, Translation(spec))


COMMON: Mapping[str, Callable[[Case], dict[str, Any]]] = {
    "policy_loss": policy_loss,
    "policy_loss_packed": policy_loss,
    "policy_loss_logits": policy_loss_logits,
    "fused_linear_policy_loss": fused_linear_policy_loss,
    "logprobs": logprobs,
}
"""Kind of case -> its replay, for kinds that several systems share."""
