"""The figure and section of online runs: every run and number is there, and missing ones are named."""

import re
from dataclasses import replace

import pytest

from workbench.compare.comparison import Comparison, Configuration
from workbench.records.directory import RunDirectory
from workbench.report.notebook import _cells
from workbench.report.online import PANELS, online_answer, online_curves, online_groups, online_table, smooth
from workbench.report.page import page
from workbench.specs.run import RunSpec

KEYS = [panel.key for panel in PANELS]
SECTION = "Online: reward and mismatch by step"


def spec(seed=0, **settings):
    online = {"task": "arithmetic", "prompts": 2, "answers": 2}
    return RunSpec(seed=seed, online=online, data={"advantages": {"name": "grpo"}}, steps=4, **settings)


def number(key, seed, step):
    """Another one for every metric, seed and step."""
    return (KEYS.index(key) + 1) * 0.01 + seed * 0.1 + step * 0.001


def records(seed, steps=4, without=()):
    return [
        {"step": step} | {key: number(key, seed, step) for key in KEYS if key not in without} for step in range(steps)
    ]


def configuration(name, seed=0, **how):
    made = how.pop("made", spec(seed))
    return Configuration(name, made.model_dump(mode="json"), run=f"runs/{name}", **{"steps": records(seed)} | how)


def two_losses():
    sharp = spec(3, loss={"name": "cispo"})
    return Comparison(
        "online",
        "Does it learn?",
        [configuration("grpo-0"), configuration("grpo-1", 1), configuration("cispo", 3, made=sharp)],
    )


def drawn(figure):
    """Title of a panel -> {line's id: its values}; broad lines count up."""
    results = {}
    for axes in figure.axes:
        lines = [line for line in axes.lines if line.get_gid()]
        results[axes.get_title(loc="left")] = {
            f"{line.get_gid()}{at if line.get_gid() == 'mean' else ''}": list(line.get_ydata())
            for at, line in enumerate(lines)
        }
    return results


def said(figure):
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    return " | ".join(
        [
            *texts,
            *(text.get_text() for legend in figure.legends for text in legend.get_texts()),
            *(text.get_text() for text in figure.texts),
        ]
    )


def test_every_panel_has_every_run_with_every_number_and_the_mean_of_seeds():
    figure = online_curves(two_losses())
    shown = drawn(figure)
    assert list(shown) == [panel.title for panel in PANELS]
    for panel in PANELS:
        lines = shown[panel.title]
        for name, seed in (("grpo-0", 0), ("grpo-1", 1), ("cispo", 3)):
            assert lines[f"run-{name}"] == [number(panel.key, seed, step) for step in range(4)]
        assert lines["mean2"] == pytest.approx([number(panel.key, 0.5, step) for step in range(4)])
        assert lines["mean4"] == lines["run-cispo"]
    assert "grpo: 2 seeds | cispo | thin: each run as recorded" in said(figure)


def test_only_the_mismatch_is_logarithmic_also_at_zero():
    panels = online_curves(two_losses()).axes
    scales = {axes.get_title(loc="left"): axes.get_yscale() for axes in panels}
    assert {title for title, scale in scales.items() if scale == "log"} == {"sampler and trainer apart"}
    low, high = panels[4].get_ylim()
    assert low == pytest.approx(0.01)
    assert high == pytest.approx(1.0)
    exact = configuration("a", steps=[record | {KEYS[4]: 0.0} for record in records(0)])
    panel = online_curves(Comparison("x", "?", [exact])).axes[4]
    assert panel.get_yscale() == "linear"
    assert list(panel.lines[0].get_ydata()) == [0.0] * 4


def test_a_metric_that_one_run_lacks_is_named_in_its_panel_and_in_no_other():
    comparison = two_losses()
    comparison.configurations[1] = replace(comparison.configurations[1], steps=records(1, without=[KEYS[4]]))
    notes = {
        axes.get_title(loc="left"): [text.get_text() for text in axes.texts if "not recorded" in text.get_text()]
        for axes in online_curves(comparison).axes
    }
    assert notes.pop("sampler and trainer apart") == ["not recorded:\ngrpo-1"]
    assert not any(notes.values())


def test_a_value_that_is_no_number_leaves_a_gap_only():
    broken = records(0)
    broken[1][KEYS[0]] = float("nan")
    figure = online_curves(Comparison("x", "?", [configuration("a", steps=broken)]))
    assert list(figure.axes[0].lines[0].get_xdata()) == [0, 2, 3]
    assert list(figure.axes[1].lines[0].get_xdata()) == [0, 1, 2, 3]


def test_runs_without_steps_or_samples_are_named():
    plain = Configuration("replayed", RunSpec().model_dump(mode="json"), steps=records(0))
    waiting = configuration("grpo-1", 1, steps=[], state="pending")
    gone = Configuration("gone", {}, state="failed", verdict="failed")
    words = said(online_curves(Comparison("x", "?", [configuration("grpo-0"), waiting, plain, gone])))
    assert "grpo: 2 seeds, no step recorded, pending (grpo-1)" in words
    assert "samples nothing, not shown: replayed, gone" in words


