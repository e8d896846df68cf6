"""A function or class of a user's file, named ``FILE.py:NAME``: a loss, a task, a trainer's function to prove.

The file is executed, with its own folder to import from.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from workbench.errors import SpecError, did_you_mean, listed


class Place(NamedTuple):
    """A name in a file."""

    path: str
    name: str


def place_of(text: str) -> Place | None:
    """Return the parts of ``FILE.py:NAME``; None if a text has another form.

    Example:
        >>> place_of("losses/mine.py:grpo")
        Place(path='losses/mine.py', name='grpo')
    """
    path, colon, name = text.rpartition(":")
    return Place(path, name) if colon and path.endswith(".py") and name.isidentifier() else None


def find_file(text: str, project: Path, *, setting: str) -> Path:
    """Return the file of ``FILE.py:NAME``, relative to the project, or else to the current folder.

    Raises:
        SpecError: another form, or no such file; ``setting`` is named in the message.
    """
    place = place_of(text)
    if place is None:
        raise SpecError(
            f"{setting} = {text!r}",
            found="no name of a function in a file",
            rule="FILE.py:NAME",
            fix="name a file that ends in .py and a function in it, such as my_losses.py:grpo",
        )
    for folder in dict.fromkeys((project, Path.cwd())):
        if (folder / place.path).is_file():
            return folder / place.path
    raise SpecError(
        f"{setting} = {text!r}",
        found=f"no file {project / place.path}"
        + (f" and none relative to the current folder, {Path.cwd()}" if Path.cwd() != project else ""),
        rule="a relative path begins at the project root, or else at the current folder",
        fix="check the path, or give an absolute one",
    )


def load(file: Path, name: str, *, setting: str) -> Any:
    """Execute a file and return what it calls ``name``.

    Raises:
        SpecError: the file cannot be executed (with the line that failed), or it has no such name.
    """
    requested = f"{setting} = {file.name}:{name}"
    # A unique name in sys.modules, where dataclasses look up their own module.
    unique = f"workbench_user_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]}"
    module_spec = importlib.util.spec_from_file_location(unique, file)
    assert module_spec is not None, "a .py file can be loaded"
    assert module_spec.loader is not None, "a .py file can be loaded"
    sys.modules[unique] = module = importlib.util.module_from_spec(module_spec)
    sys.path.insert(0, str(file.resolve().parent))
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[unique]
        raise SpecError(
            requested,
            found=f"{type(error).__name__}: {error}{where_in(file, error)}",
            rule=f"{file} can be imported",
            fix="fix the error above",
        ) from None
    finally:
        sys.path.pop(0)
    if not hasattr(module, name):
        own = [known for known, value in vars(module).items() if getattr(value, "__module__", None) == unique]
        raise SpecError(
            requested,
            found=f"no {name} in {file}" + (f" ({did_you_mean(name, own)})" if did_you_mean(name, own) else ""),
            rule="FILE.py:NAME names a function or class of the file",
            fix=f"it has {listed(own)}" if own else "define it there",
        )
    return getattr(module, name)


def where_in(file: Path, error: BaseException) -> str:
    """Return the line of a file at which an error was raised, as text; "" if it was raised elsewhere."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return ""  # its message has the line
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f", in line {lines[-1].lineno} of {file.name}: {lines[-1].line}" if lines else ""


def error_in(file: Path, error: BaseException) -> str:
    """Return an error of a user's function as text: its type, the nearest name of a misspelt attribute, the line."""
    hint = ""
    if isinstance(error, AttributeError) and error.name and error.obj is not None:
        hint = did_you_mean(error.name, [name for name in dir(error.obj) if not name.startswith("_")])
    return f"{type(error).__name__}: {error}{hint and f' ({hint})'}{where_in(file, error)}"


def check_function(file: Path, name: str, settings: Collection[str], inputs: int, *, setting: str, fix: str) -> None:
    """Raise what `load` and a call would, as far as the text of a file tells; nothing is executed.

    Args:
        file: of the function.
        name: of the function.
        settings: names of its keyword arguments.
        inputs: number of its positional arguments.
        setting: named in the message.
        fix: of a function that cannot be called so.

    Raises:
        SpecError: no Python, no such name, a setting that the function does not have or needs, or another
            number of inputs.
    """
    requested = f"{setting} = {file.name}:{name}"
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}: {(error.text or '').strip()}" if isinstance(error, SyntaxError) else ""
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        found = f"{type(error).__name__}: {message}{line}"
        raise SpecError(requested, found=found, rule=f"{file} is Python", fix="fix the line above") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    bound = classes | {leaf.id for node in tree.body for leaf in ast.walk(node) if isinstance(leaf, ast.Name)}
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        for alias in getattr(node, "names", ())
        if isinstance(alias, ast.alias)
    }
    if name not in functions:
        if name in bound or name in imported or "*" in imported:
            return  # bound in another way: known when it is loaded
        hint = did_you_mean(name, functions)
        raise SpecError(
            requested,
            found=f"no {name} in {file}" + (f" ({hint})" if hint else ""),
            rule="FILE.py:NAME names a function of the file",
            fix=f"it has {listed(functions)}" if functions else "define it there",
        )
    arguments = functions[name].args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    known = [*positional[inputs:], *(argument.arg for argument in arguments.kwonlyargs)]
    unset = positional[inputs : len(positional) - len(arguments.defaults)]
    unset += [one.arg for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if not default]
    unknown = [] if arguments.kwarg else [each for each in settings if each not in known]
    if unknown:
        hint = did_you_mean(unknown[0], known, otherwise=f"it has {', '.join(known) or 'no settings'}")
        problem = f"no setting {unknown[0]!r} ({hint})"
    elif len(positional) < inputs and not arguments.vararg:
        problem = f"it takes ({', '.join(positional)})"
    elif missing := [each for each in unset if each not in settings]:
        problem = f"no value for {', '.join(missing)}"
    else:
        return
    raise SpecError(
        f"{requested}, line {functions[name].lineno}",
        found=problem,
        rule=f"it is called with {inputs} input{'s' if inputs > 1 else ''} and the settings by name",
        fix=fix,
    )
