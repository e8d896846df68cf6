"""Effects of the second set of blindly written faults, in their declared numbers.

Wrong gradients and losses are told by right steps of other settings, and from the documents themselves.
"""

import math

import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.helpers.planted_faults import BASE, Found, documents, shown, whole
from workbench.faults import load_fault, planted
from workbench.policy.model import Policy, load_policy
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.targets import shift_targets
from workbench.specs.reading import merge
from workbench.specs.run import RunSpec
from workbench.train import step


def spec_of(name: str, **more: object) -> RunSpec:
    """Settings under which a fault shows, and further ones, without it."""
    return RunSpec.model_validate(merge(merge(BASE, load_fault(name).shows_in), more))


def batch() -> RolloutBatch:
    """The documents of every step here, in the order of the one row."""
    return documents(RunSpec.model_validate(BASE))


def moved(pair, name):
    """Return the error of a per-token value on the trained tokens."""
    right, wrong = pair.right.tokens, pair.wrong.tokens
    return (wrong[name] - right[name])[right["trained"]].abs()


def error(pair):
    """Of the whole gradient, against the right one."""
    return float((whole(pair.wrong) - whole(pair.right)).norm() / whole(pair.right).norm())


def same(one: Found, other: Found) -> None:
    """Two steps with the same gradients."""
    assert_float64_parity(one.gradients, other.gradients, context="two ways to one gradient")


@pytest.fixture(scope="module")
def policy() -> Policy:
    """On one rank."""
    return load_policy("tiny-qwen3", precision="float64", seed=3)


def gradient(policy: Policy, spec: RunSpec, rows: list, totals: object) -> torch.Tensor:
    """Of some rows of a step, all parameters as one vector."""
    result = step.run_step(policy, step.build_loss(spec.loss), rows, totals, keep_gradients=True)
    return torch.cat([values.flatten() for values in result.gradients.values()])


# -- denominators --------------------------------------------------------------------------------------------------


def test_a_likelihood_counted_in_micro_batches_is_the_only_wrong_term():
    pair, row = shown("nll_denominator_per_micro_batch"), batch()
    assert pair.wrong_numbers == ["loss/positive_nll", "loss/total"]
    imitated_S = row.loss_mask_T & (row.rewards_N > 0)[row.document_ids_T]
    surprise_S = -pair.right.tokens["policy_logprobs"]
    means = []
    for packed in step.pack_step(row, spec_of("nll_denominator_per_micro_batch")):
        mine_S = torch.zeros_like(imitated_S)
        mine_S[packed.source_T[packed.document_ids_T >= 0]] = True
        if (mine_S & imitated_S).any():
            means.append(float(surprise_S[mine_S & imitated_S].mean()))
    assert len(means) > 1
    assert pair.wrong.numbers["loss/positive_nll"] == pytest.approx(0.1 * sum(means), rel=1e-10)
    assert pair.right.numbers["loss/positive_nll"] == pytest.approx(0.1 * float(surprise_S[imitated_S].mean()))


def test_document_weights_match_each_fault(policy):
    summed = shown("length_divides_document_sum")
    same(summed.wrong, shown("length_divides_document_sum", loss={"denominator": "document"}).right)
    assert summed.cosine < 0.9
    luspo = shown("luspo_over_tokens")
    same(luspo.wrong, shown("luspo_over_tokens", loss={"denominator": "token"}).right)
    assert luspo.factor > 1.2
    assert luspo.cosine < 0.99
    pair, spec, row = shown("mean_over_all_rows"), spec_of("mean_over_all_rows"), batch()
    results = []
    for packed in step.pack_step(row, spec):
        held = row.document_ids_T[packed.source_T[packed.document_ids_T >= 0]].unique().tolist()
        alone = spec_of("mean_over_all_rows", data={"micro_batches": 1}, loss={"compat": {"documents_counted": "all"}})
        results.append(gradient(policy, alone, *step.prepare_rows(row.select(held), alone, policy.mesh)))
    torch.testing.assert_close(whole(pair.wrong), sum(results), rtol=0, atol=1e-12)
    assert pair.factor == pytest.approx(len(results), rel=0.2)


