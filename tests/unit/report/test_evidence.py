"""Facts next to a verdict: size of the error, divergence, declared breaks, evidence, settings that differ."""

import math
from dataclasses import replace

import pytest

from workbench.compare.comparison import Comparison, Configuration
from workbench.report import evidence
from workbench.report.evidence import (
    could_have_seen,
    differing_settings,
    diverged_step,
    divergence,
    limits,
    relative_error,
    relative_text,
    setting_text,
    warnings,
)
from workbench.report.page import page
from workbench.report.summary import answer, as_text, summary_table, tiles
from workbench.specs.run import RunSpec


def with_evidence(c, **evidence):
    changed = replace(c)
    object.__setattr__(changed, "evidence", evidence)
    return changed


def configuration(name, *, against="one", losses=(0.5, 0.25), norms=(1.0, 1.0), verdict=None, **settings):
    steps = [
        {"step": step, "loss/total/sum": loss, "gradient/norm/global": norm}
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True))
    ]
    return Configuration(
        name,
        RunSpec(**settings).model_dump(mode="json"),
        run=f"runs/{name}",
        against=against,
        verdict=verdict or ("equal" if against else "reference"),
        steps=steps,
    )


def reference(**settings):
    return configuration("one", against="", **settings)


def compared(*configurations):
    return Comparison("x", "?", list(configurations))


def row(comparison, name):
    table = summary_table(comparison).replace("<wbr>", "")
    return (
        next(part for part in table.split('class="row') if f">{name}</span>" in part)
        if f">{name}</span>" in table
        else ""
    )


@pytest.mark.parametrize(
    ("losses", "norms", "step"),
    [
        ((1.0, 2.0), (1.0, 1.0), None),
        ((1.0, math.nan), (1.0, 1.0), 1),
        ((1.0, 1.0), (math.inf, 1.0), 0),
        ((-math.inf, 1.0), (1.0, 1.0), 0),
        ((1e300, 0.0), (5e-324, 1e308), None),
    ],
)
def test_a_run_diverges_where_loss_or_gradient_stops_being_finite(losses, norms, step):
    result = configuration("a", losses=losses, norms=norms)
    assert diverged_step(result) == step
    assert divergence(result) == ("" if step is None else f"diverged at step {step}")


def test_a_step_that_did_not_record_its_loss_has_not_diverged():
    assert diverged_step(replace(reference(), steps=[{"step": 0, "loss/total/sum": None}, {"step": 1}])) is None


def test_the_first_screen_and_the_text_name_the_step_of_divergence():
    both = compared(reference(), configuration("hot", losses=(0.5, math.nan)))
    assert "1 of 2 runs diverged, at step 1." in answer(both)
    assert '<span class="diverged">diverged at step 1</span>' in row(both, "hot")
    assert "diverged" not in row(both, "one")
    assert [line for line in as_text(both).splitlines() if "hot" in line and "diverged at step 1" in line]
    early = compared(reference(losses=(math.inf, math.inf)), configuration("hot", losses=(0.5, math.nan)))
    assert "2 of 2 runs diverged, the first at step 0." in answer(early)


def test_the_relative_error_is_the_largest_over_steps():
    wholes = [{"step": 0, "relative_l2": 0.009}, {"step": 1, "relative_l2": 0.002}, {"step": 2}]
    c = replace(configuration("a"), whole_gradient=wholes)
    assert relative_error(c) == 0.009
    assert relative_error(replace(c, whole_gradient=[*wholes, {"relative_l2": math.nan}])) == math.inf
    assert relative_error(reference()) is None
    assert "0.90 %" in row(compared(reference(), c), "a")
    assert "0.90 %" in as_text(compared(reference(), c))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.009, "0.90 %"),
        (1.5, "150 %"),
        (409.0, "409 times"),
        (1e300, "1.0 × 10³⁰⁰ times"),
        (2e-15, "2.0 × 10⁻¹⁵"),
        (0.0, "0"),
        (None, "–"),
        (math.inf, "∞"),
        (math.nan, "not a number"),
    ],
)
def test_a_relative_error_is_written_for_people(value, text):
    assert relative_text(value) == text


def test_declared_breaks_are_shown_next_to_the_verdict():
    loss = {"name": "bnpo"}
    both = compared(
        reference(loss=loss), configuration("mb2", verdict="different", loss=loss, data={"micro_batches": 2})
    )
    assert "bnpo declares that it depends on micro-batches" in row(both, "mb2")
    assert "bnpo declares" not in row(both, "one")
    assert "bnpo declares" in next(line for line in as_text(both).splitlines() if "mb2" in line)
    assert limits(configuration("plain")) == []


def test_configurations_that_differ_in_a_setting_have_different_subtitles():
    both = compared(
        reference(), configuration("b", data={"micro_batches": 2}), configuration("c", data={"micro_batches": 4})
    )
    assert differing_settings(both) == {"one": "micro_batches 1", "b": "micro_batches 2", "c": "micro_batches 4"}
    assert "micro_batches 2" in row(both, "b")


