import pytest
from pydantic import Field

from workbench.errors import SpecError
from workbench.specs.losses import LossSpec
from workbench.systems.back import checked_back, differences, unsupported
from workbench.systems.registry import Settings, Translation


class Clip(Settings):
    clip: float = Field(0.2, ge=0)


def translate(settings):
    return Translation(LossSpec(surrogate={"clip_low": settings.clip, "clip_high": settings.clip}))


def back(spec, **settings):
    return checked_back("Nobody", spec, Clip, translate, settings)


def test_settings_that_are_the_loss_again_are_given_whatever_its_name():
    assert back(LossSpec(name="ppo", surrogate={"clip_low": 0.1, "clip_high": 0.1}), clip=0.1) == {"clip": 0.1}


def test_what_would_differ_is_said_with_both_values():
    with pytest.raises(SpecError, match=r"surrogate\.clip_high = 0\.28 \(Nobody: 0\.2\)") as caught:
        back(LossSpec(name="dapo"), clip=0.2)
    assert "Nobody has no option for this" in str(caught.value)


@pytest.mark.parametrize("scaling", [{"counts": "micro_batch"}, {"engine_divides": ["dp"]}])
def test_another_way_to_cut_a_step_is_another_loss(scaling):
    with pytest.raises(SpecError, match=r"scaling\."):
        back(LossSpec(scaling=scaling), clip=0.2)


def test_factors_that_cancel_are_none():
    spec = LossSpec(scaling={"multiplied_by": ["dp"], "engine_divides": ["dp"]})
    assert back(spec, clip=0.2) == {"clip": 0.2}


def test_a_penalty_in_the_reward_is_not_dropped():
    spec = LossSpec(surrogate={"clip_low": 0.2, "clip_high": 0.2}, kl={"coefficient": 0.1, "placement": "reward"})
    with pytest.raises(SpecError, match=r"kl\.coefficient = 0\.1 \(Nobody: 0\.0\)"):
        back(spec, clip=0.2)


def test_differences_are_listed_by_path_and_names_of_presets_are_none():
    spec = LossSpec(name="vapo", kl={"coefficient": 0.1})
    found = {path for path, _, _ in differences(spec, LossSpec(name="dapo"))}
    assert found == {"kl.coefficient", "positive_nll_coefficient"}
    assert (
        differences(LossSpec(correction={"kind": "tis"}), LossSpec(correction={"ratio": "token", "ratio_high": 2.0}))
        == []
    )


def test_a_loss_that_a_system_has_not_is_refused_with_the_rule():
    error = unsupported("Nobody", "the surrogate 'sapo'", "it clips")
    assert isinstance(error, SpecError)
    assert "options of Nobody for the surrogate 'sapo'" in str(error)
    assert "it clips" in str(error)
