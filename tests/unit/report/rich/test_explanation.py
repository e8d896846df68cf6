"""An explanation: verdict, witness, and a row for each difference."""

import dataclasses
import re

from tests.helpers.trials import HOSTILE
from workbench.report.rich import as_html as drawn
from workbench.report.rich.explanation import as_html
from workbench.systems import explain


def rows(html):
    pattern = r'<th scope="row"><strong>(.*?)</strong></th><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td>'
    return [tuple(cell.replace("<wbr>", "") for cell in row) for row in re.findall(pattern, html)]


def test_the_verdict_with_its_batch_and_a_row_for_each_difference():
    found = explain("verl", {}, "trl", {"loss_type": "dapo", "epsilon_high": 0.2})
    html = as_html(found)
    assert "<strong>verl | TRL</strong> different" in html
    assert f"batch {found.counterexample.seed}: loss " in html
    assert [row[0] for row in rows(html)] == [d.setting for d in found.differences]
    setting, about, verl, trl, acts = rows(html)[0]
    assert (setting, about, acts) == ("surrogate.dual_clip", "clip", "yes")
    assert verl.startswith("3.0 (clip_ratio_c=3, its default")
    assert trl.startswith("null")
    assert "verl: dual clip 3 is always on" in html
    assert drawn(found) == str(html)


def test_the_same_settings_have_no_rows_and_no_batch():
    html = as_html(explain("fast_llm", {}, "fast_llm", {}))
    assert "<strong>Fast-LLM | Fast-LLM</strong> same" in html
    assert rows(html) == []
    assert "batch" not in html


def test_words_of_a_system_are_quoted():
    found = explain("fast_llm", {}, "fast_llm", {"type": "gspo"})
    spoilt = dataclasses.replace(found, notes=((HOSTILE,), ()), systems=(HOSTILE, "b"))
    assert "<script" not in as_html(spoilt)
