"""Retokenisation in a dump: places with document and token, and what the dump cannot decide."""

import json
from dataclasses import replace

import pytest
import torch

from workbench.check import check_step
from workbench.dumps.step import StepDump
from workbench.errors import SpecError

VOCABULARY = ["a", "b", "c", "ab", "bc", "abc", "", "d"]


def step(*, engine=None, texts=(), **tokens):
    ids = torch.tensor([[7, 0, 1, 7], [0, 4, 6, 6]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    more = {} if engine is None else {"sampler_ids": [torch.tensor(one) for one in engine]}
    values = {"loss_mask": mask, "token_ids": ids, **tokens}
    return StepDump.from_rectangle(values, settings={"name": "grpo"}, ids=more, texts=texts)


def test_the_same_tokens_agree_and_padding_is_none():
    check = check_step(step(engine=[[7, 0, 1, 7], [0, 4]]))
    assert (check.stages[0].name, check.stages[0].status) == ("tokens", "agrees")
    masked = step(engine=[[7, 0, 1, 7], [0, 4, 6]], token_mask=torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]).bool())
    assert check_step(masked).stages[0].status == "agrees"


def test_another_split_has_document_token_and_text():
    sampler = torch.zeros(2, 4, dtype=torch.float64) - 1
    check = check_step(step(engine=[[7, 3, 7], [3, 2]], sampler_logprobs=sampler), vocabulary=VOCABULARY)
    assert (check.verdict, check.first.name, check.causes[0].kind) == ("differs", "tokens", "retokenised")
    assert check.causes[0].description == (
        "the trainer's tokens of documents 0, 1 are not those that the engine drew (the same text, split otherwise), "
        "4 that train; sampler_logprobs from there on belong to other tokens"
    )
    assert check.places == (
        "token_ids at document 0, token 1: the engine drew 3, the trainer has 0 1: both are 'ab'",
        "token_ids at document 1, token 0: the engine drew 3 2, the trainer has 0 4: both are 'abc'",
    )
    assert (check.first.mismatches[0].tokens, check.first.mismatches[0].of) == (4, 6)


def test_without_a_vocabulary_it_is_open_if_the_text_is_the_same(tmp_path):
    check = check_step(step(engine=[[7, 3, 7], [0, 4]]))
    assert "(other ids), 2 that train" in check.causes[0].description
    assert "tokens: without a vocabulary, if both encodings are the same text" in check.undecided
    path = tmp_path / "vocabulary.json"
    path.write_text(json.dumps(VOCABULARY))
    check = check_step(step(engine=[[7, 2, 7], [0, 4]]), vocabulary=path)
    assert "(other text)" in check.causes[0].description
    assert not [one for one in check.undecided if "without a vocabulary" in one]


def test_a_text_is_compared_where_no_ids_were_recorded():
    right = ["dabd", "abc"]
    check = check_step(step(texts=right), vocabulary=VOCABULARY)
    assert (check.stages[0].status, check.stages[0].compared) == ("agrees", ("texts",))
    assert "tokens: if the engine split the text into the same ids; only its text was recorded" in check.undecided
    check = check_step(step(texts=["dabd", "acb"]), vocabulary=VOCABULARY)
    assert check.places == ("token_ids at document 1, token 1: 'bc', where the text has 'cb'",)
    check = check_step(step(texts=["dabdd", "abc"]), vocabulary=VOCABULARY)
    assert check.places == ("token_ids at document 0, token 3: the last token, where the text continues with 'd'",)
    assert check.verdict == "differs"


def test_what_a_dump_cannot_decide_is_said():
    assert "tokens: if they are those that the engine drew; the dump has no sampler_ids and no texts" in (
        check_step(step()).undecided
    )
    with_text = (
        "tokens: if they are those that the engine drew; the dump has texts of its completions and no vocabulary"
    )
    assert with_text in check_step(step(texts=["", ""])).undecided
    assert not [one for one in check_step(step().with_tokens(token_ids=None)).undecided if one.startswith("tokens")]


def test_ids_that_the_vocabulary_does_not_have_are_refused():
    with pytest.raises(SpecError, match="id 7"):
        check_step(step(engine=[[7, 0], [0]]), vocabulary=VOCABULARY[:7])
    replaced = replace(step(), ids={"sampler_ids": [torch.tensor([7, 0, 1, 7]), torch.tensor([0, 4])]})
    assert check_step(replaced).stages[0].status == "agrees"
