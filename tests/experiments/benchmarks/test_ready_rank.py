"""Its cost before it joins is that of a real run's rank."""

from __future__ import annotations

import subprocess

from experiments.benchmarks import ready_rank, trivial_rank
from tests.helpers import warm
from workbench.records.provenance import project_root


def test_it_is_the_trivial_rank_with_the_imports_of_a_real_one():
    assert ready_rank.main is trivial_rank.main
    command = "import sys, experiments.benchmarks.{}; print('workbench.policy.model' in sys.modules)"
    texts = [
        subprocess.run(
            [warm.python(), "-c", command.format(name)], capture_output=True, text=True, cwd=project_root()
        ).stdout.strip()
        for name in ("ready_rank", "trivial_rank")
    ]
    assert texts == ["True", "False"]
