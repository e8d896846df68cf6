"""Code of README and the manual is of today: names, commands and settings exist."""

import ast
import contextlib
import functools
import importlib
import io
import re

import pytest
import yaml

from tests.docs.pages import MANUAL, ROOT, blocks, commands, name_of
from workbench.cli import VERBS, main
from workbench.cli.bench import BENCHMARKS
from workbench.compare.comparison import Comparison
from workbench.errors import SpecError
from workbench.launch.ablation import load_ablation
from workbench.specs.reading import parse_spec
from workbench.specs.run import RunSpec

TEXTS = {name_of(page): page.read_text() for page in MANUAL}


def every_block(language: str) -> list:
    """Return the blocks of all pages in a language, as parameters of a test."""
    return [
        pytest.param(block, id=f"{name}-{i}")
        for name, text in TEXTS.items()
        for i, block in enumerate(blocks(text, language))
    ]


PYTHON, YAML = every_block("python"), every_block("yaml")
COMMANDS = sorted({tuple(command) for text in TEXTS.values() for command in commands(text)})
NAMES = sorted({name for text in TEXTS.values() for name in re.findall(r"\bwb(?:\.[A-Za-z_]\w*)+", text)})


def resolve(name: str):
    """Return the object of a dotted name that begins with ``wb``."""
    return functools.reduce(getattr, name.split(".")[1:], importlib.import_module("workbench"))


@functools.cache
def help_of(*verb: str) -> str:
    """Return the help of a verb."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*verb, "--help"])
    return out.getvalue()


def unknown_words(command: tuple[str, ...]) -> list[str]:
    """Return the verb, subcommand, benchmark and flags of a command that do not exist."""
    verb, *rest = command
    if verb in ("VERB", "..."):
        return []
    if verb not in VERBS:
        return [verb]
    if verb == "bench":
        return [word for word in rest if not word.startswith("-") and word not in BENCHMARKS]
    where = (verb, *rest[:1]) if verb == "rollouts" and rest else (verb,)
    known = set(re.findall(r"(?<![\w-])--?[a-z][\w.-]*", help_of(*where)))
    return [word for word in rest if word.startswith("-") and word.partition("=")[0] not in known]


def problem_of(text: str) -> str | None:
    """Return why a YAML block is neither an ablation nor settings of a run."""
    settings = yaml.safe_load(text)
    try:
        if "configurations" in settings:
            load_ablation(settings).expand()
        else:
            parse_spec(RunSpec, settings, where="block")
    except SpecError as error:
        return str(error)
    return None


@pytest.mark.parametrize("block", PYTHON)
def test_python_compiles_and_its_imports_exist(block):
    for node in ast.walk(compile(block, "page", "exec", ast.PyCF_ONLY_AST)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def test_the_readme_shows_what_is_printed():
    printed = [line.split() for line in Comparison.load(ROOT / "experiments/layout_parity").verdict_lines()]
    [block] = blocks(TEXTS["README.md"], "text")
    for shown in (line.removesuffix("...").split() for line in block.splitlines()):
        assert shown in [line[: len(shown)] for line in printed]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_exists(name):
    assert resolve(name) is not None


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_verb_and_flags_of_a_command_exist(command):
    assert unknown_words(command) == []


@pytest.mark.parametrize("block", YAML)
def test_yaml_is_a_spec(block):
    assert problem_of(block) is None


@pytest.mark.parametrize("verb", list(VERBS))
def test_the_reference_has_every_verb(verb):
    assert f"`{verb}`" in (ROOT / "docs/reference/index.md").read_text()


def test_blocks_of_each_kind_are_read():
    assert len(PYTHON) >= 12
    assert len(YAML) >= 10
    assert len(COMMANDS) >= 20
    assert len(NAMES) >= 20


@pytest.mark.parametrize(
    ("command", "unknown"),
    [
        (("runs", "x.yaml"), ["runs"]),
        (("run", "x.yaml", "--wher", "here"), ["--wher"]),
        (("bench", "heads"), ["heads"]),
        (("rollouts", "check", "x", "--loss", "sft", "--lost"), ["--lost"]),
    ],
    ids=["verb", "flag", "benchmark", "flag of a subcommand"],
)
def test_a_mistaken_command_is_found(command, unknown):
    assert unknown_words(command) == unknown


@pytest.mark.parametrize("text", ["layout: {cq: 2}", "configurations: {a: {}}\nreference: b\nquestion: why"])
def test_mistaken_settings_are_found(text):
    assert problem_of(text)


def test_a_mistaken_name_is_found():
    with pytest.raises(AttributeError):
        resolve("wb.sharding.no_such_module")
