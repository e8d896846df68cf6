"""The command line is fast from a bare source tree, and reports user errors without a traceback."""

from __future__ import annotations

import errno
import importlib
import json
import os
import resource
import shlex
import subprocess
import sys

import pytest

from tests.helpers.hand_made import make_project, make_run
from workbench.cli import NO_JSON, VERBS, main
from workbench.records.provenance import project_root

BOUND_S = 1.5  # of a core; 0.1 s on a quiet machine, and importing torch alone would take 2 s


def cpu_s_of_children():
    """CPU time of the ended children: load changes their waiting time, and hardly this."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_is_fast_from_a_source_tree(tmp_path):
    """No installation and no git: PYTHONPATH alone, in a folder of its own."""
    env = {"PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(project_root()), *sys.path])}
    begin = cpu_s_of_children()
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-m", "workbench", "--help"], capture_output=True, text=True, cwd=tmp_path, env=env
        )
        assert done.returncode == 0, done.stderr
    assert (cpu_s_of_children() - begin) / 3 < BOUND_S
    assert all(verb in done.stdout for verb in VERBS)


def test_a_reader_that_has_seen_enough_is_no_error():
    command = f"{shlex.quote(sys.executable)} -m workbench --help | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, cwd=project_root())
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb, capsys):
    try:
        code = main([verb, "--help"])
    except SystemExit as end:
        code = end.code
    assert code == 0
    assert f"workbench {verb}" in capsys.readouterr().out


def test_a_missing_verb_prints_usage(capsys):
    assert main([]) == 2
    assert "usage: workbench" in capsys.readouterr().out


def test_a_misspelt_verb_names_the_nearest(capsys):
    assert main(["comprae"]) == 2
    assert "did you mean 'compare'" in capsys.readouterr().err


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("workbench 0.")


def test_a_user_error_has_exit_code_2(tmp_path):
    spec = tmp_path / "mine.yaml"
    spec.write_text("layout: {cp: 2, ordr: zigzag}\n")
    command = [sys.executable, "-m", "workbench", "run", str(spec)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=project_root())
    assert done.returncode == 2
    assert "SpecError" in done.stderr
    assert "unknown key 'layout.ordr' (did you mean 'order'?)" in done.stderr
    assert "Traceback" not in done.stderr


def test_notes_on_an_error_are_printed_too(monkeypatch, capsys):
    from workbench.errors import LaunchError

    def fail(arguments):
        error = LaunchError("do it")
        error.add_note("rank 3 of 8")
        raise error

    monkeypatch.setattr(importlib.import_module("workbench.cli.lab"), "lab", fail)
    assert main(["lab"]) == 2
    assert "rank 3 of 8" in capsys.readouterr().err


def test_an_interrupt_is_reported(monkeypatch, capsys):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("workbench.cli.lab"), "lab", interrupt)
    assert main(["lab"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_rollouts_reach_their_verbs(tmp_path, capsys):
    assert main(["rollouts", "check", str(tmp_path / "none")]) == 2
    assert "RecordError" in capsys.readouterr().err


def test_a_full_disk_is_reported(monkeypatch, capsys):
    def full(arguments):
        raise OSError(errno.ENOSPC, "No space left on device", "runs/x")

    monkeypatch.setattr(importlib.import_module("workbench.cli.lab"), "lab", full)
    assert main(["lab"]) == 2
    assert "workbench lab: No space left on device: runs/x\n  do: free disk space" in capsys.readouterr().err


# ---- --json ----------------------------------------------------------------------------------------------


def as_json(capsys, *arguments):
    """Exit code and the one JSON object that a verb printed."""
    code = main([*arguments, "--json"])
    printed = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert printed["exit_code"] == code
    return code, printed


@pytest.fixture
def project(tmp_path, monkeypatch):
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "experiments/parity", "one_rank")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        (("ls",), list),
        (("status", "one_rank"), list),
        (("attach", "parity"), list),
        (("logs", "one_rank"), list),
        (("cancel", "parity"), list),
        (("describe", "layout.cp"), dict),
        (("schema",), dict),
        (("notebooks", "mine"), dict),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_result_has_a_schema_with_a_version(project, capsys, arguments, result):
    code, printed = as_json(capsys, *arguments)
    assert (code, printed["schema"]) == (0, f"workbench.{arguments[0]}/1")
    assert isinstance(printed["result"], result)
    assert printed["result"] or arguments[0] == "logs"  # of a run without any


def test_an_error_is_json_too_and_text_on_standard_error(project, capsys):
    assert main(["status", "nope", "--json"]) == 2
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert (printed["schema"], printed["verb"], printed["exit_code"]) == ("workbench.error/1", "status", 2)
    assert printed["error"].keys() == {"type", "requested", "found", "rule", "fix", "notes"}
    assert printed["error"]["requested"] == "look for 'nope'"
    assert err.startswith("RecordError: look for 'nope'")


def test_arguments_that_cannot_be_read_are_an_error_of_usage(project, capsys):
    code, printed = as_json(capsys, "ls", "--nope")
    assert (code, printed["error"]) == (2, {"type": "UsageError", "requested": "workbench ls --nope"})


def test_full_disks_and_interrupts_are_errors_with_their_codes(project, capsys, monkeypatch):
    for error, expected in ((OSError(errno.ENOSPC, "No space left on device", "x"), 2), (KeyboardInterrupt(), 130)):

        def fail(*_args, error=error, **_more):
            raise error

        monkeypatch.setattr(importlib.import_module("workbench.cli.status"), "list_runs", fail)
        code, printed = as_json(capsys, "ls")
        assert (code, printed["error"]["type"]) == (expected, type(error).__name__)


def test_a_bug_is_no_answer(project, monkeypatch):
    def fail(*_args, **_more):
        raise ZeroDivisionError

    monkeypatch.setattr(importlib.import_module("workbench.cli.status"), "list_runs", fail)
    with pytest.raises(ZeroDivisionError):
        main(["ls", "--json"])


def test_every_verb_answers_or_says_that_it_does_not():
    """A verb whose module never gives an answer would print null."""
    folder = project_root() / "workbench/cli"
    silent = [verb for verb, (file, _) in VERBS.items() if "answered(" not in (folder / f"{file}.py").read_text()]
    assert {*silent, "lab"} == set(NO_JSON), "lab is in the module of notebooks, which answers"


def test_help_names_json(capsys):
    with pytest.raises(SystemExit):
        main(["ls", "--help"])
    assert "--json prints the result as JSON" in capsys.readouterr().out
