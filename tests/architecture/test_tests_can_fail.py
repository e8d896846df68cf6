"""No test is unable to fail: no dropped comparison, value compared with itself, returned verdict or test never run."""

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.architecture.syntax import SIGNS, nodes

TESTS = Path(__file__).parents[1]
COMPARISONS = {"allclose", "array_equal", "array_equiv", "isclose", "equal"}
ASSERTIONS = {"assert_close", "assert_allclose", "assert_array_equal"}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
NO_CHANGE = re.compile(r"\.(detach|clone|cpu|float|double|item|contiguous)\(\)")


def called(call):
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def asserts_something(below):
    """True if one of the nodes of a function asserts or expects something."""
    for node in below:
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call) and (called(node).startswith(("assert_", "expect", "raises", "gradcheck"))):
            return True
    return False


def aliases(everything):
    """Names that stand for a comparison: ``close = torch.allclose``, ``from torch import allclose as close``."""
    for node in everything:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and node.value.attr in COMPARISONS:
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        if isinstance(node, ast.ImportFrom):
            yield from (alias.asname for alias in node.names if alias.asname and alias.name in COMPARISONS)


def always_true(condition):
    """True for a generator, a function, a tuple, and a method that is not called: none of them is ever false."""
    if isinstance(condition, ast.Attribute):
        return condition.attr in {"all", "any", *COMPARISONS} - {"equal"}  # our results have a property `equal`
    return isinstance(condition, ast.GeneratorExp | ast.Lambda) or bool(getattr(condition, "elts", ()))


def never_collected(tree, everything):
    """(line, sentence) of each test that pytest passes by: it takes ``test_*`` at the top or in a class ``Test*``."""
    tests = [node for node in everything if isinstance(node, FUNCTION) and node.name.startswith("test_")]
    suites = [
        node
        for node in everything
        if isinstance(node, ast.ClassDef)
        and node.name.startswith("Test")
        and not [f for f in node.body if isinstance(f, FUNCTION) and f.name == "__init__"]
    ]
    collected = [node for scope in (tree, *suites) for node in scope.body]
    if not [test for test in tests if test in collected]:
        yield 1, "pytest collects nothing here"
    for test in tests:
        if test not in collected:
            yield test.lineno, f"{test.name} is never collected"
        if isinstance(test, ast.AsyncFunctionDef):
            yield test.lineno, f"{test.name} is a coroutine that nobody awaits"


def findings(source):
    tree = ast.parse(source)
    everything = nodes(tree)
    below = functools.cache(nodes)  # of a function: a helper is looked at for each test that calls it
    helpers = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    comparisons = COMPARISONS.union(aliases(everything))
    yield from never_collected(tree, everything)
    for node in everything:
        if isinstance(node, ast.Assert) and always_true(node.test):
            yield node.lineno, "always true"
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and called(node.value) in comparisons:
            yield node.lineno, "comparison thrown away"
        if isinstance(node, ast.Call) and called(node) in ASSERTIONS and len(node.args) > 1:
            left, right = (NO_CHANGE.sub("", ast.unparse(a)) for a in node.args[:2])
            if left == right:
                yield node.lineno, "compared with itself"
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq) and alike(node):
            left = ast.unparse(node.left)
            if left == ast.unparse(node.comparators[0]) and "(" not in left and "lambda" not in ast.unparse(node):
                yield node.lineno, "compared with itself"
    for test in (f for f in everything if isinstance(f, ast.FunctionDef) and f.name.startswith("test_")):
        names = {called(c) for c in below(test) if isinstance(c, ast.Call)}
        called_helpers = (below(helpers[name]) for name in names & helpers.keys())
        if not asserts_something(below(test)) and not any(map(asserts_something, called_helpers)):
            yield test.lineno, f"{test.name} asserts nothing"
        own = [n for n in below(test) if isinstance(n, ast.Return) and n.value is not None]
        nested = [
            n
            for f in below(test)
            if own and isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and f is not test
            for n in below(f)
            if isinstance(n, ast.Return)
        ]
        if [n for n in own if n not in nested]:
            yield test.lineno, f"{test.name} returns its verdict"


def alike(comparison):
    """True if both sides are of one kind: only then can their texts be the same, and a text takes long to write."""
    return type(comparison.left) is type(comparison.comparators[0])


@pytest.mark.parametrize("path", sorted(TESTS.rglob("test_*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_file_has_no_test_that_cannot_fail(path):
    assert list(findings(path.read_text())) == []


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("def test_a():\n    torch.allclose(a, b)\n    assert a", "comparison thrown away"),
        ("close = torch.allclose\ndef test_a():\n    close(a, b)\n    assert a", "comparison thrown away"),
        ("from numpy import isclose as near\ndef test_a():\n    near(a, b)\n    assert a", "comparison thrown away"),
        ("def test_a():\n    assert_close(x.detach(), x)", "compared with itself"),
        ("def test_a():\n    assert a\n    return a == b", "test_a returns its verdict"),
        ("def test_a():\n    assert total == total", "compared with itself"),
        ("def test_a():\n    run()", "test_a asserts nothing"),
        ("def test_a():\n    assert (x > 0 for x in y)", "always true"),
        ("def test_a():\n    assert (x > 0).all", "always true"),
        ("def test_a():\n    assert (x > 0, 'x')", "always true"),
        ("def check_a():\n    assert a", "pytest collects nothing here"),
        (
            "def test_a():\n    assert a\nclass Suite:\n    def test_b(self):\n        assert b",
            "test_b is never collected",
        ),
        (
            "def test_a():\n    assert a\nclass TestB:\n    def __init__(self): ...\n"
            "    def test_b(self):\n        assert b",
            "test_b is never collected",
        ),
        ("def test_a():\n    def test_b():\n        assert b\n    assert a", "test_b is never collected"),
        ("async def test_a():\n    assert a", "test_a is a coroutine that nobody awaits"),
    ],
)
def test_each_kind_is_seen(source, kind):
    assert [sentence for _, sentence in findings(source)] == [kind]


@pytest.mark.parametrize(
    "source",
    [
        "class TestA:\n    def test_a(self):\n        assert comparison.equal",
        "def test_a():\n    assert torch.equal(a, b)\ndef helper():\n    return a == b",
    ],
)
def test_a_sound_test_is_passed_over(source):
    assert list(findings(source)) == []


def test_the_walk_reaches_every_node():
    tree = ast.parse(Path(__file__).read_text())
    assert nodes(tree) == [node for node in ast.walk(tree) if not isinstance(node, SIGNS)]
