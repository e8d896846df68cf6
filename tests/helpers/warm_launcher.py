"""The process of a detached launcher, but its fork server starts from WARM_PYTHON (`tests.helpers.warm.python`).

The launcher itself cannot be a fork: it is known by its pid.
"""

from __future__ import annotations

import os
import runpy
import sys

from tests.helpers.stand_in import stand_in
from workbench.launch import processes

if __name__ == "__main__":
    processes.sys = stand_in(sys, executable=os.environ["WARM_PYTHON"])
    runpy.run_module("workbench.cli.launcher", run_name="__main__")
