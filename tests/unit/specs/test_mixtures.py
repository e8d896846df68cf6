"""Settings of mixtures of experts: on as soon as one is given; limits of experts are refused by name."""

import pytest

from workbench.errors import SpecError
from workbench.specs.mixtures import PredictionSpec, RoutingSpec
from workbench.specs.reading import parse_spec


def test_routers_are_on_as_soon_as_a_setting_differs():
    assert not RoutingSpec().on
    assert RoutingSpec(z=0.1).on
    assert not RoutingSpec(z=0.1).replays
    assert RoutingSpec(replay="old").replays


@pytest.mark.parametrize("name", ["capacity_factor", "expert_capacity"])
def test_a_capacity_is_refused_by_name(name):
    with pytest.raises(SpecError, match=f"{name} is not supported: with a capacity"):
        parse_spec(RoutingSpec, {name: 1.25}, where="here")


def test_layers_that_predict_are_on_with_a_depth():
    assert not PredictionSpec().on
    assert PredictionSpec(depths=1).on
