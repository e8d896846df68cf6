"""Advantages of whole completions: manual values, the oracle on adversarial groups, numbers of other systems."""

import itertools
import math
import random

import pytest
import torch

from tests.oracles import advantages as oracle
from workbench.errors import ShapeError, SpecError
from workbench.rollouts.advantages.groups import (
    combine_components,
    gdpo_advantages,
    gpg_advantages,
    group_advantages,
    group_baselines,
    opo_advantages,
    pass_at_k_advantages,
    rloo_advantages,
)

REWARDS = torch.tensor([1.0, 0.0, 0.0, 5.0, 0.25, 0.75], dtype=torch.float64)
GROUPS = torch.tensor([7, 7, 7, 2, 4, 4])
# Group 7: mean 1/3, squared deviations 4/9 + 1/9 + 1/9 = 2/3. Group 4: mean 1/2, squared deviations 1/8.


@pytest.mark.parametrize(
    ("ddof", "std_7", "std_4"), [(1, (1 / 3) ** 0.5, 0.125**0.5), (0, (2 / 9) ** 0.5, 0.0625**0.5)]
)
def test_std_scale_is_grpo(ddof, std_7, std_4):
    expected = [
        2 / 3 / (std_7 + 1e-4),
        -1 / 3 / (std_7 + 1e-4),
        -1 / 3 / (std_7 + 1e-4),
        0.0,
        -0.25 / (std_4 + 1e-4),
        0.25 / (std_4 + 1e-4),
    ]
    assert group_advantages(REWARDS, GROUPS, ddof=ddof).tolist() == pytest.approx(expected, rel=1e-14)


def test_no_scale_is_dr_grpo():
    expected = [2 / 3, -1 / 3, -1 / 3, 0.0, -0.25, 0.25]
    assert group_advantages(REWARDS, GROUPS, scale="none").tolist() == pytest.approx(expected, rel=1e-14)


def test_epsilon_is_added_to_the_deviation():
    expected = 2 / 3 / ((1 / 3) ** 0.5 + 0.5)
    assert float(group_advantages(REWARDS, GROUPS, epsilon=0.5)[0]) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("ddof", [0, 1, 2])
def test_groups_of_one_or_of_equal_rewards_have_advantage_0(scale, ddof):
    rewards = torch.tensor([0.7, 0.1, 0.1, 0.1])
    advantages = group_advantages(rewards, torch.tensor([0, 1, 1, 1]), scale=scale, ddof=ddof, epsilon=0.0)
    assert advantages.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_a_group_too_small_for_its_deviation_has_advantage_0():
    assert group_advantages(torch.tensor([0.0, 1.0]), torch.tensor([3, 3]), ddof=2).tolist() == [0.0, 0.0]
    assert group_advantages(torch.tensor([0.0, 1.0]), torch.tensor([3, 3]), ddof=2, scale="none").tolist() == [
        -0.5,
        0.5,
    ]


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


@pytest.mark.parametrize(
    "settings", [{"scale": "batch"}, {"ddof": -1}, {"epsilon": -1e-4}, {"baseline": "median"}, {"singleton": "nan"}]
)
def test_unknown_settings_are_refused(settings):
    with pytest.raises(SpecError, match="scale is one of std, leave_one_out_std, batch_std, none"):
        group_advantages(REWARDS, GROUPS, **settings)


def test_bad_rewards_are_refused():
    with pytest.raises(ShapeError, match=r"not finite at \[1\]"):
        group_advantages(torch.tensor([0.0, float("nan")]), torch.tensor([0, 0]))
    with pytest.raises(ShapeError, match="group_ids_N has N=5"):
        group_advantages(REWARDS, GROUPS[:5])


# ---- the oracle on nasty groups ----------------------------------------------------------------------------------


