"""Faults diagnosed from two records alone: the right cause is first, and faults without effect are equal."""

import pytest

from tests.helpers.planted_records import hidden_records, shown_records
from workbench.diagnose import diagnose

EXPECTED = {
    "missing_cp_factor": "over_cp",
    "gradient_averaged_over_micro_batches": "over_micro_batches",
    "gradient_divided_by_documents_again": "over_documents",
    "local_denominator": "mean_per_shards",
    "mean_of_micro_batch_means": "mean_per_rows",
    "per_sample_count_floor": "over_trained_tokens_and_masked_documents_per_trained_tokens",
    "rejected_tokens_in_denominator": "other_count",
    "gradients_summed_over_dp_only": "ranks_lost",
    "reduction_repeated_per_micro_batch": "added_repeatedly",
    "kl_without_gradient": "term_without_gradient",
    "head_weight_without_gradient": "part_without_gradient",
    "head_input_gradient_not_summed": "gradient_below_head",
    "norm_gradient_not_summed_over_tp": "norms_not_summed",
    "gqa_copies_not_summed": "keys_values_not_summed",
    "ring_block_normaliser": "attention_backward",
    "shift_after_shard": "targets_at_shard_edges",
    "label_roll_across_documents": "targets_at_document_ends",
    "positions_from_shard": "positions_of_shards",
    "attention_across_documents": "attention_across_documents",
    "old_logprobs_not_shifted": "old_logprobs",
    "temperature_missing_in_policy": "temperature",
    "temperature_divides_logprobs": "logprobs_scaled",
    "padded_vocabulary_counted": "normaliser",
    "whitening_per_rank": "advantages",
    "loss_counted_by_every_rank": "loss_alone",
    "norm_counts_replicas": "norm_alone",
    "entropy_of_vocabulary_shard": "entropy_alone",
    "metrics_of_last_micro_batch": "metrics_alone",
    "auxiliary_loss_not_normalised": "one_term",
    "smoothing_over_local_vocabulary": "smoothing",
    "nan_under_the_mask": "not_finite",
    "prediction_over_cp": "prediction_factor",
    "prediction_counts_of_shards": "prediction_counts",
    "prediction_across_documents": "prediction_targets",
    "prediction_replays_first_mixture": "prediction_layer",
    "prediction_recomputed_over_other_group": "recomputed",
    "gates_of_drifted_routes_zero": "zero_gates",
    "gates_of_other_ranks_detached": "gates_of_own_experts",
    "router_mask_of_other_slice": "router_tokens",
    "balance_of_own_tokens": "router_loads",
    "router_gradient_times_cp": "router_gradient",
    "expert_gradients_times_ep": "experts_scaled",
    "expert_gradients_doubled_per_micro_batch": "experts_repeated",
    "norm_misses_sinks_of_other_ranks": "norm_of_slice",
    "norm_misses_expert_slices": "norm_of_slice",
    "embeddings_sliced_by_other_group": "other_slices",
    "projections_gather_other_ranks": "hidden_of_other_ranks",
    "attention_returns_to_built_group": "attention_of_first_row",
    "tied_weight_of_each_end": "ends_not_summed",
    "stage_layers_numbered_locally": "other_layers",
}
"""Fault -> the cause of its kind."""


@pytest.mark.parametrize("fault", EXPECTED)
def test_the_cause_that_fits_is_first(fault):
    diagnosis = diagnose(*shown_records(fault))
    assert diagnosis.causes[0].name == EXPECTED[fault], str(diagnosis)


@pytest.mark.parametrize(
    "fault",
    ["missing_cp_factor", "norm_gradient_not_summed_over_tp", "shift_after_shard", "temperature_missing_in_policy"],
)
def test_a_fault_without_effect_is_called_equal(fault):
    diagnosis = diagnose(*hidden_records(fault))
    assert diagnosis.equal, str(diagnosis)