def test_running_runs_on_disk_are_drawn(tmp_path):
    runs = [RunDirectory.create(tmp_path, "a", spec(seed)) for seed in (0, 1)]
    nothing = online_curves(runs)
    assert "no step recorded, pending" in said(nothing)
    assert not any(axes.get_yticks().size for axes in nothing.axes)
    runs[0].append_step(records(0)[0])
    lines = drawn(online_curves(iter(runs)))["reward"]
    assert lines[f"run-{runs[0].path.name}"] == [number(KEYS[0], 0, 0)]
    assert drawn(online_curves(runs[0]))["reward"]["run-a"] == [number(KEYS[0], 0, 0)]


def test_runs_without_samples_give_a_figure_with_a_note(tmp_path):
    assert "online.task" in said(online_curves(RunDirectory.create(tmp_path, "a", RunSpec())))


def test_two_groups_of_one_name_stay_two():
    other = spec(1, loss={"name": "cispo"})
    made = [
        configuration("a-0"),
        configuration("a-1", 1),
        configuration("a-2", made=spec(0, loss={"name": "cispo"})),
        configuration("a-3", 1, made=other),
    ]
    assert [len(members) for members in online_groups(Comparison("x", "?", made)).values()] == [2, 2]


def test_compared_runs_have_lines_and_no_sentence():
    judged = configuration("other_seed", 1, against="one_rank", verdict="different")
    comparison = Comparison("x", "?", [configuration("one_rank"), judged])
    assert list(online_groups(comparison)) == ["one_rank", "other_seed"]
    assert online_answer(comparison).startswith("one_rank: 2 % of the completions right")
    assert "other_seed" not in online_answer(comparison)
    text = page(comparison)
    assert "0 of 1 configurations keep the gradient of their reference. 1 differs." in text
    assert "one_rank: 2 % of the completions right" in text


def test_the_broad_line_is_a_mean_over_a_tenth_of_the_steps():
    long = configuration("a", steps=records(0, 40))
    figure = online_curves(Comparison("x", "?", [long]))
    assert "broad: mean of seeds and of 5 steps" in said(figure)
    zigzag = [{step: float(step % 2) for step in range(9)}]
    assert smooth(zigzag, 3)[4] == pytest.approx(2 / 3)
    assert list(smooth(zigzag, 3)) == list(range(1, 8))
    assert smooth([{0: 1.0}, {0: 2.0, 1: 4.0}], 1) == {0: 1.5, 1: 4.0}


def test_the_summary_has_the_first_and_last_values_of_each_run():
    climbing = [record | {KEYS[1]: 0.25 + step / 100} for step, record in enumerate(records(0, 40))]
    comparison = two_losses()
    comparison.configurations[2] = replace(comparison.configurations[2], steps=climbing)
    assert online_answer(comparison) == (
        "grpo: 7 % of the completions right in the first tenth of the steps, 7 % in the last, mean of 2 seeds. "
        "cispo: 26 % of the completions right in the first tenth of the steps, 62 % in the last."
    )
    assert online_answer(Comparison("x", "?", [configuration("a", steps=[])])) == ""


def test_the_page_has_the_section_with_figure_and_table_for_online_runs_only():
    timed = [{"time/sample_ms": 200.0, "time/score_ms": 50.0, "time/step_ms": 500.0} | one for one in records(0)]
    text = page(two_losses())
    section = re.search(rf"<h2>{SECTION}</h2>.*?</section>", text, re.DOTALL)[0]
    assert 'id="online-curves-caption"' in section
    assert section.count("k3 on the sampler's tokens".replace("'", "&#39;")) == 1
    assert "0.0700 ± 0.0707 [0.0200, 0.120]" in section
    assert "0.323 (one seed)" in section
    assert '<td class="number">0.35</td>' in section
    assert text.index(SECTION) < text.index("<h2>Verdicts")
    assert '<td class="number">0.75 s</td>' in online_table(Comparison("x", "?", [configuration("a", steps=timed)]))
    assert "Does it learn?" in text
    assert "baseline of none" in text
    assert "there is nothing to compare" not in text
    recorded = page(Comparison("x", "?", [Configuration("a", RunSpec().model_dump(mode="json"), steps=records(0))]))
    assert SECTION not in recorded
    assert "there is nothing to compare" in recorded


def test_a_failed_online_run_is_counted_next_to_the_others():
    lost = configuration("b", state="failed", verdict="failed", steps=[], failure={"exception": "lost"})
    text = page(Comparison("x", "?", [configuration("a"), lost]))
    assert "1 failed and has no verdict." in text
    assert "a: 2 % of the completions right" in text


def test_many_steps_have_few_ticks():
    figure = online_curves(Comparison("x", "?", [configuration("a", steps=records(0, 120))]))
    assert len(figure.axes[0].get_xticks()) < 10


def test_the_notebook_of_an_online_experiment_draws_it():
    sources = [source for kind, source in _cells(two_losses(), "comparison.json") if kind == "code"]
    assert "wb.report.online.online_curves(comparison)" in sources
    recorded = Comparison("x", "?", [Configuration("a", RunSpec().model_dump(mode="json"))])
    assert not any("online" in source for _, source in _cells(recorded, "comparison.json"))
