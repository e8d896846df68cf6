"""The verdicts at a glance: the sentence counts correctly, and faults are distinguished from surprises."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.helpers.comparisons import FAILED, bare
from tests.helpers.stand_in import stand_in
from workbench.compare.comparison import Comparison
from workbench.report import summary as module
from workbench.report.page import page
from workbench.report.summary import (
    _Scale,
    answer,
    as_html,
    as_text,
    shared_note,
    show,
    summary_table,
    tiles,
    where_it_ran,
)


def only(comparison, *names):
    return Comparison("some", "?", [comparison[name] for name in names])


def test_the_summary_counts_every_verdict(comparison):
    assert answer(comparison) == (
        "9 of 13 configurations keep the gradient of their reference. "
        "3 differ, each with a known fault switched on. 1 failed and has no verdict."
    )


def test_the_summary_reports_a_difference_without_a_known_fault(comparison):
    fault = comparison["fault_missing_cp_factor"]
    surprise = replace(fault, name="surprise", settings=fault.settings | {"faults": []})
    both = Comparison("x", "?", [comparison["one_rank-float64"], fault, surprise])
    assert "2 differ, 1 of them with a known fault switched on." in answer(both)
    alone = Comparison("x", "?", [comparison["one_rank-float64"], surprise])
    assert answer(alone) == "0 of 1 configurations keep the gradient of their reference. 1 differs."


def test_the_summary_warns_of_an_undetected_fault(comparison):
    unseen = replace(comparison["fault_missing_cp_factor"], verdict="equal")
    result = Comparison("x", "?", [comparison["one_rank-float64"], unseen])
    assert "Not seen, although a fault was switched on: fault_missing_cp_factor." in answer(result)


def test_the_summary_uses_the_singular_for_one(comparison):
    both = only(comparison, "one_rank-float64", "tp2-float64", "fault_missing_cp_factor")
    assert answer(both) == (
        "1 of 2 configurations keeps the gradient of its reference. 1 differs, with a known fault switched on."
    )


def test_the_summary_of_references_alone(comparison):
    assert "nothing to compare" in answer(only(comparison, "one_rank-float64"))


def test_a_row_has_verdict_factor_meaning_and_first_difference(comparison):
    row = summary_table(only(comparison, "one_rank-float64", "fault_missing_cp_factor")).split("<tr")[-1]
    for part in ("different", "× 0.500", "1 / cp", "step 0", "embed_<wbr>tokens", "fault: missing_cp_factor"):
        assert part in row


def test_a_failed_row_names_rank_and_exception(comparison):
    row = summary_table(only(comparison, "one_rank-float32", FAILED)).split("<tr")[-1]
    assert "rank 1: ShardingError" in row
    assert "failed" in row


def test_an_unrequested_device_is_marked(comparison):
    note = "asked for 4 GPUs, 0 here"
    assert f">{note}</mark>" in where_it_ran(comparison, comparison["dp2_cp2-float64"])
    assert "<mark" not in where_it_ran(comparison, comparison["tp2-float64"])
    made = summary_table(only(comparison, "one_rank-float64", "dp2_cp2-float64"))
    assert made.count(f'<mark title="{note}">') == 1
    assert f"ran on CPU with gloo: {note}" in made


def test_a_machine_without_gpus_is_mentioned_once_and_marks_no_row(comparison):
    everywhere = [replace(bare(c), device_note="no GPU here") for c in comparison.configurations]
    on_cpu = replace(comparison, configurations=everywhere)
    assert shared_note(on_cpu) == "no GPU here"
    assert shared_note(comparison) == ""
    whole = page(on_cpu)
    assert whole.count("no GPU here") == 1
    assert "Every configuration ran on CPU with gloo: no GPU here" in whole
    assert "<mark" not in whole
    not_started = replace(comparison[FAILED], run="", device_note="")
    assert shared_note(replace(on_cpu, configurations=[*everywhere, not_started])) == "no GPU here"


def test_bitwise_equality_is_reported(comparison):
    c = comparison["tp2-float64"]
    same = replace(
        c,
        parameters=[replace(p, distance=0.0) for p in c.parameters],
        whole_gradient=[w | {"distance": 0.0, "bitwise_equal": True} for w in c.whole_gradient],
    )
    table = summary_table(Comparison("x", "?", [comparison["one_rank-float64"], same]))
    assert "0, bit for bit" in table


def test_tiles_lead_to_rows(comparison):
    made, table = tiles(comparison), summary_table(comparison)
    assert made.count('class="tile ') == len(comparison.configurations)
    for index in range(len(comparison.configurations)):
        assert f'href="#configuration-{index}"' in made
        assert table.count(f'id="configuration-{index}"') == 1


def test_the_scale_has_the_budget_inside_and_every_value_in_order():
    scale = _Scale([1e-3, 0.3, 5e11])
    places = [scale.place(value) for value in (0.0, 1e-3, 0.3, 1.0, 2.0, 5e11, float("inf"))]
    assert places == sorted(places)
    assert places[0] == 0
    assert 20 < scale.place(1.0) < 80
    assert places[-1] == 100


# ---- show: the same verdicts as HTML and as text, for whichever the front end can read ----


@pytest.fixture
def displayed(monkeypatch):
    calls = []
    monkeypatch.setattr(module, "_display", calls.append)
    return calls


def test_show_hands_over_html_and_its_text_twin(comparison, displayed):
    assert show(comparison) is None
    [data] = displayed
    assert data == {"text/html": as_html(comparison), "text/plain": as_text(comparison)}


def test_show_outside_ipython_prints_the_text(comparison, monkeypatch, capsys):
    ipython = SimpleNamespace(get_ipython=lambda: None)  # imported by another library, and not running
    monkeypatch.setattr(module, "sys", stand_in(sys, modules={"IPython": ipython}))
    show(comparison)
    assert capsys.readouterr().out == as_text(comparison) + "\n"


def test_html_and_text_agree_on_every_configuration(comparison):
    made, text = as_html(comparison).replace("<wbr>", ""), as_text(comparison)
    lines = {line.split()[1]: line for line in text.splitlines()[3:]}
    assert set(lines) == {c.name for c in comparison.configurations}
    for c in comparison.configurations:
        assert c.verdict in lines[c.name]
        assert f'<span class="name">{c.name}</span>' in made
    assert "× 0.500 (1 / cp)  step 0, model.embed_tokens.weight" in lines["fault_missing_cp_factor"]
    assert lines["cp2_tp2-float32"].endswith("rank 1: ShardingError")


def test_the_style_stays_inside_its_element(comparison):
    style = as_html(comparison).partition("<style>")[2].partition("</style>")[0]
    depth, selectors, current = 0, [], ""
    for letter in style:
        if letter == "{":
            if depth == 0:
                selectors.append(current.rpartition("*/")[2].strip())
            depth, current = depth + 1, ""
        elif letter == "}":
            depth, current = depth - 1, ""
        else:
            current += letter
    assert depth == 0
    assert selectors
    assert all(".workbench" in selector or selector.startswith("@media print") for selector in selectors)
