"""Diagnosis of a difference between two training runs: ranked causes, and the experiment that would separate them.

The modules, in the order in which a diagnosis is built:

    record.py           the record of a run, ours or another trainer's
    noise.py            how far two correct records may differ
    metric_names.py     keys of a foreign trainer's metrics, and ours
    evidence.py         differences, step by step; those of gradients in gradient_evidence.py
    denominators.py     every way to divide a loss, and names for factors
    stated.py           settings of a loss that a context states
    ratios.py           importance ratios, and the kind of noted ones
    surrogates.py       losses that explain a record's own values
    loss_changes.py     parts of a loss that explain how its noted values moved
    places.py           places where a mistake of shifting, packing or splitting shows
    token_facts.py      predicates on tokens that differ
    loss_facts.py       predicates on the losses that each record explains
    output_rows.py      rows of what models gave, and what two of them have in common
    output_facts.py     what models gave and what flowed back, as recorders saw it
    facts.py            predicates on the loss and the gradient
    causes/             possible causes, as data, by where they show
    sight.py            how much of the steps a comparison could have seen
    diagnosis.py        the ranking, and the next experiment
"""

from __future__ import annotations

from pathlib import Path

from workbench.diagnose.diagnosis import Diagnosis as Diagnosis
from workbench.diagnose.diagnosis import Runner, diagnose_records, experimented
from workbench.diagnose.record import Record as Record
from workbench.errors import VerdictError
from workbench.records.directory import RunDirectory

Source = Record | RunDirectory | Path | str


def diagnose(
    trusted: Source,
    suspect: Source,
    *,
    run: Runner | None = None,
    experiments: int = 3,
) -> Diagnosis:
    """Rank the causes that may explain how one run differs from another that is taken for right.

    Only the two records are used: loss, metrics, gradients or their norms, per-token values, each if both have it, and
    the layout that each states.

    Args:
        trusted: a record, a run directory, or the folder of either.
        suspect: the same.
        run: merges the given settings into those of both runs, runs both and returns their records, trusted first. If
            given, experiments that separate the suspects are run, and the causes ranked again.
        experiments: maximum number of them.

    Raises:
        RecordError: a folder that holds no record, or two that have nothing in common.

    Example:
        >>> from workbench.diagnose.record import RecordedStep
        >>> right = Record({"cp": 2}, [RecordedStep(0, loss=0.5, gradient_norms={"a": 1.0, "b": 2.0})])
        >>> wrong = Record({"cp": 2}, [RecordedStep(0, loss=0.5, gradient_norms={"a": 0.5, "b": 1.0})])
        >>> diagnose(right, wrong).causes[0].name
        'over_cp'
    """
    diagnosis = diagnose_records(Record.of(trusted), Record.of(suspect))
    return diagnosis if run is None else experimented(diagnosis, run, at_most=experiments)


def assert_agrees(record: Source, baseline: Source) -> Diagnosis:
    """Fail unless two records agree within rounding, and could have differed; see `diagnose`.

    Returns:
        The diagnosis, whose `Diagnosis.warnings` say what was seen little of.

    Raises:
        VerdictError: an AssertionError with the ranked causes; also for records in which nothing could differ.
        RecordError: a folder that holds no record, or two that have nothing in common.

    Example:
        >>> from workbench.diagnose.record import RecordedStep
        >>> one = Record({}, [RecordedStep(0, loss=0.5, gradient_norms={"a": 1.0, "b": 2.0})])
        >>> assert_agrees(one, one).verdict
        'equal'
    """
    diagnosis = diagnose(baseline, record)
    if not diagnosis.equal:
        raise VerdictError(
            f"{diagnosis.suspect or 'a record'} agrees with {diagnosis.trusted or 'its baseline'}",
            found=str(diagnosis),
            rule="loss, gradients and metrics that both have are equal within rounding, and something was compared",
            fix="begin with the first cause; `next` is the experiment that separates it from the others",
        ).about(diagnosis)
    return diagnosis
