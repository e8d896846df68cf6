"""OpenRLHF's estimators by its names, each with what the workbench calls it."""

import pytest

from workbench.errors import SpecError
from workbench.systems.openrlhf.advantages import estimator_of


def test_estimators():
    assert estimator_of({"estimator": "rloo"})[0] == "rloo"
    assert estimator_of({"estimator": "dr_grpo"})[1]["scale"] == "none"
    with pytest.raises(SpecError, match="rloo, group_norm, dr_grpo are recomputed"):
        estimator_of({})
