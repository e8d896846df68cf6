"""Controls of the page: hidden without a script, fed by data that no name can leave."""

import json
import re
from dataclasses import replace

from tests.helpers.comparisons import renamed
from workbench.report.controls import SCRIPT, controls, differing, pair, script, settings_difference

HOSTILE = "</script><!--<script>alert(1)"


def data(comparison):
    return json.loads(re.search(r'<script id="configurations"[^>]*>(.*?)</script>', script(comparison)).group(1))


def test_the_settings_that_differ_between_two_configurations(comparison):
    assert settings_difference(comparison, "one_rank-float64", "cp2_zigzag-float32") == {
        "layout.cp": ("1", "2"),
        "layout.order": ("contiguous", "zigzag"),
        "precision": ("float64", "float32"),
    }
    assert settings_difference(comparison, "tp2-float64", "tp2-float64") == {}


def test_only_settings_that_differ_somewhere_are_listed(comparison):
    keys = set(differing(comparison)["one_rank-float64"])
    assert {"layout.cp", "precision", "faults"} <= keys
    assert "steps" not in keys


def test_controls_are_hidden_until_the_script_runs(comparison):
    assert re.match(r"<div[^>]* hidden>", controls(comparison))
    assert re.match(r"<div[^>]* hidden>", pair())


def test_every_configuration_is_data_with_its_share(comparison):
    rows = {row["name"]: row for row in data(comparison)}
    assert list(rows) == [c.name for c in comparison.configurations]
    assert rows["fault_missing_cp_factor"]["share"] > 1
    assert rows["one_rank-float64"]["share"] is None
    assert rows["fault_missing_cp_factor"]["reference"] == "one_rank-float64"


def test_a_share_that_is_not_finite_is_data_too(comparison):
    c = comparison["fault_missing_cp_factor"]
    whole = [w | {"distance": float("nan")} for w in c.whole_gradient]
    changed = replace(comparison, configurations=[replace(c, whole_gradient=whole)])
    assert data(changed)[0]["share"] == "inf"


def test_a_name_cannot_end_the_data(comparison):
    changed = renamed(comparison, "tp2-float64", HOSTILE)
    assert script(changed).count("</script>") == 2
    assert script(changed).count("<script") == 2
    assert HOSTILE in [row["name"] for row in data(changed)]


def test_the_script_writes_text_only():
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function|fetch|XMLHttp|import", SCRIPT
    )
