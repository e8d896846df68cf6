"""A loss in a user's own file, in one of two forms.

Per token: ``function(inputs: LossInputs, **settings)`` returns a tensor [T] to be minimised, a `Term`, or terms by
name. The workbench computes the weights of the denominator on the whole step, so no result depends on the layout.
In a float64 run a function computes in float64 also where it casts to narrower floats.

Of a trainer: ``function(batch, outputs, totals, **settings)`` returns the number that the trainer back-propagates for
one micro-batch of one rank, divided by itself. Nothing makes that independent of the split: an ablation shows if it is.

Letters: T tokens.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.errors import ShapeError, SpecError, did_you_mean
from workbench.losses.terms import LossInputs, Term
from workbench.losses.wide import InFloat64
from workbench.specs.losses.own import OwnLoss
from workbench.user_file import error_in, find_file, load, place_of


@dataclass(frozen=True)
class TrainerLoss:
    """A trainer's loss, in place of a function to terms.

    Attributes:
        microbatch_loss: the function, a `workbench.train.own.MicrobatchLoss`.
        engine: what the trainer's engine does to gradients over dp x cp, "sum" or "mean".
    """

    microbatch_loss: Callable[..., Any]
    engine: str

    def __call__(self, inputs: LossInputs) -> dict[str, Term]:
        """Raise: there are no per-token terms.

        Raises:
            SpecError: always.
        """
        raise SpecError(
            f"per-token values of {getattr(self.microbatch_loss, '__name__', 'a loss')} (engine {self.engine})",
            found="a function that returns one number for a micro-batch",
            rule="curves, credit and metrics of terms need a value for each token",
            fix="write it as a function of LossInputs that returns a tensor [T], and leave engine out",
        )


def own_file(surrogate: OwnLoss, project: Path) -> Path:
    """Return the file of a user's loss.

    Raises:
        SpecError: no such file.
    """
    return find_file(surrogate.function, project, setting="loss.name")


def load_own(surrogate: OwnLoss, project: Path) -> Callable[..., Any]:
    """Load a user's loss, with its settings: of terms, or a trainer's.

    Raises:
        SpecError: no such file or function, a file that cannot be executed, a setting that the function does not have,
            or one that it needs.
    """
    file, place = own_file(surrogate, project), place_of(surrogate.function)
    assert place is not None, "`own_file` has checked it"
    function = load(file, place.name, setting="loss.name")
    if not callable(function):
        raise SpecError(
            f"loss.name = {surrogate.function!r}",
            found=f"{place.name} is a {type(function).__name__}",
            rule="a function",
            fix="name a function of the file",
        )
    positional = ("inputs",) if surrogate.engine is None else ("batch", "outputs", "totals")
    _check_settings(function, positional, surrogate)
    return _guarded(function, surrogate, file)


def _check_settings(function: Callable[..., Any], positional: tuple[str, ...], surrogate: OwnLoss) -> None:
    """Raise unless the function can be called with its inputs and settings, as far as its signature shows."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return
    parameters = list(signature.parameters.values())
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    known = [p.name for p in parameters[len(positional) :] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    unknown = [] if takes_any else [name for name in surrogate.settings if name not in known]
    if unknown:
        hint = did_you_mean(unknown[0], known, otherwise=f"it has {', '.join(known) or 'no settings'}")
        problem = f"no setting {unknown[0]!r} ({hint})"
    else:
        try:
            signature.bind(*positional, **surrogate.settings)
            return
        except TypeError as error:
            problem = str(error)
    raise SpecError(
        f"loss.name = {surrogate.function!r}: {getattr(function, '__name__', 'it')}{signature}",
        found=problem,
        rule=f"it is called with ({', '.join(positional)}) and loss.settings by name",
        fix="correct loss.settings"
        if unknown or surrogate.engine is not None
        else "correct loss.settings or the function; a trainer's microbatch_loss(batch, outputs, totals) goes with "
        "loss.engine sum or mean",
    )


def _guarded(function: Callable[..., Any], surrogate: OwnLoss, file: Path) -> Callable[..., Any]:
    """The function with its settings; an error in it names the line of the user's file."""

    def guarded(*inputs: Any) -> Any:
        values = inputs[-2 if len(inputs) == 3 else 0]  # outputs, or inputs
        wide = values.policy_logprobs_T.dtype is torch.float64
        try:
            with InFloat64() if wide else contextlib.nullcontext():
                return function(*inputs, **surrogate.settings)
        except (SpecError, ShapeError):
            raise
        except Exception as error:
            raise SpecError(
                f"loss.name = {surrogate.function!r}",
                found=error_in(file, error),
                rule="the function returns on every micro-batch of every rank, also on one without trained tokens",
                fix="fix the line above",
            ) from error

    guarded.__name__ = getattr(function, "__name__", "own")
    return guarded


def own_terms(returned: Any, inputs: LossInputs, function: str) -> dict[str, Term]:
    """Return what a user's per-token function gave as terms by name.

    Raises:
        SpecError: it is neither a tensor [T], a term, nor terms by name.
    """
    if isinstance(returned, Tensor) and returned.shape == inputs.policy_logprobs_T.shape:
        return {"policy": Term(returned)}
    if isinstance(returned, Term):
        return {"policy": returned}
    if isinstance(returned, Mapping) and returned and all(isinstance(term, Term) for term in returned.values()):
        return dict(returned)
    shape = f" of shape {list(returned.shape)}" if isinstance(returned, Tensor) else ""
    raise SpecError(
        f"loss.name = {function!r}",
        found=f"it returned a {type(returned).__name__}{shape}",
        rule=f"a tensor [{len(inputs.policy_logprobs_T)}], one number a token; or Term(values_T), or terms by name",
        fix="leave summing and dividing to loss.denominator; a function that returns one number is a trainer's: "
        "give loss.engine, sum or mean",
    )
