"""Figures: they draw the comparison, omit nothing silently, and open no window."""

import functools
import math
import sys
from dataclasses import replace

import pytest

from tests.helpers.boxes import misplaced
from tests.helpers.comparisons import FAILED, FLOORED, PARAMETERS, seeds, several
from workbench.compare.comparison import VERDICTS, Comparison
from workbench.report import evidence, figures, style

ALL = [
    figures.verdicts,
    figures.gradient_norm_by_step,
    figures.norm_ratios,
    figures.importance_ratios,
    figures.loss_by_step,
    figures.time_and_memory,
]


@pytest.fixture(scope="module")
def drawn(comparison):
    """A figure of the comparison, drawn once for the tests that only read it."""
    return functools.cache(lambda draw: draw(comparison))


def ran(comparison):
    return [c for c in comparison.configurations if c.state == "succeeded"]


def drawn_lines(figure):
    return {
        line.get_label(): line for axes in figure.axes for line in axes.lines if not line.get_label().startswith("_")
    }


def texts(figure):
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


@pytest.mark.parametrize("draw", ALL, ids=lambda draw: draw.__name__)
def test_a_figure_has_units_and_is_not_shown(draw, comparison):
    before = sys.modules.get("matplotlib.pyplot")
    figure = draw(comparison)
    assert isinstance(figure, style.Chart)
    assert sys.modules.get("matplotlib.pyplot") is before
    assert any(axes.get_xlabel() or axes.get_title(loc="left") for axes in figure.axes)


@pytest.mark.parametrize("draw", ALL, ids=lambda draw: draw.__name__)
def test_an_empty_comparison_gives_a_figure_with_a_reason(draw, comparison):
    bare = replace(comparison["one_rank-float64"], steps=[], parameters=[], ratios={}, whole_gradient=[])
    empty = Comparison("empty", "Nothing?", [bare])
    assert any(word in " ".join(texts(draw(empty))) for word in ("recorded", "nothing to compare"))


LONG = "a_name_of_somebody_who_describes_everything_"


@pytest.mark.parametrize("draw", [figures.verdicts, figures.gradient_norm_by_step], ids=lambda draw: draw.__name__)
@pytest.mark.parametrize(
    "made", [several(5), several(50), several(35, prefix=LONG), seeds(32)], ids=["5", "50", "long", "seeds"]
)
def test_no_text_leaves_a_figure_or_touches_another(draw, made):
    assert misplaced(draw(made)) == []


@pytest.mark.parametrize("draw", [figures.importance_ratios, figures.time_and_memory], ids=lambda draw: draw.__name__)
def test_texts_of_few_configurations_stay_apart(draw):
    assert misplaced(draw(several(5, prefix=LONG))) == []


@pytest.mark.parametrize("prefix", ["", LONG])
def test_titles_of_norm_ratios_stay_apart(prefix):
    assert misplaced(figures.norm_ratios(several(23, parameters=4, prefix=prefix))) == []


def test_norm_ratios_are_the_comparison_s_in_the_model_s_order(comparison):
    figure = figures.norm_ratios(comparison, step=1)
    lines = drawn_lines(figure)
    compared = [c for c in comparison.configurations if c.parameters]
    assert set(lines) == {c.name for c in compared}
    for c in compared:
        expected = [p.norm_ratio for p in c.parameters if p.step == 1]
        assert list(lines[c.name].get_xdata()) == expected
        assert list(lines[c.name].get_ydata()) == list(range(len(PARAMETERS)))
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names[0] == "embed_tokens"
    assert len(names) == len(PARAMETERS)


def test_norm_ratios_show_a_fault_off_one_and_a_correct_layout_on_it(drawn):
    axes = {line.get_label(): a for a in drawn(figures.norm_ratios).axes for line in a.lines}
    fault = axes["fault_missing_cp_factor"]
    low, high = fault.get_xlim()
    width = math.log(high / low)
    off = abs(math.log(0.5)) / width
    assert off > 0.2
    correct = next(line for line in axes["tp2-float64"].lines if line.get_label() == "tp2-float64")
    assert max(abs(math.log(x)) for x in correct.get_xdata()) / width < 1e-6


def test_norm_ratios_mark_parameters_judged_by_the_floor(drawn):
    for axes in filter(lambda axes: axes.get_visible(), drawn(figures.norm_ratios).axes):
        hollow = [line for line in axes.lines if line.get_markerfacecolor() == "#ffffff"]
        assert [list(line.get_ydata()) for line in hollow] == [[PARAMETERS.index(FLOORED)]]


@pytest.mark.parametrize(("ratio", "arrow", "said"), [(0.0, "<", "< 0"), (math.inf, ">", "> ∞"), (927.0, ">", "> 927")])
def test_norm_ratios_beyond_the_axis_are_arrows_at_its_edge(ratio, arrow, said, comparison):
    c = comparison["tp2-float64"]
    changed = replace(c, parameters=[replace(c.parameters[0], norm_ratio=ratio), *c.parameters[1:]])
    figure = figures.norm_ratios(Comparison("x", "?", [comparison["one_rank-float64"], changed]))
    edges = [line for line in figure.axes[0].lines if line.get_marker() == arrow]
    assert [list(line.get_ydata()) for line in edges] == [[0]]
    assert said in texts(figure)


