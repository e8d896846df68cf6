"""Refusals of an ablation as a whole: its parts, the order of its runs, and whether they can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.errors import SpecError, did_you_mean, listed, nearest_names
from workbench.records.certificate import compared_bitwise
from workbench.specs.run import RunSpec

if TYPE_CHECKING:
    from workbench.launch.ablation import PlannedRun


def check_structure(where: str, settings: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse an ablation without its two required parts, or with settings of runs next to them.

    Unknown keys are left to the validation, which names the nearest: a misspelt part is not a missing one.
    """
    if not {*known, *RunSpec.model_fields}.issuperset(settings):
        return
    if outside := [key for key in RunSpec.model_fields if key in settings]:
        raise SpecError(
            f"{where}: {', '.join(outside)} next to the configurations",
            found=f"settings of a run outside `base`: {', '.join(outside)}",
            rule="`base` has the settings of every run, and a configuration what it changes",
            fix=f"move them under `base`, such as `base: {{{outside[0]}: ...}}`",
        )
    configurations = settings.get("configurations")
    if not configurations:
        raise SpecError(
            f"{where}: configurations are missing",
            found=f"an ablation with {', '.join(map(str, settings))}",
            rule="an ablation names its configurations, each with the settings that it changes",
            fix="write `configurations: {one_rank: {}, cp2: {layout: {cp: 2}}}` and `reference: one_rank`",
        )
    if "reference" not in settings and isinstance(configurations, Mapping):
        raise SpecError(
            f"{where}: reference is missing",
            found=f"configurations {listed(configurations)}",
            rule="one configuration is the reference, with which the others are compared",
            fix=f"write `reference: {next(iter(configurations))}`, or the name of another configuration",
        )


def check_order(where: str, specs: Mapping[str, RunSpec]) -> None:
    """Refuse runs whose `frozen_clip` names themselves, directly or not, or a missing run."""
    for name in specs:
        chain = [name]
        while needed := specs[chain[-1]].frozen_clip:
            if needed not in specs:
                if len(specs) == 1:
                    break  # a single spec may take the decisions of an existing run
                raise unknown(f"{where}: run {chain[-1]!r}", "frozen_clip", needed, specs)
            if needed in chain:
                raise SpecError(
                    f"{where}: run {name!r} needs its own clip decisions",
                    found=" -> ".join([*chain, needed]),
                    rule="the run that decides comes first",
                    fix="leave frozen_clip out of the run whose decisions the others take",
                )
            chain.append(needed)


def check_comparable(where: str, planned: Sequence[PlannedRun]) -> None:
    """Refuse runs whose gradients cannot be compared with those of their reference or truth."""
    specs = {run.name: run.spec for run in planned}
    for run in planned:
        bits = bool(run.reference) and compared_bitwise(run.spec, specs[run.reference])  # then no distance is measured
        below = not run.spec.in_float64
        others = {"reference": run.reference, "truth": run.truth if run.reference and below and not bits else ""}
        for role, other in ((role, specs[name]) for role, name in others.items() if name):
            facts: dict[str, tuple[object, object]] = {"steps": (run.spec.steps, other.steps)}
            if bits:
                facts["reproducible"] = (run.spec.reproducible, other.reproducible)
                facts["rows"] = (_rows(run.spec), _rows(other))
            else:
                facts["record.gradients"] = (run.spec.record.gradients, other.record.gradients)
            if role == "reference":
                facts["precision"] = (run.spec.precision, other.precision)
            if unequal := [
                f"{key} {value} against {other_value}"
                for key, (value, other_value) in facts.items()
                if value != other_value or (key == "record.gradients" and value != "full")
            ]:
                raise SpecError(
                    f"{where}: compare {run.name!r} with its {role} {others[role]!r}",
                    found=", ".join(unequal),
                    **(_OF_BITS if bits else _OF_GRADIENTS),
                )


_OF_GRADIENTS = {
    "rule": "gradients are compared step by step: both take as many steps, with record.gradients full, and a reference "
    "has the precision of its runs",
    "fix": "set steps and record: {gradients: full} in `base`; several precisions are an axis, axes: {precision: "
    "[float64, float32]}. Curves alone need no gradients: then make what differs an axis, such as axes: {loss.name: "
    "[grpo, cispo], seed: [0, 1]}, and no run is compared",
}
_OF_BITS = {
    "rule": "bits are compared step by step: both take as many steps of the same rows, in one precision and in the "
    "same pieces",
    "fix": "set steps, precision and reproducible in `base`; give each layout data.micro_batches with the same product "
    "of dp and data.micro_batches, and one data.balance, or all of them one data.micro_batch_tokens",
}


def _rows(spec: RunSpec) -> str:
    """Rows of a step, as far as the settings tell."""
    if spec.data.micro_batch_tokens is not None:
        return f"of {spec.data.micro_batch_tokens} tokens"
    rows = f"{spec.layout.dp * spec.data.micro_batches} (dp * data.micro_batches)"
    return rows if spec.data.balance == "tokens" else f"{rows} with data.balance {spec.data.balance}"


def unknown(where: str, what: str, name: str, known: Iterable[str]) -> SpecError:
    """Return the error of a name that an ablation does not have."""
    names = sorted(known)
    nearest = nearest_names(name, names)
    return SpecError(
        f"{where}: {what} {name!r} does not exist",
        found=listed([*nearest, *(other for other in names if other not in nearest)], 20),
        rule=f"{what} is one of these names",
        fix=did_you_mean(name, names, otherwise="choose one of them"),
    )
