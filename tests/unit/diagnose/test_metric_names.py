"""Metrics of foreign trainers under our keys."""

import pytest

from workbench.diagnose.record import Record, RecordedStep
from workbench.errors import RecordError


def test_a_trainers_metrics_are_mapped_once_or_by_its_system(tmp_path):
    """Those of a system may be means over its micro-batches."""
    metrics = {"actor/pg_loss": 0.5, "entropy": 1.5, "other": 2.0}
    for name, context in (("mapped", {"metric_names": {"actor/pg_loss": "loss/policy"}}), ("trl", {"system": "trl"})):
        Record(context, [RecordedStep(0, metrics=metrics, partial_metrics=("actor/pg_loss",))]).save(tmp_path / name)
    [mapped] = Record.load(tmp_path / "mapped").steps
    assert mapped.metrics == {"loss/policy": 0.5, "entropy": 1.5, "other": 2.0}
    assert mapped.partial_metrics == ("loss/policy",)
    [of_trl] = Record.load(tmp_path / "trl").steps
    assert of_trl.metrics == {"actor/pg_loss": 0.5, "entropy/policy/mean": 1.5, "other": 2.0}
    assert of_trl.partial_metrics == ("actor/pg_loss", "entropy/policy/mean")
    Record({"metric_names": ["loss"]}, [RecordedStep(0, loss=1.0)]).save(tmp_path / "damaged")
    with pytest.raises(RecordError, match="a mapping from the trainer's keys to ours"):
        Record.load(tmp_path / "damaged")
