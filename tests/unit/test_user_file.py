"""Functions of a user's files: found, executed, and read without execution."""

import pytest

from workbench.errors import SpecError
from workbench.user_file import check_function, find_file, load, place_of

LOSSES = """import math
from json import dumps

scale = 2.0


def needs(inputs, a, b, *, c, d=1):
    return a


both = [lambda inputs: inputs]


def grpo(inputs, *, clip=0.2):
    return clip


def trainer(batch, outputs, totals, **settings):
    return None
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_losses.py"
    path.write_text(LOSSES)
    return path


@pytest.mark.parametrize("text", ["grpo", "my_losses.py", "my_losses.py:", "my_losses.py:a b", "my_losses:grpo"])
def test_other_forms_name_no_place(text, tmp_path):
    assert place_of(text) is None
    with pytest.raises(SpecError, match=r"FILE\.py:NAME"):
        find_file(text, tmp_path, setting="loss.name")


def test_a_relative_path_begins_at_the_project_or_else_at_the_current_folder(file, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert find_file("my_losses.py:grpo", tmp_path, setting="loss.name") == file
    monkeypatch.chdir(tmp_path)
    assert find_file("my_losses.py:grpo", elsewhere, setting="loss.name") == file
    (elsewhere / "my_losses.py").write_text("")
    assert find_file("my_losses.py:grpo", elsewhere, setting="loss.name") == elsewhere / "my_losses.py"


def test_a_missing_file_is_named_with_both_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        find_file("none.py:grpo", tmp_path / "project", setting="loss.name")
    assert all(str(part) in str(caught.value) for part in ("loss.name", tmp_path / "project" / "none.py", tmp_path))


def test_a_file_imports_from_its_own_folder(file):
    (file.parent / "beside_my_losses.py").write_text("ten = 10")
    file.write_text("from beside_my_losses import ten\n\ndef grpo(inputs):\n    return ten\n")
    assert load(file, "grpo", setting="loss.name")(None) == 10


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("def grpo(inputs)\n    pass", ["SyntaxError", "line 1"]),
        ("import no_such_package", ["no_such_package", "line 1 of my_losses.py"]),
        ("x = 1\nraise SystemExit(3)", ["SystemExit", "line 2"]),
        ("def grpa(inputs):\n    pass", ["no grpo", "did you mean 'grpa'?"]),
    ],
)
def test_a_file_that_cannot_be_executed_is_named_with_its_line(file, text, parts):
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        load(file, "grpo", setting="loss.name")
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize(
    ("name", "settings", "inputs", "parts"),
    [
        ("grpa", (), 1, ["did you mean 'grpo'?"]),
        ("grpo", ("clipp",), 1, ["no setting 'clipp'", "did you mean 'clip'?"]),
        ("grpo", (), 3, ["it takes (inputs)", "3 inputs"]),
        ("trainer", (), 1, ["no value for outputs, totals"]),
        ("needs", ("b",), 1, ["no value for a, c"]),
    ],
)
def test_the_text_tells_what_cannot_be_called(file, name, settings, inputs, parts):
    with pytest.raises(SpecError) as caught:
        check_function(file, name, settings, inputs, setting="loss.name", fix="")
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize(
    ("name", "settings", "inputs"),
    [
        ("grpo", ("clip",), 1),
        ("needs", ("a", "b", "c"), 1),
        ("trainer", ("anything",), 3),
        ("scale", (), 1),
        ("dumps", (), 1),
    ],
)
def test_what_may_be_right_is_left_to_the_call(file, name, settings, inputs):
    assert check_function(file, name, settings, inputs, setting="loss.name", fix="") is None


def test_text_that_is_no_python_is_named_without_executing_it(file):
    file.write_text("raise SystemExit\ndef grpo(inputs):\n    return (\n")
    with pytest.raises(SpecError, match="SyntaxError"):
        check_function(file, "grpo", (), 1, setting="loss.name", fix="")
