"""Check the invariants of parallel training for a loss: proved on generated layouts, or refuted by the smallest one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from workbench.errors import SpecError, VerdictError, WorkbenchError, did_you_mean
from workbench.losses.build import build_loss
from workbench.losses.terms import Loss, LossInputs, Term
from workbench.prove.invariants import INVARIANTS, Invariant
from workbench.prove.proof import Counterexample, InvariantResult, Proof
from workbench.prove.searching import search
from workbench.prove.subject import Engine, InFloat64, Subject, TrainerSubject, WorkbenchSubject
from workbench.specs.losses import LossSpec
from workbench.specs.reading import parse_spec
from workbench.specs.run import RunSpec
from workbench.user_file import error_in

__all__ = ["INVARIANTS", "Counterexample", "InvariantResult", "Proof", "assert_proved", "prove"]

ROUNDS = 4
CONSTANT = 16.0
"""Default constant of a loss that divides by a constant; the invariants are the same for any."""


def prove(
    loss: str | Mapping[str, Any] | LossSpec | RunSpec | Callable[..., Any],
    *,
    spec: LossSpec | RunSpec | Mapping[str, Any] | None = None,
    engine: Engine | None = None,
    invariants: Sequence[str] | None = None,
    seed: int = 0,
    rounds: int = ROUNDS,
    budget_s: float = 20.0,
) -> Proof:
    """Check the invariants of parallel training for a loss: loss, gradient of every parameter, and every metric.

    Each invariant changes one thing that must not matter (`workbench.prove.invariants`): the step of all documents
    in one row on one rank, in float64, is compared with the same step under the change, on all ranks of a mesh
    simulated in this process. Documents and layouts are generated adversarially. A failure is shrunk to the smallest
    case that fails in the same way, and its factor is measured and named.

    Args:
        loss: one of
            a preset's name, a `LossSpec`, or settings of one;
            a `RunSpec`: its loss, its advantages, its temperature, adapters if it trains them, and the faults that it
            plants;
            a function from `LossInputs` to terms, as for `workbench.train.step.run_step`;
            with ``engine``, a trainer's ``microbatch_loss(batch, outputs, totals)``, which does its own division (see
            `workbench.prove.subject`).
        spec: of a function: its denominator, its declared breaks, and its advantages.
        engine: reduction of gradients over dp x cp in the trainer's engine: "sum" or "mean".
        invariants: names of invariants; None: all.
        seed: of the generated cases.
        rounds: cases per invariant.
        budget_s: no case is started after this many seconds of processor time. An invariant without a case counts as
            not proved: `Proof.ok` is False, and `Proof.untried` names it.

    Returns:
        A verdict on every invariant. The model is always ``tiny-qwen3``: a loss's divisor does not depend on it.

    Raises:
        SpecError: an unknown preset or invariant; a loss whose values are not finite on one rank, or not reproducible;
            a function with other arguments.

    Example:
        >>> prove("grpo", invariants=["cp_degree"], rounds=1).ok
        True
    """
    chosen = _selected(invariants)
    return search(as_subject(loss, spec=spec, engine=engine), chosen, seed=seed, rounds=rounds, budget_s=budget_s)


def assert_proved(loss: Any, **settings: Any) -> Proof:
    """Fail unless a loss keeps every requested invariant, and all of them were tried; see `prove` for the settings.

    Returns:
        The proof. An invariant that the loss's spec declares to break is no failure.

    Raises:
        VerdictError: an AssertionError with the table of invariants and the counterexamples.

    Example:
        >>> import workbench as wb
        >>> def test_our_loss_means_the_same_on_every_layout():
        ...     wb.assert_proved(our_microbatch_loss, engine="mean")  # doctest: +SKIP
    """
    proof = prove(loss, **settings)
    if not proof.ok:
        raise VerdictError(
            f"prove {proof.subject}",
            found=str(proof),
            rule="loss, gradient and metrics are those of one unsplit process",
            fix="begin with the first broken invariant: its counterexample is the smallest that was found",
        ).about(proof)
    return proof


def as_subject(loss: Any, *, spec: Any = None, engine: Engine | None = None) -> Subject:
    """Return the subject of a proof, which takes one step, for any loss that `prove` accepts.

    Raises:
        SpecError: the loss is of no accepted kind, or does not allow ``spec`` or ``engine``.
    """
    base = _run_spec(spec, "spec")
    if engine is not None:
        if not callable(loss):
            raise SpecError(
                f"prove {loss!r} with engine = {engine!r}",
                rule="an engine is about a trainer's function",
                fix="leave engine out; what a trainer's settings do is `compat.scaling` of a LossSpec",
            )
        _check_arguments(
            loss,
            "batch",
            "outputs",
            "totals",
            fix="leave engine out if it gives terms of LossInputs, which a spec divides",
        )
        return TrainerSubject(loss, engine, base)
    if callable(loss):
        _check_arguments(
            loss,
            "inputs",
            fix="a trainer's microbatch_loss(batch, outputs, totals) goes with engine = "
            "'sum' or 'mean', what its engine does to gradients over dp x cp",
        )
        return WorkbenchSubject(getattr(loss, "__name__", "loss"), base, _checked(loss), from_spec=False)
    given = _run_spec({"name": loss} if isinstance(loss, str) else loss, "loss")
    if spec is not None:
        raise SpecError(
            f"prove {given.loss.name!r} with a separate spec",
            rule="a spec goes with a function",
            fix="put everything into the first argument: a RunSpec holds loss, data and policy",
        )
    return WorkbenchSubject(given.loss.name, given, build_loss(given.loss))


def _check_arguments(loss: Callable[..., Any], *names: str, fix: str) -> None:
    """Raise if a function cannot be called with these arguments, as far as its signature shows."""
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        raise SpecError(
            f"prove {getattr(loss, '__name__', 'loss')}{signature}",
            found=str(error),
            rule=f"it is called with ({', '.join(names)})",
            fix=fix,
        ) from None


def _selected(names: Sequence[str] | None) -> list[Invariant]:
    if names is None:
        return list(INVARIANTS.values())
    if not names:
        raise SpecError(
            "prove with invariants = ()", rule="at least one invariant; None: all", fix="name one or omit invariants"
        )
    for name in names:
        if name not in INVARIANTS:
            raise SpecError(
                f"invariant {name!r}",
                found=did_you_mean(name, INVARIANTS),
                rule=f"one of {', '.join(INVARIANTS)}",
                fix="correct the name",
            )
    return [invariant for invariant in INVARIANTS.values() if invariant.name in names]


def _run_spec(given: Any, argument: str) -> RunSpec:
    """Return the run spec for a run spec, a loss spec, or settings of either."""
    if given is None:
        return RunSpec()
    if isinstance(given, RunSpec):
        return given
    if isinstance(given, Mapping):
        settings = given if set(given) & set(RunSpec.model_fields) else {"loss": given}
    elif isinstance(given, LossSpec):
        settings = {"loss": given.overrides()}
    else:
        raise SpecError(
            f"prove: {argument} = {given!r}",
            rule="a preset's name, a LossSpec, a RunSpec, settings of one, or a function",
            fix="a trainer's function goes with engine = 'sum' or 'mean'",
        )
    loss = settings.get("loss")
    if isinstance(loss, Mapping) and parse_spec(LossSpec, loss, where=f"prove: {argument}").denominator == "constant":
        settings = {**settings, "loss": {"denominator_constant": CONSTANT, **loss}}
    return parse_spec(RunSpec, settings, where=f"prove: {argument}")


def _checked(loss: Loss) -> Loss:
    """The loss in float64 throughout; raises if it returns anything but terms.

    It is called once on four tokens, so that such a mistake is told before a model is built.
    """
    name = f"{getattr(loss, '__name__', 'loss')}(inputs)"

    def checked(inputs: LossInputs) -> dict[str, Term]:
        try:
            with InFloat64():
                terms = loss(inputs)
        except WorkbenchError:
            raise
        except Exception as error:
            file = Path(getattr(getattr(loss, "__code__", None), "co_filename", ""))
            raise SpecError(
                name,
                found=error_in(file, error),
                rule="the loss returns on every batch, also on one without trained tokens; inputs are a LossInputs",
                fix="fix the line above",
            ) from error
        if not isinstance(terms, Mapping) or not terms or not all(isinstance(term, Term) for term in terms.values()):
            raise SpecError(
                name,
                found=f"a {type(terms).__name__}",
                rule="a loss returns its terms by name, a dict: {'policy': Term(values_T)}",
                fix="return one number a token, and leave summing and dividing to the spec; a function "
                "that returns one number is a trainer's: prove(..., engine='sum')",
            )
        return terms

    try:
        checked(_four_tokens())
    except SpecError as error:
        if error.__cause__ is None or isinstance(error.__cause__, AttributeError):
            raise  # another exception may come of what these tokens lack; the search tells
    except WorkbenchError:
        pass  # likewise
    return checked


def _four_tokens() -> LossInputs:
    values_T = torch.linspace(-2.0, -0.5, 4, dtype=torch.float64)
    ids_T = torch.tensor([0, 0, 1, 1])
    return LossInputs(
        values_T.clone().requires_grad_(),
        values_T - 0.1,
        torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64),
        loss_mask_T=ids_T >= 0,
        document_ids_T=ids_T,
        group_ids_T=ids_T * 0,
        lengths_T=torch.full((4,), 2.0, dtype=torch.float64),
        source_T=torch.arange(4),
        sampler_logprobs_T=values_T + 0.05,
        ref_logprobs_T=values_T - 0.05,
        entropy_T=values_T.abs(),
        logsumexp_T=values_T.abs(),
        mean_squared_logit_T=values_T.square(),
        mean_logit_T=values_T,
        rewards_T=values_T.abs(),
    )
