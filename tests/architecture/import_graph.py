"""The import graph of a source tree, read from its text: nothing is imported and nothing runs.

A module has its dotted name; ``a/__init__.py`` is ``a``. These count as imports:

    import a.b, from a import b     anywhere, also inside functions, classes, ``try`` and ``if``. ``from a import b``
                                    imports ``a.b`` if that is a module, otherwise ``a``, which defines or re-exports
                                    the name. Relative imports are resolved
    importlib.import_module("a.b")  with a literal name; ``__import__("a.b")`` likewise
    parent packages                 importing ``a.b.c`` from outside ``a.b`` runs ``a/b/__init__.py`` and so imports
                                    ``a.b`` too; from inside ``a.b`` it does not, since that file is running already
    if TYPE_CHECKING:               marked `Import.for_types`: it does not happen at run time and makes no cycle

A computed name (``import_module(place)``, the name tables of lazy packages) is not seen.
"""

from __future__ import annotations

import ast
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class Import:
    """One import of one module.

    Attributes:
        importer: the importing module.
        imported: a module of the tree, or the dotted name of a module outside it.
        place: file and line of the statement, relative to the root of the tree.
        statement: its text.
        in_function: True if it runs when a function is called.
        for_types: True under ``if TYPE_CHECKING``.
    """

    importer: str
    imported: str
    place: str
    statement: str
    in_function: bool = False
    for_types: bool = False

    def __str__(self) -> str:
        return f"{self.place}: {self.statement}{'  (in a function)' if self.in_function else ''}"


class Statement(NamedTuple):
    """One import statement: ``names`` of ``module`` (none for ``import module``), ``level`` dots in front."""

    node: ast.AST
    module: str
    names: tuple[str, ...]
    level: int
    in_function: bool
    for_types: bool


