"""`workbench prove`: check that a loss keeps the invariants of parallel training."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from workbench.cli.terminal import print_lines, safe_lines
from workbench.errors import SpecError


def load_function(place: str) -> Callable[..., Any]:
    """Load a function from a Python file; the file is executed, with its own folder to import from.

    Args:
        place: ``path/to/file.py:name``.

    Raises:
        SpecError: no such file, it does not run, or it has no such function.
    """
    path, _, name = place.rpartition(":")
    file = Path(path)
    if not file.is_file():
        raise SpecError(
            f"prove {place}", found=f"no file {path}", rule="FILE.py:NAME of a function in it", fix="check the path"
        )
    module_spec = importlib.util.spec_from_file_location(f"proved_{file.stem}", file)
    assert module_spec is not None, "a .py file has a loader"
    assert module_spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    sys.path.insert(0, str(file.resolve().parent))
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise SpecError(
            f"prove {place}",
            found=f"{type(error).__name__}: {error}",
            rule=f"{file.name} can be imported",
            fix="fix the error above",
        ) from error
    finally:
        sys.path.pop(0)
    function = getattr(module, name, None)
    if not callable(function):
        raise SpecError(
            f"prove {place}", found=f"{file.name} has no function {name!r}", rule="FILE.py:NAME", fix="check the name"
        )
    return function


def _prove(
    loss: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="LOSS")],
    *,
    spec: Path | None = None,
    engine: Literal["sum", "mean"] | None = None,
    invariants: tuple[str, ...] = (),
    seed: int = 0,
    rounds: int = 4,
    budget_s: float = 20.0,
    json: bool = False,
) -> int:
    """Check that a loss keeps the invariants of parallel training: loss, gradient and metrics, against one process.

    Exit code 1 if an invariant is broken that the loss does not declare, or was not tried.

    Args:
        loss: A preset, FILE.yaml with a run's spec, or FILE.py:NAME of a function: per-token, or with --engine a
            trainer's microbatch_loss(batch, outputs, totals).
        spec: YAML of a run's spec: for a preset its other settings, for a function the settings of its weights.
        engine: Reduction of gradients over dp x cp by your engine; marks the function as a trainer's.
        invariants: Invariants to check; all if none is named.
        seed: Seed of the batches and layouts.
        rounds: Cases of each invariant.
        budget_s: CPU seconds after which no further case is started; invariants that were not tried are named.
        json: Print JSON.
    """
    from workbench.prove import prove
    from workbench.records.directory import to_json
    from workbench.specs.run import load_run_spec

    settings: Any = None if spec is None else load_run_spec(spec)
    subject: Any = loss
    if loss.rpartition(":")[0].endswith(".py"):
        subject = load_function(loss)
    elif loss.endswith(".py"):
        raise SpecError(
            f"prove {loss}",
            found="a file, and no function",
            rule="FILE.py:NAME of a function in it",
            fix=f"name the function: {loss}:NAME",
        )
    elif loss.endswith((".yaml", ".yml")):
        subject = load_run_spec(Path(loss))
    elif settings is not None:
        subject, settings = settings.merged({"loss": {"name": loss}}), None
    proof = prove(
        subject,
        spec=settings,
        engine=engine,
        invariants=invariants or None,
        seed=seed,
        rounds=rounds,
        budget_s=budget_s,
    )
    if json:
        print(to_json(as_json(proof)).decode(), end="")
    else:
        print_lines(safe_lines(str(proof)))
    return 0 if proof.ok else 1


def as_json(proof: Any) -> dict[str, Any]:
    """Return a proof as JSON data, with the documents of its counterexamples."""
    invariants = [
        _named(invariant) | {"counterexample": invariant.counterexample and _named(invariant.counterexample)}
        for invariant in proof.invariants
    ]
    return {
        "subject": proof.subject,
        "ok": proof.ok,
        "verdict": proof.verdict,
        "broken": proof.broken,
        "declared": proof.declared,
        "seed": proof.seed,
        "seconds": proof.seconds,
        "invariants": invariants,
    }


def _named(value: Any) -> dict[str, Any]:
    return {
        name: [asdict(document) for document in field] if name == "source" else field
        for name, field in vars(value).items()
    }


def main(arguments: Sequence[str]) -> int:
    """Run `workbench prove`: exit code 1 if the loss is not proved."""
    return tyro.cli(_prove, args=list(arguments), prog="workbench prove", config=(tyro.conf.FlagCreatePairsOff,))
