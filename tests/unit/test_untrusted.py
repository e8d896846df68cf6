"""JSON from outside is data or a ValueError."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.untrusted import parse_json

DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(DATA)
def test_data_is_read_as_python_reads_it(value):
    assert parse_json(json.dumps(value)) == value


@given(st.binary(max_size=60) | st.text(alphabet='[]{}",:0123456789eE.-+tfn\\u', max_size=60))
def test_anything_else_is_a_value_error(content):
    try:
        value = parse_json(content)
    except ValueError:
        return
    assert json.loads(content) == value or value != value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 200_000 + "]" * 200_000, "nested too deeply"),
        ('{"a": ' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
        ("9" * 5000, "4300"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' occurs twice"),
    ],
)
def test_what_python_reads_or_breaks_on(content, message):
    with pytest.raises(ValueError, match=message):
        parse_json(content)


def test_mappings_are_converted():
    assert parse_json('{"a": [{}, {"b": 1}]}', convert=len) == 1
