"""`python -m workbench` without what it needs: a message instead of a traceback."""

import sys
import tomllib
from types import SimpleNamespace

import pytest

import workbench
from tests.helpers.stand_in import stand_in
from workbench import __main__ as main
from workbench import cli
from workbench.records.provenance import project_root


def test_the_required_python_is_that_of_the_package():
    project = tomllib.loads((project_root() / "pyproject.toml").read_text(encoding="utf8"))["project"]
    assert project["requires-python"] == ">=" + ".".join(map(str, main.PYTHON))


def test_an_old_python_is_named(monkeypatch, capsys):
    monkeypatch.setattr(main, "sys", SimpleNamespace(version_info=(3, 9), version="3.9.1 (main)", stderr=sys.stderr))
    assert main.run() == 2
    assert "found: Python 3.9.1\n  rule: Python 3.11 or later" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["yaml", "pydantic.fields"])
def test_a_missing_dependency_is_named(monkeypatch, capsys, missing):
    def absent():
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setitem(sys.modules, "workbench.cli", SimpleNamespace(main=absent))
    assert main.run() == 2
    error = capsys.readouterr().err
    assert f"no module {missing.partition('.')[0]!r} in " in error
    assert error.endswith("do: pip install -e . in the folder of pyproject.toml\n")


def test_a_mistake_of_the_package_itself_is_no_missing_dependency(monkeypatch):
    monkeypatch.setitem(sys.modules, "workbench.cli", None)
    with pytest.raises(ModuleNotFoundError):
        main.run()


def test_the_verbs_are_reached(monkeypatch, capsys):
    monkeypatch.setattr(cli, "sys", stand_in(sys, argv=["workbench", "--version"]))
    assert main.run() == 0
    assert workbench.__version__ in capsys.readouterr().out


def test_a_public_name_without_its_package_tells_how_to_install(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'pydantic'", name="pydantic")

    monkeypatch.setattr(workbench, "importlib", SimpleNamespace(import_module=missing))
    monkeypatch.delitem(vars(workbench), "RunSpec", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"workbench.RunSpec needs 'pydantic': pip install -e \."):
        _ = workbench.RunSpec
