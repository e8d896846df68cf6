"""YAML from outside is data or a YAMLError with its line; reading it costs what its size allows."""

from __future__ import annotations

import re
import time

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from workbench.specs.yaml_reader import MAX_DEPTH, parse_yaml

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2020-13-45", "month must be in 1..12.*line 2"),
        ("a: !!int abc", "invalid literal.*line 1"),
        ("a: " + "9" * 5000, "4300"),
        ("? [a, b]\n: c", "a key that is a list|unhashable"),
        ("[" * 5000 + "]" * 5000, "more than 100 lists or mappings in each other.*line 1"),
        ("{a: " * (MAX_DEPTH + 5) + "1" + "}" * (MAX_DEPTH + 5), f"more than {MAX_DEPTH} lists or mappings"),
        (BOMB, "aliases stand for more than 1,000,000 values"),
        ("a: &a {b: *a}", "an alias stands for a value that it is in"),
        ("a: 1\nb: 2\na: 3", "'a' on line 1 and again on line 3"),
        ("a: !!python/object/apply:os.system [true]", "could not determine a constructor"),
        ("a: 1\nb: !!timestamp 99999", "AttributeError.*line 2"),
        ("a: !!bool maybe", "KeyError.*line 1"),
        ("a: !!int ''", "IndexError|ValueError"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(text, message):
    began = time.perf_counter()
    with pytest.raises(yaml.YAMLError) as caught:
        parse_yaml(text, "spec.yaml")
    assert re.search(message, " ".join(str(caught.value).split()))
    assert time.perf_counter() - began < 30


@given(st.text(alphabet="ab:-[]{},&*!?|>'\"#% \n0129.", max_size=80))
def test_any_text_is_data_or_a_yaml_error(text):
    try:
        value = parse_yaml(text, "spec.yaml")
    except yaml.YAMLError:
        return
    assert value == yaml.safe_load(text)


def test_aliases_are_followed():
    assert parse_yaml("a: &x {b: 1}\nc: [*x, *x]", "spec.yaml") == {"a": {"b": 1}, "c": [{"b": 1}, {"b": 1}]}
    assert parse_yaml("", "spec.yaml") is None
