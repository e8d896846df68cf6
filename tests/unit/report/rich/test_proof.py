"""A proof: verdict, a row for each invariant, the counterexample of each broken one."""

import dataclasses
import re

from tests.helpers.proofs import counterexample, make_proof
from tests.helpers.trials import HOSTILE
from workbench.report.rich import as_html as drawn
from workbench.report.rich.proof import as_html


def text(html):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def rows(html):
    first = html[: html.index("</table>")]
    found = re.findall(r'<tr><th scope="row"><code class="whole">(.*?)</code></th>(.*?)</tr>', first)
    return {name: [text(cell).strip() for cell in re.findall(r"<td.*?>(.*?)</td>", rest)] for name, rest in found}


def test_a_row_for_each_law():
    invariants = rows(as_html(make_proof()))
    assert list(invariants) == ["dp_split", "cp_degree", "packing_order", "tp"]
    assert invariants["dp_split"][1:] == ["holds", "12", "3.0 × 10⁻¹⁵", ""]
    assert invariants["cp_degree"][1:] == ["broken", "4", "0.50", "gradient, loss: × 0.500 = 1 / cp"]
    assert invariants["packing_order"][1:] == ["declared", "3", "0.12", "gradient"]
    assert invariants["tp"][1:] == ["not tried", "0", "–", "no time was left"]


def test_the_counterexample_is_drawn_and_open_only_where_nobody_declared_it():
    html = as_html(make_proof())
    assert 'cp_left_out (engine mean)</strong> <span class="trouble">breaks cp_degree; ' in html
    opened = re.findall(r"<details( open)?><summary>(\w+): the smallest step", html)
    assert opened == [(" open", "cp_degree"), ("", "packing_order")]
    assert "gradient 0.5 times that of one rank: 1 / cp" in html
    assert "3 tokens, 2 trained, advantage" in text(html)
    assert drawn(make_proof()) == str(html)


def test_words_of_a_function_are_quoted():
    proof = make_proof(HOSTILE)
    broken = dataclasses.replace(proof["cp_degree"], why=HOSTILE, counterexample=counterexample(HOSTILE))
    assert "<script" not in as_html(dataclasses.replace(proof, invariants=(broken,)))
