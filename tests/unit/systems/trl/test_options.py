"""Options of TRL's whole config that leave the loss as it is: none of them is one that the translation reads."""

from workbench.systems.trl.options import WITHOUT_EFFECT
from workbench.systems.trl.settings import AdvantageSettings, TRLSettings


def test_nothing_that_decides_the_loss_is_set_aside():
    assert not {*WITHOUT_EFFECT} & {*TRLSettings.model_fields}
    assert TRLSettings.without_effect == WITHOUT_EFFECT


def test_each_has_a_reason():
    assert len(WITHOUT_EFFECT) > 100
    assert all(WITHOUT_EFFECT.values())
    of_advantages = {name for name, reason in WITHOUT_EFFECT.items() if "advantages" in reason}
    assert {*AdvantageSettings.model_fields} - {"eps"} <= of_advantages
