"""Historical mistakes in dumps of a plain trainer are named first, and its right dumps are not accused: tuned cases."""

import pytest

from experiments.checked_steps.blind.score import is_right
from experiments.checked_steps.tuned.cases import FAULTS, clean, dump_of
from experiments.checked_steps.tuned.trainer import write
from workbench.check import check_step

SAMPLE = ("rank_means", "kl_no_gradient", "compacted", "advantages_swapped", "shard_edges")
"""Cases of the default suite: one for each module of wrong readings."""


@pytest.mark.parametrize(
    "fault", [pytest.param(f, id=f.id, marks=() if f.id in SAMPLE else pytest.mark.slow) for f in FAULTS]
)
def test_a_historical_mistake_is_named_first(fault, tmp_path):
    write(dump_of(fault), tmp_path / "dump")
    check = check_step(tmp_path / "dump")
    first = {"kind": check.causes[0].kind, "description": check.causes[0].description, "stage": check.causes[0].stage}
    assert is_right(first, [{"kind": kind, "words": words} for kind, words in fault.right]), str(check)


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=() if n in (28, 44) else pytest.mark.slow) for n in range(120)]
)  # in these two bfloat16 flips clips, and terms cancel
def test_a_right_dump_is_not_accused(number, tmp_path):
    write(clean(number), tmp_path / "dump")
    check = check_step(tmp_path / "dump")
    assert check.verdict in ("agrees", "vacuous"), str(check)
