"""Non-finite numbers, or numbers beyond an axis: every figure is drawn, and reports the values that it omits."""

import math
import re
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from workbench.compare.comparison import Comparison, Configuration, ParameterDifference
from workbench.report import evidence, figures, style
from workbench.report.loss_curves import loss_curves
from workbench.report.numbers import GRADIENT_NORM, LOSS, mebibytes, milliseconds, near_one, share, significant
from workbench.report.online import online_curves, online_table
from workbench.report.page import page
from workbench.report.rows import sparkline, sparkline_text
from workbench.report.seeds import seeds_by_step, seeds_table
from workbench.report.summary import as_text
from workbench.specs.losses import LossSpec
from workbench.specs.run import RunSpec

EXTREMES = [math.nan, math.inf, -math.inf, 1e300, -1e300, 1.7e308, 5e-324, 0.0, -0.0, 1.0, -2.5]
VALUES = st.sampled_from(EXTREMES) | st.floats()
VERDICTS = list(style.VERDICT_STYLES)
FIGURES = [
    figures.verdicts,
    figures.gradient_norm_by_step,
    figures.loss_by_step,
    figures.norm_ratios,
    figures.importance_ratios,
    figures.time_and_memory,
    seeds_by_step,
    online_curves,
]
METRICS = (
    LOSS,
    GRADIENT_NORM,
    figures.STEP_MS,
    figures.PEAK_BYTES,
    "reward/all/mean",
    "kl/policy_sampler/k3_mean",
)


def comparison_of(draw):
    """Three seeds of a run that samples and their baseline, every number of them drawn."""
    made = []
    for number in range(4):
        data = RunSpec(seed=number).model_dump(mode="json")
        data["loss"]["surrogate"]["clip_high"] = draw()
        data["online"]["task"] = "task.py:Task" if number else None
        parameters = [
            ParameterDifference(
                0,
                f"layers.{at}.weight",
                *(abs(draw()) for _ in range(3)),
                draw(),
                draw(),
                abs(draw()),
                abs(draw()),
                "floor" if at else "gradient",
                False,
            )
            for at in range(2)
        ]
        whole = [{"step": 0, "distance": abs(draw()), "budget": abs(draw()), "relative_l2": abs(draw())}]
        edges = sorted((abs(draw()) for _ in range(4)), key=lambda value: (math.isnan(value), value))
        made.append(
            Configuration(
                f"c-{number}",
                data,
                against="c-0" if number else "",
                verdict=VERDICTS[2 * number - 1] if number else "reference",
                factor=draw(),
                steps=[{"step": step} | {key: draw() for key in METRICS} for step in range(3)],
                ratios={"0": {"edges": edges, "counts": [1.0, 2.0, 3.0]}},
                parameters=parameters if number else [],
                whole_gradient=whole if number else [],
            )
        )
    return Comparison("x", "?", made)


@pytest.mark.parametrize("draw_figure", FIGURES, ids=lambda figure: figure.__name__)
@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate])
@given(data=st.data())
def test_every_figure_survives_any_numbers(draw_figure, data):
    figure = draw_figure(comparison_of(lambda: data.draw(VALUES)))
    assert style.svg_text(figure).endswith("</svg>\n")
    for axes in figure.axes:
        assert all(map(math.isfinite, (*axes.get_xlim(), *axes.get_ylim())))


@pytest.mark.parametrize("value", EXTREMES, ids=str)
def test_ratios_of_one_extreme_value_are_drawn(value):
    assert style.svg_text(figures.importance_ratios(comparison_of(lambda: value)))


@pytest.mark.parametrize("value", EXTREMES, ids=str)
def test_every_number_has_a_text_a_sparkline_and_a_row(value):
    for write in (significant, near_one, share, milliseconds, mebibytes):
        assert re.search(r"\d|∞|not a number", write(value))
    for values in ([value], [1.0, value], [value] * 3, []):
        drawn = sparkline(values, label="loss")
        assert "nan" not in drawn
        assert '"inf' not in drawn
        assert len(sparkline_text(values)) == len(values)
    everything = comparison_of(lambda: value)
    assert as_text(everything)
    assert seeds_table(everything)
    assert online_table(everything)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_the_page_survives_them(value):
    assert page(comparison_of(lambda: value)).endswith("</html>\n")


def lines(*series, **changes):
    """The loss figure of a baseline and of runs that have these losses by step."""
    made = [
        Configuration(
            f"run{at}",
            RunSpec(steps=3).model_dump(mode="json"),
            against="run0" if at else "",
            verdict="equal" if at else "reference",
            steps=[{"step": step, LOSS: loss} for step, loss in enumerate(losses)],
        )
        for at, losses in enumerate(series)
    ]
    return figures.loss_by_step(Comparison("x", "?", [replace(made[0], **changes), *made[1:]]))


