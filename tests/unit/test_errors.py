import pickle

import pytest

from workbench import errors


def every_error():
    kinds, result = [errors.WorkbenchError], []
    while kinds:
        kind = kinds.pop()
        result.append(kind)
        kinds += kind.__subclasses__()
    return [kind for kind in result if kind.__module__ == "workbench.errors"]


@pytest.mark.parametrize("kind", every_error())
def test_crosses_a_process_boundary_whole(kind):
    error = kind("mesh of 4", found="2 ranks", rule="equal", fix="start 4")
    error.add_note("rank 1 (dp=0, cp=1, tp=0)")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == "mesh of 4\n  found: 2 ranks\n  rule: equal\n  do: start 4"
    assert again.__notes__ == ["rank 1 (dp=0, cp=1, tp=0)"]


def test_empty_parts_leave_no_line():
    assert str(errors.SpecError("steps = 0", rule="at least 1")) == "steps = 0\n  rule: at least 1"


@pytest.mark.parametrize("kind", every_error())
def test_every_error_is_in_the_drawing(kind):
    assert kind is errors.WorkbenchError or f"-- {kind.__name__}(" in errors.__doc__


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("grop", {}, "did you mean 'grpo'?"),
        ("grop", {"most": 2}, "did you mean 'gropo' or 'grpo'?"),
        ("grop", {"show": str.upper}, "did you mean GRPO?"),
        ("zzz", {}, ""),
        (7, {"otherwise": "known: grpo"}, "known: grpo"),
    ],
)
def test_a_misspelt_name_is_answered_by_the_nearest(name, options, text):
    known = ["sft", "grpo"] + (["gropo"] if "most" in options else [])
    assert errors.did_you_mean(name, known, **options) == text
