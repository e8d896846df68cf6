"""Kinds of files with rollouts, checked before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path

from workbench.errors import SpecError

SUFFIXES = (".jsonl", ".parquet", ".npz")
"""Suffixes of the files that `workbench.rollouts.importers` reads."""


def check_importable(source: Path) -> None:
    """Raise unless a path is a file of a kind that can be imported.

    Raises:
        SpecError: no such file, a folder, or another suffix.
    """
    if source.is_file() and source.suffix in SUFFIXES:
        return
    parts = sorted(path.name for path in source.iterdir() if path.suffix in SUFFIXES)[:3] if source.is_dir() else []
    if parts:
        found, fix = f"a folder with {', '.join(parts)}", "import its files one by one, or join them to one file"
    elif source.is_dir():
        found, fix = "a folder", "a rollout dataset needs no import"
    elif source.suffix not in SUFFIXES:
        found, fix = f"suffix {source.suffix!r}", "rename the file to match its content, or write one of these kinds"
    else:
        found, fix = "no such file", "check the path"
    raise SpecError(f"import {source}", found=found, rule=f"a file {', '.join(SUFFIXES)}", fix=fix)
