"""Imports run down the layers only, each outside library is imported in its own modules only, and losses are pure."""

import ast
import functools
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.architecture.import_graph import import_statements
from tests.architecture.syntax import nodes

PACKAGE = Path(__file__).parents[2] / "workbench"
TESTS = Path(__file__).parents[1]
LAYERS = (
    "errors",
    "user_file",
    "columns",
    "shapes",
    "untrusted",
    "atomic",
    "specs",
    "rollouts",
    "sharding",
    "policy|losses",
    "reduction|reproducible",
    "metrics|parallel_loss",
    "records|dumps",
    "faults|attach",
    "train|systems",
    "launch|compare,prove,diagnose,check,attribution,sensitivity,engines,mismatch",
    "report",
    "experiment",
    "mutation_score",
    "cli|pytest_plugin",
)
"""From the bottom up. Layers that "|" separates do not import each other; those that "," separates may."""
ONLY_IN = {
    "torch.distributed": {"sharding", "reproducible", "launch"},
    "triton": {"policy", "reproducible", "sharding"},
    "transformers": {"policy", "attach"},
    "lightning": {"attach"},
    "verl": {"attach"},
    "deepspeed": {"attach"},
    "megatron": {"attach"},
    "torchx": {"launch"},
    "rich": {"columns"},
    "matplotlib": {"report"},
    "ipywidgets": {"report"},
    "IPython": {"report"},
    "wandb": {"report"},
    "trackio": {"report"},
    "mlflow": {"report"},
    "tensorboard": {"report"},
    "mcp": {"cli"},
}
PURE = {
    "losses": {"errors", "user_file", "shapes", "specs", "rollouts"},
    "specs": {"errors", "user_file", "shapes", "untrusted", "atomic"},
}
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in re.split("[|,]", names)}
NEIGHBOURS = {
    name: set(group.split(",")) for names in LAYERS for group in names.split("|") for name in group.split(",")
}


@functools.cache
def imported(source):
    """(line, dotted module) of every import, also those inside functions."""
    return [
        (statement.node.lineno, module)
        for statement in import_statements(source)
        for module in (statement.module, *(f"{statement.module}.{name}" for name in statement.names))
    ]


def broken_rules(here, source):
    """One sentence per broken rule of a module that lies in layer ``here``."""
    results = set()
    for line, module in imported(source):
        if module.startswith("workbench."):
            there = module.split(".")[1]
            if there not in NEIGHBOURS.get(here, {here}) and there in LEVEL:
                if LEVEL[there] >= LEVEL[here]:
                    results.add(f"line {line}: {here} imports {there}, which is not below it")
                elif there not in PURE.get(here, {there}):
                    results.add(f"line {line}: {here} is pure and may not import {there}")
            elif there not in LEVEL:
                results.add(f"line {line}: {here} imports the public name {there}, which hides the layer that it is of")
        for library, packages in ONLY_IN.items():
            if (module == library or module.startswith(f"{library}.")) and here not in packages:
                results.add(f"line {line}: {library} is imported only by {' or '.join(sorted(packages))}, not {here}")
    return sorted(results)


def modules():
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE or not path.stem.startswith("__")]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_keeps_to_its_layer(path):
    here = path.relative_to(PACKAGE).with_suffix("").parts[0]
    assert here in LEVEL, f"{here!r} is not a layer"
    assert broken_rules(here, path.read_text()) == []


@pytest.mark.parametrize(
    ("here", "source"),
    [
        ("sharding", "def f():\n    from workbench.policy.model import load_policy"),
        ("launch", "import workbench.compare.align"),
        ("train", "import torch.distributed as dist"),
        ("losses", "from workbench.sharding.mesh import Mesh"),
        ("compare", "import matplotlib.pyplot"),
        ("train", "import importlib\ncompare = importlib.import_module('workbench.compare.align')"),
        ("train", "from workbench import Experiment"),
    ],
)
def test_each_rule_can_be_broken(here, source):
    assert len(broken_rules(here, source)) == 1


def package_imports():
    """Package or module of the top level -> those that it imports, also inside functions and for types."""
    imports = {}
    for path in modules():
        here = path.relative_to(PACKAGE).with_suffix("").parts[0]
        there = {module.split(".")[1] for _, module in imported(path.read_text()) if module.startswith("workbench.")}
        imports.setdefault(here, set()).update(there & LEVEL.keys() - {here})
    return imports


def test_packages_do_not_import_each_other_in_a_cycle():
    """A cycle raises CycleError, which names it."""
    order = list(TopologicalSorter(package_imports()).static_order())
    assert order.index("errors") < order.index("train") < order.index("cli")


def test_the_package_imports_no_experiment():
    assert not [path for path in modules() if any(m.startswith("experiments") for _, m in imported(path.read_text()))]


def test_one_helper_finds_the_nearest_names():
    """`errors.nearest_names`."""
    reading = {path.stem for path in modules() if any(name == "difflib" for _, name in imported(path.read_text()))}
    assert reading == {"errors"}


def test_known_bugs_lie_below_the_code_that_plants_them():
    """A fault names its seam as text: it imports neither the step nor the worker, which plants it."""
    imports = package_imports()
    assert "faults" in imports["train"]
    assert not imports["faults"] & {"train", "systems", "prove", "launch"}


def test_no_module_is_a_drawer_for_odds_and_ends():
    assert not [p for p in PACKAGE.rglob("*.py") if p.stem in ("utils", "common", "helpers", "misc")]


def test_product_code_has_no_if_fault():
    named = re.compile(r"(?<!de)fault")
    for path in PACKAGE.rglob("*.py"):
        here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if "faults" in path.parts or LEVEL.get(here, 0) > LEVEL["train"]:
            continue  # a report may state that a fault was planted
        source = path.read_text()
        if not named.search(source.lower()):
            continue  # most files
        conditions = [node.test for node in nodes(ast.parse(source)) if isinstance(node, ast.If | ast.IfExp)]
        assert not [c for c in conditions if named.search(ast.unparse(c).lower())], path


def test_every_module_has_a_test_of_its_name():
    missing = []
    for path in modules():
        inside = path.relative_to(PACKAGE)
        if path.stem.startswith("__") and "faults" not in path.parts:
            continue
        mirror = TESTS / "unit" / inside.parent / f"test_{path.stem}.py"
        if inside.parent == Path("specs/losses") and (PACKAGE / "losses" / path.name).exists():
            mirror = TESTS / "unit/losses" / mirror.name  # settings and mathematics of a family are tested together
        by_parity = {"train/worker.py", "launch/agent.py"}  # processes: tests/parity and tests/unit/launch run them
        if "faults" in path.parts:
            mirror = TESTS / "unit/faults/test_faults.py"
        if path.parent.parent.name == "systems" and path.stem == "settings":
            mirror = mirror.with_name("test_translate.py")  # one recorded call goes through both
        if not mirror.exists() and str(inside) not in by_parity:
            missing.append(str(inside))
    assert missing == []
