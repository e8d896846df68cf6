"""Numbers of a step under its settings as they are."""

import pytest

import workbench as wb
from tests.helpers.dumped_step import dump


def test_recorded_and_recomputed_numbers_lie_within_their_bounds():
    numbers = wb.check_step(dump()).numbers
    assert {"coefficients", "losses/total", "advantages"} <= {*numbers.differing}
    assert not any(numbers.differing.values())
    far = (numbers.recorded["coefficients"] - numbers.expected["coefficients"]).abs()
    assert bool((far <= numbers.bounds["coefficients"]).all())
    assert numbers.expected["losses/total"] == pytest.approx(numbers.recorded["losses/total"], rel=1e-9)


def test_what_is_missing_is_named_by_stage():
    numbers = wb.check_step(dump().with_tokens(policy_logprobs=None, coefficients=None)).numbers
    assert numbers.missing["loss"].startswith("no policy_logprobs")
    assert numbers.expected["counts/documents"] == 8
