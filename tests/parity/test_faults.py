"""Each fault turns parity red, with the factor that its description states."""

import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.helpers.ranks import run_ranks
from tests.parity.cases import many_steps
from tests.parity.test_layouts import LAYOUTS, settings
from tests.parity.test_oracle import documents_near, oracle
from workbench.runs.faults import fault_names, load_fault

WRONG_NUMBERS = [name for name in fault_names() if load_fault(name).changes_numbers]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """The oracle's gradients, and those of each fault at cp=2, both orders."""
    documents = documents_near(11)
    cases = {(fault, order): (settings(LAYOUTS[f"cp2_{order}"], faults=[fault]), documents)
             for fault in WRONG_NUMBERS for order in ("contiguous", "zigzag")}
    found = run_ranks(many_steps, 2, tmp_path_factory.mktemp("faults"), list(cases.values()))[0]
    return documents, oracle(documents), dict(zip(cases, found, strict=True))


def test_these_faults_exist():
    assert WRONG_NUMBERS == ["local_denominator", "missing_cp_factor", "shift_after_shard"]
    stalling = ["skipped_collective", "straggler"]  # held by tests/parity/test_hangs.py
    assert sorted([*WRONG_NUMBERS, *stalling]) == fault_names()


@pytest.mark.parametrize("fault", WRONG_NUMBERS)
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_fault_breaks_parity(fault, order, answers):
    _, (_, expected, _), found = answers
    with pytest.raises(AssertionError, match="parameters differ"):
        assert_float64_parity(found[fault, order]["gradients"], expected, context=fault)


def test_missing_cp_factor_halves_every_gradient_and_not_the_loss(answers):
    _, (loss, expected, _), found = answers
    broken = found["missing_cp_factor", "zigzag"]
    assert broken["loss"] == pytest.approx(loss, rel=1e-12)
    doubled = {name: 2 * g for name, g in broken["gradients"].items()}
    assert_float64_parity(doubled, expected, context="twice the faulty gradient")


def test_local_denominator_is_too_big_and_tilted(answers):
    _, (_, expected, _), found = answers
    broken = torch.cat([g.flatten() for g in found["local_denominator", "contiguous"]["gradients"].values()])
    right = torch.cat([g.flatten() for g in expected.values()])
    ratio = float(broken.norm() / right.norm())
    cosine = float(torch.nn.functional.cosine_similarity(broken, right, dim=0))
    assert 1.5 < ratio < 3.5
    assert cosine < 0.9999


@pytest.mark.parametrize(("order", "edges"), [("contiguous", 1), ("zigzag", 2)])
def test_shift_after_shard_loses_or_changes_the_targets_at_shard_edges_only(order, edges, answers):
    documents, _, found = answers
    tokens = torch.tensor([t for d in documents for t in d["tokens"]])
    trained = torch.tensor([m for d in documents for m in d["loss_mask"]]).bool()
    kept = found["shift_after_shard", order]["tokens"]
    wrong = (trained & ~kept["trained"]) | (kept["trained"] & (kept["targets"] != tokens))
    assert 1 <= int(wrong.sum()) <= edges
