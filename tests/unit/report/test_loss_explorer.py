"""The explorer: its figure follows its controls, without a browser."""

import pytest

from workbench.report import style
from workbench.report.loss_curves import loss_curves
from workbench.report.loss_explorer import CURVED, LossExplorer, draw, takes_bounds, with_bounds
from workbench.specs.losses import PRESETS, LossSpec


def picture(specs, **how):
    text = style.svg_text(loss_curves(specs, **how))
    return text[text.index("<svg") :]


def test_it_begins_with_the_losses_and_bounds_that_it_is_given():
    explorer = LossExplorer(("dapo", "cispo"), clip_low=0.1, clip_high=0.3)
    dapo = LossSpec(name="dapo", surrogate={"clip_low": 0.1, "clip_high": 0.3})
    assert explorer.drawing.value == picture({"dapo": dapo, "cispo": LossSpec(name="cispo")})
    assert explorer.children[1] is explorer.drawing


@pytest.mark.parametrize(
    ("control", "value", "expected"),
    [
        ("low", 0.5, {"surrogate": {"clip_low": 0.5, "clip_high": 0.2}}),
        ("high", 0.5, {"surrogate": {"clip_low": 0.2, "clip_high": 0.5}}),
    ],
)
def test_a_slider_moves_a_bound(control, value, expected):
    explorer = LossExplorer(("grpo",))
    getattr(explorer, control).value = value
    assert explorer.drawing.value == picture({"grpo": LossSpec(name="grpo", **expected)})


def test_the_sign_and_the_choice_of_losses():
    explorer = LossExplorer(("grpo",))
    explorer.sign.value = "negative"
    assert explorer.drawing.value == picture({"grpo": LossSpec(name="grpo")}, advantages=(-1.0,))
    explorer.choice.value = ("reinforce",)
    assert explorer.drawing.value == picture({"reinforce": LossSpec(name="reinforce")}, advantages=(-1.0,))
    explorer.choice.value = ()
    assert "Choose a loss" in explorer.drawing.value


def test_bounds_apply_to_losses_that_clip_token_ratios():
    assert with_bounds("dapo", 0.3, 0.4).surrogate.clip_high == 0.4
    for name in ("gspo", "gmpo", "cispo", "cispo_absolute", "reinforce"):
        assert not takes_bounds(LossSpec(name=name))
        assert with_bounds(name, 0.3, 0.4) == LossSpec(name=name)


def test_every_loss_with_a_curve_can_be_chosen():
    assert set(PRESETS) - set(CURVED) == {"dpo"}
    assert draw(("grpo",), clip_low=0.2, clip_high=0.2, advantage="positive").startswith("<svg")
