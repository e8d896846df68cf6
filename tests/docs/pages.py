"""Markdown pages of the repository: links, anchors and code blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "DECISIONS.md", "tests/README.md")),
    *sorted(
        path
        for path in (ROOT / "docs").rglob("*.md")
        if {"_build", "api"}.isdisjoint(path.relative_to(ROOT / "docs").parts)
    ),
    ROOT / "notebooks/README.md",
    *sorted((ROOT / "workbench").rglob("README.md")),
]
MANUAL = [page for page in PAGES if page.is_relative_to(ROOT / "docs") or page == ROOT / "README.md"]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[(?:[^][]|\[[^]]*\])*\]\(([^()\s]+)\)")


def name_of(page: Path) -> str:
    """Return a page's path from the root, the name of its test."""
    return str(page.relative_to(ROOT))


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks in a language."""
    return [body for kind, body in _FENCE.findall(text) if kind == language]


def links(text: str) -> list[str]:
    """Return the targets of links and pictures, without code."""
    return _LINK.findall(re.sub(r"`[^`\n]*`", "code", _FENCE.sub("", text)))


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as code hosts and MyST write them."""
    titles = re.findall(r"^#{1,6} (.+)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def dead_links(page: Path, text: str) -> Iterator[str]:
    """Yield the relative links of a page that lead nowhere."""
    for link in links(text):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        exists = target.exists() and target.is_relative_to(ROOT)
        if not exists or (anchor and anchor not in anchors(text if target == page else target.read_text())):
            yield link


def commands(text: str) -> list[list[str]]:
    """Return the arguments of each ``workbench`` and ``python -m workbench`` command in code of a page."""
    spans = re.findall(r"`([^`\n]+)`", _FENCE.sub("", text))
    lines = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    found = []
    for line in (*spans, *lines, *"\n".join(blocks(text, "")).splitlines()):
        words = line.partition("  #")[0].removeprefix("$ ").split()
        words = [word for word in words if "=<" not in word]
        for start in (["python", "-m", "workbench"], ["workbench"]):
            if words[: len(start)] == start and len(words) > len(start):
                found.append(words[len(start) :])
    return found