def test_a_common_value_is_left_out_of_subtitles_and_many_are_counted():
    many = compared(
        reference(),
        configuration("b"),
        configuration("c", layout={"cp": 2}, faults=["missing_cp_factor"]),
        configuration("d", steps=3, seed=7, data={"micro_batches": 2}, optimizer={"learning_rate": 0.5}),
    )
    result = differing_settings(many)
    assert [result[name] for name in ("one", "b", "c")] == ["", "", ""]
    assert result["d"].count("·") == 3
    assert result["d"].endswith("1 more")
    assert differing_settings(compared(reference(), configuration("b"))) == {"one": "", "b": ""}


def test_settings_with_one_last_name_are_distinguished():
    both = compared(reference(), configuration("b", seed=1, model={"seed": 2}))
    assert differing_settings(both)["b"] == "model.seed 2 · seed 1"


def test_an_infinite_setting_is_shown_as_such():
    both = compared(reference(), configuration("free", loss={"surrogate": {"clip_high": math.inf}}))
    assert differing_settings(both)["free"] == "clip_high ∞"
    assert "<b>∞</b>" in page(both)
    assert [setting_text(value) for value in (-math.inf, [0.5, math.inf], False)] == ["−∞", "0.5 ∞", "no"]


def test_shared_evidence_is_shown_once_and_other_evidence_per_row():
    shares = {
        "trained_share": 0.5,
        "gradient_token_share": 1.0,
        "gradient_document_share": None,
        "clipped_share": 0.004,
    }
    text = (
        "50 % of target tokens are trained, 100 % of trained tokens have a gradient, "
        "0.40 % of trained tokens are clipped"
    )
    one, two = with_evidence(reference(), **shares), with_evidence(configuration("b"), **shares)
    assert could_have_seen(one) == text
    assert summary_table(compared(one, two)).count(text) == 1
    other = with_evidence(two, **shares | {"trained_share": 0.0, "warnings": ["no token trains"]})
    assert "could have seen: 0 % of target tokens are trained" in row(compared(one, other), "b")
    assert "no token trains" in row(compared(one, other), "b")
    assert "could have seen" in as_text(compared(one, other))


def test_evidence_that_was_not_recorded_leaves_no_line():
    without = []
    for at, recorded in enumerate(
        [None, {}, {"warnings": None}, {"trained_share": None}, {"trained_share": math.nan, "clipped_share": "all"}]
    ):
        c = configuration(f"b{at}")
        object.__setattr__(c, "evidence", recorded)
        assert could_have_seen(c) == "", recorded
        assert warnings(c) == [], recorded
        without.append(c)
    assert ">could have seen: " not in page(compared(reference(), *without))


@pytest.mark.parametrize(
    ("verdict", "sentence"),
    [
        ("vacuous", "1 is vacuous: nothing in the batch could have shown a difference."),
        ("unsound baseline", "1 has an unsound baseline"),
    ],
)
def test_verdicts_without_a_gradient_do_not_count_as_agreeing(verdict, sentence):
    both = compared(reference(), configuration("a"), configuration("b", verdict=verdict))
    assert answer(both).startswith("1 of 2 configurations keeps the gradient of its reference.")
    assert sentence in answer(both)
    assert f"</span> {verdict}</span> 1" in tiles(both)
    assert verdict in row(both, "b")
    assert verdict in as_text(both)
    assert verdict in page(both)


def test_worst_share_looks_at_every_parameter_and_step(comparison):
    c = comparison["tp2-float64"]
    lone = replace(c.parameters[-1], distance=7.0, budget=2.0)
    assert evidence.worst_share(replace(c, parameters=[*c.parameters[:-1], lone])) == 3.5
    assert evidence.worst_share(replace(c, parameters=[], whole_gradient=[])) is None


@pytest.mark.parametrize(
    ("distance", "budget", "share"),
    [
        (1.0, 4.0, 0.25),
        (0.0, 0.0, 0.0),
        (1e-30, 0.0, math.inf),
        (math.nan, 1.0, math.inf),
        (1.0, math.nan, math.inf),
        (None, 1.0, None),
        (1.0, None, None),
    ],
)
def test_share_of_budget_hides_nothing(distance, budget, share):
    assert evidence.share_of_budget(distance, budget) == share


def test_groups_have_every_configuration_once(comparison):
    grouped = evidence.groups(comparison)
    assert list(grouped) == ["one_rank-float64", "one_rank-float32"]
    assert sorted(c.name for members in grouped.values() for c in members) == sorted(
        c.name for c in comparison.configurations
    )
    assert all(members[0].name == reference for reference, members in grouped.items())


def test_changed_settings_are_those_that_leave_the_reference(comparison):
    changed = evidence.changed_settings(comparison, comparison["fault_missing_cp_factor"])
    assert changed == {"layout.cp": 2, "layout.order": "zigzag", "faults": ["missing_cp_factor"]}
    assert evidence.changed_settings(comparison, comparison["one_rank-float32"]) == {}
