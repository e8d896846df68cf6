"""The trivial rank reports the time at which it joined and a collective with the others."""

from __future__ import annotations

import os
import subprocess
import time

from tests.helpers import warm
from workbench.records.provenance import project_root


def test_one_rank_alone_is_ready_between_its_start_and_its_end(tmp_path):
    begin_ns = time.time_ns()
    done = subprocess.run(
        [warm.python(), "-m", "experiments.benchmarks.trivial_rank", str(tmp_path), "--project", "."],
        env=os.environ | {"RANK": "0", "WORLD_SIZE": "1"},
        cwd=project_root(),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert begin_ns < int((tmp_path / "ready0").read_text()) < time.time_ns()