def test_norm_ratios_beyond_the_axis_are_listed_as_a_range(comparison):
    c, many = comparison["tp2-float64"], [comparison["one_rank-float64"]]
    first, second, *others = c.parameters
    for i in range(1, 8):  # the order of a set would turn some of these round
        ratios = (900 + 10 * i, 100 * i)
        parameters = [replace(p, norm_ratio=ratio) for p, ratio in zip((first, second), ratios, strict=True)]
        many.append(replace(c, name=f"tp2-{i}", parameters=[*parameters, *others]))
    message = [text for text in texts(figures.norm_ratios(Comparison("x", "?", many))) if text.startswith("> ")]
    assert message == [f"> {100 * i} to {900 + 10 * i}" for i in range(1, 8)]


def test_norm_ratios_count_nan(comparison):
    c = comparison["tp2-float64"]
    changed = replace(c, parameters=[replace(c.parameters[0], norm_ratio=math.nan), *c.parameters[1:]])
    figure = figures.norm_ratios(Comparison("x", "?", [comparison["one_rank-float64"], changed]))
    assert "1 not a number" in texts(figure)


def test_many_configurations_use_a_second_row(comparison):
    c = comparison["tp2-float64"]
    many = [comparison["one_rank-float64"], *(replace(c, name=f"tp2-{i}") for i in range(14))]
    figure = figures.norm_ratios(Comparison("x", "?", many))
    assert set(drawn_lines(figure)) == {f"tp2-{i}" for i in range(14)}


def test_importance_ratios_are_shares_of_the_recorded_counts(drawn, comparison):
    figure = drawn(figures.importance_ratios)
    assert len(figure.axes) == 2 * 4
    assert not [text for text in texts(figure) if "beyond" in text]
    axes = figure.axes[3]
    histogram = comparison["tp2-float64"].ratios["3"]
    stairs = {patch.get_label(): patch for patch in axes.patches}["tp2-float64"]
    values, edges, _ = stairs.get_data()
    total = sum(histogram["counts"])
    assert list(values) == [n / total for n in histogram["counts"]]
    assert list(edges) == histogram["edges"]
    assert len(axes.patches) == 9


def test_importance_ratios_show_the_clip_bounds(drawn):
    for axes in drawn(figures.importance_ratios).axes:
        assert sorted(line.get_xdata()[0] for line in axes.lines) == pytest.approx([0.8, 1.28])
        assert axes.get_xlim()[0] < 0.8
        assert axes.get_xlim()[1] > 1.28


def test_distant_importance_ratios_of_a_fault_are_counted_in_the_text(comparison):
    fault = comparison["fault_shift_after_shard"]
    far = replace(fault, ratios={"0": {"edges": [1e-4, 1e-3, 1.0, 1.1], "counts": [3, 0, 9]}})
    figure = figures.importance_ratios(Comparison("x", "?", [comparison["one_rank-float64"], far]), steps=[0])
    assert "beyond this axis:\n25 % of fault_shift_after_shard" in texts(figure)
    assert figure.axes[0].get_xlim()[0] > 0.7


def test_importance_ratios_use_the_requested_steps(comparison):
    figure = figures.importance_ratios(comparison, steps=[2])
    assert len(figure.axes) == 2
    assert "step 2, share of trained tokens" in texts(figure)


def test_time_and_memory_are_the_records_and_the_failed_run_is_named(comparison):
    figure = figures.time_and_memory(comparison)
    left, right = figure.axes
    for axes, key, unit in ((left, figures.STEP_MS, 1.0), (right, figures.PEAK_BYTES, 2.0**20)):
        lines = {line.get_label(): line for line in axes.lines}
        for c in ran(comparison):
            assert list(lines[c.name].get_xdata()) == [step[key] / unit for step in c.steps]
        assert "  failed, not recorded" in [text.get_text() for text in axes.texts]
    names = [label.get_text() for label in left.get_yticklabels()]
    assert names == [c.name for c in comparison.configurations]
    assert "(ms" in left.get_title(loc="left")
    assert "(MiB" in right.get_title(loc="left")


def test_verdicts_end_at_the_worst_share_of_the_budget(comparison):
    figure = figures.verdicts(comparison)
    axes = figure.axes[0]
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert FAILED in rows
    ends = {
        rows[int(line.get_ydata()[0])]: line.get_xdata()[0]
        for line in axes.lines
        if line.get_marker() in ("o", "s", "D")
    }
    assert ends == {name: evidence.worst_share(comparison[name]) for name in rows if name != FAILED}
    assert "≠ different, factor 0.500 (1 / cp)" in texts(figure)
    assert "× failed" in texts(figure)


def test_every_verdict_can_be_drawn():
    assert set(style.VERDICT_STYLES) == {
        "reference",
        "equal",
        "within budget",
        "different",
        "vacuous",
        "unsound baseline",
        "failed",
    }
    assert set(VERDICTS) <= set(style.VERDICT_STYLES)
    for what in ("name", "sign", "color", "marker"):
        alike = [getattr(look, what) for name, look in style.VERDICT_STYLES.items() if name != "reference"]
        assert len(set(alike)) == len(alike)


@pytest.mark.parametrize("draw", [figures.gradient_norm_by_step, figures.loss_by_step, figures.importance_ratios])
def test_a_legend_of_many_kinds_lies_inside_its_figure(draw, comparison):
    c, many = comparison["tp2-float64"], [comparison["one_rank-float64"]]
    many += [replace(c, name=f"kind{i}", settings=c.settings | {"steps": 10 + i}) for i in range(24)]
    figure = draw(Comparison("x", "?", many))
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.legends[0].get_texts()]
    assert len(boxes) == 25
    assert min(box.y0 for box in boxes) >= 0
    assert max(box.y1 for box in boxes) <= figure.bbox.height
    assert max(box.x1 for box in boxes) <= figure.bbox.width
