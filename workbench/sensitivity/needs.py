"""The facts that each fault needs to change a gradient, and the prediction that a fault without one of them is hidden.

A `Need` is derived from the mathematics of the step, never from a measurement: a factor 1 / cp is 1 with one cp rank, a
count of documents without trained tokens adds nothing where every document trains. A fault is predicted to be hidden
from a comparison of gradients if one of its needs is missing, and the missing ones are the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from workbench.faults import Fault
from workbench.faults.precision import TILE
from workbench.rollouts.advantages.registry import WITHOUT_BASELINE
from workbench.sensitivity.facts import SAME, Facts
from workbench.sharding.divisibility import multiples

Test = Callable[[Facts], bool]


@dataclass(frozen=True)
class Need:
    """A fact without which a fault has no effect on a gradient.

    Attributes:
        missing: the reason for which a fault is hidden, if the fact does not hold.
        holds: the fact.
        change: name of the change in `workbench.sensitivity.changes` that makes it hold; "" if there is none.
        observed: True if the fact is of the clean run, so that it is not known before that run.
    """

    missing: str
    holds: Test
    change: str = ""
    observed: bool = False


# ---- layout and steps ------------------------------------------------------------------------------------

CP = Need("one cp rank", lambda f: f.spec.layout.cp > 1, "two cp ranks")
TP = Need("one tp rank", lambda f: f.spec.layout.tp > 1, "two tp ranks")
DP = Need("one dp rank", lambda f: f.spec.layout.dp > 1, "two dp ranks")
EP = Need("experts on one rank, or none", lambda f: f.spec.layout.ep > 1)
NO_REPLICAS_OF_EXPERTS = Need(
    "several ranks with the same experts",
    lambda f: f.spec.layout.ep == f.spec.layout.dp * f.spec.layout.cp,
)
PP = Need("one pipeline stage", lambda f: f.spec.layout.pp > 1)
RANKS = Need("one rank of dp x cp", lambda f: f.spec.layout.dp * f.spec.layout.cp > 1, "two dp ranks")
SEVERAL_RANKS = Need("one rank", lambda f: f.spec.layout.world_size > 1, "two dp ranks")
MICRO_BATCHES = Need(
    "one micro-batch", lambda f: f.any_step(lambda s: len(s.rows) > f.spec.layout.dp), "three micro-batches"
)
ROWS = Need("one row in the step", lambda f: f.any_step(lambda s: len(s.rows) > 1), "three micro-batches")
ROWS_OR_UNTRAINED = Need(
    "one row, in which every document trains",
    lambda f: f.any_step(lambda s: len(s.rows) > 1 or s.untrained > 0),
    "three micro-batches",
)
PIECES = Need(
    "one row on one rank, and a mean over tokens",
    lambda f: f.spec.layout.cp > 1 or f.spec.loss.denominator != "token" or ROWS.holds(f),
    "two cp ranks",
)
ADAPTERS = Need("no adapters", lambda f: f.spec.lora.on)
RANK_2 = Need("adapters of rank 1", lambda f: (f.spec.lora.r or 2) > 1)
SINKS = Need("a model without attention sinks", lambda f: f.sinks)
CHECKPOINTING = Need("activations that are not recomputed", lambda f: f.spec.layout.checkpointing)
PADDED = Need("no row has padding", lambda f: f.any_row(lambda r: r.padding > 0))
ROUTER = Need("a model without experts", lambda f: f.experts > 0)
REPLAYED_ROUTES = Need("routes are not replayed", lambda f: f.spec.routing.replays)
BALANCED = Need("no load-balancing loss", lambda f: bool(f.spec.routing.balance))
ROUTER_LOSS = Need("no loss of routers", lambda f: bool(f.spec.routing.balance or f.spec.routing.z))
SEQUENCE_PARALLEL = Need("no sequence parallelism", lambda f: f.spec.layout.sequence_parallel)
NO_SEQUENCE_PARALLEL = Need(
    "sequence parallelism, where all replicated weights need that sum", lambda f: not f.spec.layout.sequence_parallel
)
NOT_CONTIGUOUS = Need("contiguous shards", lambda f: f.spec.layout.order != "contiguous", "zigzag shards")
NOT_ZIGZAG = Need("zigzag shards, which is what the fault assumes", lambda f: f.spec.layout.order != "zigzag")
HEAD_COPIES = Need("no more ranks than key heads", lambda f: f.spec.layout.cp > f.key_heads)
STEPS_2 = Need("one step", lambda f: f.spec.steps >= 2, "four steps")
STEPS_3 = Need("fewer than three steps", lambda f: f.spec.steps >= 3, "four steps")

# ---- data ------------------------------------------------------------------------------------------------

SHARED_ROW = Need("every document has a row of its own", lambda f: f.any_row(lambda r: r.documents > 1))
SPLIT_DOCUMENT = Need(
    "no trained document lies on several cp ranks", lambda f: f.any_row(lambda r: r.split_documents > 0)
)
TORN_DOCUMENT = Need(
    "no document has two separate pieces on a cp rank", lambda f: f.any_row(lambda r: r.torn_documents > 0)
)
UNTRAINED = Need(
    "every document has a trained token", lambda f: f.any_step(lambda s: s.untrained > 0), "a masked document"
)
UNTRAINED_IN_GROUP = Need(
    "no masked document in a group", lambda f: f.any_step(lambda s: s.untrained_with_others > 0), "a masked document"
)
HOLES = Need("no hole in a mask", lambda f: f.any_step(lambda s: s.holes > 0), "a hole in a mask")
LOOSE_MASK = Need(
    "every mask is one run of tokens to the document's end",
    lambda f: f.any_step(lambda s: s.holes + s.open_ends > 0),
    "a hole in a mask",
)
TRAINED_END = Need("no document trains its last token", lambda f: f.any_step(lambda s: s.trained_ends > 0))
EMPTY_SHARD = Need(
    "every row has a trained token on every rank",
    lambda f: f.any_row(lambda r: 0 in r.shard_tokens),
    "one trained document",
)
SEVERAL_DOCUMENTS = Need(
    "one trained document", lambda f: f.any_step(lambda s: sum(length > 0 for length in s.lengths) > 1)
)
VARIED_LENGTHS = Need(
    "documents of one trained length", lambda f: f.any_step(lambda s: len({*filter(None, s.lengths)}) > 1)
)
LONG = Need("documents of one trained token", lambda f: f.any_step(lambda s: max(s.lengths) > 1))
UNEQUAL_ROWS = Need(
    "rows with equal counts",
    lambda f: f.any_step(lambda s: len({(r.tokens, r.trained_documents) for r in s.rows}) > 1),
)
UNEQUAL_SHARES = Need(
    "rows whose share of the documents is that of the tokens",
    lambda f: f.any_step(
        lambda s: any(
            row.tokens * sum(each.documents for each in s.rows) != row.documents * sum(each.tokens for each in s.rows)
            for row in s.rows
        )
    ),
)
UNEQUAL_PROMPTS = Need(
    "prompts with equal counts of trained tokens",
    lambda f: f.any_step(lambda s: len({*filter(None, s.prompt_tokens)}) > 1),
)
MIXED_UP_GROUPS = Need(
    "groups of equal size, one after another", lambda f: f.any_step(lambda s: not s.groups_in_place), "mixed-up groups"
)
SPLIT_GROUP = Need("every group in one row", lambda f: f.any_step(lambda s: s.split_groups > 0), "three micro-batches")
OUT_OF_ORDER = Need("rows in the order of arrival", lambda f: f.any_step(lambda s: not s.in_order))
VARIED_ADVANTAGES = Need("equal advantages", lambda f: f.any_step(lambda s: s.varied_advantages))
PADDED_DOCUMENTS = Need(
    "no document is padded",
    lambda f: multiples(f.spec.layout).document > 1 and f.any_step(lambda s: s.padded_documents > 0),
)
SEVERAL_SAMPLES = Need(
    "every rollout is one document",
    lambda f: f.any_step(lambda s: s.rollouts_of_several > 0),
    "a rollout of two documents",
)
PADDED_VOCABULARY = Need(f"the vocabulary is a multiple of {TILE}", lambda f: f.vocabulary % TILE != 0)
OTHER_TEMPERATURE = Need("temperature 1", lambda f: f.temperature != 1.0, "temperature 0.7")

# ---- what the clean run has met --------------------------------------------------------------------------

CLIPPED = Need("no token is clipped", lambda f: f.observed.clipped > 0, "other old log-probabilities", True)
CLIPPED_BELOW = Need(
    "no token is clipped at the lower bound",
    lambda f: f.observed.clipped_below > 0 and getattr(f.spec.loss.surrogate, "clip_low", 0.5) != 0.5,
    "other old log-probabilities",
    True,
)
OWN_CLIP = Need("clip decisions are those of another run", lambda f: f.spec.frozen_clip is None)
MOVED = Need(
    "the ratio is 1 in every step", lambda f: f.observed.old_distance > SAME, "other old log-probabilities", True
)


def _clips(factor: Callable[[Facts], float]) -> Need:
    """A norm, or one that is too large by a factor, over the clip: below it a wrong norm changes no weight."""

    def over(facts: Facts) -> bool:
        bound = facts.spec.optimizer.max_grad_norm
        return bound is not None and facts.observed.largest_norm * factor(facts) > bound

    return Need("no gradient norm is over the clip", over, "a clip of the gradient norm", True)


CLIPS = _clips(lambda f: 1.0)
CLIPS_MICRO_BATCHES = _clips(lambda f: max(len(step.rows) for step in f.steps) / f.spec.layout.dp)
CLIPS_REPLICAS = _clips(lambda f: f.spec.layout.tp**0.5)
CLIPS_EXPERTS = _clips(lambda f: (f.spec.layout.dp * f.spec.layout.cp / f.spec.layout.ep) ** 0.5)

# ---- loss, advantages, optimizer -------------------------------------------------------------------------

_RATIO_KINDS_WITHOUT_OLD = ("reinforce", "gpg", "on_policy", "sft", "ref_kl", "dpo")
READS_OLD = Need(
    "a loss without recorded old log-probabilities",
    lambda f: (
        f.spec.loss.old_policy == "recorded"
        and (f.spec.loss.surrogate.kind not in _RATIO_KINDS_WITHOUT_OLD or f.spec.loss.correction.kind != "none")
    ),
)
RECORDED_OLD = Need("the old policy is the current one", lambda f: f.spec.loss.old_policy == "recorded")
_DOCUMENT_KINDS = ("gspo", "gspo_token", "luspo", "gmpo", "vespo", "dpo")
READS_DOCUMENTS = Need(
    "a loss on tokens",
    lambda f: (
        f.spec.loss.surrogate.kind in _DOCUMENT_KINDS
        or getattr(f.spec.loss.surrogate, "level", "token") != "token"
        or f.spec.loss.correction.ratio not in ("none", "token", "given")
    ),
    "one ratio for each document",
)
READS_SAMPLER = Need(
    "no correction for the sampler",
    lambda f: (
        f.any_step(lambda s: s.has_sampler)
        and (
            f.spec.loss.correction.kind != "none"
            or getattr(f.spec.loss.surrogate, "anchor", "old") == "sampler"
            or (f.spec.loss.kl.coefficient != 0 and f.spec.loss.kl.against == "sampler")
        )
    ),
    "truncated importance sampling",
)


def _denominator(*names: str, change: str = "") -> Need:
    return Need(f"the denominator is not {' or '.join(names)}", lambda f: f.spec.loss.denominator in names, change)


NO_TOKEN_MEAN = Need("the denominator is token already", lambda f: f.spec.loss.denominator != "token")
TOKEN_MEAN = _denominator("token", change="a mean over tokens")
CONSTANT = _denominator("constant", change="a constant denominator")
DOCUMENT_SUM = _denominator("document_sum", change="a mean of sums over documents")
COUNTS_DOCUMENTS = _denominator("document", "document_sum", "constant", change="a mean over documents")
ROLLOUT = _denominator("rollout", change="a mean over rollouts")


def _kind(kind: str) -> Need:
    return Need(f"the loss is not {kind}", lambda f: f.spec.loss.surrogate.kind == kind, f"loss {kind}")


AUXILIARY = Need(
    "no auxiliary loss",
    lambda f: bool(f.spec.loss.squared_logit_coefficient or f.spec.loss.mean_squared_logit_coefficient),
    "an auxiliary loss",
)
PREDICTS = Need("no prediction of further tokens", lambda f: f.spec.prediction.on)
NOTES_ROUTES = Need("no routes that are noted", lambda f: f.spec.routing.on)
SMOOTHED = Need("no label smoothing", lambda f: f.spec.loss.label_smoothing != 0)
LIKELIHOOD = Need("no likelihood term", lambda f: f.spec.loss.positive_nll_coefficient != 0, "loss vapo")
ENTROPY = Need("no entropy bonus", lambda f: f.spec.loss.entropy_coefficient != 0)
KL = Need("no KL penalty", lambda f: f.spec.loss.kl.coefficient != 0, "a KL penalty")
SCORE = Need("a penalty without its score", lambda f: f.spec.loss.kl.gradient == "score", "a penalty with its score")
CLAMPED_KL = Need("no clamp of the penalty", lambda f: f.spec.loss.kl.input_clamp is not None, "a clamped penalty")
ODD_KL = Need("an even estimator", lambda f: f.spec.loss.kl.estimator != "k2")
COTANGENTS = Need(
    "all tokens weigh the same",
    lambda f: (
        (f.spec.loss.surrogate.reads_advantages and VARIED_ADVANTAGES.holds(f))
        or f.spec.loss.kl.coefficient != 0
        or (f.spec.loss.denominator != "token" and VARIED_LENGTHS.holds(f))
    ),
)
TOKEN_CORRECTION = Need(
    "a correction without a weight of tokens",
    lambda f: f.spec.loss.correction.ratio == "token",
    "truncated importance sampling",
)
DOCUMENT_MEAN_CORRECTION = Need(
    "a correction without a mean over documents",
    lambda f: f.spec.loss.correction.ratio == "document_mean",
    "a mean over documents in the correction",
)
COUNTS_SURVIVORS = Need(
    "the denominator does not count survivors",
    lambda f: f.spec.loss.correction.denominator == "survivors",
    "icepop with narrow bounds",
)


def _rejects(facts: Facts) -> bool:
    """True if a correction has a token whose weight old / sampler is outside its bounds."""
    low, high = facts.spec.loss.correction.ratio_low, facts.spec.loss.correction.ratio_high
    return facts.any_step(
        lambda s: (low is not None and s.least_weight < low) or (high is not None and s.largest_weight > high)
    )


REJECTED = Need("no token is rejected", _rejects, "another sampler")
DOCUMENT_ADVANTAGE = Need(
    "each token keeps its advantage", lambda f: getattr(f.spec.loss.surrogate, "advantage_level", "") == "document"
)
CHUNKED = Need(
    "the head is not chunked",
    lambda f: f.spec.policy.logprobs == "chunked" or f.spec.policy.fused_loss,
    "a chunked head",
)
UNFUSED_CHUNKED = Need("the head is not chunked", lambda f: f.spec.policy.logprobs == "chunked", "a chunked head")


def _advantages(missing: str, test: Callable[[str], bool], change: str) -> Need:
    return Need(missing, lambda f: test(f.spec.data.advantages.name), change)


ESTIMATED = _advantages("recorded advantages", lambda name: name != "recorded", "advantages rloo")
GROUPED = _advantages(
    "advantages without a group", lambda name: name != "recorded" and name not in WITHOUT_BASELINE, "advantages grpo"
)
OF_GRPO = _advantages("advantages are not those of grpo", lambda name: name == "grpo", "advantages grpo")
WHITENED = _advantages(
    "advantages are not whitened over the step",
    lambda name: name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "grpo_whitened"),
    "advantages reinforce_plus_plus",
)
UNSCALED = _advantages(
    "advantages divided by a deviation",
    lambda name: name in ("rloo", "dr_grpo", "opo", "gpg", "gdpo", "remax", "optimal_token_baseline", "gae", "vapo"),
    "advantages rloo",
)
ADAM = Need("an optimizer without moments", lambda f: f.spec.optimizer.name == "adamw", "adamw")
WIDE_WEIGHTS = Need("weights of eight bits", lambda f: f.spec.dtypes.weights != "bfloat16")
LEARNS = Need("a learning rate of 0", lambda f: f.spec.optimizer.learning_rate > 0)
LOSS_SCALE = Need("no loss scale", lambda f: (f.spec.dtypes.loss_scale or 1.0) != 1.0)
OVERFLOW = Need("no scaled gradient overflows", lambda f: not f.observed.finite, observed=True)

# ---- how a comparison sees a fault -----------------------------------------------------------------------

GRADIENT = Need("changes reported numbers only, and the comparison judges gradients", lambda f: False)

ALWAYS: tuple[Need, ...] = ()

NEEDS: Mapping[str, tuple[Need, ...]] = {
    "adapter_counted_by_every_tp_rank": (ADAPTERS, TP),
    "adapter_drawn_on_every_rank": (ADAPTERS, RANKS),
    "adapter_factor_not_summed_over_tp": (ADAPTERS, TP),
    "adapter_scaled_by_alpha": (ADAPTERS, RANK_2),
    "advantages_normalised_twice": (OF_GRPO,),
    "advantages_of_other_documents": (OUT_OF_ORDER, VARIED_ADVANTAGES),
    "attention_across_documents": (SHARED_ROW,),
    "attention_input_gradient_times_cp": (CP,),
    "attention_returns_to_built_group": (CP, MICRO_BATCHES, SPLIT_DOCUMENT),
    "auxiliary_gradient_over_cp": (CP, AUXILIARY),
    "auxiliary_loss_dropped": (AUXILIARY,),
    "auxiliary_loss_not_normalised": (CP, AUXILIARY),
    "auxiliary_loss_times_micro_batches": (AUXILIARY, MICRO_BATCHES),
    "balance_of_own_tokens": (BALANCED, RANKS),
    "baseline_per_micro_batch": (GROUPED, ROWS, SPLIT_GROUP),
    "clamped_kl_keeps_weight_gradient": (KL, SCORE, CLAMPED_KL),
    "clip_before_unscaling": (LOSS_SCALE, CLIPS, STEPS_2, LEARNS),
    "clip_never_applied": (CLIPPED,),
    "clip_of_averaged_gradients": (RANKS, CLIPS, STEPS_2, LEARNS),
    "constant_denominator_without_dp": (CONSTANT, DP),
    "contiguous_shards_taken_for_zigzag": (CP, NOT_ZIGZAG),
    "correction_weight_not_detached": (TOKEN_CORRECTION,),
    "correction_weight_of_current_policy": (READS_SAMPLER, RECORDED_OLD, MOVED),
    "cp_factor_twice": (CP,),
    "denominator_of_another_batch": (TOKEN_MEAN,),
    "document_sum_without_adjoint": (CP, READS_DOCUMENTS, SPLIT_DOCUMENT),
    "documents_from_shard_positions": (CP, NOT_CONTIGUOUS, SPLIT_DOCUMENT),
    "embeddings_sliced_by_other_group": (CP, TP, SEQUENCE_PARALLEL),
    "empty_micro_batch_divides_by_zero": (EMPTY_SHARD,),
    "end_token_masked": (TRAINED_END,),
    "entropy_in_bfloat16": (ENTROPY,),
    "entropy_of_vocabulary_shard": (TP, ENTROPY),
    "entropy_without_gradient": ALWAYS,
    "expert_gradients_doubled_per_micro_batch": (EP, NO_REPLICAS_OF_EXPERTS, MICRO_BATCHES),
    "expert_gradients_times_ep": (EP,),
    "first_cotangent_for_all": (COTANGENTS,),
    "first_micro_batch_synchronised": (RANKS, MICRO_BATCHES),
    "gates_of_drifted_routes_zero": (REPLAYED_ROUTES,),
    "gates_of_other_ranks_detached": (EP,),
    "gathered_logits_in_parallel_softmax": (TP,),
    "gathered_tokens_summed_again": (TP, SEQUENCE_PARALLEL),
    "gqa_copies_not_summed": (HEAD_COPIES,),
    "gradient_averaged_over_micro_batches": (MICRO_BATCHES,),
    "gradient_divided_by_documents_again": (SEVERAL_DOCUMENTS,),
    "gradient_norm_times_micro_batches": (MICRO_BATCHES, CLIPS_MICRO_BATCHES, STEPS_2, LEARNS),
    "gradients_kept_in_bfloat16": (MICRO_BATCHES,),
    "gradients_of_last_micro_batch": (MICRO_BATCHES,),
    "gradients_summed_over_dp_only": (CP,),
    "groups_by_position": (GROUPED, MIXED_UP_GROUPS),
    "head_gradient_in_bfloat16": (CHUNKED,),
    "head_input_gradient_not_summed": (TP,),
    "head_output_detached": (UNFUSED_CHUNKED,),
    "head_over_temperature_in_bfloat16": (OTHER_TEMPERATURE,),
    "head_weight_without_gradient": ALWAYS,
    "heads_tiled": (HEAD_COPIES,),
    "kept_mass_ignored": (READS_SAMPLER,),
    "key_gradients_not_returned": (CP, SPLIT_DOCUMENT),
    "kl_added_to_reward": (KL,),
    "kl_without_gradient": (KL,),
    "kl_without_score_gradient": (KL, SCORE),
    "label_roll_across_documents": (SHARED_ROW, TRAINED_END),
    "layers_without_gradient": ALWAYS,
    "leave_one_out_over_zero_deviation": ALWAYS,
    "length_divides_document_sum": (DOCUMENT_SUM, LONG),
    "length_slipped_into_token_mean": (TOKEN_MEAN, LONG),
    "local_denominator": (PIECES,),
    "logits_in_bfloat16": (CHUNKED,),
    "loss_divided_by_sequence_ranks": (CP,),
    "loss_mask_one_late": ALWAYS,
    "lower_clip_at_epsilon": (CLIPPED_BELOW, OWN_CLIP),
    "luspo_over_tokens": (_kind("luspo"), NO_TOKEN_MEAN),
    "masked_rows_in_baseline": (GROUPED, UNTRAINED_IN_GROUP),
    "masters_in_bfloat16": (WIDE_WEIGHTS, STEPS_2),
    "mean_of_micro_batch_means": (ROWS, UNEQUAL_ROWS),
    "mean_over_all_rows": (_kind("gmpo"), ROWS_OR_UNTRAINED),
    "micro_batch_denominator": (TOKEN_MEAN, ROWS),
    "missing_cp_factor": (CP,),
    "moments_in_bfloat16": (ADAM, STEPS_3, LEARNS),
    "nan_under_the_mask": ALWAYS,
    "nll_denominator_per_micro_batch": (LIKELIHOOD, ROWS),
    "norm_counts_experts_of_replicas": (EP, CLIPS_EXPERTS, STEPS_2, LEARNS),
    "norm_counts_replicas": (TP, CLIPS_REPLICAS, STEPS_2, LEARNS),
    "norm_gradient_not_summed_over_tp": (TP,),
    "norm_gradient_summed_per_micro_batch": (TP, MICRO_BATCHES),
    "norm_misses_expert_slices": (EP, TP, CLIPS, STEPS_2, LEARNS),
    "norm_misses_sinks_of_other_ranks": (SINKS, TP, CLIPS, STEPS_2, LEARNS),
    "old_logprobs_as_prefix": (READS_OLD, LOOSE_MASK),
    "old_logprobs_in_bfloat16": (READS_OLD,),
    "old_logprobs_not_shifted": (READS_OLD,),
    "overflow_not_skipped": (LOSS_SCALE, OVERFLOW),
    "padded_vocabulary_counted": (PADDED_VOCABULARY,),
    "padded_width_in_denominator": (CONSTANT,),
    "per_sample_count_floor": (TOKEN_MEAN, UNTRAINED),
    "pipeline_gradients_averaged": (PP, MICRO_BATCHES),
    "pipeline_gradients_averaged_per_call": (PP, MICRO_BATCHES),
    "pipeline_loss_divided_after_backward": (PP,),
    "positions_from_shard": (CP, SPLIT_DOCUMENT),
    "prediction_across_documents": (PREDICTS, SHARED_ROW),
    "prediction_counts_of_shards": (PREDICTS, PIECES),
    "prediction_not_normalised": (PREDICTS,),
    "prediction_over_cp": (PREDICTS, CP),
    "prediction_recomputed_over_other_group": (PREDICTS, CP, TP, CHECKPOINTING),
    "prediction_replays_first_mixture": (PREDICTS, ROUTER, NOTES_ROUTES),
    "prediction_targets_shifted_again": (PREDICTS,),
    "projections_gather_other_ranks": (CP, TP, SEQUENCE_PARALLEL),
    "prompt_in_document_advantage": (READS_DOCUMENTS, DOCUMENT_ADVANTAGE),
    "prompt_mean_for_token_mean": (TOKEN_MEAN, UNEQUAL_PROMPTS),
    "reduction_in_bfloat16": (SEVERAL_RANKS,),
    "reduction_repeated_per_micro_batch": (RANKS, MICRO_BATCHES),
    "reference_at_temperature_one": (OTHER_TEMPERATURE, KL),
    "rejected_tokens_in_denominator": (COUNTS_SURVIVORS, REJECTED),
    "response_length_in_denominator": (TOKEN_MEAN, LOOSE_MASK),
    "reversed_kl": (KL, ODD_KL),
    "reward_on_every_cp_rank": (ESTIMATED, UNSCALED, CP),
    "ring_block_normaliser": (CP, SPLIT_DOCUMENT),
    "rotary_tables_in_bfloat16": ALWAYS,
    "router_gradient_not_summed_over_tp": (ROUTER, TP, SEQUENCE_PARALLEL),
    "router_gradient_over_cp": (ROUTER_LOSS, CP),
    "router_gradient_times_cp": (ROUTER_LOSS, CP),
    "router_in_bfloat16": (ROUTER,),
    "router_mask_of_other_slice": (ROUTER_LOSS, CP, TP, SEQUENCE_PARALLEL, PADDED),
    "router_without_gradient": (ROUTER,),
    "routes_not_replayed": (REPLAYED_ROUTES,),
    "routes_of_another_layer": (REPLAYED_ROUTES,),
    "routes_shifted_by_one": (REPLAYED_ROUTES,),
    "rows_without_signal_counted": (COUNTS_DOCUMENTS, UNTRAINED),
    "sample_share_times_token_mean": (TOKEN_MEAN, ROWS, UNEQUAL_SHARES),
    "sampler_logprobs_before_temperature": (OTHER_TEMPERATURE, READS_SAMPLER),
    "sampler_logprobs_one_late": (READS_SAMPLER,),
    "samples_for_rollouts": (ROLLOUT, SEVERAL_SAMPLES),
    "segments_numbered_per_shard": (CP, READS_DOCUMENTS),
    "sequence_ratio_per_shard": (CP, READS_DOCUMENTS, SPLIT_DOCUMENT),
    "sequence_ratio_without_gradient": (READS_DOCUMENTS,),
    "sequence_sums_at_wrong_offsets": (CP, READS_DOCUMENTS, NOT_CONTIGUOUS),
    "sequence_weight_sums_logs": (DOCUMENT_MEAN_CORRECTION,),
    "shift_after_shard": (CP, SPLIT_DOCUMENT),
    "smoothing_over_local_vocabulary": (TP, SMOOTHED),
    "stage_layers_numbered_locally": (PP,),
    "stages_prepared_per_micro_batch": (PP, MICRO_BATCHES),
    "stale_keys_in_ring_backward": (CP, SPLIT_DOCUMENT),
    "tail_positions_follow_head": (CP, NOT_CONTIGUOUS, TORN_DOCUMENT),
    "targets_shifted_twice": ALWAYS,
    "temperature_divides_logprobs": (OTHER_TEMPERATURE,),
    "temperature_missing_in_policy": (OTHER_TEMPERATURE,),
    "tokens_counted_over_dp_only": (CP, TOKEN_MEAN),
    "tied_weight_of_each_end": (PP,),
    "tool_mask_ignored": (HOLES,),
    "unpadded_borders_on_padded_row": (PADDED_DOCUMENTS,),
    "whitening_per_rank": (DP, WHITENED),
    "whole_norm_gradients_summed_over_tp": (TP, NO_SEQUENCE_PARALLEL),
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