# -- factors of parallel axes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cp", [2, 3])
def test_tokens_counted_over_dp_only_are_cp_times_too_few(cp):
    likelihood = {"name": "sft", "kl": {"coefficient": 0.0}}
    pair = shown("tokens_counted_over_dp_only", layout={"cp": cp}, loss=likelihood)
    spec, row = spec_of("tokens_counted_over_dp_only", layout={"cp": cp}, loss=likelihood), batch()
    (packed,) = step.pack_step(row, spec)
    targets, plan = shift_targets(packed), step.plan_row(packed.document_ids_T, spec.layout)
    means = []
    for rank in range(cp):
        held_T = plan.split(targets.loss_mask_T, rank)
        at_S = plan.split(targets.source_T, rank)[held_T]
        means.append(-float(pair.right.tokens["policy_logprobs"][at_S].mean()))
    assert pair.wrong.numbers["loss/total"] == pytest.approx(sum(means), rel=1e-10)
    assert pair.factor == pytest.approx(cp, rel=0.2)
    assert pair.cosine < 1 - 1e-4


@pytest.mark.parametrize("layout", [{"cp": 2}, {"cp": 3}])
def test_a_mean_over_sequence_ranks_is_one_factor_in_loss_and_gradient(layout):
    pair = shown("loss_divided_by_sequence_ranks", layout=layout)
    assert pair.factor == pytest.approx(1 / layout["cp"], rel=1e-10)
    assert pair.cosine == pytest.approx(1, abs=1e-12)
    assert pair.ratio("loss/total") == pytest.approx(1 / layout["cp"], rel=1e-10)


def test_a_reward_on_every_rank_multiplies_the_policy_term():
    pair = shown("reward_on_every_cp_rank")
    assert pair.ratio("loss/policy") == pytest.approx(2, rel=1e-9)
    assert pair.ratio("loss/kl") == pytest.approx(1, rel=1e-12)
    for key in ("advantage/all/min", "advantage/all/max", "advantage/all/std"):
        assert pair.ratio(key) == pytest.approx(2, rel=1e-9)
    assert shown("reward_on_every_cp_rank", data={"advantages": {"name": "grpo"}}).factor == pytest.approx(1, rel=1e-3)


# -- accumulation --------------------------------------------------------------------------------------------------


def test_later_micro_batches_of_other_ranks_are_lost(policy):
    pair = shown("first_micro_batch_synchronised")
    spec = spec_of("first_micro_batch_synchronised", layout={"dp": 1}, data={"micro_batches": 6})
    rows, totals = step.prepare_rows(batch(), spec, policy.mesh)
    assert len(rows) == 6
    torch.testing.assert_close(whole(pair.wrong), gradient(policy, spec, rows[:4], totals), rtol=0, atol=1e-12)
    torch.testing.assert_close(whole(pair.right), gradient(policy, spec, rows, totals), rtol=0, atol=1e-12)
    assert pair.cosine < 0.98


@pytest.mark.parametrize("name", ["missing_cp_factor", "expert_gradients_times_ep"])
def test_frozen_weights_have_no_gradient_to_scale(name):
    pair = shown(name, lora={"r": 2, "init_lora_weights": "random"})
    assert all("lora" in name for name in pair.right.gradients)


def test_frozen_weights_have_no_later_micro_batches():
    pair = shown("first_micro_batch_synchronised", lora={"r": 2, "init_lora_weights": "random"})
    assert pair.wrong_gradients
    assert all("lora" in name for name in pair.right.gradients)


def test_sums_in_bfloat16_are_off_by_thousandths_in_the_gradient_alone():
    pair = shown("gradients_kept_in_bfloat16")
    assert 1e-4 < error(pair) < 5e-3
    assert set(pair.wrong_gradients) == set(pair.right.gradients)
    assert float(moved(pair, "policy_logprobs").max()) == 0


# -- metrics -------------------------------------------------------------------------------------------------------


def test_after_the_clip_no_ratio_is_outside():
    pair = shown("clip_fraction_after_clip")
    assert pair.wrong_numbers == ["clip/policy/fraction", "clip/region/fraction", "clip/region/document_mean"]
    assert {pair.wrong.numbers[key] for key in pair.wrong_numbers} == {0.0}
    assert min(pair.right.numbers[key] for key in pair.wrong_numbers) > 0.02


