"""A spec: only what differs, and everything on request."""

import re

from tests.helpers.trials import HOSTILE
from workbench.report.rich.spec import as_html, setting_text
from workbench.specs.run import LayoutSpec, RunSpec


def rows(drawn):
    return re.findall(r"<code>(.*?)</code></th><td>(.*?)</td><td>(.*?)</td>", drawn.partition("<details>")[0])


def test_only_what_differs_is_in_the_table():
    spec = RunSpec(layout={"cp": 2, "order": "zigzag"}, loss={"surrogate": {"clip_high": 0.28}}, steps=4)
    assert rows(as_html(spec)) == [
        ("loss.surrogate.clip_high", "0.28", "0.2"),
        ("layout.cp", "2", "1"),
        ("layout.order", "zigzag", "contiguous"),
        ("steps", "4", "1"),
    ]


def test_the_defaults_are_said_in_words():
    assert rows(as_html(RunSpec())) == []
    assert "Every setting is as it is by default." in as_html(RunSpec())


def test_everything_is_there_on_request():
    details = as_html(RunSpec()).partition("<details>")[2]
    for name in RunSpec.model_fields:
        assert f"&quot;{name}&quot;:" in details


def test_settings_are_quoted():
    assert "<script" not in as_html(RunSpec(faults=[HOSTILE], model={"source": HOSTILE}))


def test_values_are_said_as_yaml_has_them():
    assert [setting_text(value) for value in ("cuda", None, True, 0.5, ["a"])] == [
        "cuda",
        "null",
        "true",
        "0.5",
        '["a"]',
    ]


def test_the_text_twin_says_only_what_differs_and_can_be_read_back():
    spec = RunSpec(layout={"cp": 2}, steps=4)
    assert repr(RunSpec()) == "RunSpec()"
    assert repr(spec) == "RunSpec(layout=LayoutSpec(cp=2), steps=4)"
    assert eval(repr(spec), {"RunSpec": RunSpec, "LayoutSpec": LayoutSpec}) == spec
