"""Programs that a test puts into a search path of its own."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def write_program(path: Path, source: str, *options: str) -> None:
    """Make an executable file of Python source; by way of a shell, as a ``#!`` line takes no path with a space."""
    command = shlex.join([sys.executable, *options])
    path.write_text(f"#!/bin/sh\n'''exec' {command} \"$0\" \"$@\"\n' '''\n{source}")
    path.chmod(0o755)