def nasty(seed):
    """Completions of unequal groups: large, pairs, singletons, equal rewards, all but one equal, nothing trained."""
    rng = random.Random(seed)
    rewards, groups = [], []
    for number, values in enumerate(
        [
            [rng.gauss(0, 1) for _ in range(7)],
            [0.1] * 3,
            [1.0, 0.0, 0.0, 0.0],
            [rng.random(), rng.random()],
            [0.7],
            [2.5, 2.5],
            [1e6 + rng.random() for _ in range(5)],
            [rng.choice((0.0, 1.0)) for _ in range(6)],
        ]
    ):
        rewards += values
        groups += [10 - number] * len(values)
    order = list(range(len(rewards)))
    rng.shuffle(order)
    rewards, groups = [rewards[i] for i in order], [groups[i] for i in order]
    trained = [rng.random() > 0.25 for _ in rewards]
    lengths = [rng.randint(1, 40) if alive else 0 for alive in trained]
    return rewards, groups, trained, lengths


CASES = list(
    itertools.product(
        ("mean", "leave_one_out", "length_weighted"),
        ("std", "leave_one_out_std", "batch_std", "none"),
        (0, 1, 2),
        ("zero", "reward"),
    )
)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("baseline", "scale", "ddof", "singleton"), CASES)
def test_every_combination_is_the_oracles(baseline, scale, ddof, singleton, masked):
    for seed in range(3):
        rewards, groups, trained, lengths = nasty(seed)
        settings = {"baseline": baseline, "scale": scale, "ddof": ddof, "singleton": singleton, "epsilon": 1e-6}
        lengths = [max(1, length) for length in lengths] if not masked else lengths
        expected = oracle.group(rewards, groups, trained=trained if masked else None, lengths=lengths, **settings)
        advantages = group_advantages(
            torch.tensor(rewards, dtype=torch.float64),
            torch.tensor(groups),
            **settings,
            trained_N=torch.tensor(trained) if masked else None,
            lengths_N=torch.tensor(lengths) if baseline == "length_weighted" else None,
        )
        assert advantages.tolist() == pytest.approx(expected, rel=1e-8, abs=1e-9)


def test_an_untrained_completion_changes_no_other_advantage():
    rewards, groups, trained, _ = nasty(4)
    alive = torch.tensor(trained)
    for scale in ("std", "leave_one_out_std", "batch_std", "none"):
        advantages = group_advantages(torch.tensor(rewards), torch.tensor(groups), scale=scale, trained_N=alive)
        without = group_advantages(torch.tensor(rewards)[alive], torch.tensor(groups)[alive], scale=scale)
        assert advantages[alive].tolist() == without.tolist()
        assert not advantages[~alive].any()
        other = torch.where(alive, torch.tensor(rewards), float("nan"))
        assert (
            group_advantages(other, torch.tensor(groups), scale=scale, trained_N=alive).tolist() == advantages.tolist()
        )


@pytest.mark.parametrize("scale", ["std", "batch_std", "leave_one_out_std", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "length_weighted"])
def test_a_large_offset_of_all_rewards_cancels_nowhere(baseline, scale):
    """The mean of squares minus the squared mean of these is far off in float64."""
    rewards = torch.tensor([0.0, 1.0, 2.0, 4.0], dtype=torch.float64)
    settings = {
        "baseline": baseline,
        "scale": scale,
        "lengths_N": torch.tensor([1, 7, 2, 4]) if baseline == "length_weighted" else None,
    }
    moved = group_advantages(rewards + 2.0**30, torch.zeros(4).long(), **settings)
    still = group_advantages(rewards, torch.zeros(4).long(), **settings)
    assert moved.tolist() == pytest.approx(still.tolist(), rel=1e-6)
    far = rewards + 2.0**30
    assert float(far.square().mean() - far.mean().square()) != pytest.approx(float(rewards.var(correction=0)))


def test_rloo_is_the_mean_of_the_others_and_n_over_n_minus_one_of_the_centred_reward():
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 3.0], dtype=torch.float64), torch.tensor([0, 0, 0, 1])
    result = rloo_advantages(rewards, groups)
    assert result.tolist() == pytest.approx([0.75, -0.75, 0.0, 0.0])
    centred = group_advantages(rewards, groups, scale="none")
    assert result[:3].tolist() == pytest.approx((1.5 * centred[:3]).tolist())


