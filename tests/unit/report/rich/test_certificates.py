"""Two runs by their certificates: the sentence, and a row for each tensor that differs."""

import re
from dataclasses import replace

from tests.helpers.trials import HOSTILE
from workbench.compare.certificates import CertificateComparison, Element
from workbench.metrics.evidence import Evidence
from workbench.report.rich import as_html as drawn
from workbench.report.rich.certificates import as_html

APART = CertificateComparison(
    "mine", "ref", 2, 1, ("gradient/head", "weight/head"), 9, Element((1, 2), 0.5, 0.25, 1, 6)
)


def rows(html):
    return re.findall(r'<code class="whole">(.*?)</code>', str(html))


def test_a_row_for_each_tensor_and_the_element_of_the_first():
    html = as_html(APART)
    assert rows(html) == ["gradient/head", "weight/head"]
    assert html.count("element [1, 2] 0.5 against 0.25, the first of 1 in 6") == 2
    assert 'class="trouble">step 1: certificates part at gradient/head' in html
    assert drawn(APART) == str(html)


def test_what_was_not_recorded_is_said_and_many_are_counted():
    many = replace(APART, element=None, differing=tuple(f"gradient/{n}" for n in range(15)))
    assert len(rows(as_html(many))) == 12
    assert "and 3 more</p>" in as_html(many)
    assert "not recorded" in as_html(many)


def test_equal_ones_are_no_trouble():
    html = as_html(replace(APART, step=None, differing=(), element=None))
    assert 'class="trouble"' not in html
    assert "the same bits" in html


def test_bits_that_prove_nothing_are_trouble_and_evidence_is_stated():
    same = replace(APART, step=None, differing=(), element=None, evidence=Evidence(1, 8, 0, 24, 0))
    html = as_html(replace(same, vacuous="no document has a gradient"))
    assert 'class="trouble">vacuous: no document has a gradient' in html
    assert "could have seen: gradient on 0 of 8 documents" in html
    assert 'class="trouble">unsound baseline' in as_html(replace(same, not_finite="step 0: the loss is nan"))


def test_names_are_quoted():
    assert "<script" not in as_html(replace(APART, run=HOSTILE, reference=HOSTILE, differing=(HOSTILE,)))
