"""Every fault shows where and as it is declared, and changes nothing where it hides.

Of one of each kind, the right cause is diagnosed first from the records of the same two steps alone.
"""

import ast
import functools
from pathlib import Path

import pytest

from tests.helpers.bars import assert_float64_parity
from tests.helpers.planted_faults import hidden, shown
from tests.helpers.planted_records import hidden_records, shown_records
from workbench.diagnose import diagnose
from workbench.faults import FAMILIES, fault_names, load_fault

NAMES = [name for name in fault_names() if load_fault(name).changes_numbers]
HIDING = [name for name in NAMES if load_fault(name).hidden_in is not None]
ROOT = Path(__file__).parents[2]

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


def test_every_family_has_a_fault_that_changes_numbers():
    assert {load_fault(name).family for name in NAMES} == set(FAMILIES) - {"U"}
    others = {name: load_fault(name) for name in set(fault_names()) - set(NAMES)}
    assert sorted(name for name in others if not others[name].changes_update) == ["skipped_collective", "straggler"]
    assert {fault.family for fault in others.values() if fault.changes_update} == {"U"}


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_turns_parity_red(name):
    fault, pair = load_fault(name), shown(name)
    if fault.changes_gradient:
        with pytest.raises(AssertionError, match="parameters differ"):
            assert_float64_parity(pair.wrong.gradients, pair.right.gradients, context=name)
    else:
        assert_float64_parity(pair.wrong.gradients, pair.right.gradients, context=name)
    assert bool(pair.wrong_numbers) == fault.changes_metrics, pair.wrong_numbers[:5]


@pytest.mark.parametrize("name", HIDING)
def test_a_fault_without_effect_is_called_equal(name):
    pair = hidden(name)
    assert_float64_parity(pair.wrong.gradients, pair.right.gradients, context=f"{name}, hidden")
    assert pair.wrong_numbers == []


@pytest.mark.parametrize("fault", EXPECTED)
def test_the_cause_that_fits_is_first(fault):
    diagnosis = diagnose(*shown_records(fault))
    assert diagnosis.causes[0].name == EXPECTED[fault], str(diagnosis)


@pytest.mark.parametrize(
    "fault",
    ["missing_cp_factor", "norm_gradient_not_summed_over_tp", "shift_after_shard", "temperature_missing_in_policy"],
)
def test_a_fault_without_effect_is_diagnosed_as_equal(fault):
    diagnosis = diagnose(*hidden_records(fault))
    assert diagnosis.equal, str(diagnosis)


@pytest.mark.parametrize("name", fault_names())
def test_a_fault_describes_itself(name):
    fault = load_fault(name)
    assert fault.family in FAMILIES
    assert all([fault.what, fault.origin, fault.signature])
    file, _, test = fault.detected_by.partition("::")
    assert test in functions_of(ROOT / file), f"{name}: no test {fault.detected_by}"


@functools.cache  # of some forty files for two hundred faults
def functions_of(path):
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
