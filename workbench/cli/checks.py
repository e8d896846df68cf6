"""`workbench prove`, `diagnose` and `bisect`: check a loss, explain a difference, find its first tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from workbench.cli.terminal import answered, print_lines, safe_lines
from workbench.errors import SpecError
from workbench.launch.ablation import load_ablation
from workbench.records.provenance import project_root
from workbench.specs.reading import read_yaml
from workbench.specs.run import RunSpec, load_run_spec
from workbench.user_file import find_file, load

_YAML = (".yaml", ".yml")


def prove(
    loss: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="LOSS")],
    *,
    spec: Path | None = None,
    engine: Literal["sum", "mean"] | None = None,
    invariants: tuple[str, ...] = (),
    seed: int = 0,
    rounds: int = 4,
    budget_s: float = 20.0,
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
    """
    subject, settings = loss_subject(loss, None if spec is None else load_run_spec(spec))
    from workbench.prove import prove  # torch; mistakes above are told without it

    proof = prove(
        subject,
        spec=settings,
        engine=engine,
        invariants=invariants or None,
        seed=seed,
        rounds=rounds,
        budget_s=budget_s,
    )
    _print(proof, lambda: proof_json(proof))
    return 0 if proof.ok else 1


def diagnose(
    trusted: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TRUSTED")],
    suspect: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SUSPECT")],
) -> int:
    """Rank the causes why a run differs from a trusted one, and propose the next experiment.

    The verdict is "equal", "different", "vacuous" (no trained token or no gradient: nothing to compare) or
    "unsound baseline" (the trusted record is not finite). Exit code 0 for equal, 1 for any other verdict, 2 for
    invalid input, such as stored gradients whose norms are not the recorded ones.

    Args:
        trusted: Folder of a run, or of a record that a recorder wrote.
        suspect: Likewise, the one in doubt.
    """
    from workbench.diagnose import diagnose

    diagnosis = diagnose(trusted, suspect)
    _print(diagnosis, lambda: diagnosis_json(diagnosis))
    return 0 if diagnosis.equal else 1


def bisect(
    a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")],
    b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B")],
    *,
    block_tokens: int | None = None,
    steps: int | None = None,
) -> int:
    """Run two configurations again and name the first tensor, and block of tokens, in which they differ.

    The verdict is "equal", "different", "vacuous" (the same bits, and nothing was trained) or "unsound baseline" (the
    same bits, and the first is not finite). Exit code 0 for equal, 1 for any other verdict, 2 for invalid input.

    Args:
        a: A run (as `workbench status` finds it), a YAML file with a spec, or FILE:NAME, a run that an ablation plans.
        b: Likewise.
        block_tokens: Tokens of a block; by default those of the reproducible mode, or 64.
        steps: Maximum number of optimizer steps.
    """
    from workbench.compare.bisect import bisect

    names = (_short_name(a), _short_name(b))
    bisection = bisect(spec_or_target(a), spec_or_target(b), names=names, block_tokens=block_tokens, steps=steps)
    _print(bisection, lambda: bisection_json(bisection))
    return 0 if bisection.equal else 1


def _print(result: Any, data: Callable[[], dict[str, Any]]) -> None:
    if not answered(data):
        print_lines(safe_lines(str(result)))


def _short_name(target: str) -> str:
    return Path(target.rpartition(":")[2]).name.removesuffix(".yaml")


def loss_subject(loss: str, settings: RunSpec | None) -> tuple[Any, RunSpec | None]:
    """Return what `workbench.prove` proves, and its ``spec``, for a preset, FILE.yaml or FILE.py:NAME.

    Raises:
        SpecError: a file without the name of a function, or one that cannot be read.
    """
    if loss.rpartition(":")[0].endswith(".py"):
        return load_function(loss), settings
    if loss.endswith(".py"):
        raise SpecError(
            f"prove {loss}",
            found="a file, and no function",
            rule="FILE.py:NAME of a function in it",
            fix=f"name the function: {loss}:NAME",
        )
    if loss.endswith(_YAML):
        return load_run_spec(Path(loss)), settings
    if settings is not None:
        return settings.merged({"loss": {"name": loss}}), None
    return loss, None


def load_function(place: str) -> Callable[..., Any]:
    """Load a function from ``path/to/file.py:name``; the file is executed, with its own folder to import from.

    Raises:
        SpecError: no such file, it does not run, or it has no such function.
    """
    file, name = find_file(place, project_root(), setting="prove"), place.rpartition(":")[2]
    function = load(file, name, setting="prove")
    if not callable(function):
        raise SpecError(
            f"prove {place}", found=f"{name} is a {type(function).__name__}", rule="a function", fix="check the name"
        )
    return function


def spec_or_target(target: str) -> Any:
    """Return the spec of a run of an ablation if the argument names one; anything else unchanged.

    Raises:
        SpecError: the ablation plans no run of that name, or none is named.
    """
    file, _, name = target.rpartition(":")
    if Path(target).suffix in _YAML and "configurations" in (read_yaml(Path(target)) or {}):
        file, name = target, ""
    elif Path(file).suffix not in _YAML:
        return target
    planned = {run.name: run.spec for run in load_ablation(file).expand()}
    if name not in planned:
        raise SpecError(
            f"bisect {target}",
            found=f"no run {name!r} in {file}" if name else f"an ablation of {len(planned)} runs",
            rule=f"one of {', '.join(planned)}",
            fix=f"name one of its runs, as {file}:{next(iter(planned))}",
        )
    return planned[name]


def proof_json(proof: Any) -> dict[str, Any]:
    """Return a proof as JSON data, with the documents of its counterexamples."""
    invariants = [
        _named(invariant) | {"counterexample": invariant.counterexample and _named(invariant.counterexample)}
        for invariant in proof.invariants
    ]
    names = ("subject", "ok", "verdict", "broken", "declared", "seed", "seconds")
    return {name: getattr(proof, name) for name in names} | {"invariants": invariants}


def _named(value: Any) -> dict[str, Any]:
    return {
        name: [asdict(document) for document in field] if name == "source" else field
        for name, field in vars(value).items()
    }


def bisection_json(bisection: Any) -> dict[str, Any]:
    """Return a bisection as JSON data."""
    verdicts = {"verdict": bisection.verdict, "equal": bisection.equal}
    return verdicts | asdict(bisection) | {"evidence": bisection.evidence and bisection.evidence.as_json()}


def diagnosis_json(diagnosis: Any) -> dict[str, Any]:
    """Return a diagnosis as JSON data."""
    following = diagnosis.next_experiment()
    causes = [asdict(cause) | {"needs": sorted(cause.needs)} for cause in diagnosis.causes]
    return {name: getattr(diagnosis, name) for name in ("trusted", "suspect", "verdict", "equal")} | {
        "warnings": list(diagnosis.warnings),
        "evidence": diagnosis.sight and diagnosis.sight.as_json(),
        "first_step": diagnosis.evidence.first.number,
        "causes": causes,
        "next_experiment": following and asdict(following),
    }
