"""Long comparisons in columns: what is read back is what was written, and nothing else is read."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from tests.helpers.comparisons import layout_parity
from tests.helpers.stand_in import stand_in
from workbench import atomic as whole_files
from workbench.compare import columnar, comparison
from workbench.compare.columnar import read_table, write_table
from workbench.compare.comparison import Comparison
from workbench.errors import RecordError

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(alphabet=st.characters(), max_size=4),
    st.lists(st.floats(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.floats(), max_size=3),
    st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=2)), max_size=3),
)
NAMES = st.one_of(st.sampled_from(["step", "configuration", "loss/total/sum", '"a"']), st.text(max_size=4))
COLUMNS = st.dictionaries(NAMES, VALUES, max_size=4)
"""Records in which any key has any value."""


@pytest.fixture
def long(monkeypatch):
    """Every comparison is a long one."""
    monkeypatch.setattr(comparison, "LONG", 0)


@settings(max_examples=60, deadline=None)  # the first one imports pyarrow
@given(st.lists(st.lists(COLUMNS, max_size=3), max_size=4))
def test_any_records_are_read_back_in_every_bit(tmp_path_factory, table):
    path = tmp_path_factory.mktemp("table") / "comparison.json"
    said = json.loads(json.dumps(write_table(path, "steps", table)))
    assert repr(read_table(path, said)) == repr(table)  # of a float, repr has every bit; of a mapping, the order


def test_numbers_are_columns_of_numbers(tmp_path):
    rows = [{"step": 0, "loss": 0.5, "norms": {"b": 2.0, "a": float("nan")}, "edges": [1.0, 2.0], "why": "x"}]
    said = write_table(tmp_path / "comparison.json", "steps", [[], rows])
    read = parquet.read_table(tmp_path / said["file"])
    types = {field.name: str(field.type) for field in read.schema}
    assert types.pop("norms").startswith("map<string, double")
    assert types.pop("edges").startswith("list<")
    assert types == {"configuration": "int64", "step": "int64", "loss": "double", "why": "string"}
    assert read.column("configuration").to_pylist() == [1]


def test_a_long_comparison_is_a_small_json_next_to_its_tables(tmp_path, long):
    saved = layout_parity()
    saved.save(tmp_path / "comparison.json")
    names = sorted(path.name.split(".")[1] for path in tmp_path.glob("*.parquet"))
    assert names == sorted(comparison.TABLES)
    assert "gradient_norms" not in json.dumps(json.loads((tmp_path / "comparison.json").read_text())["configurations"])
    assert Comparison.load(tmp_path) == saved
    assert repr(Comparison.load(tmp_path).steps()) == repr(saved.steps())


def test_the_next_comparison_takes_the_place_of_files_too(tmp_path, long, monkeypatch):
    path, other = tmp_path / "comparison.json", tmp_path / "mine.steps.parquet"
    other.write_text("of a user")
    layout_parity().save(path)
    first = set(tmp_path.glob("comparison.*.parquet"))
    shorter = replace(layout_parity(), configurations=layout_parity().configurations[:3])
    shorter.save(path)
    second = set(tmp_path.glob("comparison.*.parquet"))
    assert Comparison.load(path) == shorter
    assert len(second) == len(comparison.TABLES)
    assert not first & second
    monkeypatch.setattr(comparison, "LONG", 10**9)
    shorter.save(path)
    assert sorted(tmp_path.iterdir()) == [path, other]
    assert Comparison.load(path) == shorter


def test_the_old_comparison_stays_whole_until_the_new_one_is_on_disk(tmp_path, long, monkeypatch):
    path, old = tmp_path / "comparison.json", layout_parity()
    old.save(path)
    calls = iter(range(100))
    for last in range(5):  # fails at each of the files

        def crash(number, stop=last, calls=calls):
            if next(calls) >= 2 * stop:  # the file and its folder
                raise OSError("disk full")

        with monkeypatch.context() as patch:
            patch.setattr(whole_files, "os", stand_in(os, fsync=crash))
            with pytest.raises(OSError, match="disk full"):
                replace(old, configurations=old.configurations[:3]).save(path)
        assert Comparison.load(path) == old
        calls = iter(range(100))


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "exchanged", "elsewhere", "rows", "keys"])
def test_a_file_that_is_not_the_one_that_was_written_is_refused_by_name(tmp_path, long, damage):
    path = tmp_path / "comparison.json"
    layout_parity().save(path)
    data = json.loads(path.read_text())
    said = data["tables"]["steps"]
    file = tmp_path / said["file"]
    content = file.read_bytes()
    if damage == "cut":
        file.write_bytes(content[:-10])
    elif damage == "changed":
        file.write_bytes(content[:99] + bytes([content[99] ^ 1]) + content[100:])
    elif damage == "gone":
        file.unlink()
    elif damage == "exchanged":
        file.write_bytes((tmp_path / data["tables"]["parameters"]["file"]).read_bytes())
    elif damage == "elsewhere":
        said["file"] = f"../{tmp_path.name}/{said['file']}"
    elif damage == "rows":
        said["rows"][0] += 1
    elif damage == "keys":
        said["keys"][0][0] = "another"
    path.write_text(json.dumps(data))
    with pytest.raises(RecordError, match=r"comparison\.json") as raised:
        Comparison.load(Path(tmp_path))
    assert "next to it" in str(raised.value)


def test_a_table_of_no_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not the name of a file"):
        columnar.read_table(tmp_path / "comparison.json", {"file": "/etc/passwd"})
