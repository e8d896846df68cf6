"""Ranking, what is missing, and experiments that split the suspects."""

from dataclasses import replace

import pytest

from tests.helpers.hand_records import COUNTS, make_record, norms_alone, tokens
from workbench.compare.diagnose import diagnose
from workbench.compare.diagnose.diagnosis import diagnose_records
from workbench.compare.diagnose.record import Record, RecordedStep
from workbench.errors import RecordError, SpecError

TWINS = {"dp": 3, "micro_batches": 3}
"""Sizes that one factor cannot tell apart."""


def pair(scale=1.0, **context):
    return make_record(context), make_record(context, scale=scale)


def test_a_layout_without_what_a_cause_needs_rules_it_out():
    found = diagnose_records(*pair(1 / 2, cp=1, dp=2))
    assert found.causes[0].name == "over_dp"
    assert "over_cp" not in [cause.name for cause in found.causes]


@pytest.mark.parametrize(("documents", "packed"), [(4, False), (5, False), (6, True)])
def test_a_record_that_says_no_ranks_is_of_one_and_packs_where_documents_outnumber_micro_batches(documents, packed):
    """Five micro-batches, and tokens of later documents differ."""
    def record(by):
        there = tokens()
        there["policy_logprobs"][6:] += by
        made = make_record(counts=COUNTS | {"documents": float(documents)}, tokens=there)
        return replace(made, context={name: size for name, size in made.context.items() if name != "dp"})

    found = diagnose_records(record(0.0), record(-1.0))
    assert ("attention_across_documents" in [cause.name for cause in found.causes]) == packed


def test_the_next_experiment_splits_the_suspects():
    found = diagnose_records(*pair(1 / 3, **TWINS))
    assert found.suspects == ("over_dp", "over_micro_batches")
    experiment = found.next_experiment()
    assert experiment.changes == {"layout": {"dp": 1}}
    assert (experiment.excludes, experiment.leaves) == (("over_dp",), ("over_micro_batches",))
    assert "next: one data-parallel rank; it would rule out over_dp" in str(found)


@pytest.mark.parametrize("guilty", ["dp", "micro_batches"])
def test_experiments_are_run_until_one_suspect_is_left(guilty):
    asked = []

    def run(changes):
        asked.append(changes)
        context = dict(TWINS) | changes.get("layout", {}) | changes.get("data", {})
        return pair(1 / context[guilty], **context)

    found = diagnose(*pair(1 / 3, **TWINS), run=run)
    assert asked == [{"layout": {"dp": 1}}]
    assert found.suspects == (f"over_{guilty}",)
    assert found.tried[0].equal == (guilty == "dp")
    assert f"tried one data-parallel rank: {'equal' if guilty == 'dp' else 'still different'}" in str(found)
    assert found.next_experiment() is None


def test_no_more_experiments_than_asked():
    found = diagnose(*pair(1 / 3, **TWINS), run=lambda changes: pair(1 / 3, **TWINS), experiments=0)
    assert found.tried == ()


def test_a_cause_says_what_it_lacked():
    found = diagnose_records(norms_alone(make_record(loss=0.3)), norms_alone(make_record(loss=0.4, scale=130 / 149)))
    assert found["other_count"].lacked == ("tokens",)
    assert "not recorded: tokens" in str(found)
    with pytest.raises(SpecError, match="cause 'times_cp'"):
        found["times_cp"]


def test_what_no_cause_explains_is_said():
    record = Record({}, (RecordedStep(0, loss=1.0),), "one")
    found = diagnose_records(record, Record({}, (RecordedStep(0, loss=2.0),), "two"))
    assert (found.equal, found.causes[0].name) == (False, "unknown")


@pytest.mark.parametrize("other", [Record({}, ()), Record({}, (RecordedStep(0, loss=1.0),))])
def test_nothing_in_common_is_refused(other):
    with pytest.raises(RecordError, match="nothing that both recorded"):
        diagnose(Record({}, (RecordedStep(0, gradient_norms={"a": 1.0}),)), other)


def test_folders_are_taken(tmp_path):
    right, wrong = pair(1 / 2)
    found = diagnose(right.save(tmp_path / "right"), str(wrong.save(tmp_path / "wrong")))
    assert found.causes[0].name == "over_cp"
