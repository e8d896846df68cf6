"""Verdicts: the sentence, and a row for each cause, tensor, invariant or setting."""

import dataclasses
import re
from dataclasses import replace

from tests.helpers.hand_records import make_record
from tests.helpers.proofs import counterexample, make_proof
from tests.helpers.trials import HOSTILE
from workbench.compare.bisect import Bisection, Divergence
from workbench.compare.certificates import CertificateComparison, Element
from workbench.diagnose import diagnose
from workbench.metrics.evidence import Evidence
from workbench.report.rich import as_html as drawn
from workbench.report.rich.verdicts import (
    bisection_html,
    certificates_html,
    diagnosis_html,
    explanation_html,
    proof_html,
)
from workbench.systems import explain

APART = CertificateComparison(
    "mine", "ref", 2, 1, ("gradient/head", "weight/head"), 9, Element((1, 2), 0.5, 0.25, 1, 6)
)


def rows(html):
    return re.findall(r'<code class="whole">(.*?)</code>', str(html))


def test_a_row_for_each_tensor_and_the_element_of_the_first():
    html = certificates_html(APART)
    assert rows(html) == ["gradient/head", "weight/head"]
    assert html.count("element [1, 2] 0.5 against 0.25, the first of 1 in 6") == 2
    assert 'class="trouble">step 1: certificates part at gradient/head' in html
    assert drawn(APART) == str(html)


def test_unrecorded_steps_are_reported_and_counted():
    many = replace(APART, element=None, differing=tuple(f"gradient/{n}" for n in range(15)))
    assert len(rows(certificates_html(many))) == 12
    assert "and 3 more</p>" in certificates_html(many)
    assert "not recorded" in certificates_html(many)


def test_equal_ones_are_no_trouble():
    html = certificates_html(replace(APART, step=None, differing=(), element=None))
    assert 'class="trouble"' not in html
    assert "the same bits" in html


def test_bits_that_prove_nothing_are_trouble_and_evidence_is_stated():
    same = replace(APART, step=None, differing=(), element=None, evidence=Evidence(1, 8, 0, 24, 0))
    html = certificates_html(replace(same, vacuous="no document has a gradient"))
    assert 'class="trouble">vacuous: no document has a gradient' in html
    assert "could have seen: gradient on 0 of 8 documents" in html
    assert 'class="trouble">unsound baseline' in certificates_html(replace(same, not_finite="step 0: the loss is nan"))


def test_names_are_quoted():
    assert "<script" not in certificates_html(replace(APART, run=HOSTILE, reference=HOSTILE, differing=(HOSTILE,)))


# ---- A bisection: the sentence and the place ----


PLACE = Divergence(0, "forward", "model.norm", 1, 2, (16, 24), 3, 9, "model.layers.2")


def cells(html):
    return dict(re.findall(r'<tr><th scope="row">(.*?)</th><td[^>]*>(.*?)</td></tr>', str(html)))


def test_the_place_stands_in_a_table():
    result = Bisection("one", "two", PLACE, 1, 59, {"one": {"data.micro_batches": 2}})
    html = bisection_html(result)
    assert cells(html) == {
        "step": "0",
        "way": "forward",
        "tensor": "<code>model.norm</code>",
        "row": "1",
        "tokens": "16 to 23",
        "blocks that differ": "3 of 9",
        "the same until": "<code>model.layers.2</code>",
    }
    assert 'class="trouble">one and two: step 0, forward: the output of model.norm' in html
    assert "one was run with data.micro_batches = 2" in html
    assert drawn(result) == str(html)


def test_where_no_tokens_can_be_named_none_are():
    html = bisection_html(Bisection("one", "two", Divergence(3, "weights", "head"), 4, 59, {}))
    assert list(cells(html)) == ["step", "way", "tensor"]


def test_equal_ones_are_no_trouble_of_bisection():
    html = bisection_html(Bisection("one", "two", None, 4, 59, {}))
    assert 'class="trouble"' not in html
    assert "the same bits in 4 steps" in html


def test_names_are_quoted_of_bisection():
    assert "<script" not in bisection_html(
        Bisection(HOSTILE, HOSTILE, Divergence(0, "loss", HOSTILE), 1, 1, {HOSTILE: {}})
    )


# ---- A diagnosis: a row for each cause, the trials, and the next experiment ----


TWINS = {"dp": 3, "micro_batches": 3}


def text(html):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def found(context=None, **told):
    return diagnose(make_record(context), make_record(context, **told))


def test_a_row_for_each_cause():
    html = diagnosis_html(found(TWINS, scale=1 / 3))
    rows = re.findall(r'<tr><th scope="row"><code class="whole">(.*?)</code></th>(.*?)</tr>', html)
    assert [name for name, _ in rows] == ["over_dp", "over_micro_batches"]
    cells = [text(cell).strip() for cell in re.findall(r"<td.*?>(.*?)</td>", rows[0][1])]
    assert cells[0] == "0.95"
    assert "every gradient is 0.333333 times the trusted one, which is 1 / dp" in cells[2]
    assert "next: one data-parallel rank" in re.sub(r" +", " ", text(html))
    assert drawn(found(TWINS, scale=1 / 3)) == str(html)


