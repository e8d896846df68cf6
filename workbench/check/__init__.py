"""Check of one step of any trainer: its loss is recomputed from a dump, stage by stage, and compared with the record.

The modules, in the order in which a check is built:

    reading.py          a step with one reading of its settings
    recompute.py        everything that a dump determines, in float64
    stages.py           stages, tolerances, comparison
    alternatives.py     mistakes in the loss, each as another reading of the step
    estimators.py       mistakes in the advantages
    judging.py          causes of the first difference, and what the dump cannot decide
    numbers.py          the step under its settings as they are: recorded, recomputed, bounds
    screen.py, memo.py  mistakes excluded on a sample of the step, shared results
    matching.py         documents and tokens of two dumps of one batch
    against.py          comparison of two systems on one batch
    tokens.py           the trainer's tokens and those that the engine drew
    model.py            the step passed through its checkpoint, in any layout
    model_stages.py     log-probabilities and gradient compared with the checkpoint's
    verdict.py          the result
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.check.against import StepsCompared as StepsCompared
from workbench.check.against import compare_steps
from workbench.check.judging import judge
from workbench.check.reading import Reading
from workbench.check.tokens import with_tokens
from workbench.check.verdict import StepCheck as StepCheck
from workbench.dumps.interchange import STEP, read_step
from workbench.dumps.step import StepDump
from workbench.errors import SpecError, check_kind
from workbench.rollouts.vocabulary import read_vocabulary
from workbench.specs.losses import LossSpec
from workbench.specs.reading import parse_spec
from workbench.systems.registry import load_system
from workbench.systems.translate import loss_spec

if TYPE_CHECKING:
    from workbench.check.model import Precision


def check_step(
    dump: StepDump | Path | str,
    *,
    system: str | None = None,
    settings: Mapping[str, Any] | None = None,
    advantages: Mapping[str, Any] | None = None,
    on_policy: bool | None = None,
    against: StepCheck | StepDump | Path | str | None = None,
    model: Path | str | None = None,
    layout: Mapping[str, Any] | None = None,
    precision: Precision | None = None,
    vocabulary: Sequence[str] | Path | None = None,
) -> StepCheck:
    """Recompute the loss of a trainer's step in float64, and compare every number that the trainer recorded.

    Stages: advantages, mask and denominator, ratios, corrections, clip decisions, coefficients, loss, metrics. Each is
    computed from what was recorded before it, so that the first one that differs has the mistake. Its cause is found
    by trying known mistakes: one that is named reproduces the recorded numbers of that stage; the settings do not.

    Args:
        dump: a step; or the folder of one in the interchange format, or a file that the system wrote.
        system: one of `workbench.systems`; None: the dump's own. "": settings are those of a `LossSpec`.
        settings: of the loss, by the system's names; None: the dump's own.
        advantages: of the advantage estimator, by the system's names (`{"estimator": "grpo"}` in verl), or for a
            `LossSpec` its name and settings (`{"name": "grpo"}`); None: the dump's own.
        on_policy: the loss was computed on the old policy itself, before any update; None: as the dump says.
        against: another system's step on the same batch, to be compared by document and token: a dump, checked with
            its own system and settings, or the result of its own `check_step`.
        model: checkpoint of the weights with which the step's loss was computed, as `model.source` of a run: two more
            stages, log-probabilities and gradient, are computed in float64 and compared.
        layout: in which the model is passed, such as `{"cp": 2}`; its ranks are simulated. None: one rank.
        precision: of the trainer's model, whose distance from float64 is the tolerance; None: that of the dump.
        vocabulary: text of each token id, or a JSON file with a list of them: says if tokens of the trainer that the
            engine did not draw are the same text.

    Raises:
        RecordError: a file that is missing, damaged or no dump.
        SpecError: an unknown system, setting or estimator; a system whose dumps are not read; a model of another
            vocabulary or with other parameters, a layout that is none.

    Example:
        >>> import torch
        >>> rows = {"loss_mask": torch.ones(1, 2, dtype=torch.bool), "advantages": torch.tensor([[1.0, 1.0]])}
        >>> rows |= {"policy_logprobs": torch.tensor([[-1.0, -2.0]]), "old_logprobs": torch.tensor([[-1.0, -2.0]])}
        >>> check_step(StepDump.from_rectangle(rows, settings={"name": "grpo"}, losses={"total": -1.0})).verdict
        'agrees'
    """
    step = read_dump(dump, system or "")
    given: dict[str, Any] = {
        "system": system,
        "settings": None if settings is None else dict(settings),
        "advantages": None if advantages is None else dict(advantages),
        "on_policy": on_policy,
    }
    step = replace(step, **{name: value for name, value in given.items() if value is not None})
    reading = Reading(step, _spec(step), _estimator(step))
    result = judge(reading)
    if model is not None:
        from workbench.check.model_stages import with_model  # loads the training step

        result = with_model(result, reading, model, layout, precision)
    elif layout is not None or precision is not None:
        raise SpecError(
            "check a step",
            found="layout or precision without model",
            rule="they are of the pass through the model",
            fix="give the checkpoint: model= (--model)",
        )
    texts = read_vocabulary(Path(vocabulary)) if isinstance(vocabulary, str | Path) else vocabulary
    result = with_tokens(result, step, texts)
    if against is None:
        return result
    other = against if isinstance(against, StepCheck) else check_step(against)
    if result.numbers is None or other.numbers is None:
        raise SpecError(
            "compare two steps",
            found="a StepCheck without its numbers",
            rule="both are results of check_step",
            fix="check the dump again in this process",
        )
    return replace(result, against=compare_steps(result.numbers, other.numbers))


def read_dump(dump: StepDump | Path | str, system: str = "") -> StepDump:
    """Return a step: of a folder in the interchange format, or of a file by the reader of a system.

    Raises:
        SpecError: the system has no reader, or none is named.
        RecordError: the file is damaged or no dump.
    """
    if isinstance(dump, StepDump):
        return dump
    check_kind("check a step", dump, (str, Path), "pass a StepDump, or the path of one")
    path = Path(dump)
    if (path / STEP).exists() or (path.is_dir() and not system) or path.name == STEP:
        return read_step(path.parent if path.name == STEP else path)
    if not system:
        raise SpecError(
            f"check the step {path}",
            found="a file, and no system",
            rule=f"a folder with {STEP}, or a file of a system with a reader",
            fix="name the system: system='verl' (--system verl)",
        )
    reader = load_system(system).read_dump
    if reader is None:
        raise SpecError(
            f"read a dump of {system}",
            rule="its files are not read",
            fix="write the interchange format: docs/guides/check-a-step.md",
        )
    return reader(path)


def _spec(step: StepDump) -> LossSpec:
    if step.system:
        return loss_spec(step.system, dict(step.settings))
    return parse_spec(LossSpec, dict(step.settings), where=f"settings of {step.origin}")


def _estimator(step: StepDump) -> tuple[str, Mapping[str, Any]] | None:
    if not step.advantages:
        return None
    if not step.system:
        own = dict(step.advantages)
        return str(own.pop("name", "grpo")), own
    estimator = load_system(step.system).estimator
    if estimator is None:
        raise SpecError(
            f"advantages of {step.system}",
            found=f"options {dict(step.advantages)}",
            rule="its estimators are not translated",
            fix="leave advantages out: the recorded ones are then taken as they are",
        )
    return estimator(step.advantages)
