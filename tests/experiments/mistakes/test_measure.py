"""When a message to a mistake is right, and what its time is."""

import pytest

from experiments.mistakes import measure
from experiments.mistakes.measure import answer, problem

CASE = {"command": "x", "must_name": [["clip"], ["did you mean", "nearest"]]}


@pytest.mark.parametrize(
    ("message", "code", "seconds", "found"),
    [
        ("unknown clip; did you mean clip_low?", 2, 0.5, ""),
        ("unknown clip; the NEAREST is clip_low", 2, 0.5, ""),
        ("unknown clip", 2, 0.5, "does not name 'did you mean' nor 'nearest'"),
        ("unknown clip; did you mean clip_low?", 0, 0.5, "no error"),
        ("unknown clip; did you mean clip_low?", 2, 2.5, "took 2.5 s"),
        ("Traceback (most recent call last)\nclip did you mean", 2, 0.5, "a traceback"),
        ("clip did you mean\n" * 31, 2, 0.5, "31 lines"),
    ],
)
def test_a_message_is_right_if_it_names_what_it_has_to(message, code, seconds, found):
    assert problem(CASE, message, code, seconds) == found


def test_what_is_supported_must_work():
    assert problem({"ok": True}, "", 0, 9.0) == ""
    assert problem({"ok": True}, "", 2, 0.1).startswith("exit code 2")


def test_a_mistake_is_made_in_a_folder_of_its_own_and_imports_are_no_part_of_the_message(monkeypatch):
    script = "import sys, pathlib\nsys.exit('clip in ' + pathlib.Path('my.txt').read_text() + ': did you mean it?')"
    case = {"area": "spec", "python": script, "files": {"my.txt": "here"}, "must_name": CASE["must_name"]}
    entry = answer(case)
    assert (entry["message"], entry["exit_code"], entry["problem"]) == ("clip in here: did you mean it?\n", 1, "")
    assert entry["import_torch_seconds"] == 0
    monkeypatch.setattr(measure, "LIMIT_S", 0.0)
    assert answer(case)["problem"].startswith("took")


def test_the_import_of_torch_is_told_apart():
    lines = "import time:      2 |    7 |   torch.nn\nimport time:  9 | 2100000 | torch\nimport time: 1 | 1 | torchx\n"
    assert measure._TORCH.findall(lines) == ["2100000"]
    assert measure._IMPORT.sub("", lines + "clip\n") == "clip\n"
