"""Group advantages against numbers worked out by hand."""

import pytest
import torch

from workbench.errors import ShapeError, SpecError
from workbench.rollouts.advantages import group_advantages

REWARDS = torch.tensor([1.0, 0.0, 0.0, 5.0, 0.25, 0.75], dtype=torch.float64)
GROUPS = torch.tensor([7, 7, 7, 2, 4, 4])
# Group 7: mean 1/3, squared deviations 4/9 + 1/9 + 1/9 = 2/3. Group 4: mean 1/2, squared deviations 1/8.


@pytest.mark.parametrize(("ddof", "std_7", "std_4"), [(1, (1 / 3) ** 0.5, 0.125**0.5),
                                                      (0, (2 / 9) ** 0.5, 0.0625**0.5)])
def test_std_scale_is_grpo(ddof, std_7, std_4):
    expected = [2 / 3 / (std_7 + 1e-4), -1 / 3 / (std_7 + 1e-4), -1 / 3 / (std_7 + 1e-4), 0.0,
                -0.25 / (std_4 + 1e-4), 0.25 / (std_4 + 1e-4)]
    assert group_advantages(REWARDS, GROUPS, ddof=ddof).tolist() == pytest.approx(expected, rel=1e-14)


def test_no_scale_is_dr_grpo():
    expected = [2 / 3, -1 / 3, -1 / 3, 0.0, -0.25, 0.25]
    assert group_advantages(REWARDS, GROUPS, scale="none").tolist() == pytest.approx(expected, rel=1e-14)


def test_epsilon_is_added_to_the_deviation():
    expected = 2 / 3 / ((1 / 3) ** 0.5 + 0.5)
    assert float(group_advantages(REWARDS, GROUPS, epsilon=0.5)[0]) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("ddof", [0, 1, 2])
def test_a_group_of_one_and_a_group_of_equals_say_nothing(scale, ddof):
    rewards = torch.tensor([0.7, 0.1, 0.1, 0.1])
    advantages = group_advantages(rewards, torch.tensor([0, 1, 1, 1]), scale=scale, ddof=ddof, epsilon=0.0)
    assert advantages.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_a_group_too_small_for_its_deviation_says_nothing():
    assert group_advantages(torch.tensor([0.0, 1.0]), torch.tensor([3, 3]), ddof=2).tolist() == [0.0, 0.0]
    assert group_advantages(torch.tensor([0.0, 1.0]), torch.tensor([3, 3]), ddof=2,
                            scale="none").tolist() == [-0.5, 0.5]


def test_equal_rewards_give_exact_zeros_although_their_mean_is_rounded():
    rewards = torch.full((3,), 0.1, dtype=torch.float64)
    assert float(rewards.sum() / 3) != 0.1
    assert group_advantages(rewards, torch.zeros(3).long(), epsilon=1e-16).tolist() == [0.0, 0.0, 0.0]


def test_groups_need_not_lie_together_nor_count_from_zero():
    order = torch.tensor([4, 0, 3, 5, 1, 2])
    shuffled = group_advantages(REWARDS[order], GROUPS[order])
    assert shuffled.tolist() == pytest.approx(group_advantages(REWARDS, GROUPS)[order].tolist(), rel=1e-14)


def test_dtype_is_the_rewards():
    assert group_advantages(REWARDS.float(), GROUPS).dtype == torch.float32


def test_no_documents():
    assert group_advantages(torch.zeros(0), torch.zeros(0).long()).tolist() == []


@pytest.mark.parametrize("settings", [{"scale": "batch"}, {"ddof": -1}, {"epsilon": -1e-4}])
def test_unknown_settings_are_refused(settings):
    with pytest.raises(SpecError, match='scale is "std" or "none"'):
        group_advantages(REWARDS, GROUPS, **settings)


def test_bad_rewards_are_refused():
    with pytest.raises(ShapeError, match=r"not finite at \[1\]"):
        group_advantages(torch.tensor([0.0, float("nan")]), torch.tensor([0, 0]))
    with pytest.raises(ShapeError, match="group_ids_N has N=5"):
        group_advantages(REWARDS, GROUPS[:5])
