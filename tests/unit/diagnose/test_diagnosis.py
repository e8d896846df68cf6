"""Ranking, missing inputs, and experiments that split the suspects."""

import math
from dataclasses import replace

import pytest
import torch

from tests.helpers.hand_records import COUNTS, make_record, norms_alone, tokens
from tests.helpers.vacuous_rollouts import CASES, ran
from workbench.diagnose import assert_agrees, diagnose
from workbench.diagnose.diagnosis import diagnose_records
from workbench.diagnose.record import Record, RecordedStep
from workbench.errors import RecordError, SpecError, VerdictError

TWINS = {"dp": 3, "micro_batches": 3}
"""Sizes that one factor cannot tell apart."""


def pair(scale=1.0, **context):
    return make_record(context), make_record(context, scale=scale)


def test_a_layout_without_the_needs_of_a_cause_rules_it_out():
    diagnosis = diagnose_records(*pair(1 / 2, cp=1, dp=2))
    assert diagnosis.causes[0].name == "over_dp"
    assert "over_cp" not in [cause.name for cause in diagnosis.causes]


@pytest.mark.parametrize(("documents", "packed"), [(4, False), (5, False), (6, True)])
def test_a_record_without_ranks_is_one_rank_that_may_pack_documents(documents, packed):
    """Five micro-batches, and tokens of later documents differ."""

    def record(by):
        there = tokens()
        there["policy_logprobs"][6:] += by
        made = make_record(counts=COUNTS | {"documents": float(documents)}, tokens=there)
        return replace(made, context={name: size for name, size in made.context.items() if name != "dp"})

    diagnosis = diagnose_records(record(0.0), record(-1.0))
    assert ("attention_across_documents" in [cause.name for cause in diagnosis.causes]) == packed


def test_the_next_experiment_splits_the_suspects():
    diagnosis = diagnose_records(*pair(1 / 3, **TWINS))
    assert diagnosis.suspects == ("over_dp", "over_micro_batches")
    experiment = diagnosis.next_experiment()
    assert experiment.changes == {"layout": {"dp": 1}}
    assert (experiment.excludes, experiment.leaves) == (("over_dp",), ("over_micro_batches",))
    assert "next: one data-parallel rank; it would rule out over_dp" in str(diagnosis)


@pytest.mark.parametrize("guilty", ["dp", "micro_batches"])
def test_experiments_are_run_until_one_suspect_is_left(guilty):
    asked = []

    def run(changes):
        asked.append(changes)
        context = dict(TWINS) | changes.get("layout", {}) | changes.get("data", {})
        return pair(1 / context[guilty], **context)

    diagnosis = diagnose(*pair(1 / 3, **TWINS), run=run)
    assert asked == [{"layout": {"dp": 1}}]
    assert diagnosis.suspects == (f"over_{guilty}",)
    assert diagnosis.tried[0].equal == (guilty == "dp")
    assert f"tried one data-parallel rank: {'equal' if guilty == 'dp' else 'still different'}" in str(diagnosis)
    assert diagnosis.next_experiment() is None


def test_at_most_the_requested_experiments_run():
    diagnosis = diagnose(*pair(1 / 3, **TWINS), run=lambda changes: pair(1 / 3, **TWINS), experiments=0)
    assert diagnosis.tried == ()


def test_a_cause_states_what_is_missing():
    diagnosis = diagnose_records(
        norms_alone(make_record(loss=0.3)), norms_alone(make_record(loss=0.4, scale=130 / 149))
    )
    assert diagnosis["other_count"].missing == ("tokens",)
    assert "not recorded: tokens" in str(diagnosis)
    with pytest.raises(SpecError, match="cause 'times_cp'"):
        diagnosis["times_cp"]


def test_an_unexplained_difference_is_reported():
    record = Record({}, (RecordedStep(0, loss=1.0),), "one")
    diagnosis = diagnose_records(record, Record({}, (RecordedStep(0, loss=2.0),), "two"))
    assert (diagnosis.equal, diagnosis.causes[0].name) == (False, "unknown")


@pytest.mark.parametrize("other", [Record({}, ()), Record({}, (RecordedStep(0, loss=1.0),))])
def test_nothing_in_common_is_refused(other):
    with pytest.raises(RecordError, match="nothing that both recorded"):
        diagnose(Record({}, (RecordedStep(0, gradient_norms={"a": 1.0}),)), other)


def test_folders_are_taken(tmp_path):
    right, wrong = pair(1 / 2)
    diagnosis = diagnose(right.save(tmp_path / "right"), str(wrong.save(tmp_path / "wrong")))
    assert diagnosis.causes[0].name == "over_cp"


