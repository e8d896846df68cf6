"""Effects of the faults that a first version of `diagnose` had not seen, in their declared numbers.

Weighted sums are told by gradients of other specs and from the documents themselves.
"""

import math

import pytest
import torch

from tests.helpers.planted_faults import BASE, documents, shown, whole
from workbench.faults import load_fault, planted
from workbench.policy.model import load_policy
from workbench.rollouts.batch import RolloutBatch
from workbench.specs.reading import merge
from workbench.specs.run import RunSpec
from workbench.train import step

LAST = "model.layers.2."
NO_KL = {"kl": {"coefficient": 0.0}}


def batch() -> RolloutBatch:
    """The documents of every step here, in the order of the one row."""
    return documents(RunSpec.model_validate(BASE))


def near(pair, factor):
    """True if the whole gradient and the loss are the correct ones times a factor."""
    return (
        pair.factor == pytest.approx(factor, rel=1e-10)
        and pair.cosine == pytest.approx(1, abs=1e-12)
        and pair.ratio("loss/total") == pytest.approx(factor, rel=1e-10)
    )


def moved(pair, name):
    """Return the error of a per-token value on the trained tokens."""
    right, wrong = pair.right.tokens, pair.wrong.tokens
    return (wrong[name] - right[name])[right["trained"]].abs()


@pytest.fixture(scope="module")
def sums() -> list[torch.Tensor | None]:
    """Of each document the gradient of its unweighted policy sum; None where nothing trains."""
    policy = load_policy("tiny-qwen3", precision="float64", seed=3)
    spec = RunSpec.model_validate(merge(BASE, {"loss": {**NO_KL, "denominator": "raw"}}))
    results = []
    for number, length in enumerate(lengths()):
        rows, totals = step.prepare_rows(batch().select([number]), spec, policy.mesh)
        result = step.run_step(policy, step.build_loss(spec.loss), rows, totals, keep_gradients=True)
        gradients = torch.cat([gradient.flatten() for gradient in result.gradients.values()])
        results.append(gradients if length else None)
    return results


def lengths() -> list[int]:
    """Trained tokens of each document."""
    row = batch()
    return [int(row.loss_mask_T[row.document_ids_T == number].sum()) for number in range(row.num_documents)]


# -- denominators --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layout", "factor"),
    [
        ("cp_factor_twice", {"cp": 2}, 2),
        ("cp_factor_twice", {"cp": 3}, 3),
        ("cp_factor_twice", {"cp": 2, "dp": 2}, 2),
        ("constant_denominator_without_dp", {"dp": 2}, 1 / 2),
        ("constant_denominator_without_dp", {"dp": 3}, 1 / 3),
    ],
)
def test_a_factor_of_the_layout_is_one_factor(name, layout, factor):
    assert near(shown(name, layout=layout), factor)


@pytest.mark.parametrize("settings", [{}, {"layout": {"dp": 2}}, {"layout": {"cp": 2}, "data": {"micro_batches": 3}}])
def test_tokens_of_another_batch_are_one_factor_in_every_layout(settings):
    assert near(shown("denominator_of_another_batch", **settings), 1 / 2)


def test_rows_without_signal_shrink_a_mean_over_documents():
    assert near(shown("rows_without_signal_counted"), sum(map(bool, lengths())) / len(lengths()))


def test_wrong_means_match_sums_with_their_weights(sums):
    held, row = lengths(), batch()
    total, group, rollout = sum(held), row.group_ids_N.tolist(), row.extensions["rollout_ids"].values.tolist()
    alive = [number for number, length in enumerate(held) if length]

    def told(weights: dict[int, float]) -> torch.Tensor:
        return sum(weight * sums[number] for number, weight in weights.items())

    def same(name: str, wrong: dict[int, float], right: dict[int, float], **more) -> None:
        pair = shown(name, **merge({"loss": NO_KL}, more))
        torch.testing.assert_close(whole(pair.wrong), told(wrong), rtol=0, atol=1e-12)
        torch.testing.assert_close(whole(pair.right), told(right), rtol=0, atol=1e-12)
        assert not near(pair, pair.factor)

    by_token = dict.fromkeys(alive, 1 / total)
    prompts = {group[number] for number in alive}
    in_prompt = {prompt: sum(held[n] for n in alive if group[n] == prompt) for prompt in prompts}
    same("prompt_mean_for_token_mean", {n: 1 / len(prompts) / in_prompt[group[n]] for n in alive}, by_token)
    same("length_slipped_into_token_mean", {n: 1 / total / held[n] for n in alive}, by_token)
    rollouts = {rollout[number] for number in alive}
    in_rollout = {name: sum(held[n] for n in alive if rollout[n] == name) for name in rollouts}
    same(
        "samples_for_rollouts",
        {n: 1 / len(alive) / held[n] for n in alive},
        {n: 1 / len(rollouts) / in_rollout[rollout[n]] for n in alive},
    )
    packed = step.pack_step(row, RunSpec.model_validate(merge(BASE, {"data": {"micro_batches": 3}})))
    share = {}
    for each in packed:
        local = row.document_ids_T[each.source_T[each.document_ids_T >= 0]].unique().tolist()
        tokens = sum(held[number] for number in local)
        share |= {number: len(local) / len(held) / tokens for number in local if held[number]}
    same("sample_share_times_token_mean", share, by_token)


