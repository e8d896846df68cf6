"""No import cycle between modules of the package, neither inside a sub-package nor through imports inside functions."""

from pathlib import Path

import pytest

from tests.architecture.import_graph import Sources, import_cycles

WORKBENCH = Sources(Path(__file__).parents[2], "workbench")


def tree(root, files):
    """A package ``p`` below a folder, from the sources of its files."""
    for name, source in {"__init__.py": "", **files}.items():
        path = root / "p" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    return Sources(root, "p")


def test_the_package_has_no_import_cycle():
    cycles = import_cycles(WORKBENCH)
    assert not cycles, "\n".join(cycles)


def test_the_import_graph_has_every_module_and_its_imports():
    assert len(WORKBENCH.files) == len(list((WORKBENCH.root / "workbench").rglob("*.py")))
    step = {each.imported for each in WORKBENCH.imports("workbench.train.step")}
    assert {"torch", "workbench.reduction.weights", "workbench.policy.logprobs"} <= step
    api = "workbench.policy.logprobs"
    kinds = {(each.imported, each.in_function, each.for_types) for each in WORKBENCH.imports(api)}
    assert {
        (f"{api}.head", False, False),
        (f"{api}.driver", True, False),
        (f"{api}.truncated_support", False, True),
    } <= kinds


@pytest.mark.parametrize(
    ("files", "cycle"),
    [
        pytest.param(
            {"a.py": "from p.b import f", "b.py": "import p.a"},
            ["p/a.py:1: from p.b import f", "p/b.py:1: import p.a"],
            id="top level",
        ),
        pytest.param(
            {"s/__init__.py": "", "s/a.py": "from p.s import b", "s/b.py": "from p.s.a import f"},
            ["p/s/a.py:1: from p.s import b", "p/s/b.py:1: from p.s.a import f"],
            id="inside a sub-package",
        ),
        pytest.param(
            {"a.py": "def f():\n    from p import b\n    return b", "b.py": "from p.a import f"},
            ["p/a.py:2: from p import b  (in a function)", "p/b.py:1: from p.a import f"],
            id="in a function",
        ),
        pytest.param(
            {"a.py": "class A:\n    f = lambda: __import__('p.b')", "b.py": "from p.a import A"},
            ["p/a.py:2: __import__('p.b')  (in a function)", "p/b.py:1: from p.a import A"],
            id="__import__",
        ),
        pytest.param(
            {"a.py": "import importlib\nb = importlib.import_module('p.b')", "b.py": "from .a import b"},
            ["p/a.py:2: importlib.import_module('p.b')", "p/b.py:1: from .a import b"],
            id="import_module",
        ),
        pytest.param(
            {"a.py": "try:\n    from p import b\nexcept ImportError:\n    b = None", "b.py": "from . import a"},
            ["p/a.py:2: from p import b", "p/b.py:1: from . import a"],
            id="in try, relative",
        ),
        pytest.param(
            {"s/__init__.py": "from .a import f", "s/a.py": "from ..b import g", "b.py": "from .s import f"},
            ["p/b.py:1: from .s import f", "p/s/__init__.py:1: from .a import f", "p/s/a.py:1: from ..b import g"],
            id="relative, from a package",
        ),
        pytest.param(
            {"s/__init__.py": "from p.s.a import f", "s/a.py": "from p.s.b import g", "s/b.py": "from p.s import f"},
            [
                "p/s/__init__.py:1: from p.s.a import f",
                "p/s/a.py:1: from p.s.b import g",
                "p/s/b.py:1: from p.s import f",
            ],
            id="through a re-exported name",
        ),
        pytest.param(
            {
                "s/__init__.py": "from p.s.a import f",
                "s/a.py": "from p.b import g",
                "s/c.py": "",
                "b.py": "import p.s.c",
            },
            ["p/b.py:1: import p.s.c", "p/s/__init__.py:1: from p.s.a import f", "p/s/a.py:1: from p.b import g"],
            id="through the package of a module",
        ),
        pytest.param(
            {"a.py": "if TYPE_CHECKING:\n    x = 1\nelse:\n    import p.b", "b.py": "import p.a"},
            ["p/a.py:4: import p.b", "p/b.py:1: import p.a"],
            id="else of TYPE_CHECKING",
        ),
        pytest.param({"a.py": "import p.a"}, ["p/a.py:1: import p.a"], id="itself"),
    ],
)
def test_each_kind_of_cycle_is_seen(tmp_path, files, cycle):
    (message,) = import_cycles(tree(tmp_path, files))
    assert message.splitlines()[1:] == [f"    {line}" for line in cycle]


def test_the_message_names_all_modules_and_the_shortest_cycle(tmp_path):
    sources = tree(
        tmp_path,
        {
            "a.py": "import p.b",
            "b.py": "import p.c",
            "c.py": "import p.a\nimport p.d",
            "d.py": "import p.c",
            "e.py": "import p.a",
            "f.py": "import p.g",
            "g.py": "import p.f",
        },
    )
    large, small = import_cycles(sources)
    assert large.splitlines() == [
        "4 modules import each other: p.a, p.b, p.c, p.d; the shortest cycle is",
        "    p/c.py:2: import p.d",
        "    p/d.py:1: import p.c",
    ]
    assert small.startswith("2 modules import each other: p.f, p.g;")


@pytest.mark.parametrize(
    "files",
    [
        pytest.param({"a.py": "from p import b", "b.py": "import os"}, id="one way"),
        pytest.param(
            {
                "s/__init__.py": "from p.s.a import f",
                "s/a.py": "from p.s.b import g",
                "s/b.py": "g = 1",
                "c.py": "from p.s import f",
            },
            id="a package that re-exports its modules, which import each other's",
        ),
        pytest.param({"a.py": "if TYPE_CHECKING:\n    from p.b import B", "b.py": "from p.a import f"}, id="types"),
        pytest.param(
            {"a.py": "if typing.TYPE_CHECKING:\n    from p.b import B", "b.py": "from p.a import f"},
            id="types, by typing's name",
        ),
        pytest.param({"a.py": "name = 'p.b'", "b.py": "import p.a"}, id="a name in a table"),
    ],
)
def test_no_cycle_is_reported_without_one(tmp_path, files):
    assert import_cycles(tree(tmp_path, files)) == []
