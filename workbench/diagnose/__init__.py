"""Why do two training runs differ? Two records in, ranked causes out, with the experiment that would split them.

The modules, in the order in which a diagnosis comes about:

    record.py        what a run wrote down, ours or another trainer's
    noise.py         how far two correct records may lie apart
    evidence.py      what differs, step by step
    places.py        where the tokens lie that differ
    denominators.py  every way to divide a loss, and what a factor may equal
    facts.py         the questions that causes ask of it
    modules.py       one module among several, in which alone something differs
    causes.py        what may have gone wrong, as data
    diagnosis.py     the ranking, and the next experiment
"""

from __future__ import annotations

from pathlib import Path

from workbench.diagnose.diagnosis import Diagnosis as Diagnosis
from workbench.diagnose.diagnosis import Runner, diagnose_records, experimented
from workbench.diagnose.record import Record as Record
from workbench.records.directory import RunDirectory


def diagnose(
    trusted: Record | RunDirectory | Path | str,
    suspect: Record | RunDirectory | Path | str,
    *,
    run: Runner | None = None,
    experiments: int = 3,
) -> Diagnosis:
    """Say what may have gone wrong in one run, held against another that is taken for right.

    Nothing but the two records is looked at: loss, metrics, gradients or their norms, per-token values, as far as both
    have them, and what each says of its layout.

    Args:
        trusted: a record, a run directory, or the folder of either.
        suspect: the same.
        run: given settings to merge into those of both runs, runs both so and gives their records, trusted first. With
            it, experiments that split the suspects are run, and the causes ranked again.
        experiments: how many at most.

    Raises:
        RecordError: a folder that holds no record, or two that have nothing in common.

    Example:
        >>> from workbench.diagnose.record import RecordedStep
        >>> right = Record({"cp": 2}, [RecordedStep(0, loss=0.5, gradient_norms={"a": 1.0, "b": 2.0})])
        >>> wrong = Record({"cp": 2}, [RecordedStep(0, loss=0.5, gradient_norms={"a": 0.5, "b": 1.0})])
        >>> diagnose(right, wrong).causes[0].name
        'over_cp'
    """
    found = diagnose_records(Record.of(trusted), Record.of(suspect))
    return found if run is None else experimented(found, run, at_most=experiments)
