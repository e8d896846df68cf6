"""Read-only verbs are fast: they load neither torch nor pandas nor matplotlib."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import workbench
from tests.helpers.hand_made import make_project, make_run

HEAVY = (
    "torch",
    "torchx",
    "pandas",
    "matplotlib",
    "transformers",
    "numpy",
    "IPython",
    "wandb",
    "trackio",
    "mlflow",
    "tensorboard",
)
NEEDED = "import pydantic, tyro, yaml"
BOUND = 8.0
"""Times what loading the libraries that are needed takes on this machine now. Measured beside much other work: looking
takes 2.6 to 4.9 times as long (0.6 to 0.9 s of a core), and loading torch alone would add 11 times."""

LOOKING = (
    ["ls"],
    ["ls", "--json"],
    ["status", "parity"],
    ["status", "cp2"],
    ["logs", "cp2"],
    ["--help"],
    *([verb, "--help"] for verb in ("ls", "status", "logs", "cancel", "export", "doctor")),
)

PROGRAM = """
import sys
from workbench.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print("loaded:", *sorted(set({heavy!r}).intersection(sys.modules)))
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    make_project(folder)
    for number in range(20):
        make_run(folder / "experiments" / "parity", f"run{number}", at_s=number, seed=number, logs={0: "line\n" * 100})
    make_run(folder / "experiments" / "parity", "cp2", at_s=99, layout={"cp": 2}, logs={0: "x\n"})
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of both programs: modules are compiled once, whether or not this process may write bytecode."""
    cache = {"PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("bytecode")), "PYTHONDONTWRITEBYTECODE": ""}
    return os.environ | cache | {"PYTHONPATH": str(Path(workbench.__file__).parents[1])}


@pytest.fixture(scope="module")
def needed_s(environment):
    """Of a core. The first time the libraries are compiled and read from the disk."""
    seconds = []
    for _ in range(4):
        before = _seconds_of_children()
        subprocess.run([sys.executable, "-c", NEEDED], check=True, env=environment)
        seconds.append(_seconds_of_children() - before)
    return min(seconds)


@pytest.mark.parametrize("arguments", LOOKING, ids=" ".join)
def test_read_only_verbs_import_nothing_heavy_and_return_at_once(project, arguments, needed_s, environment):
    command = [sys.executable, "-c", PROGRAM.format(heavy=HEAVY), *arguments]
    seconds = []
    while not seconds or (len(seconds) < 3 and seconds[-1] >= BOUND * needed_s):  # again, if something came between
        before = _seconds_of_children()
        done = subprocess.run(command, cwd=project, capture_output=True, text=True, env=environment)
        seconds.append(_seconds_of_children() - before)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "loaded:"
    assert seconds[-1] < BOUND * needed_s, seconds


def _seconds_of_children():
    """Of a core, whatever else this machine does."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
