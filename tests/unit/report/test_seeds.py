"""Seeds in the report: the page has the section if and only if there are several, with mean and spread."""

import re
from dataclasses import replace

import pytest

from workbench.compare.comparison import Comparison, Configuration
from workbench.compare.seeds import Spread
from workbench.report.page import page
from workbench.report.seeds import seeds_by_step, spread_text
from workbench.report.summary import as_text
from workbench.specs.run import RunSpec


def made(seeds):
    return Comparison(
        "x",
        "?",
        [
            Configuration(
                f"a-{seed}",
                RunSpec(seed=seed).model_dump(mode="json"),
                verdict="reference",
                steps=[
                    {"step": step, "loss/total/sum": float(seed + step), "gradient/norm/global": 2.0 * seed}
                    for step in range(2)
                ],
            )
            for seed in seeds
        ],
    )


def test_the_page_shows_mean_and_spread_of_seeds():
    text = page(made([1, 2, 3]))
    section = re.search(r"<h2>Across seeds</h2>.*?</section>", text, re.DOTALL)[0]
    assert "3.00 ± 1.00 [2.00, 4.00]" in section
    assert "4.00 ± 2.00 [2.00, 6.00]" in section
    assert "3 × reference" in section
    assert "1 · 2 · 3" in section


def test_identical_seeds_are_named_and_have_no_spread():
    same = made([1, 1])
    other = RunSpec(seed=2).model_dump(mode="json")
    same.configurations[1] = replace(same.configurations[0], name="a-2", settings=other)
    note = "seeds 1 and 2 gave identical runs: seed draws nothing"
    text = page(same)
    assert text.count(note) == 2
    assert text.index(note) < text.index("<h2>")
    assert note in as_text(same)
    assert "2.00 (identical runs)" in text
    assert "±" not in re.search(r"<h2>Across seeds</h2>.*?<tbody>(.*?)</section>", text, re.DOTALL)[1]
    assert "identical" not in page(made([1, 2]))


def test_one_seed_makes_no_section():
    assert "Across seeds" not in page(made([1]))


def test_the_band_is_one_deviation_wide():
    axes = seeds_by_step(made([1, 2, 3])).axes[0]
    assert list(axes.lines[0].get_ydata()) == [2.0, 3.0]
    corners = axes.collections[0].get_paths()[0].vertices
    assert sorted({round(y, 9) for _, y in corners}) == pytest.approx([1.0, 2.0, 3.0, 4.0])


def test_an_experiment_without_seeds_is_reported():
    assert "several seeds" in seeds_by_step(made([1])).texts[0].get_text()


def test_a_spread_of_one_and_of_none_is_labelled():
    assert spread_text(Spread.of([2.0])) == "2.00 (one seed)"
    assert spread_text(Spread.of([])) == "–"
