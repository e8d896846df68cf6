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


@pytest.mark.parametrize("part", ["requested", "found", "rule", "fix"])
@pytest.mark.parametrize("text", ["name, " * 20_000, "\n".join(["first", *["row"] * 500, "ValueError: last"])])
def test_a_message_fits_a_screen_and_keeps_its_ends(part, text):
    texts = {"requested": "many", "found": "first\n" * 9, "rule": "rule", "fix": "fix"} | {part: text}
    error = errors.SpecError(texts.pop("requested"), **texts)
    assert len(str(error)) <= 4000
    assert str(error).count("\n") < 30
    assert error.parts[part] == text
    assert text[:5] in str(error)
    assert text[-16:] in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_four_full_parts_fit_a_screen():
    text = "\n".join(["word " * 40] * 60)
    error = errors.SpecError(text, found=text, rule=text, fix=text)
    assert len(str(error)) <= 4000 + 200  # labels, and the counts of what is left out
    assert str(error).count("\n") < 30


class TestInANotebook:
    """IPython asks an exception for its lines."""

    def lines(self, code, cause=None):
        def fail():
            error = errors.SpecError("steps = 0", rule="at least 1")
            error.add_note("in every run")
            raise error from cause

        try:
            exec(compile(code, "cell.py", "exec"), {"fail": fail})
        except errors.SpecError as error:
            return error._render_traceback_()
        raise AssertionError("it fails")

    def test_the_message_and_notes_are_shown_without_a_frame_of_the_library(self):
        lines = self.lines("fail()")
        assert lines[1:] == ["SpecError: steps = 0", "  rule: at least 1", "  in every run"]
        assert lines[0].startswith("line ")

    def test_an_error_of_the_users_own_code_stays_visible(self):
        lines = self.lines("fail()", cause=KeyError("reward"))
        assert lines[-2:] == ["  in every run", "  caused by KeyError: 'reward'"]

    def test_frames_inside_the_package_are_not_the_users(self):
        with pytest.raises(errors.SpecError) as caught:
            errors.check_kind("load", 3, str, "pass a path")
        assert caught.value._render_traceback_()[0].endswith('errors.check_kind("load", 3, str, "pass a path")')


def test_a_long_list_is_counted():
    assert errors.listed(["a", "b"], 2) == "a, b"
    assert errors.listed("abcde", 2, rest="in the file", separator="; ") == "a; b and 3 more (in the file)"


def test_an_argument_of_another_kind_is_refused_by_name():
    errors.check_kind("load", "x", (str, bytes), "pass a path")
    with pytest.raises(errors.SpecError, match=r"load\n  found: a list, \[0, 0(?s:.*)rule: a str or bytes\n  do: pass"):
        errors.check_kind("load", [0] * 1000, (str, bytes), "pass a path")


def test_the_nearest_names_come_first_and_a_cutoff_leaves_out_what_is_far():
    known = ["grpo", "sft", "gropo"]
    assert errors.nearest_names("grop", known) == ["gropo", "grpo"]
    assert errors.nearest_names("grop", known, most=1) == ["gropo"]
    assert errors.nearest_names("grop", known, cutoff=0.8) == ["gropo"]
    assert errors.nearest_names("xyz", known) == []
    assert len(errors.nearest_names("xyz", known, cutoff=0.0)) == 3
