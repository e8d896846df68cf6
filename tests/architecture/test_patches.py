"""Tests patch names of the workbench or of the tests, never a function that the whole process uses.

A thread of another module, or of the test runner, would meet the replaced `time.sleep`. A test replaces the name that
the module under test has for it (`tests.helpers.stand_in`), passes an argument, or watches (`tests.helpers.watched`).
"""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

from tests.architecture.syntax import nodes

TESTS = Path(__file__).parents[1]
OURS = ("workbench", "tests", "experiments")
AS_TORCH_DOES = ("helpers/lent_kernels.py", "helpers/pretended_ring.py")
"""In ranks of their own, and only where torch's `context_parallel` itself replaces its attention function."""
REPAIRED = ("helpers/interpreted_triton.py",)
"""Triton's interpreter, which nothing but kernels without a GPU runs in."""


def test_no_test_patches_global_state():
    results = [
        f"{name}:{line}: {what}"
        for path in sorted(TESTS.rglob("*.py"))
        if (name := path.relative_to(TESTS).as_posix()) not in AS_TORCH_DOES + REPAIRED
        for line, what in foreign_patches(path.read_text())
    ]
    assert not results, "\n".join(results)


@pytest.mark.parametrize(
    ("code", "refused"),
    [
        ("import time\ndef test(monkeypatch):\n    monkeypatch.setattr(time, 'sleep', print)", "time.sleep"),
        ("def test(monkeypatch):\n    monkeypatch.setattr('time.sleep', print)", "time.sleep"),
        ("def test(monkeypatch):\n    monkeypatch.setattr(f'pathlib.Path.{1}', print)", "a name made up while it runs"),
        (
            "from workbench.faults import masks\n"
            "def test(monkeypatch):\n    monkeypatch.setattr(masks.time, 'sleep', print)",
            "masks.time.sleep",
        ),
        (
            "import importlib\nmodule = importlib.import_module('workbench.faults.masks')\n"
            "def test(monkeypatch):\n    monkeypatch.delattr(module.time, 'sleep')",
            "module.time.sleep",
        ),
        (
            "def test(monkeypatch):\n    import torch\n    with monkeypatch.context() as patch:\n"
            "        patch.setattr(torch.cuda, 'is_available', print)",
            "torch.cuda.is_available",
        ),
        ("from pathlib import Path\ndef test(monkeypatch):\n    monkeypatch.setattr(Path, 'open', print)", "Path.open"),
        (
            "import sys\ndef test(monkeypatch):\n    monkeypatch.setattr(sys.stdout, 'isatty', print)",
            "sys.stdout.isatty",
        ),
        ("import os\nos.fsync = print", "os.fsync"),
        ("import os\nos.name, os.fsync = 'x', print", "os.fsync"),
        ("import os\nsetattr(os, 'fsync', print)", "os.fsync"),
        ("from unittest import mock", "unittest.mock"),
        ("import unittest.mock", "unittest.mock"),
    ],
)
def test_it_sees_every_way_to(code, refused):
    assert [what for _, what in foreign_patches(code)] == [refused]


@pytest.mark.parametrize(
    "code",
    [
        "from workbench.faults import masks\ndef test(monkeypatch):\n    monkeypatch.setattr(masks, 'time', print)",
        "from workbench.records.directory import RunDirectory\n"
        "def test(monkeypatch):\n    monkeypatch.setattr(RunDirectory, 'note', print)",
        "def test(monkeypatch):\n    monkeypatch.setattr('workbench.records.provenance.provenance', print)",
        "def test(monkeypatch):\n    monkeypatch.setenv('HOME', 'x')\n    monkeypatch.chdir('y')",
        "import os\nos.environ['HF_HUB_OFFLINE'] = '1'",
        "import torch\ntorch.utils.deterministic.fill_uninitialized_memory = False",  # a setting
        "def test(monkeypatch, made):\n    made.size = 3\n    monkeypatch.setattr(made, 'sleep', print)",
    ],
)
def test_names_of_the_package_may_be_patched(code):
    assert list(foreign_patches(code)) == []


def foreign_patches(code):
    """Return (line, target) of each replaced attribute of a foreign module, class or object."""
    everything = nodes(ast.parse(code))
    names = dict(_imported(everything))
    for node in everything:
        if isinstance(node, ast.Import | ast.ImportFrom):
            whole = {f"{getattr(node, 'module', None) or ''}.{alias.name}".strip(".") for alias in node.names}
            if any(name.startswith("unittest.mock") for name in whole):
                yield node.lineno, "unittest.mock"
        elif isinstance(node, ast.Assign):
            targets = [part for target in node.targets for part in getattr(target, "elts", [target])]
            for target in targets:
                if (
                    isinstance(target, ast.Attribute)
                    and _foreign(target.value, names)
                    and callable(_value(target, names))
                ):
                    yield node.lineno, ast.unparse(target)
        elif (
            isinstance(node, ast.Call)
            and node.args
            and (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", ""))
            in ("setattr", "delattr")
        ):
            owner, *rest = node.args
            if isinstance(owner, ast.JoinedStr):
                yield node.lineno, "a name made up while it runs"
            elif isinstance(owner, ast.Constant):
                if not str(owner.value).startswith(tuple(f"{ours}." for ours in OURS)):
                    yield node.lineno, str(owner.value)
            elif _foreign(owner, names):
                yield node.lineno, f"{ast.unparse(owner)}.{getattr(rest[0], 'value', '?')}"


def _imported(everything):
    """Return the meanings of names that are imported anywhere in the file, or by `importlib.import_module("...")`."""
    for node in everything:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (
                    alias.asname or alias.name.partition(".")[0],
                    (alias.name if alias.asname else alias.name.partition(".")[0], None),
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, (node.module, alias.name)
        elif (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func).endswith("import_module")
            and isinstance(node.value.args[0], ast.Constant)
        ):
            yield node.targets[0].id, (node.value.args[0].value, None)


def _foreign(expression, names):
    """True if the value is a foreign module, class or object; values known only at run time are not."""
    value = _value(expression, names)
    if value is None:
        return False
    if inspect.ismodule(value):
        home = value.__name__
    else:
        home = getattr(value if inspect.isclass(value) or callable(value) else type(value), "__module__", None) or ""
    return home.partition(".")[0] not in OURS


def _value(expression, names):
    """Return the value of a name or a chain of attributes after all imports; None if known only at run time."""
    *chain, root = _chain(expression)
    if root not in names:
        return None
    module, name = names[root]
    try:
        value = importlib.import_module(module)
        for part in [*filter(None, [name]), *reversed(chain)]:
            if not hasattr(value, part):
                importlib.import_module(f"{value.__name__}.{part}")
            value = getattr(value, part)
    except (AttributeError, ImportError):
        return None
    return value


def _chain(expression):
    """Return `a.b.c` as c, b, a; a chain that does not start with a name ends in ""."""
    while isinstance(expression, ast.Attribute):
        yield expression.attr
        expression = expression.value
    yield expression.id if isinstance(expression, ast.Name) else ""
