"""Effects of faults of collectives over another group of ranks, in their declared numbers."""

import torch

from tests.helpers.planted_faults import BASE, documents, shown
from workbench.faults import load_fault
from workbench.specs.reading import merge
from workbench.specs.run import RunSpec
from workbench.train.rows import pack_step


def row_of(name):
    """The one packed row of a fault's settings: document ids and source, in the order of the row."""
    spec = RunSpec.model_validate(merge(BASE, load_fault(name).shows_in))
    (row,) = pack_step(documents(spec), spec)
    return row.document_ids_T, row.source_T


def moved(pair):
    return (pair.wrong.tokens["policy_logprobs"] - pair.right.tokens["policy_logprobs"]).abs() > 1e-9


def test_activations_recomputed_from_other_ranks():
    pair = shown("prediction_recomputed_over_other_group")
    right = set(pair.right.gradients) - set(pair.wrong_gradients)
    assert "model.prediction.0.post_norm.weight" in right, "behind the layer"
    assert any("prediction.0.mtp_block" in name for name in pair.wrong_gradients)
    assert any(name.startswith("model.layers.0.") for name in pair.wrong_gradients), "what flows back is wrong too"


def test_padding_counts_in_the_losses_of_routers():
    pair = shown("router_mask_of_other_slice")
    assert sorted(key for key in pair.wrong_numbers if "norm" not in key) == [
        "loss/router_balance",
        "loss/router_z",
        "loss/total",
    ]
    assert not moved(pair).any()


def test_queries_and_keys_of_other_ranks():
    pair = shown("projections_gather_other_ranks")
    trained = pair.right.tokens["trained"].bool()
    assert float(moved(pair)[trained].double().mean()) > 0.95


def test_slices_of_tokens_are_computed_twice():
    """Behind the slices 1 and 2 of 4, each of which is another one's, all tokens of their documents are wrong."""
    pair, (ids_T, source_T) = shown("embeddings_sliced_by_other_group"), row_of("embeddings_sliced_by_other_group")
    slices_T = torch.arange(len(ids_T)) // (len(ids_T) // 4)
    wrong_T = torch.isin(slices_T, torch.tensor([1, 2]))
    behind_T = torch.stack([(wrong_T[: t + 1] & (ids_T[: t + 1] == ids_T[t])).any() for t in range(len(ids_T))])
    off, trained = moved(pair), pair.right.tokens["trained"].bool()
    # values lie at the target, which is one place behind the input that predicts it
    for t in range(len(ids_T) - 1):
        if ids_T[t] >= 0 and ids_T[t + 1] == ids_T[t] and trained[source_T[t + 1]]:
            assert bool(off[source_T[t + 1]]) == bool(behind_T[t]), t
    assert 0 < int(off.sum()) < int(trained.sum())


def test_attention_returns_to_its_first_group():
    pair = shown("attention_returns_to_built_group")
    spec = RunSpec.model_validate(merge(BASE, load_fault("attention_returns_to_built_group").shows_in))
    first, *others = pack_step(documents(spec), spec)
    off = moved(pair)
    assert not off[first.source_T[first.source_T >= 0]].any()
    for row in others:
        half = row.num_tokens // 2
        before = row.source_T[: half + 1]  # the first token of the second shard is predicted by the first
        assert not off[before[before >= 0]].any()
    assert off.any()


def test_a_second_tp_rank_is_no_second_pass_of_attention():
    one_row = shown("attention_returns_to_built_group", layout={"cp": 2, "tp": 2}, data={"micro_batches": 1})
    assert not moved(one_row).any()
