"""Curves of losses: the lines are the numbers of `ratio_curves`, and the bounds stand where the loss clips."""

import math

import numpy as np
import pytest
import torch

from workbench.errors import SpecError
from workbench.losses import ratio_curves
from workbench.report import style
from workbench.report.loss_curves import (
    CURVED,
    LossExplorer,
    bounds_of,
    draw,
    loss_curves,
    name_specs,
    takes_bounds,
    with_bounds,
)
from workbench.report.style import line_styles
from workbench.specs.losses import PRESETS, LossSpec

DAPO = LossSpec(name="dapo")


def lines(axes, label):
    return next(line for line in axes.lines if line.get_label() == label)


def verticals(axes):
    return sorted(float(line.get_xdata()[0]) for line in axes.lines if line.get_gid())


@pytest.mark.parametrize("advantage", [2.0, -0.5])
@pytest.mark.parametrize("name", ["dapo", "gspo", "cispo", "kl_cov"])
def test_lines_are_loss_less_its_value_at_1_and_coefficient(name, advantage):
    spec = LossSpec(name=name, kl={"coefficient": 0.1})
    left, right = loss_curves(spec, advantages=(advantage,)).axes
    ratios_T = torch.from_numpy(np.asarray(lines(left, name).get_xdata()))
    probability = 0.5 / float(ratios_T.max())
    loss_T, coefficient_T = ratio_curves(spec, ratios_T, advantage, anchor_probability=probability)
    at_one = ratio_curves(spec, torch.ones(1), advantage, anchor_probability=probability)[0]
    np.testing.assert_allclose(lines(left, name).get_ydata(), loss_T - at_one, rtol=0, atol=1e-12)
    np.testing.assert_allclose(lines(right, name).get_ydata(), coefficient_T, rtol=0, atol=1e-12)
    assert 0.0 in lines(left, name).get_ydata()


def test_a_row_for_each_advantage_and_a_line_for_each_loss():
    figure = loss_curves([DAPO, LossSpec(name="cispo"), LossSpec(name="reinforce")])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["advantage 1.0", " ", "advantage −1.0", " "]
    for axes in figure.axes:
        assert [line.get_label() for line in axes.lines if not line.get_label().startswith("_")] == [
            "dapo",
            "cispo",
            "reinforce",
        ]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["dapo", "cispo", "reinforce"]


def test_clip_bounds_are_marked_where_the_gradient_ends():
    figure = loss_curves([DAPO, LossSpec(name="dual_clip")])
    for axes in figure.axes[:2]:
        assert verticals(axes) == pytest.approx([0.8, 0.8, 1.2, 1.28])
    for axes in figure.axes[2:]:
        assert verticals(axes) == pytest.approx([0.8, 0.8, 1.2, 1.28, 3.0])


def test_a_cut_is_drawn_as_one_and_not_as_a_slope_between_two_points():
    line = lines(loss_curves(DAPO, ratios=(0.11, 3.37)).axes[1], "dapo")
    behind = int(np.argmax(np.asarray(line.get_ydata()) == 0.0))
    assert line.get_ydata()[behind - 1] == pytest.approx(-1.28)
    assert line.get_xdata()[behind] - line.get_xdata()[behind - 1] < 1e-6


@pytest.mark.parametrize(
    ("settings", "advantage", "expected"),
    [
        ({"name": "dapo"}, 1.0, [0.8, 1.28]),
        ({"name": "dual_clip"}, -1.0, [0.8, 1.2, 3.0]),
        ({"name": "cispo"}, 1.0, [5.0]),
        ({"name": "cispo_absolute"}, 1.0, [5.0]),
        ({"name": "gmpo"}, 1.0, [math.exp(-0.4), math.exp(0.4)]),
        ({"name": "gspo"}, 1.0, [0.9997, 1.0004]),
        ({"name": "reinforce"}, 1.0, []),
        ({"name": "dppo_tv"}, 1.0, []),
    ],
)
def test_bounds_of_losses(settings, advantage, expected):
    assert bounds_of(LossSpec(**settings), advantage) == pytest.approx(expected)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "dpo"])
def test_every_preset_has_finite_curves_in_its_own_range(name):
    figure = loss_curves(LossSpec(name=name), advantages=(1.0,))
    assert all(np.isfinite(lines(axes, name).get_ydata()).all() for axes in figure.axes)
    assert all(np.isfinite([*axes.get_xlim(), *axes.get_ylim()]).all() for axes in figure.axes)


def test_every_preset_can_be_drawn():
    text = style.svg_text(loss_curves(CURVED, advantages=(1.0,)))
    assert text.startswith("<?xml")
    assert all(f">{name}</text>" in text for name in CURVED)


def test_the_same_losses_give_the_same_bytes():
    assert style.svg_text(loss_curves(DAPO)) == style.svg_text(loss_curves(DAPO))


def test_names_have_the_differences_of_equal_presets():
    specs = [
        LossSpec(name="ppo"),
        LossSpec(name="ppo", surrogate={"clip_high": 0.3}, kl={"coefficient": 0.1}),
        LossSpec(name="gspo"),
        LossSpec(name="ppo"),
    ]
    assert list(name_specs(specs)) == ["ppo", "ppo clip_high=0.3 kl.coefficient=0.1", "gspo", "ppo (2)"]
    assert list(name_specs(DAPO)) == ["dapo"]
    assert list(name_specs({"mine": DAPO})) == ["mine"]


def test_no_two_of_many_lines_look_the_same():
    looks = [tuple(map(repr, look.values())) for look in line_styles([str(i) for i in range(10)]).values()]
    assert len(set(looks)) == 10


def test_the_range_can_be_set():
    axes = loss_curves(DAPO, ratios=(0.5, 1.1)).axes[0]
    assert axes.get_xlim() == (0.5, 1.1)
    assert verticals(axes) == pytest.approx([0.8])


@pytest.mark.parametrize("how", [{"specs": []}, {"advantages": ()}, {"ratios": (1.0, 2.0)}, {"ratios": (0.0, 2.0)}])
def test_a_loss_that_cannot_be_drawn_is_refused(how):
    with pytest.raises(SpecError, match="at least one of each, and a range of ratios above 0 with 1 inside"):
        loss_curves(**({"specs": DAPO} | how))


def picture(specs, **how):
    text = style.svg_text(loss_curves(specs, **how))
    return text[text.index("<svg") :]


def test_it_begins_with_the_losses_and_bounds_that_it_is_given():
    explorer = LossExplorer(("dapo", "cispo"), clip_low=0.1, clip_high=0.3)
    dapo = LossSpec(name="dapo", surrogate={"clip_low": 0.1, "clip_high": 0.3})
    assert explorer.drawing.value == picture({"dapo": dapo, "cispo": LossSpec(name="cispo")})
    assert explorer.children[1] is explorer.drawing


def test_a_slider_moves_a_bound():
    explorer = LossExplorer(("grpo",))
    explorer.low.value = 0.5
    assert explorer.drawing.value == picture({"grpo": LossSpec(name="grpo", surrogate={"clip_low": 0.5})})
    explorer.high.value = 0.6
    both = {"clip_low": 0.5, "clip_high": 0.6}
    assert explorer.drawing.value == picture({"grpo": LossSpec(name="grpo", surrogate=both)})


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