# -- factors of parallel axes --------------------------------------------------------------------------------------


def test_norms_of_averaged_gradients_are_too_small_by_the_ranks():
    pair = shown("clip_of_averaged_gradients")
    results = {round(pair.wrong.norms[name] / norm, 9) for name, norm in pair.right.norms.items()}
    assert results == {1 / 4}
    assert pair.ratio("gradient/norm/global") == pytest.approx(1 / 4)


def test_wrong_offsets_of_sequence_sums_spare_losses_on_tokens():
    pair = shown("sequence_sums_at_wrong_offsets")
    assert pair.cosine < 0.9
    assert pair.wrong.numbers["clip/policy/fraction"] != pair.right.numbers["clip/policy/fraction"]
    assert float(moved(pair, "policy_logprobs").max()) == 0
    assert shown("sequence_sums_at_wrong_offsets", loss={"name": "dapo"}).wrong_gradients == []


# -- metrics -------------------------------------------------------------------------------------------------------


def test_padding_moves_the_entropy_alone():
    pair = shown("padding_in_entropy")
    assert "entropy/policy/mean" in pair.wrong_numbers
    assert set(pair.wrong_numbers) <= {"entropy/policy/mean", "entropy/policy/min", "entropy/policy/max"}


def test_swapped_extremes_are_each_other():
    pair = shown("extremes_swapped")
    assert {key.rpartition("/")[2] for key in pair.wrong_numbers} == {"min", "max"}
    low, mean, high = (pair.wrong.numbers[f"entropy/policy/{name}"] for name in ("min", "mean", "max"))
    assert low > mean > high


def test_scaled_means_are_too_large_by_dp():
    pair = shown("metrics_scaled_by_dp")
    ratios = [pair.ratio(key) for key in pair.wrong_numbers]
    assert ratios == pytest.approx([2.0] * len(ratios))
    assert {"entropy/policy/mean", "clip/policy/fraction", "logprob/policy/mean"} <= set(pair.wrong_numbers)
    assert not any(key.endswith(("/sum", "/min", "/max", "/std")) for key in pair.wrong_numbers)


def test_a_kl_changed_in_place_is_its_coefficient_too_small():
    pair = shown("kl_changed_in_place", loss={"kl": {"coefficient": 0.3}})
    assert pair.wrong_numbers == ["kl/policy_ref/k3_mean"]
    assert pair.ratio("kl/policy_ref/k3_mean") == pytest.approx(0.3)


# -- boundaries and masks ------------------------------------------------------------------------------------------


def test_a_mask_one_late_trains_the_token_after_each_trained_one():
    pair, row = shown("loss_mask_one_late"), batch()
    follows_T = row.loss_mask_T.roll(1) & (row.document_ids_T == row.document_ids_T.roll(1))
    follows_T[0] = False
    assert torch.equal(pair.wrong.tokens["trained"], follows_T)
    both_T = follows_T & row.loss_mask_T
    last_T = row.document_ids_T != row.document_ids_T.roll(-1)
    assert pair.right.counts["tokens"] - pair.wrong.counts["tokens"] == int((row.loss_mask_T & last_T).sum()) > 0
    torch.testing.assert_close(
        pair.wrong.tokens["policy_logprobs"][both_T], pair.right.tokens["policy_logprobs"][both_T], rtol=0, atol=1e-12
    )


