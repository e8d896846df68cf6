"""Values of another type in the files of a run directory."""

from pathlib import Path

import pytest

from workbench.errors import RecordError
from workbench.records.damage import EXIT_TYPES, STATE_TYPES, check_types, unfit

FILE = Path("run/state.json")


@pytest.mark.parametrize(
    ("content", "types", "rule"),
    [
        ({"world_size": "2"}, STATE_TYPES, "world_size is int"),
        ({"world_size": True}, STATE_TYPES, "world_size is int"),
        ({"ok": 1}, EXIT_TYPES, "ok is bool"),
        ({"rank": "0"}, EXIT_TYPES, "rank is int or null"),
    ],
)
def test_a_value_of_another_type_is_named(content, types, rule):
    with pytest.raises(RecordError) as caught:
        check_types(FILE, content, types)
    assert caught.value.parts["rule"] == rule
    assert caught.value.parts["found"] == repr(content)


def test_what_a_writer_writes_and_keys_that_it_does_not_know_pass():
    check_types(FILE, {"world_size": 2, "unknown": object()}, STATE_TYPES)
    check_types(FILE, {"rank": None, "ok": False}, EXIT_TYPES)
    assert len(unfit(FILE, "x" * 500, "short").parts["found"]) == 80
