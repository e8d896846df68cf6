"""The facts that each fault needs to change a gradient, and the prediction that a fault without one of them is hidden.

A `Need` is derived from the mathematics of the step, never from a measurement: a factor 1 / cp is 1 with one cp rank, a
count of documents without trained tokens adds nothing where every document trains. A fault is predicted to be hidden
from a comparison of gradients if one of its needs is missing, and the missing ones are the reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workbench.faults import Fault
from workbench.sensitivity import data_needs as data
from workbench.sensitivity import layout_needs as layout
from workbench.sensitivity import loss_needs as loss
from workbench.sensitivity.facts import Facts
from workbench.sensitivity.need import Need

GRADIENT = Need("changes reported numbers only, and the comparison judges gradients", lambda f: False)

ALWAYS: tuple[Need, ...] = ()

NEEDS: Mapping[str, tuple[Need, ...]] = {
    "adapter_counted_by_every_tp_rank": (layout.ADAPTERS, layout.TP),
    "adapter_drawn_on_every_rank": (layout.ADAPTERS, layout.RANKS),
    "adapter_factor_not_summed_over_tp": (layout.ADAPTERS, layout.TP),
    "adapter_scaled_by_alpha": (layout.ADAPTERS, layout.RANK_2),
    "advantages_normalised_twice": (loss.OF_GRPO, loss.POLICY_TERM),
    "advantages_of_other_documents": (data.MISDEALT_ADVANTAGES,),
    "attention_across_documents": (data.SHARED_ROW, data.LATER_DOCUMENT),
    "attention_input_gradient_times_cp": (layout.CP,),
    "attention_returns_to_built_group": (layout.CP, layout.SPLIT_LATER),
    "auxiliary_gradient_over_cp": (layout.CP, loss.AUXILIARY),
    "auxiliary_loss_dropped": (loss.AUXILIARY,),
    "auxiliary_loss_not_normalised": (layout.CP, loss.AUXILIARY),
    "auxiliary_loss_times_micro_batches": (loss.AUXILIARY, layout.MICRO_BATCHES),
    "balance_of_own_tokens": (layout.BALANCED, layout.RANKS),
    "baseline_per_micro_batch": (loss.ESTIMATED, layout.ROWS, data.OWN_BASELINES),
    "clamped_kl_keeps_weight_gradient": (loss.KL, loss.SCORE, loss.CLAMPED_KL),
    "clip_before_unscaling": (loss.LOSS_SCALE, loss.CLIPS, layout.STEPS_2, loss.LEARNS),
    "clip_never_applied": (loss.CLIPPED,),
    "clip_of_averaged_gradients": (layout.RANKS, loss.CLIPS, layout.STEPS_2, loss.LEARNS),
    "constant_denominator_without_dp": (loss.CONSTANT, layout.DP),
    "contiguous_shards_taken_for_zigzag": (layout.CP, layout.NOT_ZIGZAG),
    "correction_weight_not_detached": (loss.TOKEN_CORRECTION,),
    "correction_weight_of_current_policy": (loss.READS_SAMPLER, loss.RECORDED_OLD, loss.MOVED),
    "cp_factor_twice": (layout.CP,),
    "denominator_of_another_batch": (loss.TOKEN_MEAN, loss.MEAN_TERM),
    "document_sum_without_adjoint": (layout.CP, loss.DOCUMENT_GRADIENT, data.SPLIT_DOCUMENT),
    "documents_from_shard_positions": (layout.CP, layout.NOT_CONTIGUOUS, data.SPLIT_DOCUMENT),
    "embeddings_sliced_by_other_group": (layout.TP, layout.SEQUENCE_PARALLEL),
    "empty_micro_batch_divides_by_zero": (data.EMPTY_SHARD, loss.UNFUSED),
    "end_token_masked": (data.TRAINED_END,),
    "entropy_in_bfloat16": (loss.ENTROPY,),
    "entropy_of_vocabulary_shard": (layout.TP, loss.ENTROPY),
    "entropy_without_gradient": ALWAYS,
    "expert_gradients_doubled_per_micro_batch": (layout.EP, layout.NO_REPLICAS_OF_EXPERTS, layout.MICRO_BATCHES),
    "expert_gradients_times_ep": (layout.EP,),
    "first_cotangent_for_all": (loss.COTANGENTS,),
    "first_micro_batch_synchronised": (layout.RANKS, layout.MICRO_BATCHES, layout.TRAINED_LATE_ELSEWHERE),
    "gates_of_drifted_routes_zero": (layout.REPLAYED_ROUTES,),
    "gates_of_other_ranks_detached": (layout.EP,),
    "gathered_logits_in_parallel_softmax": (layout.TP,),
    "gathered_tokens_summed_again": (layout.TP, layout.SEQUENCE_PARALLEL),
    "gqa_copies_not_summed": (layout.HEAD_COPIES,),
    "gradient_averaged_over_micro_batches": (layout.MICRO_BATCHES,),
    "gradient_divided_by_documents_again": (data.SEVERAL_DOCUMENTS,),
    "gradient_norm_times_micro_batches": (layout.MICRO_BATCHES, loss.CLIPS_MICRO_BATCHES, layout.STEPS_2, loss.LEARNS),
    "gradients_kept_in_bfloat16": (layout.MICRO_BATCHES, layout.TRAINED_EARLY),
    "gradients_of_last_micro_batch": (layout.MICRO_BATCHES, layout.TRAINED_EARLY),
    "gradients_summed_over_dp_only": (layout.CP, data.REACHED_ELSEWHERE),
    "groups_by_position": (loss.GROUPED, data.MIXED_UP_GROUPS, data.REGROUPED_ADVANTAGES),
    "head_gradient_in_bfloat16": (loss.CHUNKED,),
    "head_input_gradient_not_summed": (layout.TP,),
    "head_output_detached": (loss.CHUNKED,),
    "head_over_temperature_in_bfloat16": (data.OTHER_TEMPERATURE,),
    "head_weight_without_gradient": ALWAYS,
    "heads_tiled": (layout.HEAD_COPIES,),
    "kept_mass_ignored": (loss.READS_SAMPLER,),
    "key_gradients_not_returned": (layout.CP, data.SPLIT_DOCUMENT),
    "kl_added_to_reward": (loss.KL,),
    "kl_without_gradient": (loss.KL,),
    "kl_without_score_gradient": (loss.KL, loss.SCORE),
    "label_roll_across_documents": (data.FOLLOWED_END,),
    "layers_without_gradient": ALWAYS,
    "leave_one_out_over_zero_deviation": ALWAYS,
    "length_divides_document_sum": (loss.DOCUMENT_SUM, data.LONG),
    "length_slipped_into_token_mean": (loss.TOKEN_MEAN, data.LONG, loss.MEAN_TERM),
    "local_denominator": (layout.PIECES, layout.TRAINED_PIECES),
    "logits_in_bfloat16": (loss.CHUNKED,),
    "loss_divided_by_sequence_ranks": (layout.CP,),
    "loss_mask_one_late": ALWAYS,
    "lower_clip_at_epsilon": (loss.CLIPPED_BELOW, loss.OWN_CLIP),
    "luspo_over_tokens": (loss.of_kind("luspo"), loss.NO_TOKEN_MEAN),
    "masked_rows_in_baseline": (loss.GROUPED, data.UNTRAINED_IN_GROUP),
    "masters_in_bfloat16": (loss.WIDE_WEIGHTS, layout.STEPS_2),
    "mean_of_micro_batch_means": (layout.ROWS, data.UNEQUAL_ROWS),
    "mean_over_all_rows": (loss.of_kind("gmpo"), layout.ROWS_OR_UNTRAINED),
    "metrics_of_last_micro_batch": (layout.NO_EVIDENCE,),
    "micro_batch_denominator": (loss.TOKEN_MEAN, layout.ROWS, layout.TRAINED_ROWS, loss.MEAN_TERM),
    "missing_cp_factor": (layout.CP,),
    "moments_in_bfloat16": (loss.ADAM, layout.STEPS_3, loss.LEARNS),
    "nan_under_the_mask": ALWAYS,
    "nll_denominator_per_micro_batch": (loss.LIKELIHOOD, layout.ROWS, layout.TRAINED_ROWS),
    "norm_counts_experts_of_replicas": (layout.EP, loss.CLIPS_EXPERTS, layout.STEPS_2, loss.LEARNS),
    "norm_counts_replicas": (layout.TP, loss.CLIPS_REPLICAS, layout.STEPS_2, loss.LEARNS),
    "norm_gradient_not_summed_over_tp": (layout.TP,),
    "norm_gradient_summed_per_micro_batch": (layout.TP, layout.MICRO_BATCHES, layout.TRAINED_EARLY),
    "norm_misses_expert_slices": (layout.EP, layout.TP, loss.CLIPS, layout.STEPS_2, loss.LEARNS),
    "norm_misses_sinks_of_other_ranks": (layout.SINKS, layout.TP, loss.CLIPS, layout.STEPS_2, loss.LEARNS),
    "old_logprobs_as_prefix": (loss.READS_OLD, loss.POLICY_TERM, data.LOOSE_MASK),
    "old_logprobs_in_bfloat16": (loss.READS_OLD, loss.POLICY_TERM),
    "old_logprobs_not_shifted": (loss.READS_OLD, loss.POLICY_TERM),
    "overflow_not_skipped": (loss.LOSS_SCALE, loss.OVERFLOW),
    "padded_vocabulary_counted": (data.PADDED_VOCABULARY, loss.LOGPROB_TERM),
    "padded_width_in_denominator": (loss.CONSTANT,),
    "per_sample_count_floor": (loss.TOKEN_MEAN, data.UNTRAINED, loss.MEAN_TERM),
    "pipeline_gradients_averaged": (layout.PP, layout.MICRO_BATCHES),
    "pipeline_gradients_averaged_per_call": (layout.PP, layout.MICRO_BATCHES),
    "pipeline_loss_divided_after_backward": (layout.PP,),
    "positions_from_shard": (layout.CP, data.SPLIT_DOCUMENT),
    "prediction_across_documents": (loss.PREDICTS, data.SHARED_ROW),
    "prediction_counts_of_shards": (loss.PREDICTS, layout.PIECES),
    "prediction_not_normalised": (loss.PREDICTS,),
    "prediction_over_cp": (loss.PREDICTS, layout.CP),
    "prediction_recomputed_over_other_group": (loss.PREDICTS, layout.CP, layout.TP, layout.CHECKPOINTING),
    "prediction_replays_first_mixture": (loss.PREDICTS, layout.ROUTER, loss.NOTES_ROUTES),
    "prediction_targets_shifted_again": (loss.PREDICTS,),
    "projections_gather_other_ranks": (layout.TP, layout.SEQUENCE_PARALLEL),
    "prompt_in_document_advantage": (loss.READS_DOCUMENTS, loss.DOCUMENT_ADVANTAGE),
    "prompt_mean_for_token_mean": (loss.TOKEN_MEAN, data.UNEQUAL_PROMPTS, loss.MEAN_TERM),
    "reduction_in_bfloat16": (layout.SEVERAL_RANKS,),
    "reduction_repeated_per_micro_batch": (layout.SUMMED_OVER_RANKS, layout.MICRO_BATCHES, layout.TRAINED_EARLY),
    "reference_at_temperature_one": (data.OTHER_TEMPERATURE, loss.KL),
    "rejected_tokens_in_denominator": (loss.COUNTS_SURVIVORS, loss.REJECTED),
    "response_length_in_denominator": (loss.TOKEN_MEAN, data.LOOSE_MASK, loss.MEAN_TERM),
    "reversed_kl": (loss.KL, loss.ODD_KL),
    "reward_on_every_cp_rank": (loss.ESTIMATED, data.SCALED_ADVANTAGES, layout.CP),
    "ring_block_normaliser": (layout.CP, data.SPLIT_DOCUMENT),
    "rotary_tables_in_bfloat16": ALWAYS,
    "router_gradient_not_summed_over_tp": (layout.ROUTER, layout.WHOLE_MODEL, layout.TP, layout.SEQUENCE_PARALLEL),
    "router_gradient_over_cp": (layout.ROUTER_LOSS, layout.CP),
    "router_gradient_times_cp": (layout.ROUTER_LOSS, layout.CP),
    "router_in_bfloat16": (layout.ROUTER,),
    "router_mask_of_other_slice": (layout.ROUTER_LOSS, layout.CP, layout.TP, layout.SEQUENCE_PARALLEL, layout.PADDED),
    "router_without_gradient": (layout.ROUTER,),
    "routes_not_replayed": (layout.REPLAYED_ROUTES,),
    "routes_of_another_layer": (layout.REPLAYED_ROUTES,),
    "routes_shifted_by_one": (layout.REPLAYED_ROUTES,),
    "rows_without_signal_counted": (loss.COUNTS_DOCUMENTS, data.UNTRAINED),
    "sample_share_times_token_mean": (loss.TOKEN_MEAN, layout.ROWS, data.UNEQUAL_SHARES),
    "sampler_logprobs_before_temperature": (data.OTHER_TEMPERATURE, loss.READS_SAMPLER),
    "sampler_logprobs_one_late": (loss.READS_SAMPLER,),
    "samples_for_rollouts": (loss.ROLLOUT, data.SEVERAL_SAMPLES),
    "segments_numbered_per_shard": (layout.CP, loss.READS_DOCUMENTS),
    "sequence_ratio_per_shard": (layout.CP, loss.READS_DOCUMENTS, data.SPLIT_DOCUMENT, loss.UNLIKE_RATIOS),
    "sequence_ratio_without_gradient": (loss.DOCUMENT_GRADIENT,),
    "sequence_sums_at_wrong_offsets": (layout.CP, loss.READS_DOCUMENTS, layout.NOT_CONTIGUOUS),
    "sequence_weight_sums_logs": (loss.DOCUMENT_MEAN_CORRECTION,),
    "shift_after_shard": (layout.CP, data.SPREAD_DOCUMENT),
    "smoothing_over_local_vocabulary": (layout.TP, loss.SMOOTHED),
    "stage_layers_numbered_locally": (layout.PP,),
    "stages_prepared_per_micro_batch": (layout.PP, layout.MICRO_BATCHES),
    "stale_keys_in_ring_backward": (layout.CP, data.SPLIT_DOCUMENT),
    "tail_positions_follow_head": (layout.CP, layout.NOT_CONTIGUOUS, data.TORN_DOCUMENT),
    "targets_shifted_twice": ALWAYS,
    "temperature_divides_logprobs": (data.OTHER_TEMPERATURE,),
    "temperature_missing_in_policy": (data.OTHER_TEMPERATURE,),
    "tokens_counted_over_dp_only": (layout.CP, loss.TOKEN_MEAN, loss.MEAN_TERM, data.TRAINED_ON_SEVERAL),
    "tied_weight_of_each_end": (layout.PP, layout.TIED, layout.WHOLE_MODEL),
    "tool_mask_ignored": (data.HOLES,),
    "unpadded_borders_on_padded_row": (data.PADDED_DOCUMENTS,),
    "whitening_per_rank": (layout.DP, loss.WHITENED),
    "whole_norm_gradients_summed_over_tp": (layout.TP, layout.NO_SEQUENCE_PARALLEL),
}
"""Fault -> its needs, all of which must hold; `ALWAYS` for one that shows wherever its seam is called."""


def needs_of(fault: Fault) -> Sequence[Need]:
    """Return the needs of a fault.

    A fault of metrics has none that data or settings could meet, and one that is not listed those of its declaration:
    it is hidden in the settings of its ``hidden_in``.
    """
    if fault.name in NEEDS:
        return NEEDS[fault.name]
    if not fault.changes_gradient and not fault.changes_update:
        return (GRADIENT,)
    return (Need("settings in which the fault declares to be hidden", lambda f: not _hidden_by_declaration(fault, f)),)


def missing_needs(fault: Fault, facts: Facts) -> tuple[Need, ...]:
    """Return the needs of a fault that do not hold, for which it is predicted to be hidden; () if it is not."""
    return tuple(need for need in needs_of(fault) if not need.holds(facts))


def _hidden_by_declaration(fault: Fault, facts: Facts) -> bool:
    if fault.hidden_in is None:
        return False
    merged = facts.spec.merged(fault.hidden_in)
    return merged == facts.spec
