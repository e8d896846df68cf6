"""Effects of faults of layouts, boundaries, temperatures, gradients and kernels, in their declared numbers."""

import math

import pytest
import torch

from tests.helpers.bars import distances
from tests.helpers.planted_faults import BASE, documents, shown
from workbench.faults import precision, sampling
from workbench.records.integrity import piece_of_norm
from workbench.rollouts.batch import RolloutBatch
from workbench.specs.run import RunSpec
from workbench.train.step import pack_step

NO_KL = {"kl": {"coefficient": 0.0}}
LAST = "model.layers.2."


def batch() -> RolloutBatch:
    """The documents of every step here, in the order of the one row."""
    return documents(RunSpec.model_validate(BASE))


def logprobs(found) -> torch.Tensor:
    """Of the trained tokens."""
    return found.tokens["policy_logprobs"][found.tokens["trained"]]


def wrong_in_last_layer(pair) -> set[str]:
    return {name.removeprefix(LAST) for name in pair.wrong_gradients if name.startswith(LAST)}


# -- factors of parallel axes --------------------------------------------------------------------------------------


def test_a_sequence_ratio_per_shard_changes_clipping_but_not_token_losses():
    pair = shown("sequence_ratio_per_shard")
    assert pair.cosine < 0.98
    assert pair.wrong.numbers["clip/policy/fraction"] != pair.right.numbers["clip/policy/fraction"]
    assert shown("sequence_ratio_per_shard", loss={"name": "dapo"}).wrong_gradients == []


def test_a_gradient_divided_twice_is_one_over_the_documents_too_small():
    pair = shown("gradient_divided_by_documents_again")
    assert pair.right.counts["documents"] == 8
    assert pair.factor == pytest.approx(1 / 8, rel=1e-12)
    assert pair.cosine == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("cp", [2, 3])
def test_a_loss_counted_by_every_rank_is_reported_cp_times(cp):
    pair = shown("loss_counted_by_every_rank", layout={"cp": cp})
    assert pair.wrong_numbers == ["loss/policy", "loss/kl", "loss/total"]
    assert [pair.ratio(number) for number in pair.wrong_numbers] == pytest.approx([cp] * 3, rel=1e-12)


# -- boundaries ----------------------------------------------------------------------------------------------------


def test_a_roll_across_documents_trains_first_tokens():
    pair, row = shown("label_roll_across_documents"), batch()
    new_T = pair.wrong.tokens["trained"] & ~pair.right.tokens["trained"]
    first_T = row.positions_T == 0
    follows_T = first_T & row.loss_mask_T.roll(1)
    follows_T[0] = False
    assert torch.equal(new_T, follows_T)
    assert pair.wrong.counts["tokens"] - pair.right.counts["tokens"] == int(new_T.sum()) == 5


def test_attention_across_documents_spares_the_first_document_of_the_row():
    pair, row = shown("attention_across_documents", data={"micro_batches": 4}), batch()
    packed = pack_step(row, RunSpec.model_validate(BASE | {"data": {"micro_batches": 4}}))
    first = {int(row.document_ids_T[each.source_T[0]]) for each in packed}
    changed_T = (pair.wrong.tokens["policy_logprobs"] - pair.right.tokens["policy_logprobs"]).abs() > 1e-12
    changed, trained = (set(row.document_ids_T[mask_T].tolist()) for mask_T in (changed_T, row.loss_mask_T))
    assert trained - changed == trained & first
    assert len(trained - changed) == 3


def test_old_logprobs_that_were_not_shifted_are_those_of_the_token_before():
    pair, row = shown("old_logprobs_not_shifted"), batch()
    trained_T = pair.right.tokens["trained"]
    assert torch.equal(pair.wrong.tokens["old_logprobs"][trained_T], row.old_logprobs_T.roll(1)[trained_T])
    assert torch.equal(logprobs(pair.wrong), logprobs(pair.right))
    assert pair.wrong.numbers["clip/policy/fraction"] > 2 * pair.right.numbers["clip/policy/fraction"]


def test_positions_counted_on_a_shard_change_the_tail_of_a_document_that_straddles():
    pair = shown("positions_from_shard")
    changed_T = (pair.wrong.tokens["policy_logprobs"] - pair.right.tokens["policy_logprobs"]).abs() > 1e-12
    ids_T, trained_T = batch().document_ids_T, pair.right.tokens["trained"]
    (straddling,) = set(ids_T[changed_T].tolist())
    tail = changed_T[trained_T & (ids_T == straddling)].tolist()
    assert tail == sorted(tail), "right, and then wrong to its end"
    assert set(tail) == {False, True}