def test_a_line_ends_at_the_first_non_finite_value_with_a_note():
    figure = lines([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, math.nan, math.inf])
    axes = figure.axes[0]
    line = next(line for line in axes.lines if line.get_label() == "run1")
    assert [value for value in line.get_ydata() if math.isfinite(value)] == [1.0, 2.0]
    [cross] = [line for line in axes.lines if line.get_gid() == "lost-run1"]
    assert list(cross.get_xdata()) == [2]
    assert "× not finite from step 2: run1" in axes.get_xlabel()
    assert axes.get_ylim()[1] < 6


def test_a_recovering_run_is_distinguished_from_a_diverged_one():
    assert "not finite at step 1: run0" in lines([1.0, math.inf, 3.0]).axes[0].get_xlabel()
    assert "at 2 of 4 steps, first at step 0" in lines([math.nan, 1.0, math.nan, 3.0]).axes[0].get_xlabel()
    assert "not finite" not in lines([1.0, 2.0]).axes[0].get_xlabel()


def test_a_value_beyond_any_axis_does_not_flatten_the_rest_and_is_reported():
    axes = lines([1.0, 2.0, 1e300]).axes[0]
    assert axes.get_ylim()[1] < 10
    assert "not finite or beyond 10¹⁰⁰ from step 2: run0" in axes.get_xlabel()


@pytest.mark.parametrize(
    ("losses", "scale"), [([1.0, 1.2, 1e30], "log"), ([-1.0, 1.2, 1e30], "asinh"), ([1.0, 2.0, 3.0], "linear")]
)
def test_a_baseline_that_runs_away_does_not_set_the_scale(losses, scale):
    assert lines([*losses, *losses[:2]]).axes[0].get_yscale() == scale


def histogram(edges, counts, **surrogate):
    data = RunSpec(loss={"surrogate": surrogate}).model_dump(mode="json")
    return figures.importance_ratios(
        Comparison("x", "?", [Configuration("one", data, ratios={"0": {"edges": edges, "counts": counts}})])
    )


def test_ratios_with_an_infinite_edge_are_drawn_in_part_and_counted():
    axes = histogram([0.0, 0.5, 1.0, math.inf], [1.0, 2.0, 1.0]).axes[0]
    [stairs] = axes.patches
    assert list(stairs.get_data().edges) == [0.0, 0.5, 1.0]
    assert any("25 % of one" in text.get_text() for text in axes.texts)


def test_all_infinite_ratios_give_an_empty_panel_with_a_note():
    axes = histogram([0.0, 0.5, 1.0, math.inf], [0.0, 0.0, 4.0]).axes[0]
    assert not axes.patches
    assert any("100 % of one" in text.get_text() for text in axes.texts)


def test_without_an_upper_clip_only_the_lower_one_is_drawn():
    axes = histogram([0.9, 1.0, 1.1], [1.0, 1.0], clip_low=0.2, clip_high=math.inf).axes[0]
    assert [line.get_xdata()[0] for line in axes.lines] == pytest.approx([0.8])


def test_a_loss_without_an_upper_clip_has_curves():
    figure = loss_curves([LossSpec(name="grpo", surrogate={"clip_high": math.inf})])
    assert style.svg_text(figure)


def test_a_distance_beyond_the_axis_is_an_arrow_with_its_relative_error():
    spec = RunSpec().model_dump(mode="json")
    made = [Configuration("one", spec)] + [
        Configuration(
            f"far{at}",
            spec,
            against="one",
            verdict="different",
            whole_gradient=[{"step": 0, "distance": distance, "budget": 1.0, "relative_l2": 0.009}],
        )
        for at, distance in enumerate((1e40, math.inf, 7.0))
    ]
    axes = figures.verdicts(Comparison("x", "?", made)).axes[0]
    arrows = [line for line in axes.lines if line.get_marker() == ">"]
    assert [line.get_ydata()[0] for line in arrows] == [0, 1]
    assert axes.get_xlim()[1] <= 1e22
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("0.90 %") == 3
    assert "relative error" in texts


@pytest.mark.parametrize("budget", [math.inf, math.nan])
def test_a_budget_that_is_not_finite_judges_nothing(budget):
    assert evidence.share_of_budget(1.0, budget) == math.inf
    assert evidence.share_of_budget(math.inf, budget) == math.inf


def test_durations_that_are_not_finite_leave_the_others():
    spec = RunSpec().model_dump(mode="json")
    steps = [{"step": step, figures.STEP_MS: value} for step, value in enumerate((4.0, math.inf, 3.0, math.nan))]
    axes = figures.time_and_memory(Comparison("x", "?", [Configuration("a", spec, steps=steps)])).axes[0]
    assert axes.get_xlim()[1] < 10
    lost = [{"step": 0, figures.STEP_MS: math.nan}]
    axes = figures.time_and_memory(Comparison("x", "?", [Configuration("a", spec, steps=lost)])).axes[0]
    assert "  not finite" in [text.get_text() for text in axes.texts]