def test_opo_weighs_by_length_and_equals_dr_grpo_for_equal_lengths():
    rewards, groups = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64), torch.tensor([0, 0, 0])
    assert opo_advantages(rewards, groups, torch.tensor([2, 5, 3])).tolist() == pytest.approx([0.8, -0.2, -0.2])
    equal = opo_advantages(rewards, groups, torch.tensor([4, 4, 4]))
    assert equal.tolist() == pytest.approx(group_advantages(rewards, groups, scale="none").tolist())


def test_lengths_come_with_the_baseline_that_uses_them_and_with_no_other():
    with pytest.raises(SpecError, match="lengths_N is None"):
        group_advantages(REWARDS, GROUPS, baseline="length_weighted")
    with pytest.raises(SpecError, match="lengths_N is given"):
        group_advantages(REWARDS, GROUPS, lengths_N=torch.ones(6))


@pytest.mark.parametrize("masked", [False, True])
def test_gpg_is_the_oracles(masked):
    for seed in range(3):
        rewards, groups, trained, _ = nasty(seed)
        trained = trained if masked else None
        advantages = gpg_advantages(
            torch.tensor(rewards, dtype=torch.float64),
            torch.tensor(groups),
            trained_N=None if trained is None else torch.tensor(trained),
        )
        assert advantages.tolist() == pytest.approx(oracle.gpg(rewards, groups, trained=trained), rel=1e-8, abs=1e-9)


def test_gpg_may_count_rewards_that_are_not_0_and_leave_a_singleton_its_own():
    rewards, groups = torch.tensor([1.0, 0.0, 3.0, 3.0, 0.0, 2.0]).double(), torch.tensor([1, 1, 2, 2, 3, 4])
    advantages = gpg_advantages(rewards, groups, informative="rewards_not_zero", singleton="reward", divisor=2.0)
    assert advantages.tolist() == pytest.approx([6 / 4 * 0.25, -6 / 4 * 0.25, 0.0, 0.0, 0.0, 6 / 4 * 1.0])
    assert gpg_advantages(rewards, groups, informative="rewards_not_zero").tolist()[5] == 0.0


@pytest.mark.parametrize("scale", ["std", "none"])
def test_pass_at_k_is_the_oracles(scale):
    for seed in range(6):
        g = torch.Generator().manual_seed(seed)
        rewards = torch.randint(0, 5, (9,), generator=g).double() / 4
        groups = torch.tensor([0, 0, 1, 1, 2, 2, 2, 1, 0])
        result = pass_at_k_advantages(rewards, groups, scale=scale)
        expected = oracle.pass_at_k(rewards.tolist(), groups.tolist(), scale=scale)
        assert result.tolist() == pytest.approx(expected, rel=1e-12)
        assert int((result != 0).sum()) <= 3


def test_pass_at_k_needs_two_trained_completions():
    rewards, groups = torch.tensor([9.0, 1.0, 0.5, 0.25]), torch.tensor([3, 3, 3, 3])
    trained = torch.tensor([False, True, True, True])
    assert pass_at_k_advantages(rewards, groups, scale="none", trained_N=trained).tolist() == [0.0, 0.5, 0.0, 0.0]
    with pytest.raises(SpecError, match="second best completion of group 3"):
        pass_at_k_advantages(rewards[:1], groups[:1])
    with pytest.raises(SpecError, match="scale is std or none"):
        pass_at_k_advantages(rewards, groups, scale="batch_std")