# -- masks ---------------------------------------------------------------------------------------------------------


def test_nan_under_the_mask_is_nan_in_every_gradient_and_not_in_the_loss():
    pair = shown("nan_under_the_mask")
    assert all(bool(gradient.isnan().any()) for gradient in pair.wrong.gradients.values())
    assert all(math.isnan(norm) for norm in pair.wrong.norms.values())
    assert pair.ratio("loss/total") == pytest.approx(1, rel=1e-12)


# -- temperature and sampler ---------------------------------------------------------------------------------------


def test_a_missing_temperature_gives_the_log_probabilities_of_temperature_one():
    pair, at_one = (
        shown("temperature_missing_in_policy"),
        shown("temperature_missing_in_policy", policy={"temperature": 1.0}).right,
    )
    torch.testing.assert_close(logprobs(pair.wrong), logprobs(at_one), rtol=0, atol=1e-12)
    assert pair.right.numbers["ratio/policy_old/mean"] == pytest.approx(1, abs=0.02)
    assert pair.wrong.numbers["ratio/policy_old/mean"] == pytest.approx(1.22, abs=0.02)
    assert (pair.factor, pair.cosine) == (pytest.approx(0.85, abs=0.02), pytest.approx(0.88, abs=0.02))


def test_a_temperature_on_log_probabilities_divides_those_of_temperature_one():
    pair, at_one = (
        shown("temperature_divides_logprobs"),
        shown("temperature_missing_in_policy", policy={"temperature": 1.0}).right,
    )
    torch.testing.assert_close(logprobs(pair.wrong), logprobs(at_one) / 0.7, rtol=0, atol=1e-12)


def test_summed_logs_make_a_weight_the_power_of_its_length():
    pair, row = shown("sequence_weight_sums_logs"), batch()
    log_T = torch.where(row.loss_mask_T, row.old_logprobs_T - row.sampler_logprobs_T, 0.0)
    ids_T = row.document_ids_T[row.loss_mask_T]
    product_N = torch.zeros(row.num_documents).double().index_add(0, ids_T, log_T[row.loss_mask_T]).exp()
    assert pair.wrong.numbers["weight/raw/max"] == pytest.approx(float(product_N.max()), rel=1e-9)
    assert pair.right.numbers["weight/raw/max"] < pair.wrong.numbers["weight/raw/max"]


def test_an_ignored_support_mass_scales_the_policy_term():
    mass = sampling.TOP_P_MASS
    pair = shown("kept_mass_ignored")
    assert pair.ratio("loss/policy") == pytest.approx(mass, rel=1e-9)
    assert pair.ratio("loss/kl") == pytest.approx(1, rel=1e-12)
    alone = shown("kept_mass_ignored", loss=NO_KL)
    assert (alone.factor, alone.cosine) == (pytest.approx(mass, rel=1e-9), pytest.approx(1, rel=1e-9))


# -- gradients that are missing or too many ------------------------------------------------------------------------


def test_a_penalty_without_gradient_alone_trains_nothing():
    assert shown("kl_without_gradient", loss={"surrogate": {"coefficient": 0.0}}).factor == 0.0
    assert shown("kl_without_gradient").cosine < 0.9999


def test_a_head_without_gradient_is_the_only_wrong_parameter():
    pair = shown("head_weight_without_gradient")
    assert pair.wrong_gradients == ["lm_head.weight"]
    assert pair.factor_of("lm_head.weight") == 0.0
    tied = shown("head_weight_without_gradient", model={"tied": True})
    assert tied.wrong_gradients == ["model.embed_tokens.weight"]
    assert tied.factor_of("embed_tokens.weight") > 0


def test_a_live_weight_doubles_the_policys_gradient():
    pair = shown("correction_weight_not_detached", loss=NO_KL)
    assert (pair.factor, pair.cosine) == (pytest.approx(2, rel=1e-9), pytest.approx(1, rel=1e-9))


# -- kernels and auxiliary losses ----------------------------------------------------------------------------------


