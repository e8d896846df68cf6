"""A batch as strips: every token is drawn by its kind, and omitted tokens are counted."""

import re

import pytest
import torch

from tests.helpers.trials import HOSTILE
from workbench.report.rich import batch as module
from workbench.report.rich.batch import batch_html
from workbench.rollouts.batch import Extension, RolloutBatch


def document(mask, advantages, **more):
    return {
        "tokens": list(range(len(mask))),
        "loss_mask": mask,
        "advantages": advantages,
        "old_logprobs": [-0.5 * each for each in mask],
        **more,
    }


@pytest.fixture
def batch():
    """A good completion, one with a tool's output that ends badly, and one of no advantage; and padding."""
    return RolloutBatch.from_documents(
        [
            document([0, 0, 1, 1], 0.5, reward=1.0),
            document([0, 1, 0, 1, 1], [0.0, 0.25, 0.0, -0.25, -0.25], reward=0.0),
            document([0, 1], 0.0, reward=0.5),
        ]
    ).pad_to(16)


def strips(drawn):
    """[(label, [(kind, length), ...]), ...]"""
    matches = re.findall(r'<span class="strip" role="img" aria-label="([^"]*)">(.*?)</span>', drawn)
    return [
        (label, [(kind, int(length)) for kind, length in re.findall(r'class="(\w+)"[^>]*flex-grow:(\d+)', inside)])
        for label, inside in matches
    ]


def test_every_token_is_drawn_by_its_kind(batch):
    drawn = strips(batch_html(batch))
    assert [pieces for _, pieces in drawn] == [
        [("prompt", 2), ("up", 2), ("gap", 1)],
        [("prompt", 1), ("up", 1), ("context", 1), ("down", 2)],
        [("prompt", 1), ("zero", 1), ("gap", 3)],
        [("padding", 5)],
    ]


def test_each_strip_has_its_numbers_with_the_sign_of_the_advantage(batch):
    labels = [label for label, _ in strips(batch_html(batch))]
    assert labels == [
        "document 0: 4 tokens, 2 trained, advantage +0.500, reward 1.00",
        "document 1: 5 tokens, 3 trained, advantage −0.250 to +0.250, reward 0",
        "document 2: 2 tokens, 1 trained, advantage 0, reward 0.500",
        "padding: 5 tokens",
    ]


def test_a_document_that_trains_nothing_has_no_advantage():
    batch = RolloutBatch.from_documents([document([0, 0], 0.5)])
    assert strips(batch_html(batch)) == [("document 0: 2 tokens, 0 trained, advantage –", [("prompt", 2)])]


def test_many_documents_are_folded_away_and_too_many_counted(monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE", 2)
    monkeypatch.setattr(module, "AT_ALL", 5)
    batch = RolloutBatch.from_documents([document([0, 1], 0.5)] * 7)
    drawn = batch_html(batch)
    assert len(strips(drawn)) == 5
    assert len(strips(drawn.partition("<details>")[0])) == 2
    assert "<summary>3 more</summary>" in drawn
    assert "2 more documents are not drawn." in drawn


def test_fields_are_listed_with_their_trained_tokens(batch):
    cells = r"<code>(\w+)</code></th><td>.*?</td><td>.*?</td><td>.*?</td><td>(.*?)</td>"
    rows = dict(re.findall(cells, batch_html(batch)))
    assert set(rows) == {*batch.token_fields(), *batch.document_fields()}
    assert rows["tokens_T"] == "1 to 4"
    assert rows["loss_mask_T"] == "true on 6 of 16"
    assert rows["old_logprobs_T"] == "−0.500"
    assert rows["rewards_N"] == "0 to 1.00"


def test_a_field_of_the_users_own_is_listed_and_quoted(batch):
    values = Extension(torch.zeros(16), "token", HOSTILE, "ours")
    drawn = batch_html(RolloutBatch(**batch.token_fields(), rewards_N=batch.rewards_N, extensions={HOSTILE: values}))
    assert "<script" not in drawn
    assert drawn.count("&lt;script&gt;") == 2


def test_the_text_twin_stays_short(batch):
    assert len(repr(batch).splitlines()) == 2
