"""API pages in Markdown, one per package, from the source: signatures, fields and docstrings of public names.

Nothing is imported, so that a build needs neither torch nor a GPU. Docstrings are Markdown with Google's sections.
"""

from __future__ import annotations

import ast
import inspect
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs/reference/api"

_SECTION = re.compile(r"^([A-Z][a-z]+(?: [a-z]+)?):$")
_INLINE = re.compile(r"^(Formula|Shapes|Units|Backward|Source|Note|Example|Returns|Raises):\s+(?=\S)")
_ITEM = re.compile(r"^(\*{0,2}[\w.]+)(?: \([^)]*\))?: (.*)$")


def write_api_pages() -> None:
    """Write docs/reference/api/: an index, and one page per package."""
    pages: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "workbench").rglob("*.py")):
        if path.stem != "__main__":
            folder = path.relative_to(ROOT / "workbench").parts[0]
            pages.setdefault("workbench" if folder.endswith(".py") else folder, []).append(path)
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    for name, paths in pages.items():
        (PAGES / f"{name}.md").write_text("\n\n".join([f"# {name}", *_readme(name), *map(_module, paths)]) + "\n")
    listed = "\n".join(sorted(pages))
    (PAGES / "index.md").write_text(f"# API\n\n```{{toctree}}\n:maxdepth: 1\n\n{listed}\n```\n")


def _readme(package: str) -> Iterator[str]:
    if (ROOT / "workbench" / package / "README.md").exists():
        yield f"Formulas and rules: [README of the package](../../../workbench/{package}/README.md)."


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    tree = _Qualified(name).visit(ast.parse(path.read_text()))
    body = [f"## {name}", _markdown(ast.get_docstring(tree))]
    body += [_class(name, node) if isinstance(node, ast.ClassDef) else _function(name, node) for node in _public(tree)]
    return "\n\n".join(filter(None, body))


class _Qualified(ast.NodeTransformer):
    """Write names of this package in full in annotations: a bare one may be a class of several modules."""

    def __init__(self, module: str):
        self.module, self.names = module, {}

    def visit_Module(self, node: ast.Module) -> ast.Module:
        for item in ast.walk(node):
            if isinstance(item, ast.ImportFrom) and (item.module or "").startswith("workbench"):
                self.names |= {alias.asname or alias.name: f"{item.module}.{alias.name}" for alias in item.names}
        self.names |= {item.name: f"{self.module}.{item.name}" for item in node.body if isinstance(item, ast.ClassDef)}
        for item in ast.walk(node):
            if isinstance(item, ast.arg | ast.AnnAssign) and item.annotation:
                item.annotation = self.visit(item.annotation)
            if isinstance(item, ast.FunctionDef) and item.returns:
                item.returns = self.visit(item.returns)
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.parse(self.names[node.id], mode="eval").body if node.id in self.names else node


def _public(tree: ast.Module | ast.ClassDef) -> list[ast.ClassDef | ast.FunctionDef]:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    named = {node.name: node for node in tree.body if isinstance(node, kinds)}  # the last of overloads
    return [node for name, node in named.items() if not name.startswith("_")]


def _function(owner: str, node: ast.FunctionDef, *, kind: str = "function") -> str:
    marks = {ast.unparse(mark) for mark in node.decorator_list}
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if marks & {"property", "functools.cached_property", "cached_property"}:
        head = f"{{py:property}} {owner}.{node.name}"
    else:
        arguments = ast.unparse(node.args)
        if kind == "method" and "staticmethod" not in marks:
            arguments = re.sub(r"^(self|cls)(, )?(/, )?", "", arguments)
        head = f"{{py:{kind}}} {owner}.{node.name}({arguments}){returns}"
    return f"`````{head}\n\n{_markdown(ast.get_docstring(node))}\n`````"


def _class(owner: str, node: ast.ClassDef) -> str:
    name = f"{owner}.{node.name}"
    parts = [_markdown(ast.get_docstring(node)), "\n".join(_fields(node))]
    parts += [_function(name, item, kind="method") for item in _public(node) if not isinstance(item, ast.ClassDef)]
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    body = "\n\n".join(filter(None, parts))
    return f"``````{{py:class}} {name}{f'({bases})' if bases else ''}\n\n{body}\n``````"


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Yield the annotated fields of a class, each with the string below it."""
    for item, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name) or item.target.id[0] == "_":
            continue
        documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        text = " ".join(inspect.cleandoc(after.value.value).split()) if documented else ""
        default = f" = {ast.unparse(item.value)}" if item.value else ""
        kind = re.sub(r"\bworkbench\.[\w.]*\.", "", ast.unparse(item.annotation))
        field = f"`` {item.target.id}: {kind}{default} ``"
        yield f"- {field}" + (f": {text}" if text else "")


def _markdown(docstring: str | None) -> str:
    """Convert Google's sections to bold titles and lists; the rest is Markdown already."""
    if docstring is None:
        return ""
    lines, out = docstring.split("\n"), []
    while lines:
        line = lines.pop(0)
        section = _SECTION.match(line)
        if section is None or not lines or not lines[0].startswith("    "):
            inline = _INLINE.match(line)
            out += ["", f"**{inline[1]}**: {line[inline.end() :]}"] if inline else [line]
            continue
        block = []
        while lines and (not lines[0].strip() or lines[0].startswith("    ")):
            block.append(lines.pop(0))
        out += ["", f"**{section[1]}**", "", *_section(inspect.cleandoc("\n".join(block)).split("\n")), ""]
    return "\n".join(out).strip()


def _section(lines: list[str]) -> list[str]:
    if lines[0].startswith(">>>"):
        return ["```pycon", *lines, "```"]
    if not _ITEM.match(lines[0]):
        return lines
    out = []
    for line in lines:
        item = _ITEM.match(line)
        out.append(f"- `{item[1]}`: {item[2]}" if item else f"  {line.strip()}" if line.strip() else "")
    return out
