"""Lines by step: they are the records, look the same everywhere, and hide nothing."""

import itertools
from dataclasses import replace

import pytest

from workbench.compare.comparison import Comparison
from workbench.report import figures, series


def ran(comparison):
    return [c for c in comparison.configurations if c.state == "succeeded"]


def drawn_lines(figure):
    return {
        line.get_label(): line for axes in figure.axes for line in axes.lines if not line.get_label().startswith("_")
    }


@pytest.mark.parametrize(
    ("draw", "key"), [(figures.gradient_norm_by_step, series.GRADIENT_NORM), (figures.loss_by_step, series.LOSS)]
)
def test_lines_by_step_are_the_records(draw, key, comparison):
    figure = draw(comparison)
    lines = drawn_lines(figure)
    assert set(lines) == {c.name for c in ran(comparison)}
    for c in ran(comparison):
        assert list(lines[c.name].get_xdata()) == [step["step"] for step in c.steps]
        assert list(lines[c.name].get_ydata()) == [step[key] for step in c.steps]
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["one_rank-float64", "one_rank-float32"]
    assert [len(axes.lines) for axes in figure.axes] == [9, 5]


def test_lines_of_the_same_kind_look_the_same_in_both_panels_and_others_do_not(comparison):
    looks = series.series_styles(comparison)
    assert looks["cp2_zigzag-float64"] == looks["cp2_zigzag-float32"]
    assert looks["cp2_zigzag-float64"].label == "cp2_zigzag"
    assert len(set(looks.values())) == 9
    beside_reference = [look for look in set(looks.values()) if look.marker]
    assert len({look.color for look in beside_reference}) == 8
    assert len({look.marker for look in beside_reference}) == 8


def test_agreeing_lines_take_turns_on_one_path(comparison):
    figure = figures.loss_by_step(comparison)
    lines = drawn_lines(figure)
    agreeing = [c for c in ran(comparison) if c.verdict == "equal"]
    turns = [lines[c.name]._unscaled_dash_pattern for c in agreeing]
    assert len(agreeing) == 5
    assert [offset for offset, _ in turns] == [0, 3, 6, 9, 12]
    assert {tuple(pattern) for _, pattern in turns} == {(3, 12)}


def test_the_legend_has_every_kind_once(comparison):
    legend = figures.gradient_norm_by_step(comparison).legends[0]
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == [
        "one_rank (reference)",
        "cp2_contiguous",
        "cp2_zigzag",
        "tp2",
        "dp2_cp2",
        "cp2_tp2",
        "fault_local_denominator",
        "fault_missing_cp_factor",
        "fault_shift_after_shard",
    ]


@pytest.mark.parametrize(("far", "low", "scale"), [(1.0, 0.01, "linear"), (90.0, 0.01, "log"), (90.0, -0.01, "asinh")])
def test_a_distant_fault_does_not_flatten_agreeing_runs(far, low, scale, comparison):
    reference, fault = comparison["one_rank-float64"], comparison["fault_missing_cp_factor"]
    sound = replace(reference, steps=[{"step": 0, series.LOSS: low}, {"step": 1, series.LOSS: 0.5}])
    wrong = replace(fault, steps=[{"step": 0, series.LOSS: far}])
    axes = figures.loss_by_step(Comparison("x", "?", [sound, wrong])).axes[0]
    assert axes.get_yscale() == scale
    assert any("logarithmic" in text.get_text() for text in axes.texts) == (scale != "linear")


@pytest.mark.parametrize("low", [-0.0112, -0.0474, -3.0, -80.0])
@pytest.mark.parametrize("high", [5.4, 90.0, 1e6, 1e12])
def test_ticks_around_zero_do_not_collide(low, high, comparison):
    reference, fault = comparison["one_rank-float64"], comparison["fault_missing_cp_factor"]
    sound = replace(reference, steps=[{"step": 0, series.LOSS: -0.0112}, {"step": 1, series.LOSS: -0.0245}])
    wrong = replace(fault, steps=[{"step": 0, series.LOSS: high}, {"step": 1, series.LOSS: low}])
    figure = figures.loss_by_step(Comparison("x", "?", [sound, wrong]))
    figure.draw_without_rendering()
    axes = figure.axes[0]
    assert axes.get_yscale() == "asinh"
    bottom, top = axes.get_ylim()
    boxes = sorted(
        (label.get_window_extent() for label in axes.get_yticklabels() if bottom <= label.get_position()[1] <= top),
        key=lambda box: box.y0,
    )
    assert len(boxes) >= 3
    assert all(below.y1 < above.y0 for below, above in itertools.pairwise(boxes))