def test_truncated_ratios_are_reported_as_ratios():
    pair = shown("ratio_truncated_before_log")
    assert all(key.startswith("ratio/policy_old/") for key in pair.wrong_numbers)
    right = pair.right.tokens
    ratios = (right["policy_logprobs"] - right["old_logprobs"])[right["trained"]].exp()
    assert float(ratios.max()) > 1.2
    assert pair.wrong.numbers["ratio/policy_old/max"] == pytest.approx(1.2)
    assert pair.wrong.numbers["ratio/policy_old/mean"] == pytest.approx(float(ratios.clamp(max=1.2).mean()))
    assert pair.ratio("ratio/policy_old/effective_samples") > 1.001


def test_a_rounded_entropy_is_the_only_wrong_quantity():
    pair = shown("entropy_in_bfloat16")
    assert {key.rpartition("/")[0] for key in pair.wrong_numbers} == {"entropy/policy"}
    kept = pair.wrong.tokens["entropy_nats"]
    assert torch.equal(kept, kept.bfloat16().double())
    relative = moved(pair, "entropy_nats") / pair.right.tokens["entropy_nats"][pair.right.tokens["trained"]]
    assert 1e-5 < float(relative.max()) <= 2**-8


# -- advantages ----------------------------------------------------------------------------------------------------