class TestVerdicts:
    """Equal needs something to compare, and a trusted record that is finite."""

    @pytest.mark.parametrize("case", CASES)
    def test_runs_that_train_nothing_are_never_equal(self, case, tmp_path):
        diagnosis = diagnose(
            ran(tmp_path, case, "one"), ran(tmp_path, case, "cp2", layout={"cp": 2}, faults=["missing_cp_factor"])
        )
        assert diagnosis.verdict == "vacuous"
        assert not diagnosis.equal
        assert diagnosis.headline.startswith("vacuous: no ")
        assert "could have seen: gradient on 0 of " in str(diagnosis)
        assert "no_difference" not in str(diagnosis)

    def test_the_same_fault_on_rollouts_that_train_is_different(self, tmp_path):
        diagnosis = diagnose(
            ran(tmp_path, "advantages of both signs", "one"),
            ran(tmp_path, "advantages of both signs", "cp2", layout={"cp": 2}, faults=["missing_cp_factor"]),
        )
        assert (diagnosis.verdict, diagnosis.causes[0].name) == ("different", "over_cp")
        assert "could have seen: gradient on 4 of 8 documents (50.0%)" in str(diagnosis)

    @pytest.mark.parametrize("kept", [("gradients", "gradient_norms"), ("gradient_norms",), ("gradients",)])
    def test_external_records_with_two_zero_gradients_are_vacuous(self, kept):
        zero = make_record(scale=0.0, loss=0.0).steps[0]
        step = RecordedStep(0, loss=0.0, **{name: getattr(zero, name) for name in kept})
        diagnosis = diagnose_records(*(Record({"cp": 2}, [step], name) for name in ("right", "recorded")))
        assert diagnosis.verdict == "vacuous"
        assert str(diagnosis).startswith("recorded against right: vacuous: every gradient is zero in every step")

    def test_equal_records_are_equal_and_state_the_evidence(self):
        diagnosis = diagnose_records(make_record(), make_record())
        assert (diagnosis.verdict, diagnosis.equal) == ("equal", True)
        assert (
            "could have seen: 11 trained tokens in 3 of 3 documents, a gradient in 1 of 1 steps; unknown: "
            "clipped tokens, gradient tokens" in str(diagnosis)
        )

    def test_a_gradient_against_none_is_different_whichever_has_it(self):
        some, none = make_record(), make_record(scale=0.0)
        assert diagnose_records(some, none).verdict == "different"
        assert diagnose_records(none, some).verdict == "different"

    @pytest.mark.parametrize(
        ("broken", "said"),
        [
            ({"loss": math.inf}, "step 0 of made: the loss is inf"),
            ({"loss": math.nan}, "step 0 of made: the loss is nan"),
            (
                {"changes": {"model.norm.weight": torch.full((40,), math.nan)}},
                "step 0 of made: the gradient of model.norm.weight has norm nan",
            ),
        ],
    )
    @pytest.mark.parametrize("suspect", [{}, {"loss": math.nan}, {"scale": 0.5}])
    def test_a_trusted_record_that_is_not_finite_is_an_unsound_baseline(self, broken, said, suspect):
        diagnosis = diagnose_records(make_record(**broken), make_record(**suspect))
        assert diagnosis.verdict == "unsound baseline"
        assert diagnosis.headline == f"unsound baseline: {said}"
        assert [cause.name for cause in diagnosis.causes] == ["unsound_baseline"]
        assert diagnosis.next_experiment() is None

    def test_a_suspect_that_is_not_finite_is_the_suspects_own(self):
        diagnosis = diagnose_records(make_record(), make_record(loss=math.nan))
        assert (diagnosis.verdict, diagnosis.causes[0].name) == ("different", "not_finite")

    def test_a_difference_before_the_trusted_record_diverges_counts(self):
        def two(scale, loss):
            return Record(
                {"cp": 2, "precision": "float64"},
                [
                    RecordedStep(0, loss=0.5, gradient_norms={"a": scale, "b": 2 * scale}),
                    RecordedStep(1, loss=loss, gradient_norms={"a": 1.0, "b": 2.0}),
                ],
            )

        assert diagnose_records(two(1.0, math.inf), two(0.5, math.inf)).verdict == "different"
        assert diagnose_records(two(1.0, math.inf), two(1.0, math.inf)).verdict == "unsound baseline"

    @pytest.mark.parametrize("kept", [{"gradient_norms": {"a": 0.0}}, {"gradients": {"a": torch.zeros(3)}}])
    def test_two_zeros_are_not_reported_as_agreement(self, kept):
        zero = RecordedStep(0, loss=0.0, metrics={"loss/x/sum": 1.0}, **kept)
        other = RecordedStep(0, loss=0.0, metrics={"loss/x/sum": 2.0}, **kept)
        diagnosis = diagnose_records(Record({}, [zero]), Record({}, [other]))
        assert diagnosis.verdict == "different"
        assert "loss and gradient unknown or zero in both; 1 of 1 metrics differ" in str(diagnosis)
        assert "gradient are right" not in str(diagnosis)

    def test_a_trainers_own_metric_alone_is_a_note_and_no_difference(self):
        """It may be that of the last micro-batch: verl's and TRL's are."""
        one, other = (
            replace(make_record(), steps=(replace(make_record().steps[0], metrics={"pg_clipfrac": value}),))
            for value in (0.5, 0.55)
        )
        diagnosis = diagnose_records(one, other)
        assert diagnosis.equal
        assert diagnosis.warnings[-1] == "in step 0 pg_clipfrac is 0.55, not 0.5: of a micro-batch, or merged otherwise"

    def test_an_experiment_that_shows_nothing_leaves_the_scores(self):
        def run(changes):
            return make_record(scale=0.0, loss=0.0), make_record(scale=0.0, loss=0.0)

        diagnosis = diagnose(*pair(1 / 3, **TWINS), run=run, experiments=1)
        assert diagnosis.suspects == ("over_dp", "over_micro_batches")
        assert "tried one data-parallel rank: vacuous" in str(diagnosis)