def test_a_prefix_of_zeros_spares_documents_without_holes():
    pair, row = shown("old_logprobs_as_prefix"), batch()
    wrong_T = pair.wrong.tokens["old_logprobs"] != pair.right.tokens["old_logprobs"]
    broken_up = set()
    for number in range(row.num_documents):
        mask = row.loss_mask_T[row.document_ids_T == number].tolist()
        if any(mask) and not all(mask[mask.index(True) :]):
            broken_up.add(number)
    assert broken_up == set(row.document_ids_T[wrong_T].tolist())
    assert bool((pair.wrong.tokens["old_logprobs"][wrong_T] == 0).any())
    assert float(moved(pair, "policy_logprobs").max()) == 0


def test_an_empty_micro_batch_makes_gradients_nan():
    pair = shown("empty_micro_batch_divides_by_zero")
    assert all(bool(gradient.isnan().any()) for gradient in pair.wrong.gradients.values())
    assert all(math.isnan(norm) for norm in pair.wrong.norms.values())
    assert pair.ratio("loss/total") == pytest.approx(1, rel=1e-12)
    assert shown("empty_micro_batch_divides_by_zero", data={"micro_batches": 2}).wrong_gradients == []


# -- sampler -------------------------------------------------------------------------------------------------------


def test_a_weight_of_the_live_policy_spares_the_penalty():
    pair, row = shown("correction_weight_of_current_policy"), batch()
    trained_T = row.loss_mask_T
    live_T = (pair.right.tokens["policy_logprobs"] - row.sampler_logprobs_T)[trained_T].exp()
    assert pair.wrong.numbers["weight/raw/max"] == pytest.approx(float(live_T.max()), rel=1e-9)
    assert pair.wrong.numbers["weight/raw/mean"] == pytest.approx(float(live_T.mean()), rel=1e-9)
    assert pair.ratio("loss/policy") != pytest.approx(1, rel=1e-3)
    assert pair.ratio("loss/kl") == pytest.approx(1, rel=1e-12)
    assert pair.cosine < 0.999


# -- missing gradients ---------------------------------------------------------------------------------------------


def test_without_the_score_a_penalty_has_the_gradient_of_its_path():
    pair, path = (
        shown("kl_without_score_gradient"),
        shown("kl_without_score_gradient", loss={"kl": {"gradient": "path"}}).right,
    )
    torch.testing.assert_close(whole(pair.wrong), whole(path), rtol=0, atol=1e-14)
    alone = shown("kl_without_score_gradient", loss={"surrogate": {"coefficient": 0.0}})
    assert alone.cosine < 0.9999


def test_a_bonus_without_gradient_is_that_of_no_bonus():
    pair, without = (
        shown("entropy_without_gradient"),
        shown("entropy_without_gradient", loss={"entropy_coefficient": 0.0}).right,
    )
    torch.testing.assert_close(whole(pair.wrong), whole(without), rtol=0, atol=1e-14)
    alone = shown("entropy_without_gradient", loss={"surrogate": {"coefficient": 0.0}, **NO_KL})
    assert alone.factor == 0.0


def test_a_detached_sequence_ratio_leaves_the_penalty():
    pair, penalty = (
        shown("sequence_ratio_without_gradient"),
        shown("sequence_ratio_without_gradient", loss={"surrogate": {"coefficient": 0.0}}).right,
    )
    torch.testing.assert_close(whole(pair.wrong), whole(penalty), rtol=0, atol=1e-14)


def test_a_detached_head_output_trains_nothing():
    pair = shown("head_output_detached")
    assert pair.factor == 0.0
    assert float(moved(pair, "policy_logprobs").max()) == 0


# -- advantages ----------------------------------------------------------------------------------------------------


def test_a_deviation_of_zero_makes_advantages_of_millions():
    spec = RunSpec.model_validate(merge(BASE, {"data": {"advantages": {"name": "leave_one_out"}}}))
    row = batch()
    with planted(["leave_one_out_over_zero_deviation"]):
        wrong_T = step.compute_advantages(row, spec).advantages_T
    right_T = step.compute_advantages(row, spec).advantages_T
    changed_T = wrong_T != right_T
    assert 0 < int(changed_T.sum()) < int(row.loss_mask_T.sum())
    torch.testing.assert_close(wrong_T[changed_T], right_T[changed_T] * 1e6)
    pair = shown("leave_one_out_over_zero_deviation")
    assert pair.factor > 1e3
    assert float(moved(pair, "policy_logprobs").max()) == 0