def test_gpg_counts_a_completion_at_the_mean_of_an_unequal_group():
    rewards, groups = torch.tensor([0.0, 0.5, 1.0, 0.3, 0.3, 2.0]), torch.tensor([0, 0, 0, 1, 1, 2])
    assert gpg_advantages(rewards, groups).tolist() == [-1.0, 0.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("masked", [False, True])
def test_gdpo_is_the_oracles(masked):
    for seed in range(3):
        rewards, groups, trained, _ = nasty(seed)
        rng = random.Random(seed)
        components = [[reward, rng.choice((0.0, 1.0)), rng.gauss(0, 3)] for reward in rewards]
        weights = [1.0, 0.5, -0.25]
        trained = trained if masked else None
        advantages = gdpo_advantages(
            torch.tensor(components, dtype=torch.float64),
            torch.tensor(groups),
            torch.tensor(weights),
            trained_N=None if trained is None else torch.tensor(trained),
        )
        assert advantages.tolist() == pytest.approx(
            oracle.gdpo(components, groups, weights, trained=trained), rel=1e-8, abs=1e-9
        )


def test_gdpo_leaves_components_out_that_were_not_scored():
    nan = math.nan
    components = torch.tensor(
        [[1.0, nan], [3.0, 2.0], [nan, 4.0], [nan, nan], [5.0, 0.0], [5.0, nan]], dtype=torch.float64
    )
    groups, weights = torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([1.0, 0.5])
    # In group 0: (1, 3) and (2, 4) are +-1 around their means with deviation sqrt 2; in group 1 nothing differs.
    z = 1 / (math.sqrt(2) + 1e-4)
    totals = [-z, z - 0.5 * z, 0.5 * z, 0.0, 0.0]
    mean = math.fsum(totals) / 5
    deviation = math.sqrt(math.fsum((t - mean) ** 2 for t in totals) / 4) + 1e-4
    expected = [(t - mean) / deviation for t in totals]
    result = gdpo_advantages(components, groups, weights, unscored="skip").tolist()
    assert result == pytest.approx([*expected[:3], 0.0, *expected[3:]], rel=1e-12, abs=1e-15)
    with pytest.raises(ShapeError, match="every reward is finite"):
        gdpo_advantages(components, groups, weights)


def test_one_reward_of_components_is_the_weighted_sum_of_those_that_were_scored():
    components = torch.tensor([[1.0, 2.0], [math.nan, 2.0], [math.nan, math.nan]])
    rewards, scored = combine_components(components, torch.tensor([10.0, 0.5]))
    assert (rewards.tolist(), scored.tolist()) == ([11.0, 1.0, 0.0], [True, True, False])


def test_gdpo_separates_completions_with_equal_sums():
    components = torch.tensor([[3.0, 0.0], [0.0, 3.0], [0.0, 0.0], [1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    advantages = gdpo_advantages(components, torch.zeros(5).long(), torch.tensor([1.0, 1.0]))
    assert abs(float(advantages[0] - advantages[1])) > 0.05
    summed = group_advantages(components.sum(1), torch.zeros(5).long())
    assert float(summed[0] - summed[1]) == 0.0


# ---- numbers of other systems ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "rewards", "groups", "advantages"),
    [
        # NeMo-RL 7ea279ab, leave-one-out baseline and normalisation: pairs are never divided
        (
            {"baseline": "leave_one_out", "scale": "leave_one_out_std", "epsilon": 1e-6},
            [1.7841796875, 0.919921875, 0.4619140625, -1.0810546875, -0.7900390625, 1.3349609375],
            [2, 2, 0, 1, 0, 1],
            [0.8642578125, -0.8642578125, 1.251953125, -2.416015625, -1.251953125, 2.416015625],
        ),
        (
            {"baseline": "leave_one_out", "scale": "leave_one_out_std", "epsilon": 1e-6},
            [
                -0.259765625,
                0.0458984375,
                1.1083984375,
                0.4599609375,
                -0.236328125,
                1.330078125,
                0.400390625,
                -0.615234375,
                0.4384765625,
                0.4140625,
            ],
            [2, 1, 1, 3, 2, 0, 0, 0, 0, 1],
            [
                -0.0234375,
                -1.456975139961903,
                3.3742180715248833,
                0.0,
                0.0234375,
                2.100713208249867,
                0.016379964874960615,
                -2.543621574250238,
                0.06858538917566523,
                -0.2170710942681839,
            ],
        ),
        # PipelineRL 58d39345: leave-one-out baseline, deviation of the whole group
        (
            {"baseline": "leave_one_out"},
            [1.1826171875, 0.267578125, 0.134765625, 0.3486328125, 0.25, 0.25, 0.25, 0.4541015625],
            [0, 0, 0, 0, 1, 1, 1, 2],
            [1.9647499656190714, -0.6064381877120317, -0.9796309186117437, -0.3786808592952959, 0.0, 0.0, 0.0, 0.0],
        ),
        # TRL 1.16.0, scale_rewards "group"
        (
            {},
            [0.5, 0.5, 0.5, 0.5, -0.80078125, -0.134765625, 1.0263671875, -1.4169921875],
            [0, 0, 0, 0, 1, 1, 1, 1],
            [0.0, 0.0, 0.0, 0.0, -0.4486500374670727, 0.18814356409909502, 1.2983306495275018, -1.0378241761595242],
        ),
        # NousResearch torchtitan, distributed_reward_norm on two ranks: the population deviation
        (
            {"ddof": 0, "epsilon": 1e-8},
            [
                -0.0927734375,
                0.1728515625,
                1.3095703125,
                -0.728515625,
                -1.1669921875,
                0.865234375,
                -0.92578125,
                1.51171875,
            ],
            [0, 1, 0, 1, 2, 2, 0, 1],
            [
                -0.20574614604373934,
                -0.15845128820166682,
                1.3145872967631718,
                -1.137807576215987,
                -0.9999999901585778,
                0.9999999901585778,
                -1.1088411507194322,
                1.296258864417654,
            ],
        ),
        # verl 1dda039b, rloo_vectorized: a singleton gets 0
        (
            {"baseline": "leave_one_out", "scale": "none"},
            [
                -0.1767578125,
                -1.6748046875,
                0.4755859375,
                0.26171875,
                0.5224609375,
                0.7138671875,
                0.6904296875,
                1.4765625,
                0.1201171875,
                1.3076171875,
            ],
            [1, 0, 3, 2, 1, 1, 0, 2, 0, 0],
            [
                -0.794921875,
                -2.380859375,
                0.0,
                -1.21484375,
                0.25390625,
                0.541015625,
                0.7727864583333334,
                1.21484375,
                0.012369791666666666,
                1.595703125,
            ],
        ),
    ],
)
def test_advantages_are_those_of_other_systems(settings, rewards, groups, advantages):
    result = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), **settings)
    assert result.tolist() == pytest.approx(advantages, rel=1e-12, abs=1e-13)


def test_verls_grpo_gives_a_singleton_its_bare_reward():
    advantages = group_advantages(
        torch.tensor([0.5], dtype=torch.float64), torch.tensor([3]), epsilon=1e-6, singleton="reward"
    )
    assert advantages.item() == pytest.approx(0.5 / (1 + 1e-6), rel=1e-15)
    assert math.isclose(
        group_advantages(torch.tensor([0.5]), torch.tensor([3]), scale="none", singleton="reward").item(), 0.5
    )


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_baselines_and_deviations_are_those_of_the_group_or_of_the_others(baseline):
    rewards, groups = [1.0, -0.5, 2.0, 0.25, 0.25, 3.0, 1.0, 1.0], [4, 4, 4, 9, 9, 1, 4, 9]
    result, deviation = group_baselines(torch.tensor(rewards), torch.tensor(groups), baseline=baseline)
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i]
        looked_at = others if baseline == "leave_one_out" else [*others, reward]
        assert result[i].item() == pytest.approx(sum(looked_at) / len(looked_at) if others else reward)
        assert deviation[i].item() == pytest.approx(oracle.deviation(looked_at, 1) if len(looked_at) > 1 else 0.0)
