"""An oracle shares no code with the package: nothing in ``tests/oracles`` imports it, directly or through helpers."""

from pathlib import Path

import pytest

from tests.architecture.import_graph import Sources, ways_to

TESTS = Sources(Path(__file__).parents[2], "tests")


def impure(sources):
    return ways_to("workbench", sources, "tests.oracles")


def tree(root, files):
    """A folder of tests with oracles, from the sources of its files."""
    packages = ("", "helpers/", "oracles/", "oracles/systems/")
    for name, source in {**{f"{package}__init__.py": "" for package in packages}, **files}.items():
        path = root / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return Sources(root, "tests")


def test_oracles_share_no_code_with_the_package():
    messages = impure(TESTS)
    assert not messages, "\n".join(messages)


def test_every_oracle_is_checked():
    oracles = {module for module in TESTS.files if f"{module}.".startswith("tests.oracles.")}
    assert len(oracles) == len(list((TESTS.root / "tests/oracles").rglob("*.py")))
    assert {"tests.oracles.step", "tests.oracles.systems", "tests.oracles.systems.verl"} <= oracles


@pytest.mark.parametrize(
    ("files", "module", "way"),
    [
        pytest.param(
            {"oracles/kl.py": "import workbench"},
            "tests.oracles.kl",
            ["tests/oracles/kl.py:1: import workbench"],
            id="import",
        ),
        pytest.param(
            {"oracles/systems/verl.py": "from workbench.losses import kl"},
            "tests.oracles.systems.verl",
            ["tests/oracles/systems/verl.py:1: from workbench.losses import kl"],
            id="in a sub-folder",
        ),
        pytest.param(
            {"oracles/kl.py": "def kl(x):\n    import workbench.losses.kl\n    return x"},
            "tests.oracles.kl",
            ["tests/oracles/kl.py:2: import workbench.losses.kl  (in a function)"],
            id="in a function",
        ),
        pytest.param(
            {"oracles/kl.py": "if TYPE_CHECKING:\n    from workbench import LossSpec"},
            "tests.oracles.kl",
            ["tests/oracles/kl.py:2: from workbench import LossSpec"],
            id="for types",
        ),
        pytest.param(
            {
                "oracles/kl.py": "from tests.helpers.a import f",
                "helpers/a.py": "from tests.helpers import b",
                "helpers/b.py": "def g():\n    import workbench",
            },
            "tests.oracles.kl",
            [
                "tests/oracles/kl.py:1: from tests.helpers.a import f",
                "tests/helpers/a.py:1: from tests.helpers import b",
                "tests/helpers/b.py:2: import workbench  (in a function)",
            ],
            id="through helpers",
        ),
        pytest.param(
            {"oracles/kl.py": "import importlib\nx = importlib.import_module('workbench.losses.kl')"},
            "tests.oracles.kl",
            ["tests/oracles/kl.py:2: importlib.import_module('workbench.losses.kl')"],
            id="import_module",
        ),
        pytest.param(
            {
                "oracles/kl.py": "from tests.helpers import a",
                "helpers/__init__.py": "import workbench",
                "helpers/a.py": "",
            },
            "tests.oracles.kl",
            ["tests/oracles/kl.py:1: from tests.helpers import a", "tests/helpers/__init__.py:1: import workbench"],
            id="through the package of a helper",
        ),
    ],
)
def test_each_way_to_the_package_is_seen(tmp_path, files, module, way):
    (message,) = impure(tree(tmp_path, files))
    assert message.splitlines()[0].startswith(f"{module} imports workbench")
    assert message.splitlines()[1:] == [f"    {line}" for line in way]


def test_a_package_around_oracles_makes_all_of_them_impure(tmp_path):
    sources = tree(tmp_path, {"oracles/__init__.py": "import workbench", "oracles/kl.py": "import math"})
    assert [message.split()[0] for message in impure(sources)] == [
        "tests.oracles",
        "tests.oracles.kl",
        "tests.oracles.systems",
    ]


def test_oracles_may_import_each_other_and_pure_helpers(tmp_path):
    assert (
        impure(
            tree(
                tmp_path,
                {
                    "oracles/kl.py": "import torch\nfrom tests.helpers.rows import row\n"
                    "from tests.oracles.systems import verl",
                    "oracles/systems/verl.py": "import workbenchmark",
                    "helpers/rows.py": "import math",
                    "helpers/other.py": "import workbench",
                },
            )
        )
        == []
    )
