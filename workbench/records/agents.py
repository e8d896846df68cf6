"""Files that each agent of a job writes under ``ranks``: one agent a node, and a file of its own for each.

The first node's agent writes NAME.json, that of node 2 NAME.node2.json. Readers take all of them together.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from workbench.atomic import from_json


def of_agent(name: str, node: int) -> str:
    """Name of the file of a node's agent.

    Example:
        >>> of_agent("ranks/waiting.json", 0), of_agent("ranks/waiting.json", 2)
        ('ranks/waiting.json', 'ranks/waiting.node2.json')
    """
    return f"{name.removesuffix('.json')}.node{node}.json" if node else name


def files_of_agents(run: Path, name: str) -> list[Path]:
    """Files of that name of all agents of a run, in the order in which they were last written.

    The times are those of one file system, whatever the clocks of the nodes say.
    """
    pattern = name.removesuffix(".json") + "*.json"
    times: list[tuple[int, Path]] = []
    for path in sorted(run.glob(pattern)):
        with contextlib.suppress(OSError):
            times.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(times)]


def read_of_agents(run: Path, name: str) -> list[dict[str, Any]]:
    """Contents of these files; what cannot be read, or is no mapping, is left out."""
    contents = []
    for path in files_of_agents(run, name):
        with contextlib.suppress(OSError, ValueError, TypeError):
            contents.append(dict(from_json(path.read_bytes())))
    return contents