@functools.cache  # several tests read all modules
def import_statements(source: str) -> list[Statement]:
    """Every import of a module, also inside functions, in the order of its lines."""
    skipped = () if "import_module" in source or "__import__" in source else ast.expr  # most of a tree is expressions
    statements, waiting = [], [(ast.parse(source), False, False)]
    while waiting:
        node, *where = waiting.pop()
        in_function, for_types = where
        if isinstance(node, ast.Import):
            statements += [Statement(node, alias.name, (), 0, *where) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            statements.append(Statement(node, node.module or "", names, node.level, *where))
        elif isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING":
            waiting += [(each, in_function, True) for each in node.body]
            waiting += [(each, *where) for each in node.orelse]
        else:
            if isinstance(node, ast.Call) and (name := _imported_by_call(node)):
                statements.append(Statement(node, name.lstrip("."), (), len(name) - len(name.lstrip(".")), *where))
            in_function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            waiting += [
                (each, in_function, for_types) for each in ast.iter_child_nodes(node) if not isinstance(each, skipped)
            ]
    return sorted(statements, key=lambda statement: (statement.node.lineno, statement.node.col_offset))


def _imported_by_call(node: ast.Call) -> str | None:
    """The literal name in ``import_module("a.b")`` or ``__import__("a.b")``."""
    if _name(node.func) in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
        return node.args[0].value
    return None


def _name(node: ast.expr) -> str:
    """The last part of a dotted name; "" for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@dataclass(frozen=True)
class Sources:
    """The modules of one package, parsed when their imports are first requested.

    Attributes:
        root: the parent folder of the package.
        package: its name.
        files: the file of each module, by dotted name.
    """

    root: Path
    package: str
    files: Mapping[str, Path] = field(init=False)
    _imports: dict[str, list[Import]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        files = {}
        for path in sorted((self.root / self.package).rglob("*.py")):
            parts = path.relative_to(self.root).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        object.__setattr__(self, "files", files)

    def imports(self, module: str) -> list[Import]:
        """The imports of a module; [] for a module outside the package."""
        if module not in self._imports:
            self._imports[module] = list(self._parse(module)) if module in self.files else []
        return self._imports[module]

    def _parse(self, module: str) -> Iterator[Import]:
        path = self.files[module]
        for statement in import_statements(path.read_text(encoding="utf-8")):
            base = statement.module
            if statement.level:
                up = module.split(".")[: None if path.name == "__init__.py" else -1]
                base = ".".join([*up[: len(up) - statement.level + 1], *([base] if base else [])])
            targets = {
                full if (full := f"{base}.{name}") in self.files else self._known(base) for name in statement.names
            } or {self._known(base)}
            targets |= {
                parent
                for target in targets
                for parent in _parents(target)
                if parent in self.files and not f"{module}.".startswith(f"{parent}.")
            }
            place = f"{path.relative_to(self.root).as_posix()}:{statement.node.lineno}"
            for target in sorted(targets):
                yield Import(
                    module, target, place, ast.unparse(statement.node), statement.in_function, statement.for_types
                )

    def _known(self, name: str) -> str:
        """The longest prefix of a dotted name that is a module of the package; the name itself if none is."""
        return next((each for each in (name, *_parents(name)) if each in self.files), name)


def _parents(name: str) -> list[str]:
    """The parent packages of a module, innermost first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def import_cycles(sources: Sources) -> list[str]:
    """One message per set of modules that import each other at run time, with its shortest cycle."""

    def at_run_time(module: str) -> list[Import]:
        return [each for each in sources.imports(module) if not each.for_types]

    edges = {module: {each.imported for each in at_run_time(module)} for module in sources.files}
    reached = {module: _reached(module, edges) for module in edges}
    messages, reported = [], set()
    for module in sorted(edges):
        component = {other for other in reached[module] if other in reached and module in reached[other]}
        if not component or module in reported:
            continue
        reported |= component
        cycle = min((_shortest_path([start], at_run_time, start.__eq__) for start in sorted(component)), key=len)
        messages.append(
            f"{len(component)} modules import each other: {', '.join(sorted(component))}; the shortest "
            "cycle is\n" + "\n".join(f"    {each}" for each in cycle)
        )
    return messages


def _reached(start: str, edges: Mapping[str, Iterable[str]]) -> set[str]:
    """Every module that ``start`` imports, directly or indirectly; ``start`` itself only through a cycle."""
    reached, waiting = set(), [start]
    while waiting:
        new = [each for each in edges.get(waiting.pop(), ()) if each not in reached]
        reached.update(new)
        waiting += new
    return reached


def _shortest_path(
    starts: Sequence[str], imports: Callable[[str], Iterable[Import]], is_end: Callable[[str], bool]
) -> list[Import]:
    """The fewest imports from one of ``starts`` to a module that is an end; [] if none is reached."""
    before: dict[str, Import] = {}
    waiting = deque(starts)
    while waiting:
        for each in imports(waiting.popleft()):
            if is_end(each.imported):
                path = [each]
                while path[0].importer not in starts:
                    path.insert(0, before[path[0].importer])
                return path
            if each.imported not in before and each.imported not in starts:
                before[each.imported] = each
                waiting.append(each.imported)
    return []


def ways_to(forbidden: str, sources: Sources, folder: str) -> list[str]:
    """Return one message per module of a sub-package that imports a forbidden package, directly or indirectly.

    Imports for types count too.

    Args:
        forbidden: top-level name of the forbidden package.
        sources: the package whose imports are followed; those inside other packages are not.
        folder: dotted name of the sub-package to check, at any depth.
    """
    messages = []
    for module in sorted(each for each in sources.files if f"{each}.".startswith(f"{folder}.")):
        path = _shortest_path(
            [module, *_parents(module)], sources.imports, lambda name: name.split(".")[0] == forbidden
        )
        if path:
            messages.append(f"{module} imports {path[-1].imported}:\n" + "\n".join(f"    {each}" for each in path))
    return messages
