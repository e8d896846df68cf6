"""The restricted machine builds what Python's own builds of plain data, and refuses by name everything else."""

import os
import pickle
from collections import Counter

import pytest

from workbench.errors import RecordError
from workbench.rollouts.pickles import Known, read_pickle

PLAIN = {
    "numbers": [0, 1, -1, 255, 65536, -(2**40), 2**70, 1.5, float("inf")],
    "texts": ["", "a", "ä" * 300, b"", b"\x00\xff" * 200, bytearray(b"ab")],
    "constants": (None, True, False),
    "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
    "nested": [[], {}, {1: {2: [3]}}, [[1, [2]]]],
    "long": list(range(3000)),
}
CONTAINERS = Known(calls={"builtins.bytes": lambda: b"", "builtins.bytearray": bytearray, "_codecs.encode": str.encode})


class Calls:
    """A pickle of it is a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_comes_back(protocol):
    assert read_pickle(pickle.dumps(PLAIN, protocol), CONTAINERS, what="a pickle") == PLAIN


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_shared_and_cyclic_values_stay_shared(protocol):
    shared = [1]
    content = {"a": shared, "b": shared}
    read = read_pickle(pickle.dumps(content, protocol), Known(), what="a pickle")
    assert read["a"] is read["b"]
    shared.append(shared)
    read = read_pickle(pickle.dumps(shared, protocol), Known(), what="a pickle")
    assert read[1] is read


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_call_is_refused_by_name_and_not_made(protocol, tmp_path):
    trace = tmp_path / "trace"
    content = pickle.dumps([1, Calls(os.mkdir, str(trace))], protocol)
    with pytest.raises(RecordError, match=r"global posix\.mkdir|global nt\.mkdir"):
        read_pickle(content, CONTAINERS, what="a pickle")
    assert not trace.exists()
    pickle.loads(content)  # Python's own machine makes it
    assert trace.exists()


def test_a_class_that_is_not_known_is_refused_by_name():
    with pytest.raises(RecordError, match=r"collections\.Counter"):
        read_pickle(pickle.dumps(Counter("ab")), CONTAINERS, what="a pickle")


def test_known_classes_are_built_from_arguments_and_state():
    class Point:
        def __init__(self, x):
            self.x = x

    Point.__module__, Point.__qualname__ = __name__, "Point"
    globals()["Point"] = Point
    known = Known(states={"copyreg._reconstructor": lambda arguments, state: None, f"{__name__}.Point": lambda a, s: s})
    point = Point(3)
    assert read_pickle(pickle.dumps([point, point], 4), known, what="a pickle") == [{"x": 3}, {"x": 3}]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "global os.system"),
        (b"(S'true'\nios\nsystem\n.", "global os.system"),
        (b"c__builtin__\neval\n(S'1'\ntR.", "global builtins.eval"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"Pname\n.", "persistent id"),
        (b"]S'x'\n)R.", "call of a str"),
        (b"]}b.", "state of a list"),
        (b"S'x'\nI1\na.", "items of a str where a list is filled"),
    ],
)
def test_each_opcode_that_builds_more_than_data_is_refused(content, found):
    with pytest.raises(RecordError, match=found):
        read_pickle(content, CONTAINERS, what="a pickle")


def test_a_call_of_a_constructor_gets_no_state_and_no_attribute():
    """BUILD on the name of a constructor would set attributes of a function in Python's machine."""
    content = b"\x80\x02c_codecs\nencode\n}b."
    with pytest.raises(RecordError, match=r"state of a _codecs\.encode"):
        read_pickle(content, CONTAINERS, what="a pickle")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_damaged_pickle_is_an_error_in_four_parts(protocol):
    """Cut anywhere, and with each byte changed: an error of the workbench, or other data, but no other exception."""
    whole = pickle.dumps({name: PLAIN[name] for name in ("numbers", "texts", "tuples", "nested")}, protocol)
    refused = 0
    for at in range(0, len(whole), 7):
        for content in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :]):
            try:
                read_pickle(content, CONTAINERS, what="a pickle")
            except RecordError as error:
                refused += bool(error.parts["found"] and error.parts["fix"])
    assert refused > len(whole) / 10
