"""The process of a detached launcher, but its fork server starts from WARM_PYTHON (`tests.helpers.warm.python`).

The launcher itself cannot be a fork: it is known by its pid. The server of warm programs lets the interpreter run this
program in its place.
"""

from __future__ import annotations

import os
import runpy
import sys
from types import SimpleNamespace

if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 (as the interpreter does for `-m`)
    from workbench.launch import processes

    processes.sys = SimpleNamespace(**vars(sys) | {"executable": os.environ["WARM_PYTHON"]})
    runpy.run_module("workbench.cli.launcher", run_name="__main__")
