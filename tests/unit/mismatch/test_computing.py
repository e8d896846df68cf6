import pytest
import torch

from tests.helpers.gaps import computation, recorded, records
from workbench.errors import SpecError
from workbench.mismatch import computing
from workbench.mismatch.computing import KEPT_MODELS, TOKENS, batches
from workbench.mismatch.configuration import Configuration
from workbench.mismatch.factors import Switch
from workbench.policy.decoder import load_decoder


def by_hand(given, temperature=1.0):
    """Each document alone, by the stock model in float64."""
    model, values = load_decoder("tiny-qwen3").double(), []
    for one in given:
        ids = one["prompt_ids"] + one["completion_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0] / temperature
        logprobs = torch.log_softmax(logits, -1)
        first = len(one["prompt_ids"])
        values += [logprobs[at - 1, ids[at]] for at in range(first, len(ids))]
    return torch.stack(values)


def test_a_column_is_the_stock_models():
    given = records()
    for document, length in zip(given, (12, 3, 7, 12, 1, 12, 5, 12), strict=True):
        for name in ("completion_ids", "sampler_logprobs"):
            document[name] = document[name][:length]
    own = computation(given)
    column_T = own.column(Configuration(temperature=0.7))
    assert (column_T - by_hand(given, 0.7)).abs().max() < 3e-6
    exact = own.exact_column(Configuration(temperature=0.7))
    assert (exact - by_hand(given, 0.7)).abs().max() < 1e-6  # the stock norms are float32


def test_the_sampler_with_padding_and_a_cache_is_reproduced():
    own = computation()
    assert (own.column(Configuration()) - recorded(own)).abs().max() < 5e-6


def test_offsets_move_values_and_logits():
    own = computation()
    plain = own.column(Configuration()).reshape(8, 12)
    ahead = own.column(Configuration(offset="values +1")).reshape(8, 12)
    behind = own.column(Configuration(offset="values -1")).reshape(8, 12)
    assert torch.equal(ahead[:, :-1], plain[:, 1:])
    assert torch.equal(behind[:, 1:], plain[:, :-1])
    assert ahead[:, -1].isnan().all()
    assert behind[:, 0].isnan().all()
    logits_TV, _ = own.logits_of(Configuration(), torch.arange(96))
    moved, tokens = own.logits_of(Configuration(offset="logits +1"), torch.arange(96))
    assert torch.allclose(moved.reshape(8, 12, -1)[:, :-1], logits_TV.reshape(8, 12, -1)[:, 1:])
    expected = torch.log_softmax(moved, -1).gather(1, tokens[:, None])[:, 0].double()
    assert torch.allclose(own.column(Configuration(offset="logits +1")), expected, atol=1e-6)


def test_a_switch_of_some_documents_leaves_the_others():
    own = computation()
    switch = Switch("temperature", "", (("temperature", 0.5),), frozenset({2}))
    column_T = own.assembled(Configuration(), [switch])
    inside = own.document_T == 2
    assert torch.equal(column_T[~inside], own.column(Configuration())[~inside])
    assert torch.equal(column_T[inside], own.column(Configuration(temperature=0.5))[inside])


def test_a_part_has_the_values_of_the_whole():
    own = computation()
    few = own.part([3, 1])
    expected = torch.cat([own.column(Configuration())[own.document_T == n] for n in (3, 1)])
    assert torch.allclose(few.column(Configuration()), expected, atol=1e-6)


def test_precisions_and_heads_differ():
    own = computation()
    columns = [
        own.column(Configuration(precision=precision, head=head))
        for precision in ("float32", "bfloat16", "float16")
        for head in (None, "float32", "bfloat16", "bfloat16_softmax", "float32_masters")
    ]
    distinct = {tuple(column.tolist()) for column in columns}
    # in float32 the head in float32 is that of the masters, and the trunk's own; in bfloat16 its own is bfloat16
    assert len(distinct) == 15 - 2 - 1


def test_ids_beyond_the_vocabulary_are_refused():
    with pytest.raises(SpecError, match="id 19"):
        computation([{"prompt_ids": [1], "completion_ids": [19], "sampler_logprobs": [-1.0]}])


def test_batches_have_every_row_once_and_are_small():
    lengths = [1, TOKENS, 3, TOKENS // 2, 2]
    groups = batches(lengths)
    assert sorted(n for group in groups for n in group) == [0, 1, 2, 3, 4]
    assert all(len(group) * max(lengths[n] for n in group) <= TOKENS for group in groups)


def test_openings_are_those_of_the_documents_and_their_passes_are_kept():
    own, names, numbers = computation(), ["recorded", "drop_first:1"], [2, 5]
    few = own.openings("recorded", names, numbers, 4)
    column_NDC = few.column(Configuration()).reshape(2, 2, 12)
    for name, column_DC in zip(names, column_NDC, strict=True):
        expected_DC = own.column(Configuration(prefix=name)).reshape(8, 12)[numbers]
        assert torch.allclose(column_DC[:, :4], expected_DC[:, :4], rtol=0, atol=1e-6)
        assert column_DC[:, 4:].isnan().all()
    taken = few.passes
    again = own.openings("recorded", names, numbers, 4)
    again.column(Configuration(temperature=0.5))
    assert again.passes == taken
    other = own.openings("recorded", names, [5, 2], 4)
    assert torch.allclose(other.column(Configuration()).reshape(2, 2, 12)[:, 0, :4], column_NDC[:, 1, :4], atol=1e-6)


def test_no_configuration_changes_the_weights_that_are_kept():
    own = computation()
    own.column(Configuration(precision="bfloat16"))
    own.column(Configuration(precision="bfloat16", head="float32_masters"))
    for name, weight in load_decoder("tiny-qwen3").state_dict().items():
        assert torch.equal(own.base.state_dict()[name], weight)
        assert own.base.state_dict()[name].dtype == weight.dtype


@pytest.mark.parametrize(("kept_bytes", "kept"), [(2**28, 6), (0, KEPT_MODELS)])
def test_small_models_are_kept_and_of_large_ones_the_last(kept_bytes, kept, monkeypatch):
    monkeypatch.setattr(computing, "KEPT_BYTES", kept_bytes)
    own = computation()
    precisions = ("float32", "bfloat16", "float16", "float64")
    asked = [Configuration(precision=precision) for precision in precisions]
    asked += [Configuration(precision=precision, attention="eager") for precision in precisions[:2]]
    models = [own.model(one) for one in asked]
    assert len(own._models) == kept
    assert len({id(model) for model in models}) == len(asked)
    assert [own.model(one) for one in asked[-kept:]] == models[-kept:]
