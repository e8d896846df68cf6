"""slime's options name an estimator here; those without a counterpart are refused."""

import pytest

from workbench.errors import SpecError
from workbench.systems.slime.advantages import estimator_of


def test_rewards_are_normalised_in_their_group():
    same = {"epsilon": 1e-6, "masked_in_baseline": True}
    assert estimator_of({}) == ("grpo", {"scale": "std", **same})
    assert estimator_of({"grpo_std_normalization": False}) == ("grpo", {"scale": "none", **same})


@pytest.mark.parametrize("options", [{"rewards_normalization": False}, {"normalize_advantages": True}, {"lambd": 1.0}])
def test_what_has_no_counterpart_is_refused(options):
    with pytest.raises(SpecError, match=next(iter(options))):
        estimator_of(options)
