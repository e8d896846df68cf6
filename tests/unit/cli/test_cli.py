"""The command line is fast from a bare source tree, and reports user errors without a traceback."""

from __future__ import annotations

import errno
import importlib
import os
import resource
import shlex
import subprocess
import sys

import pytest

from workbench.cli import VERBS, main
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
