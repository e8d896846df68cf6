"""SkyRL's estimators by its names, each with what the workbench calls it."""

import pytest

from workbench.errors import SpecError
from workbench.systems.skyrl.advantages import estimator_of


def test_estimators():
    assert estimator_of({})[1] == {
        "scale": "std",
        "epsilon": 1e-6,
        "singleton": "reward",
        "masked_in_baseline": True,
    }
    assert estimator_of({"advantage_estimator": "rloo"})[0] == "rloo"
    with pytest.raises(SpecError, match="grpo and rloo are recomputed"):
        estimator_of({"advantage_estimator": "gae"})
    with pytest.raises(SpecError, match="did you mean"):
        estimator_of({"advantage_estimatr": "gae"})
