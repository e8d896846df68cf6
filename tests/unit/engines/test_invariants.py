import pytest

from tests.helpers.toy_engine import MISTAKES, ToyEngine
from workbench.engines.case import EngineStep
from workbench.engines.invariants import INVARIANTS, compared
from workbench.engines.proof import prove_engine


def test_a_right_engine_keeps_every_invariant():
    proof = prove_engine(ToyEngine())
    assert proof.ok, str(proof)
    assert {result.verdict for result in proof.results} == {"holds"}
    assert [result.name for result in proof.results] == list(INVARIANTS)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_breaks_its_invariants_alone(mistake):
    assert set(prove_engine(ToyEngine(mistake), shrink=False).broken) == MISTAKES[mistake]


def test_every_invariant_is_broken_by_a_mistake():
    assert set().union(*MISTAKES.values()) == set(INVARIANTS)


def test_the_factor_of_an_update_is_measured():
    result = prove_engine(ToyEngine("sum over ranks"), invariants=["ranks"])["ranks"]
    assert result.factor == pytest.approx(2)
    assert result.counterexample.description == "the update is multiplied by 2"


def test_reported_numbers_are_compared_where_updates_agree():
    import torch

    weights = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
    _, text, factor = compared(EngineStep(*weights, (1.0,), (2.0,)), EngineStep(*weights, (1.5,), (2.0,)))
    assert text == "the update is the same, the reported loss is 1 and 1.5"
    assert factor is None
