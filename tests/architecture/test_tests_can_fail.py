"""No test may be unable to fail: dropped comparisons, values held against themselves, returned verdicts."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
COMPARISONS = {"allclose", "array_equal", "isclose", "equal"}
ASSERTIONS = {"assert_close", "assert_allclose", "assert_array_equal"}
NO_CHANGE = re.compile(r"\.(detach|clone|cpu|float|double|item|contiguous)\(\)")


def called(call):
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def asserts_something(function):
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call) and (called(node).startswith(("assert_", "expect", "raises", "gradcheck"))):
            return True
    return False


def findings(source):
    tree = ast.parse(source)
    helpers = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and called(node.value) in COMPARISONS:
            yield node.lineno, "comparison thrown away"
        if isinstance(node, ast.Call) and called(node) in ASSERTIONS and len(node.args) > 1:
            left, right = (NO_CHANGE.sub("", ast.unparse(a)) for a in node.args[:2])
            if left == right:
                yield node.lineno, "compared with itself"
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq) and "lambda" not in ast.unparse(node):
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            if left == right and "(" not in left:
                yield node.lineno, "compared with itself"
    for test in (f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name.startswith("test_")):
        names = {called(c) for c in ast.walk(test) if isinstance(c, ast.Call)}
        if not asserts_something(test) and not any(asserts_something(helpers[n]) for n in names & helpers.keys()):
            yield test.lineno, f"{test.name} asserts nothing"
        own = [n for n in ast.walk(test) if isinstance(n, ast.Return) and n.value is not None]
        nested = [n for f in ast.walk(test) if isinstance(f, ast.FunctionDef | ast.Lambda) and f is not test
                  for n in ast.walk(f) if isinstance(n, ast.Return)]
        if [n for n in own if n not in nested]:
            yield test.lineno, f"{test.name} returns its verdict"


@pytest.mark.parametrize("path", sorted(TESTS.rglob("test_*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_file_has_no_test_that_cannot_fail(path):
    assert list(findings(path.read_text())) == []


@pytest.mark.parametrize("source", [
    "def test_a():\n    torch.allclose(a, b)\n    assert a",
    "def test_a():\n    assert_close(x.detach(), x)",
    "def test_a():\n    return a == b",
    "def test_a():\n    assert total == total",
    "def test_a():\n    run()",
])
def test_each_kind_is_seen(source):
    assert list(findings(source))