def test_a_head_summed_in_bfloat16_is_off_by_thousandths_and_more_with_more_chunks():
    far = []
    for chunk in (16, 4, 1):
        pair = shown("head_gradient_in_bfloat16", policy={"chunk_tokens": chunk})
        assert pair.wrong_gradients == ["lm_head.weight"]
        far.append(distances(pair.wrong.gradients, pair.right.gradients)["lm_head.weight"])
    assert 1e-3 < far[0] < far[1] < far[2] < 1e-2


def test_counted_padding_lowers_every_log_probability(monkeypatch):
    pair = shown("padded_vocabulary_counted")
    less = logprobs(pair.right) - logprobs(pair.wrong)
    assert 0.3 < float(less.min()) < float(less.max()) < math.log1p(13)
    monkeypatch.setattr(precision, "TILE", 19)  # a key of its own keeps the step from the cache
    assert shown("padded_vocabulary_counted", data={"micro_batches": 2}).wrong_gradients == []


def test_an_auxiliary_loss_is_the_trained_tokens_too_big():
    pair = shown("auxiliary_loss_not_normalised")
    assert pair.ratio("loss/logit") == pytest.approx(pair.right.counts["tokens"], rel=1e-9)
    assert pair.wrong_numbers == ["loss/logit", "loss/total"]


# -- sharding ------------------------------------------------------------------------------------------------------


def test_gradients_summed_over_dp_only_are_those_of_a_ranks_own_tokens():
    assert 0.7 < shown("gradients_summed_over_dp_only").cosine < 0.8
    assert shown("gradients_summed_over_dp_only", layout={"dp": 2, "cp": 1}).wrong_gradients == []


def test_copies_of_key_heads_that_are_not_summed_spare_queries_in_the_last_layer():
    pair = shown("gqa_copies_not_summed")
    wrong = ["self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.k_norm.weight", "input_layernorm.weight"]
    assert wrong_in_last_layer(pair) == set(wrong)
    assert all(pair.factor_of(LAST + name) < 0.8 for name in wrong)


def test_a_rings_own_normaliser_spares_the_output_projection_of_the_last_layer():
    pair = shown("ring_block_normaliser")
    wrong = [f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")]
    assert wrong_in_last_layer(pair) == {*wrong, "input_layernorm.weight"}
    assert all(pair.factor_of(LAST + name) > 1.05 for name in wrong)


def test_norms_that_are_not_summed_over_tp_are_the_only_wrong_parameters():
    heads = shown("norm_gradient_not_summed_over_tp").wrong_gradients
    assert {name.split(".")[-2] for name in heads} == {"q_norm", "k_norm"}
    assert len(heads) == 6
    tokens = shown("norm_gradient_not_summed_over_tp", layout={"sequence_parallel": True})
    assert set(tokens.wrong_gradients) == {name for name in tokens.right.gradients if "norm" in name}


def test_a_hidden_gradient_that_is_not_summed_spares_the_head_alone():
    pair = shown("head_input_gradient_not_summed")
    assert set(pair.right.gradients) - set(pair.wrong_gradients) == {"lm_head.weight"}
    assert pair.cosine < 0.7


def test_counting_replicas_scales_norms_of_replicated_weights_by_sqrt_tp():
    pair = shown("norm_counts_replicas")
    results = {name: pair.wrong.norms[name] / norm for name, norm in pair.right.norms.items()}
    assert {name for name, factor in results.items() if factor > 1} == {name for name in results if "norm" in name}
    assert max(results.values()) == pytest.approx(math.sqrt(2), rel=1e-12)
    assert pair.ratio("gradient/norm/norm") == pytest.approx(math.sqrt(2), rel=1e-12)


@pytest.mark.parametrize(
    ("fault", "end"),
    [("norm_misses_sinks_of_other_ranks", "sinks"), ("norm_misses_expert_slices", "experts.down_proj")],
)
def test_norms_of_slices_are_those_of_the_first_rank(fault, end):
    pair = shown(fault)
    wrong = [name for name, norm in pair.wrong.norms.items() if norm != pair.right.norms[name]]
    assert {name for name in pair.right.norms if name.endswith(end)} <= set(wrong)
    assert all(end.partition(".")[0] in name for name in wrong)
    for name in wrong:
        pieces = piece_of_norm(pair.right.gradients[name], pair.wrong.norms[name])
        assert pieces is not None, name
        assert pieces[1] == 2, name