def test_baselines_of_micro_batches_turn_the_policy_term_alone():
    pair = shown("baseline_per_micro_batch")
    assert pair.cosine < 0.9
    assert {"loss/policy", "loss/total"} <= set(pair.wrong_numbers)
    assert not any(
        key.startswith(("loss/kl", "kl/", "ratio/", "logprob/", "entropy/", "tokens/")) for key in pair.wrong_numbers
    )
    spec, alone = RunSpec.model_validate(merge(BASE, load_fault("baseline_per_micro_batch").shows_in)), 0
    whole_step = step.compute_advantages(batch(), spec)
    with planted(["baseline_per_micro_batch"]):
        rows = step.pack_step(whole_step, spec)
    for row in rows:
        for number, group in enumerate(row.group_ids_N.tolist()):
            mine_T = (row.document_ids_T == number) & row.loss_mask_T
            if mine_T.any() and row.group_ids_N.tolist().count(group) == 1:
                assert not row.advantages_T[mine_T].any()
                alone += bool(whole_step.advantages_T[row.source_T[mine_T]].any())
    assert alone > 1


# -- precision and auxiliary losses --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["logits_in_bfloat16", "head_over_temperature_in_bfloat16"])
def test_eight_bits_of_a_head_move_every_log_probability_by_thousandths(name):
    pair = shown(name)
    off = moved(pair, "policy_logprobs")
    assert float(off.min()) > 0
    assert 1e-4 < float(off.mean()) < 5e-3
    error = float((whole(pair.wrong) - whole(pair.right)).norm() / whole(pair.right).norm())
    assert 3e-4 < error < 1e-2


def test_an_auxiliary_loss_is_the_micro_batches_too_big():
    pair = shown("auxiliary_loss_times_micro_batches")
    assert pair.ratio("loss/logit") == pytest.approx(3)
    assert pair.wrong_numbers == ["loss/logit", "loss/total"]


# -- sharding ------------------------------------------------------------------------------------------------------


def test_norms_summed_once_a_micro_batch_are_the_only_wrong_parameters():
    pair = shown("norm_gradient_summed_per_micro_batch")
    assert {name.split(".")[-2] for name in pair.wrong_gradients} == {"q_norm", "k_norm"}
    assert len(pair.wrong_gradients) == 6
    assert 1 < pair.factor_of("q_norm.weight") < 2**2
    tokens = shown("norm_gradient_summed_per_micro_batch", layout={"sequence_parallel": True})
    assert set(tokens.wrong_gradients) == {name for name in tokens.right.gradients if "norm" in name}


def test_keys_without_their_gradient_spare_queries_in_the_last_layer():
    pair = shown("key_gradients_not_returned")
    wrong = {name.removeprefix(LAST) for name in pair.wrong_gradients if name.startswith(LAST)}
    assert wrong == {
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "self_attn.k_norm.weight",
        "input_layernorm.weight",
    }


def test_labels_are_smoothed_over_a_slice_of_the_vocabulary():
    """Of 19 tokens the first rank has 10: its mean is over these, and columns get 1/10 or 1/9 instead of 1/19."""
    pair = shown("smoothing_over_local_vocabulary", loss=NO_KL, model={"tied": False})
    for name in ("policy_logprobs", "entropy_nats"):
        torch.testing.assert_close(pair.wrong.tokens[name], pair.right.tokens[name], rtol=0, atol=0)
    plain = shown("smoothing_over_local_vocabulary", loss=NO_KL | {"surrogate": {"label_smoothing": 0.0}})
    assert plain.wrong_gradients == []
    head = "lm_head.weight"
    wrong, right = pair.wrong.gradients[head], pair.right.gradients[head]
    extra = wrong - right  # -e (1 / v - 1 / V) times the mean hidden state, on each column of a slice of v
    for columns, count in ((slice(0, 10), 10), (slice(10, 19), 9)):
        torch.testing.assert_close(extra[columns], extra[columns][:1].expand_as(extra[columns]), rtol=1e-9, atol=1e-15)
        assert count == len(extra[columns])
    assert float(extra[0].norm() / extra[-1].norm()) == pytest.approx((1 / 10 - 1 / 19) / (1 / 9 - 1 / 19), rel=1e-9)
    assert abs(pair.ratio("loss/total") - 1) > 1e-5
