"""A diagnosis: a row for each cause, what was tried, what comes next."""

import re
from dataclasses import replace

from tests.helpers.hand_records import make_record
from tests.helpers.trials import HOSTILE
from workbench.diagnose import diagnose
from workbench.report.rich import as_html as drawn
from workbench.report.rich.diagnosis import as_html

TWINS = {"dp": 3, "micro_batches": 3}


def text(html):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def found(context=None, **told):
    return diagnose(make_record(context), make_record(context, **told))


def test_a_row_for_each_cause():
    html = as_html(found(TWINS, scale=1 / 3))
    rows = re.findall(r'<tr><th scope="row"><code class="whole">(.*?)</code></th>(.*?)</tr>', html)
    assert [name for name, _ in rows] == ["over_dp", "over_micro_batches"]
    cells = [text(cell).strip() for cell in re.findall(r"<td.*?>(.*?)</td>", rows[0][1])]
    assert cells[0] == "0.95"
    assert "every gradient is 0.333333 times the trusted one, which is 1 / dp" in cells[2]
    assert "next: one data-parallel rank" in re.sub(r" +", " ", text(html))
    assert drawn(found(TWINS, scale=1 / 3)) == str(html)


def test_what_was_tried_is_said():
    right, wrong = (make_record(TWINS, scale=scale) for scale in (1, 1 / 3))
    tried = diagnose(right, wrong, run=lambda changes: (right, right))
    assert "tried one data-parallel rank: equal" in text(as_html(tried))
    assert "next:" not in text(as_html(tried))


def test_equal_records_are_no_trouble():
    assert 'class="trouble"' not in as_html(found())
    assert 'class="trouble">from step 0 on' in as_html(found(scale=2.0))


def test_evidence_is_stated_and_what_proves_nothing_is_trouble():
    assert "could have seen: 11 trained tokens in 3 of 3 documents" in text(as_html(found()))
    zero = make_record(scale=0.0, loss=0.0)
    vacuous = diagnose(zero, zero)
    assert 'class="trouble">vacuous: every gradient is zero in every step' in as_html(vacuous)
    tried = diagnose(
        make_record(TWINS), make_record(TWINS, scale=1 / 3), run=lambda changes: (zero, zero), experiments=1
    )
    assert "tried one data-parallel rank: vacuous" in text(as_html(tried))
    clipped = make_record(tokens=dict(zero.steps[0].tokens) | {"clipped": zero.steps[0].tokens["trained"]})
    assert "warning: 100.0% of the trained tokens are clipped" in text(as_html(diagnose(clipped, clipped)))


def test_names_of_records_are_quoted():
    assert "<script" not in as_html(replace(found(scale=2.0), suspect=HOSTILE, trusted=HOSTILE))
