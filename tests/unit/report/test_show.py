"""show: the same verdicts as HTML and as text, for whichever the front end can read."""

import pytest

from workbench.report import show as module
from workbench.report.show import as_html, as_text, show


@pytest.fixture
def displayed(monkeypatch):
    calls = []
    monkeypatch.setattr(module, "_display", calls.append)
    return calls


def test_show_hands_over_html_and_its_text_twin(comparison, displayed):
    assert show(comparison) is None
    [data] = displayed
    assert data == {"text/html": as_html(comparison), "text/plain": as_text(comparison)}


def test_html_and_text_say_the_same_of_every_configuration(comparison):
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
