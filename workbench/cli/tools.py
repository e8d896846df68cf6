"""Tools of `workbench mcp`: functions from plain JSON arguments to JSON data and a text, without any protocol.

Each docstring and each description of an argument is read by the program that chooses a tool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from workbench.cli.checks import bisection_json, diagnosis_json, loss_subject, proof_json, spec_or_target
from workbench.cli.experiment import certified, verdicts_json
from workbench.cli.status import list_lines
from workbench.errors import SpecError
from workbench.launch.status import list_runs, listing, statuses
from workbench.prove.invariants import INVARIANTS
from workbench.records.lookup import compared_at, look_up
from workbench.specs.reading import parse_spec
from workbench.specs.run import RunSpec
from workbench.systems.registry import SYSTEMS

_FOLDER = "a folder, the name of an experiment, or the beginning of a run's name"

Settings = dict[str, Any]
System = Annotated[str, Field(json_schema_extra={"enum": list(SYSTEMS)})]
Configuration = Annotated[
    str | Settings,
    Field(
        description="One configuration: the folder or name of a run, a YAML file with a run's spec, FILE.yaml:NAME of "
        'a run that an ablation plans, or the spec\'s settings as an object, such as {"layout": {"cp": 2}}; {} has '
        "every default"
    ),
]
Record = Annotated[str, Field(description="Folder of a run, or of a record that `wb.Recorder` wrote")]


@dataclass(frozen=True)
class Answer:
    """Result of a tool: JSON data, and the same for a reader."""

    data: dict[str, Any]
    text: str


def compare(
    target: Annotated[str, Field(description="An experiment with a saved comparison, or a run: " + _FOLDER)],
    reference: Annotated[
        str,
        Field(description="A run to compare the run `target` with, bit for bit; empty for the saved verdicts"),
    ] = "",
) -> Answer:
    """Read the verdict on each configuration of a saved experiment, or compare two runs bit for bit.

    `agrees` is true only if every configuration without a planted fault is equal or within budget. "vacuous" and
    "unsound baseline" are not agreement: nothing was compared. Nothing is run; `workbench run FILE.yaml` runs.
    """
    if reference:
        text, equal = certified(target, reference)
        return Answer({"run": target, "reference": reference, "equal": equal}, text)
    from workbench.compare.comparison import Comparison

    comparison = Comparison.load(compared_at(target))
    return Answer(verdicts_json(comparison), "\n".join(comparison.verdict_lines()))


def diagnose(trusted: Record, suspect: Record) -> Answer:
    """Rank the causes why a suspect run differs from a trusted one, and propose the experiment that separates them.

    Reads two records; runs nothing. The verdict is "equal", "different", "vacuous" (nothing was trained) or "unsound
    baseline" (the trusted record is not finite); only "equal" is agreement.
    """
    from workbench.diagnose import diagnose

    diagnosis = diagnose(trusted, suspect)
    return Answer(diagnosis_json(diagnosis), str(diagnosis))


def bisect(
    a: Configuration,
    b: Configuration,
    block_tokens: Annotated[int | None, Field(ge=1, description="Tokens of a block; null chooses")] = None,
    steps: Annotated[int | None, Field(ge=1, description="Most optimizer steps; null: as many as both have")] = None,
) -> Answer:
    """Run two configurations again, in this process, and name the first tensor and block of tokens that differ.

    Bitwise: two ordinary layouts differ at the first product of another shape, which is no bug; two reproducible ones
    must be equal. Takes seconds for tiny models, and longer for larger ones: set `steps` to 1 first.
    """
    from workbench.compare.bisect import bisect

    bisection = bisect(_spec_of(a, "a"), _spec_of(b, "b"), block_tokens=block_tokens, steps=steps)
    return Answer(bisection_json(bisection), str(bisection))


def prove(
    loss: Annotated[
        str | Settings,
        Field(
            description='A preset such as "grpo", FILE.yaml with a run\'s spec, FILE.py:NAME of a function (the file '
            'is executed), or settings of a loss, such as {"name": "grpo", "denominator": "sequence_mean"}'
        ),
    ],
    spec: Annotated[
        Settings | None,
        Field(description="Settings of a run: for a preset its other settings, for a function those of its weights"),
    ] = None,
    engine: Annotated[
        Literal["sum", "mean"] | None,
        Field(description="Only for a trainer's microbatch_loss(batch, outputs, totals): reduction over ranks"),
    ] = None,
    invariants: Annotated[
        list[Annotated[str, Field(json_schema_extra={"enum": list(INVARIANTS)})]] | None,
        Field(description="Invariants to check; null checks all"),
    ] = None,
    seed: Annotated[int, Field(description="Seed of the generated batches and layouts")] = 0,
    rounds: Annotated[int, Field(ge=1, description="Cases of each invariant")] = 4,
    budget_s: Annotated[float, Field(gt=0, description="CPU seconds after which no further case is started")] = 20.0,
) -> Answer:
    """Check that a loss gives the same loss, gradient and metrics for every split of a step over ranks.

    A broken invariant comes with its smallest counterexample and the factor of its gradient. `ok` is false also if an
    invariant was not tried within `budget_s`: then raise it.
    """
    from workbench.prove import prove

    settings = None if spec is None else parse_spec(RunSpec, spec, where="spec")
    subject, settings = loss_subject(loss, settings) if isinstance(loss, str) else (loss, settings)
    chosen: Sequence[str] | None = invariants
    proof = prove(subject, spec=settings, engine=engine, invariants=chosen, seed=seed, rounds=rounds, budget_s=budget_s)
    return Answer(proof_json(proof), str(proof))


def translate(
    system: Annotated[System, Field(description="The trainer whose options they are")],
    settings: Annotated[Settings, Field(description="Its loss options by its own names; unset ones have its defaults")],
    other_system: Annotated[
        System | None, Field(description="A second trainer, or the same one, to compare with; null only translates")
    ] = None,
    other_settings: Annotated[Settings | None, Field(description="Options of the second; null: its defaults")] = None,
) -> Answer:
    """Translate another trainer's loss options to a loss spec, or decide if two trainers' options are the same loss.

    Of two: the verdict is "same" (proven for every batch), "different" (with a batch that tells them apart) or "cannot
    say"; `same_scaling` says if it holds for any split of a step; each difference names the option that decides it.
    """
    from workbench.systems.explanations import explain
    from workbench.systems.translate import translation

    if other_system is not None:
        explanation = explain(system, settings, other_system, other_settings or {})
        data = asdict(explanation) | {"specs": [spec.overrides() for spec in explanation.specs]}
        return Answer(data, str(explanation))
    if other_settings is not None:
        raise SpecError(
            "translate with other_settings",
            found="no other_system",
            rule="options belong to a system",
            fix="name other_system, or leave other_settings out",
        )
    result = translation(system, settings)
    loss = result.spec.overrides()
    data = {"system": system, "loss": loss, "notes": list(result.notes), "counts_of_the_batch": list(result.given)}
    return Answer(data, "\n".join([f"loss: {loss}", *result.notes]))


def status(
    target: Annotated[str, Field(description=_FOLDER + "; empty lists the runs of all experiments")] = "",
) -> Answer:
    """Show the state of a run or of every run of an experiment: progress, who is waited for, and why one failed."""
    if not target:
        runs = list_runs()
        return Answer({"runs": [asdict(run) for run in runs]}, "\n".join(list_lines(runs)) if runs else "no runs yet")
    found = look_up(target)
    states = [asdict(status) for status in statuses(found.opened())]
    return Answer({"runs": states}, "\n".join(list_lines([listing(entry) for entry in found.runs])))


TOOLS: dict[Callable[..., Answer], bool] = {
    compare: True,
    diagnose: True,
    bisect: False,
    prove: False,
    translate: True,
    status: True,
}
"""Tool -> True if it only reads; the others execute functions of users' files that a loss names."""


def _spec_of(configuration: str | Settings, where: str) -> Any:
    if isinstance(configuration, str):
        return spec_or_target(configuration)
    return parse_spec(RunSpec, configuration, where=where)