class TestDamage:
    """Stored gradients that differ from the recorded ones are refused, never judged."""

    def test_a_flipped_bit_in_a_run_is_refused_by_name(self, tmp_path):
        one, two = (ran(tmp_path, "advantages of both signs", name) for name in ("one", "two"))
        assert diagnose(one, two).equal
        name = flip_largest(two, "model.norm.weight", bit=54)
        with pytest.raises(RecordError, match=rf"record two: tensors/step0000\.gradients\n  found: parameter {name} "):
            diagnose(one, two)
        with pytest.raises(RecordError, match="record two"):
            diagnose(two, one)

    def test_a_certificate_shows_the_last_bit(self, tmp_path):
        one, two = (
            ran(tmp_path, "advantages of both signs", name, record={"certificate": True, "gradients": "full"})
            for name in ("one", "two")
        )
        assert diagnose(one, two).equal
        flip_largest(two, "model.norm.weight", bit=0)
        with pytest.raises(RecordError, match=r"model\.norm\.weight has fingerprint float64 \w+, certified float64 "):
            diagnose(one, two)


def flip_largest(run, name, *, bit):
    """Flip one bit of the largest element of a stored gradient."""
    stored = run.read_tensors("step0000.gradients")
    bits = stored[name].clone().view(torch.int64)
    bits[int(stored[name].abs().argmax())] ^= 1 << bit
    run.write_tensors("step0000.gradients", stored | {name: bits.view(torch.float64)})
    return name


def sampled(share, name=""):
    """A record of two steps whose sampler had this share of its weights changed by the end."""
    made = make_record({})
    first = made.steps[0]
    metrics = {} if share is None else {"sampler/moved/fraction": share}
    return replace(made, name=name, steps=(first, replace(first, number=1, metrics=dict(first.metrics) | metrics)))


@pytest.mark.parametrize(("trusted", "suspect", "named"), [(None, 0.02, True), (0.9, 0.02, True), (0.02, 0.021, False)])
def test_updates_that_a_sampler_does_not_see_are_named(trusted, suspect, named):
    diagnosis = diagnose_records(sampled(trusted, "right"), sampled(suspect, "other"))
    assert ("updates_not_sampled" in [cause.name for cause in diagnosis.causes]) == named
    assert any(warning.startswith("other: only 0.02") for warning in diagnosis.warnings)
    assert any(warning.startswith("right: only") for warning in diagnosis.warnings) == (trusted == 0.02)
    assert "warning: other: only 0.02" in str(diagnosis)


def test_a_sampler_that_sees_most_updates_is_not_warned_of():
    assert diagnose_records(sampled(0.7), sampled(0.7)).warnings == ()


def test_norms_in_bfloat16_name_no_factor_with_confidence():
    """Another gradient of about twice the length would look the same."""
    one, twice = (
        Record(
            {"precision": "bf16_mixed", "dp": 2, "observed": {}},
            [RecordedStep(0, loss=0.5, gradient_norms={"a": scale, "b": 2.05 * scale})],
        )
        for scale in (1.0, 2.0)
    )
    diagnosis = diagnose_records(one, twice)
    assert diagnosis["times_dp"].score == 0.45
    assert "norms in this precision tell no factor from another gradient" in diagnosis["times_dp"].evidence[-1]
    assert "cannot be told from these records" in diagnosis.headline


class TestAssertAgrees:
    def test_rounding_agrees_and_a_factor_does_not(self):
        right, same = make_record({"cp": 2}), make_record({"cp": 2})
        assert assert_agrees(same, right).equal
        with pytest.raises(VerdictError, match=r"(?s)agrees with.*over_cp"):
            assert_agrees(make_record({"cp": 2}, scale=0.5), right)

    def test_the_baseline_is_the_one_that_is_taken_for_right(self):
        """A baseline that is not finite proves nothing of the record."""
        right = make_record({})
        broken = Record({}, [replace(step, loss=math.nan) for step in right.steps])
        with pytest.raises(VerdictError, match="unsound"):
            assert_agrees(right, broken)

    def test_records_in_which_nothing_could_differ_do_not_agree(self):
        dead = Record({}, [RecordedStep(0, loss=0.0, gradient_norms={"a": 0.0, "b": 0.0})])
        with pytest.raises(VerdictError, match="vacuous"):
            assert_agrees(dead, dead)
