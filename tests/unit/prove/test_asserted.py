"""A proof as one line of a test suite."""

import pytest

from tests.helpers.trainer_losses import cp_left_out, token_mean_undoing_the_average
from workbench.errors import VerdictError
from workbench.prove.asserted import assert_proved

CHEAP = {"engine": "mean", "rounds": 1, "budget_s": 60}


def test_a_loss_that_keeps_its_laws_passes_with_its_proof():
    proof = assert_proved(token_mean_undoing_the_average, invariants=["cp_degree", "tp"], **CHEAP)
    assert proof.kept == ("cp_degree", "tp")


def test_one_that_does_not_fails_with_the_table_and_the_counterexample():
    with pytest.raises(AssertionError) as failure:
        assert_proved(cp_left_out, invariants=["cp_degree"], **CHEAP)
    words = str(failure.value)
    assert isinstance(failure.value, VerdictError)
    assert words.startswith("prove cp_left_out (engine mean)\n  found: cp_left_out (engine mean): breaks cp_degree")
    assert "cp_degree  broken" in words
    assert "(1 / cp)" in words
    assert "document 0: " in words


def test_a_law_that_was_not_tried_is_no_pass():
    with pytest.raises(VerdictError, match="1 not tried"):
        assert_proved(token_mean_undoing_the_average, invariants=["cp_degree"], engine="mean", budget_s=0)
