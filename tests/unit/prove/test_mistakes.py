"""Mistakes that were made are refuted by the invariant that they are about; losses that are right never."""

import pytest

from tests.helpers.trainer_losses import MISTAKES, RIGHT, clipped
from workbench.prove import INVARIANTS, prove

SAMPLE = (
    "mean of micro-batch means",
    "gspo without adjoint",
    "replicated and sliced",
    "one token at least",
    "no backward",
    "averaged over stages",
)
PLAIN_LAWS = [name for name in INVARIANTS if name != "together"]


def refuted(name, invariants, **settings):
    mistake = MISTAKES[name]
    proof = prove(mistake.loss, engine=mistake.engine, invariants=invariants, **settings)
    invariant = proof[mistake.invariant]
    assert not proof.ok
    assert invariant.verdict == "broken", proof
    assert invariant.differing == mistake.differing, proof
    assert (invariant.factor_name or None) == mistake.factor, proof
    if mistake.factor is None:
        assert invariant.factor is None, proof
    return proof


@pytest.mark.parametrize("name", SAMPLE)
def test_a_mistake_is_refuted_with_its_factor(name):
    proof = refuted(name, [MISTAKES[name].invariant], rounds=2, budget_s=60)
    example = proof[MISTAKES[name].invariant].counterexample
    assert len(example.documents) <= 3
    assert example.plain != example.changed


def test_a_factor_matches_its_name():
    half = refuted("cp left out", ["cp_degree"], rounds=1, budget_s=60)["cp_degree"]
    assert half.factor == pytest.approx(0.5, rel=1e-9)
    assert half.counterexample.changed.startswith("cp=2")


@pytest.mark.parametrize("name", ["gspo", "replicated over cp"])
def test_a_right_loss_is_not_refuted(name):
    right = RIGHT[name]
    proof = prove(right.loss, engine=right.engine, rounds=1, budget_s=60)
    assert proof.ok, proof
    assert set(proof.kept) == set(INVARIANTS)


def dp_plus_cp(batch, outputs, totals):
    """dp ranks right alone, and cp ranks alone: 3 where both are 2."""
    return clipped(batch, outputs).sum() / totals.tokens * (totals.dp + totals.cp - 1)


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_bug_of_two_axes_is_refuted_in_any_number_of_rounds(rounds, unshrunk):
    proof = prove(dp_plus_cp, engine="mean", invariants=["dp_split", "together"], rounds=rounds, budget_s=60)
    assert proof.broken == ("together",), proof
    assert proof["together"].factor == pytest.approx(3 / 4, rel=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_bug_breaks_exactly_its_known_invariants(name):
    proof = refuted(name, PLAIN_LAWS, rounds=3, budget_s=600)
    assert set(proof.broken) == MISTAKES[name].breaks, proof
    assert not proof.untried


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loss_is_refuted_by_no_seed(name):
    right = RIGHT[name]
    for seed in range(20):
        proof = prove(right.loss, engine=right.engine, seed=seed, rounds=3, budget_s=600)
        assert proof.ok, proof