def test_trials_are_listed():
    right, wrong = (make_record(TWINS, scale=scale) for scale in (1, 1 / 3))
    tried = diagnose(right, wrong, run=lambda changes: (right, right))
    assert "tried one data-parallel rank: equal" in text(diagnosis_html(tried))
    assert "next:" not in text(diagnosis_html(tried))


def test_equal_records_are_no_trouble():
    assert 'class="trouble"' not in diagnosis_html(found())
    assert 'class="trouble">from step 0 on' in diagnosis_html(found(scale=2.0))


def test_evidence_is_listed_and_vacuous_evidence_is_highlighted():
    assert "could have seen: 11 trained tokens in 3 of 3 documents" in text(diagnosis_html(found()))
    zero = make_record(scale=0.0, loss=0.0)
    vacuous = diagnose(zero, zero)
    assert 'class="trouble">vacuous: every gradient is zero in every step' in diagnosis_html(vacuous)
    tried = diagnose(
        make_record(TWINS), make_record(TWINS, scale=1 / 3), run=lambda changes: (zero, zero), experiments=1
    )
    assert "tried one data-parallel rank: vacuous" in text(diagnosis_html(tried))
    clipped = make_record(tokens=dict(zero.steps[0].tokens) | {"clipped": zero.steps[0].tokens["trained"]})
    assert "warning: 100.0% of the trained tokens are clipped" in text(diagnosis_html(diagnose(clipped, clipped)))


def test_names_of_records_are_quoted():
    assert "<script" not in diagnosis_html(replace(found(scale=2.0), suspect=HOSTILE, trusted=HOSTILE))


# ---- A proof: verdict, a row for each invariant, the counterexample of each broken one ----


def rows_of_proof(html):
    first = html[: html.index("</table>")]
    matches = re.findall(r'<tr><th scope="row"><code class="whole">(.*?)</code></th>(.*?)</tr>', first)
    return {name: [text(cell).strip() for cell in re.findall(r"<td.*?>(.*?)</td>", rest)] for name, rest in matches}


def test_each_invariant_has_a_row():
    invariants = rows_of_proof(proof_html(make_proof()))
    assert list(invariants) == ["dp_split", "cp_degree", "packing_order", "tp"]
    assert invariants["dp_split"][1:] == ["holds", "12", "3.0 × 10⁻¹⁵", ""]
    assert invariants["cp_degree"][1:] == ["broken", "4", "0.50", "gradient, loss: × 0.500 = 1 / cp"]
    assert invariants["packing_order"][1:] == ["declared", "3", "0.12", "gradient"]
    assert invariants["tp"][1:] == ["not tried", "0", "–", "no time was left"]


def test_the_counterexample_is_open_only_if_undeclared():
    html = proof_html(make_proof())
    assert 'cp_left_out (engine mean)</strong> <span class="trouble">breaks cp_degree; ' in html
    opened = re.findall(r"<details( open)?><summary>(\w+): the smallest step", html)
    assert opened == [(" open", "cp_degree"), ("", "packing_order")]
    assert "gradient 0.5 times that of one rank: 1 / cp" in html
    assert "3 tokens, 2 trained, advantage" in text(html)
    assert drawn(make_proof()) == str(html)


def test_texts_of_a_function_are_escaped():
    proof = make_proof(HOSTILE)
    broken = dataclasses.replace(proof["cp_degree"], why=HOSTILE, counterexample=counterexample(HOSTILE))
    assert "<script" not in proof_html(dataclasses.replace(proof, invariants=(broken,)))


# ---- An explanation: verdict, witness, and a row for each difference ----


def rows_of_explanation(html):
    pattern = r'<th scope="row"><strong>(.*?)</strong></th><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td>'
    return [tuple(cell.replace("<wbr>", "") for cell in row) for row in re.findall(pattern, html)]


def test_the_verdict_with_its_batch_and_a_row_for_each_difference():
    explanation = explain("verl", {}, "trl", {"loss_type": "dapo", "epsilon_high": 0.2})
    html = explanation_html(explanation)
    assert "<strong>verl | TRL</strong> different" in html
    assert f"batch {explanation.counterexample.seed}: loss " in html
    assert [row[0] for row in rows_of_explanation(html)] == [d.setting for d in explanation.differences]
    setting, about, verl, trl, acts = rows_of_explanation(html)[0]
    assert (setting, about, acts) == ("surrogate.dual_clip", "clip", "yes")
    assert verl.startswith("3.0 (clip_ratio_c=3, its default")
    assert trl.startswith("null")
    assert "verl: dual clip 3 is always on" in html
    assert drawn(explanation) == str(html)


def test_the_same_settings_have_no_rows_and_no_batch():
    html = explanation_html(explain("fast_llm", {}, "fast_llm", {}))
    assert "<strong>Fast-LLM | Fast-LLM</strong> same" in html
    assert rows_of_explanation(html) == []
    assert "batch" not in html


def test_texts_of_a_system_are_escaped():
    explanation = explain("fast_llm", {}, "fast_llm", {"type": "gspo"})
    spoilt = dataclasses.replace(explanation, notes=((HOSTILE,), ()), systems=(HOSTILE, "b"))
    assert "<script" not in explanation_html(spoilt)
