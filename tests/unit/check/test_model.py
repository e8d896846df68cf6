"""A step passed through its checkpoint: layouts, what is left out, and what is refused."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.model_step import MODEL, PROMPTS, documents, dump, logprobs, mask
from workbench.check.model import check_gradients, model_step
from workbench.dumps.step import StepDump
from workbench.errors import RecordError, ShardingError, SpecError

LAYOUTS = (
    {"cp": 2, "order": "zigzag"},
    {"tp": 2, "sequence_parallel": True, "cp": 2, "attention": "ring"},
    {"dp": 2, "pp": 2},
    {"dp": 4, "cp": 2},
)


@pytest.fixture(scope="module")
def derivatives():
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(len(mask()), generator=generator, dtype=torch.float64) for _ in range(2)]
    return {"coefficients_T": values[0] * mask(), "of_entropies_T": values[1] * mask()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_gives_the_same_to_1e_12(layout, derivatives):
    plain = model_step(dump(), MODEL).take(**derivatives)
    split = model_step(dump(), MODEL, layout).take(**derivatives)
    assert float((split.logprobs_T - plain.logprobs_T).abs().max()) < 1e-12
    for name, gradient in plain.gradients.items():
        assert float((split.gradients[name] - gradient).norm()) < 1e-12 * float(gradient.norm()), name
    assert plain.norm > 1


def test_log_probabilities_are_those_of_the_stock_decoder_document_by_document():
    passed = model_step(dump(), MODEL).take()
    own = torch.where(mask(), torch.cat(logprobs(*documents())).detach(), 0.0)
    assert float((passed.logprobs_T - own).abs().max()) < 1e-12


def test_the_head_at_another_temperature_is_the_stock_decoder_there():
    found = model_step(dump(), MODEL).head().logprobs(1.3)
    own = torch.cat(logprobs(*documents(), temperature=1.3)).detach()
    assert float((found - own)[mask()].abs().max()) < 1e-12
    assert bool(found[~mask()].isnan().all())


def test_padding_and_documents_without_a_trained_token_are_left_out():
    prompts, completions = documents()
    rows = torch.zeros(5, 7, dtype=torch.int64)
    trains = torch.zeros(5, 7, dtype=torch.bool)
    for number, ids in enumerate(completions):
        rows[number, : len(ids)], trains[number, : len(ids)] = ids, True
    rows[4] = 99  # of no vocabulary, and untrained
    padded = StepDump.from_rectangle(
        {"loss_mask": trains, "token_ids": rows}, ids={"prompt_ids": [*prompts, torch.tensor([99])]}, temperature=0.8
    )
    passed = model_step(padded, MODEL).take()
    own = torch.cat(logprobs(prompts, completions)).detach()
    assert float((passed.logprobs_T[trains.reshape(-1)] - own).abs().max()) < 1e-12


def test_padding_on_the_left_of_completions_is_left_out():
    prompts, completions = documents()
    rows = torch.zeros(4, 7, dtype=torch.int64)
    tokens = torch.zeros(4, 7, dtype=torch.bool)
    for number, ids in enumerate(completions):
        rows[number, 7 - len(ids) :], tokens[number, 7 - len(ids) :] = ids, True
    values = {"loss_mask": tokens, "token_mask": tokens, "token_ids": rows}
    padded = StepDump.from_rectangle(values, ids={"prompt_ids": prompts}, temperature=0.8)
    own = torch.cat(logprobs(prompts, completions)).detach()
    assert float((model_step(padded, MODEL).take().logprobs_T[tokens.reshape(-1)] - own).abs().max()) < 1e-12


def test_a_dump_without_ids_or_prompts_is_refused_by_what_it_lacks():
    step = dump()
    with pytest.raises(RecordError, match="a dump without prompt_ids"):
        model_step(replace(step, ids={}), MODEL)
    with pytest.raises(RecordError, match="a dump without token_ids"):
        model_step(step.with_tokens(token_ids=None), MODEL)
    none = [ids[:0] for ids in step.ids["prompt_ids"]]
    with pytest.raises(RecordError, match="no prompt of document 0, whose first token trains"):
        model_step(replace(step, ids={"prompt_ids": none}), MODEL)
    with pytest.raises(RecordError, match="no token that trains"):
        model_step(step.with_tokens(loss_mask=torch.zeros_like(mask())), MODEL)


def test_ids_beyond_the_vocabulary_are_refused_with_document_and_token():
    step = dump()
    ids = step.tokens["token_ids"].clone()
    ids[6] = 19
    with pytest.raises(SpecError, match=r"first 19, of document 1, token 1(.|\n)*0 to 18(.|\n)*tokenizer"):
        model_step(step.with_tokens(token_ids=ids), MODEL)
    prompts = [torch.full((n,), 31) for n in PROMPTS]
    with pytest.raises(SpecError, match="first 31, of a prompt"):
        model_step(replace(step, ids={"prompt_ids": prompts}), MODEL)


def test_a_layout_that_is_none_is_refused():
    with pytest.raises(SpecError, match="cpp"):
        model_step(dump(), MODEL, {"cpp": 2})
    with pytest.raises(ShardingError, match="3"):
        model_step(dump(), MODEL, {"tp": 3}).take()


def test_gradients_of_other_parameters_or_shapes_are_refused():
    gradient = {"a.weight": torch.zeros(2, 3)}
    with pytest.raises(SpecError, match=r"a gradient of b.weight(.|\n)*a.weight(.|\n)*prefix"):
        check_gradients("compare", {"b.weight": torch.zeros(2, 3)}, gradient)
    with pytest.raises(SpecError, match=r"\[3, 2\](.|\n)*\[2, 3\](.|\n)*gather"):
        check_gradients("compare", {"a.weight": torch.zeros(3, 2)}, gradient)
