"""Completion scripts, executed by the shells themselves: verbs, options, settings, their choices, and names."""

import shutil
import subprocess
import time

import pytest

from tests.helpers.hand_made import make_project, make_run
from workbench.cli import VERBS, main
from workbench.cli.completion import options

BASH_COMPLETES = """
source "$0"
COMP_WORDS=("$@"); COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
_workbench
printf '%s\n' "${COMPREPLY[@]}"
"""
CASES = [
    (["rep"], {"report"}),
    (["run", "--layout.or"], {"--layout.order"}),
    (
        ["run", "--layout.order", ""],
        {"contiguous", "zigzag", "striped", "document_zigzag", "whole_documents", "balanced"},
    ),
    (["run", "--where", "p"], {"processes"}),
    (["export", "--to", "ml"], {"mlflow"}),
    (["ls", "--"], {"--all", "--help", "--json"}),
    (["status", "par"], {"parity"}),
    (["status", "one"], {"one_rank-ID"}),
]


@pytest.fixture
def project(tmp_path, monkeypatch):
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "experiments/parity", "one_rank")
    return run.path.name


@pytest.fixture
def script(project, tmp_path, capsys):
    def write(shell):
        assert main(["completion", shell]) == 0
        path = tmp_path / f"completion.{shell}"
        path.write_text(capsys.readouterr().out)
        return path

    return write


@pytest.mark.parametrize(
    ("words", "expected"), CASES, ids=lambda value: " ".join(value) if isinstance(value, list) else "names"
)
def test_bash_completes(script, project, words, expected):
    command = ["bash", "--norc", "-c", BASH_COMPLETES, str(script("bash")), "workbench", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert set(done.stdout.split()) == {each.replace("one_rank-ID", project) for each in expected}


def test_a_tab_starts_no_python(script):
    path, begin = script("bash"), time.monotonic()
    environment = {"PATH": "/usr/bin:/bin"}
    command = ["bash", "--norc", "-c", BASH_COMPLETES, str(path), "workbench", "run", "--lo"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "--loss.name" in done.stdout.split()
    assert "python" not in path.read_text()
    assert time.monotonic() - begin < 5, "0.02 s on a quiet machine"


def shells():
    return [shell for shell in ("zsh", "fish") if shutil.which(shell)]


def test_other_shells_that_are_here_accept_their_scripts(script):
    checks = {
        "zsh": ["-f", "-c", 'source "$0" && whence -w _workbench && print -r -- ${_comps[workbench]}'],
        "fish": ["--no-config", "-c", 'source $argv[1]; complete -C "workbench run --layout.or"'],
    }
    shown = {"zsh": "_workbench: function", "fish": "--layout.order"}
    for shell in shells():
        done = subprocess.run([shell, *checks[shell], str(script(shell))], capture_output=True, text=True, check=False)
        assert shown[shell] in done.stdout, (shell, done.stderr)
    assert "complete -F" not in script("fish").read_text()
    assert "bashcompinit" in script("zsh").read_text()


def test_every_verb_has_its_options():
    by_verb = options()
    assert by_verb.keys() == VERBS.keys()
    assert by_verb["run"]["--where"] == ("torchx", "processes", "here", "slurm", "sbatch", "kubernetes")
    assert "--loss.surrogate.clip-high" in by_verb["run"]
    assert "--json" not in by_verb["lab"]
    assert {"--gpus", "--steps"} <= by_verb["verify"].keys()
    assert "--names" not in by_verb["bench"], "a positional argument"