def made(name: str, spec: RunSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages of trained tokens with a fault, and without."""
    row = batch()
    with planted([name]):
        wrong_T = step.compute_advantages(row, spec).advantages_T
    right_T = step.compute_advantages(row, spec).advantages_T
    return wrong_T[row.loss_mask_T], right_T[row.loss_mask_T]


def test_twice_normalised_advantages_have_mean_0_and_deviation_1():
    wrong_T, right_T = made("advantages_normalised_twice", spec_of("advantages_normalised_twice"))
    assert float(wrong_T.mean()) == pytest.approx(0, abs=1e-12)
    assert float(wrong_T.std()) == pytest.approx(1, rel=1e-6)
    assert abs(float(right_T.mean())) > 0.01
    pulled = (right_T - right_T.mean()) / right_T.std()
    torch.testing.assert_close(wrong_T, pulled, rtol=1e-6, atol=1e-6)
    assert shown("advantages_normalised_twice").ratio("loss/kl") == pytest.approx(1, rel=1e-12)


def test_a_penalty_of_the_other_sign_moves_advantages_alone():
    undivided = {"advantages": {"name": "rloo"}}
    wrong_T, right_T = made("kl_added_to_reward", spec_of("kl_added_to_reward", data=undivided))
    without, _ = made(
        "kl_added_to_reward", spec_of("kl_added_to_reward", data=undivided, loss={"kl": {"coefficient": 0.0}})
    )
    torch.testing.assert_close(wrong_T - without, without - right_T)
    assert float((wrong_T - right_T).abs().max()) > 0.01
    keys = shown("kl_added_to_reward").wrong_numbers
    assert {"loss/policy", "advantage/all/std"} <= set(keys)
    assert not any(key.startswith(("ratio/", "logprob/", "kl/", "entropy/", "tokens/")) for key in keys)


def test_a_document_advantage_over_all_tokens_spares_the_penalty(policy):
    pair, spec, row = shown("prompt_in_document_advantage"), spec_of("prompt_in_document_advantage"), batch()
    assert pair.wrong_numbers == ["loss/policy", "loss/total"]
    trained_N, all_N = (
        torch.bincount(row.document_ids_T[mask_T], minlength=row.num_documents).double()
        for mask_T in (row.loss_mask_T, row.document_ids_T >= 0)
    )
    rows, totals = step.prepare_rows(row, spec, policy.mesh)
    for local in rows:
        share_T = (trained_N / all_N)[row.document_ids_T[local.row.source_T.clamp_min(0)]]
        local.row.advantages_T.mul_(share_T)
    torch.testing.assert_close(whole(pair.wrong), gradient(policy, spec, rows, totals), rtol=0, atol=1e-12)
    assert pair.cosine < 0.99


# -- terms of the loss ---------------------------------------------------------------------------------------------


def test_a_clip_that_is_never_applied_is_an_importance_weight():
    pair = shown("clip_never_applied")
    same(pair.wrong, shown("clip_never_applied", loss={"name": "importance_sampling"}).right)
    assert pair.wrong_numbers == ["loss/policy", "loss/total"]
    assert pair.right.numbers["clip/policy/fraction"] > 0.02
    assert pair.cosine < 0.99


def test_a_reversed_kl_is_the_only_wrong_term():
    pair, row = shown("reversed_kl"), batch()
    assert pair.wrong_numbers == ["loss/kl", "loss/total"]
    d_T = (row.ref_logprobs_T - pair.right.tokens["policy_logprobs"])[row.loss_mask_T]
    for result, sign in ((pair.right, 1), (pair.wrong, -1)):
        expected = 0.5 * float((torch.expm1(sign * d_T) - sign * d_T).mean())
        assert result.numbers["loss/kl"] == pytest.approx(expected, rel=1e-10)


# -- precision and fused kernels -----------------------------------------------------------------------------------


def test_every_token_pulls_as_the_first():
    pair = shown("first_cotangent_for_all")
    likelihood = whole(shown("first_cotangent_for_all", loss={"name": "sft", "kl": {"coefficient": 0.0}}).right)
    row, right = batch(), pair.right.tokens
    first = int(torch.nonzero(row.loss_mask_T)[0])
    text = float(right["policy_logprobs"][first])
    ratio, d = math.exp(text - float(row.old_logprobs_T[first])), float(row.ref_logprobs_T[first]) - text
    policy_part = 0.0 if right["clipped"][first] else -ratio * float(row.advantages_T[first])
    pull = policy_part + 0.07 * (1 - math.exp(d))
    torch.testing.assert_close(whole(pair.wrong), -pull * likelihood, rtol=0, atol=1e-12)
    assert abs(pair.cosine) < 0.9
    assert float(moved(pair, "policy_logprobs").max()) == 0


def test_rounded_old_logprobs_are_off_by_their_last_bit():
    pair, row = shown("old_logprobs_in_bfloat16"), batch()
    trained_T, kept = row.loss_mask_T, pair.wrong.tokens["old_logprobs"]
    assert torch.equal(kept[trained_T], row.old_logprobs_T[trained_T].bfloat16().double())
    relative = moved(pair, "old_logprobs") / row.old_logprobs_T[trained_T].abs()
    assert 1e-4 < float(relative.max()) <= 2**-8
    assert float(moved(pair, "policy_logprobs").max()) == 0


def test_rounded_rotary_tables_spare_the_first_step_of_a_document():
    pair, row = shown("rotary_tables_in_bfloat16"), batch()
    off, place = moved(pair, "policy_logprobs"), row.positions_T[row.loss_mask_T]
    assert float(off[place == 1].max()) == 0
    assert float(off[place > 1].min()) > 0
    assert 1e-5 < float(off[place > 1].mean()) < 5e-3
    assert 1e-4 < error(pair) < 1e-2


# -- masks and shifts ----------------------------------------------------------------------------------------------


def test_an_ignored_tool_mask_fills_the_holes():
    pair, row = shown("tool_mask_ignored"), batch()
    filled_S = row.loss_mask_T.clone()
    for number in row.document_ids_T[row.loss_mask_T].unique():
        places = (row.loss_mask_T & (row.document_ids_T == number)).nonzero()
        filled_S[int(places.min()) : int(places.max()) + 1] = True
    assert torch.equal(pair.wrong.tokens["trained"], filled_S)
    assert pair.wrong.counts["tokens"] == int(filled_S.sum()) > pair.right.counts["tokens"]
    assert float(moved(pair, "policy_logprobs").max()) == 0


def test_a_masked_end_costs_each_finished_document_one_token():
    pair, row = shown("end_token_masked"), batch()
    lost_S = row.loss_mask_T & ~pair.wrong.tokens["trained"]
    finished = {
        number
        for number in row.document_ids_T[row.loss_mask_T].tolist()
        if not row.extensions["truncated"].values[row.document_ids_T == number].any()
        and row.loss_mask_T[row.document_ids_T == number][-1]
    }
    assert sorted(row.document_ids_T[lost_S].tolist()) == sorted(finished)
    assert bool((row.document_ids_T[lost_S] != row.document_ids_T.roll(-1)[lost_S]).all())
    assert pair.right.counts["tokens"] - pair.wrong.counts["tokens"] == len(finished) > 2


def test_targets_shifted_twice_are_those_after_the_next(policy):
    pair, row = shown("targets_shifted_twice"), batch()
    trained_S = pair.wrong.tokens["trained"]
    assert torch.equal(trained_S, row.loss_mask_T & (row.positions_T >= 2))
    (local,), _ = step.prepare_rows(row, spec_of("targets_shifted_twice"), policy.mesh)
    with torch.no_grad():
        hidden_TD = policy.hidden_states(local.row.tokens_T, local.row.positions_T, local.attention)
        said_T = policy.token_logprobs(hidden_TD, local.row.targets_T.roll(-1)).logprobs_T
    torch.testing.assert_close(
        pair.wrong.tokens["policy_logprobs"][trained_S], said_T.roll(2)[trained_S], rtol=0, atol=1e-12
    )
    off = (pair.wrong.tokens["policy_logprobs"] - pair.right.tokens["policy_logprobs"])[trained_S].abs()
    assert 0.1 < float(off.mean()) < 1


def test_borders_without_padding_spare_the_first_document():
    more = {"data": {"micro_batches": 2}}
    pair, row = shown("unpadded_borders_on_padded_row", **more), batch()
    off_S = (pair.wrong.tokens["policy_logprobs"] - pair.right.tokens["policy_logprobs"]).abs()
    first_S = torch.zeros_like(row.loss_mask_T)
    for packed in step.pack_step(row, spec_of("unpadded_borders_on_padded_row", **more)):
        first_S[packed.source_T[packed.document_ids_T == 0]] = True
    first, others = off_S[row.loss_mask_T & first_S], off_S[row.loss_mask_T & ~first_S]
    assert len(first)
    assert float(first.max()) < 1e-12, "attention of another number of pieces may round otherwise, and no more"
    assert float((others > 1e-6).double().mean()) > 0.8


def test_numbers_of_a_shard_spare_losses_on_tokens():
    pair = shown("segments_numbered_per_shard")
    assert pair.cosine < 0.9
    assert set(pair.wrong_numbers) <= {
        "loss/policy",
        "loss/total",
        "clip/policy/fraction",
        "clip/gradient_zero/fraction",
    }
    assert float(moved(pair, "policy_logprobs").max()) == 0
    assert shown("segments_numbered_per_shard", loss={"name": "dapo"}).wrong_gradients == []


def test_documents_read_off_positions_end_at_the_seams():
    pair, row = shown("documents_from_shard_positions"), batch()
    (packed,) = step.pack_step(row, spec_of("documents_from_shard_positions"))
    chunk = packed.num_tokens // 8
    seams = [chunk * number for number in (1, 2, 3, 5, 6, 7)]  # chunks 3 and 4 are one rank's
    place_S = torch.arange(row.num_tokens)
    begin_S = place_S - row.positions_T
    behind_S = torch.stack([(begin_S < seam) & (seam < place_S) for seam in seams]).any(0)
    off_S = (pair.wrong.tokens["policy_logprobs"] - pair.right.tokens["policy_logprobs"]).abs()
    assert torch.equal((off_S > 1e-12)[row.loss_mask_T], behind_S[row.loss_mask_T])  # less is rounding
    assert 0 < int(behind_S[row.loss_mask_T].sum()) < int(row.loss_mask_T.sum())


# -- the sampler, the reference, the clip --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sampler_logprobs_one_late", "sampler_logprobs_before_temperature"])
def test_other_logprobs_of_the_sampler_move_weights_and_the_policy_term(name):
    pair = shown(name)
    assert {"loss/policy", "ratio/old_sampler/mean", "weight/applied/mean"} <= set(pair.wrong_numbers)
    assert pair.ratio("loss/kl") == pytest.approx(1, rel=1e-12)
    assert pair.ratio("ratio/policy_old/mean") == pytest.approx(1, rel=1e-12)
    assert float(moved(pair, "policy_logprobs").max()) == 0
    assert pair.cosine < 0.99


def test_the_sampler_one_late_is_that_of_the_token_before():
    pair, row = shown("sampler_logprobs_one_late"), batch()
    weights = (row.old_logprobs_T - row.sampler_logprobs_T.roll(1))[row.loss_mask_T].exp()
    assert pair.wrong.numbers["ratio/old_sampler/mean"] == pytest.approx(float(weights.mean()), rel=1e-9)


def test_a_reference_without_temperature_moves_the_penalty_alone():
    pair = shown("reference_at_temperature_one")
    of_penalty = ("loss/kl", "loss/total", "logprob/ref/", "kl/policy_ref/")
    assert all(key.startswith(of_penalty) for key in pair.wrong_numbers)
    assert pair.ratio("loss/kl") > 2
    assert pair.cosine < 0.999
    assert float(moved(pair, "policy_logprobs").max()) == 0


def test_a_lower_bound_at_epsilon_frees_tokens_of_negative_advantage():
    pair, row = shown("lower_clip_at_epsilon"), batch()
    right_S, wrong_S = pair.right.tokens["clipped"], pair.wrong.tokens["clipped"]
    freed_S = right_S & ~wrong_S
    ratio_S = (pair.right.tokens["policy_logprobs"] - pair.right.tokens["old_logprobs"]).exp()
    below_S = row.loss_mask_T & (row.advantages_T < 0) & (ratio_S < 0.98)
    assert torch.equal(freed_S, below_S & (ratio_S >= 0.02))
    assert not (wrong_S & ~right_S).any()
    lost = float((row.advantages_T * (0.98 - ratio_S))[freed_S].sum()) / pair.right.counts["tokens"]
    result = pair.wrong.numbers["loss/policy"] - pair.right.numbers["loss/policy"]
    assert result == pytest.approx(lost, rel=1e-9)
    assert result < 0


# -- missing gradients, and one too many ---------------------------------------------------------------------------


def test_without_layers_the_head_and_the_last_norm_train():
    pair = shown("layers_without_gradient")
    assert {name for name in pair.right.gradients if name not in pair.wrong_gradients} == {
        "lm_head.weight",
        "model.norm.weight",
    }
    assert {pair.factor_of(name) for name in pair.wrong_gradients} == {0.0}


def test_a_weight_beyond_the_clamp_is_all_that_is_wrong(policy):
    name = "clamped_kl_keeps_weight_gradient"
    pair, spec = shown(name), spec_of(name)
    (local,), totals = step.prepare_rows(batch(), spec, policy.mesh)
    row = local.row
    hidden_TD = policy.hidden_states(row.tokens_T, row.positions_T, local.attention)
    logprobs_T = policy.token_logprobs(hidden_TD, row.targets_T).logprobs_T
    apart_T = row.ref_logprobs_T - logprobs_T.detach()
    cut_T = row.loss_mask_T & (apart_T.abs() > 0.1)
    values_T = (logprobs_T.detach() - row.old_logprobs_T).exp() * -apart_T.clamp(-0.1, 0.1)
    extra = 0.5 * (values_T * logprobs_T)[cut_T].sum() / totals.tokens
    result = torch.cat([gradient.flatten() for gradient in torch.autograd.grad(extra, list(policy.model.parameters()))])
    assert 0 < int(cut_T.sum()) < totals.tokens
    torch.testing.assert_close(whole(pair.wrong) - whole(pair.right), result, rtol=0, atol=1e-12)
    assert error(pair) > 1e-3


def test_a_detached_router_spares_the_last_experts():
    pair = shown("router_without_gradient")
    routers = {name for name in pair.right.gradients if name.endswith("mlp.gate.weight")}
    assert len(routers) == 2
    assert {pair.factor_of(name) for name in routers} == {0.0}
    assert {name for name in pair.right.gradients if name not in pair.wrong_gradients} == {
        "model.layers.2.mlp.experts.gate_up_proj",
        "model.layers.2.mlp.experts.down_proj",
        "model.norm.weight",
    }


# -- auxiliary losses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cp", [2, 3])
def test_an_auxiliary_gradient_is_one_over_cp_of_itself(cp):
    name, layout = "auxiliary_gradient_over_cp", {"cp": cp}
    pair, without = shown(name, layout=layout), shown(name, layout=layout, loss={"squared_logit_coefficient": 0.0})
    others = whole(without.right)
    told = others + (whole(pair.right) - others) / cp
    torch.testing.assert_close(whole(pair.wrong), told, rtol=0, atol=1e-14)
    assert float((told - whole(pair.right)).norm()) > 1e-3


def test_a_dropped_auxiliary_loss_leaves_the_other_terms():
    pair = shown("auxiliary_loss_dropped")
    same(pair.wrong, shown("auxiliary_loss_dropped", loss={"mean_squared_logit_coefficient": 0.0}).right)
    assert pair.wrong_numbers == ["loss/logit_size", "loss/total"]
    assert pair.wrong.numbers["loss/logit_size"] == 0


# -- attention over ranks ------------------------------------------------------------------------------------------


def last_layer(pair) -> set[str]:
    """Return the parameters of the last layer whose gradient is wrong."""
    last = "model.layers.2."
    return {name.removeprefix(last) for name in pair.wrong_gradients if name.startswith(last)}


def test_stale_keys_do_not_affect_layers_above_attention():
    pair = shown("stale_keys_in_ring_backward")
    assert last_layer(pair) == {
        "input_layernorm.weight",
        *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")),
    }
    assert pair.cosine < 0.95


def test_tiled_heads_move_every_token():
    pair = shown("heads_tiled")
    assert float(moved(pair, "policy_logprobs").min()) > 0
    assert abs(pair.cosine) < 0.1


def test_shards_in_another_order_do_not_affect_tokens_before_the_first_boundary():
    pair, row = shown("contiguous_shards_taken_for_zigzag"), batch()
    (packed,) = step.pack_step(row, spec_of("contiguous_shards_taken_for_zigzag"))
    place_S = torch.arange(row.num_tokens)[row.loss_mask_T]
    assert torch.equal(moved(pair, "policy_logprobs") > 0, place_S > packed.num_tokens // 4)


def test_positions_that_count_on_spare_heads_of_documents():
    pair, row = shown("tail_positions_follow_head"), batch()
    chunk_S = -(-torch.bincount(row.document_ids_T)[row.document_ids_T] // 4)
    tails_S = row.positions_T > 3 * chunk_S
    assert torch.equal(moved(pair, "policy_logprobs") > 0, tails_S[row.loss_mask_T])
    assert bool(tails_S[row.loss_mask_T].any())


def test_copies_of_attention_inflate_gradients_below_it():
    pair = shown("attention_input_gradient_times_cp")
    assert last_layer(pair) == {"input_layernorm.weight"}
    assert [round(pair.factor_of(f"layers.{number}.input_layernorm.weight"), 1) for number in (2, 1, 0)] == [2, 3, 3.7]


# -- tensor parallelism --------------------------------------------------------------------------------------------


def test_norms_that_were_whole_are_tp_times_too_big():
    pair = shown("whole_norm_gradients_summed_over_tp")
    assert len(pair.wrong_gradients) == 7
    assert all("layernorm" in name or name == "model.norm.weight" for name in pair.wrong_gradients)
    assert [pair.factor_of(name) for name in pair.wrong_gradients] == pytest.approx([2] * 7, rel=1e-12)


def test_routers_alone_have_their_ranks_part():
    pair = shown("router_gradient_not_summed_over_tp")
    assert pair.wrong_gradients == ["model.layers.0.mlp.gate.weight", "model.layers.2.mlp.gate.weight"]


def test_tokens_summed_again_are_tp_times_too_big_below_the_head():
    pair = shown("gathered_tokens_summed_again")
    assert {name for name in pair.right.gradients if name not in pair.wrong_gradients} == {"lm_head.weight"}
    assert {round(pair.factor_of(name), 9) for name in pair.wrong_gradients} == {2.0}


def test_copies_of_the_vocabulary_cost_every_token_log_tp():
    pair = shown("gathered_logits_in_parallel_softmax")
    off = (pair.right.tokens["policy_logprobs"] - pair.wrong.tokens["policy_logprobs"])[pair.right.tokens["trained"]]
    torch.testing.assert_close(off, torch.full_like(off, math.log(2)))
    key = "entropy/policy/mean"
    assert pair.wrong.numbers[key] - pair.right.numbers[key] == pytest.approx(math.log(2))
    assert pair.cosine < 0.9
