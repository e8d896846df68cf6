"""Causes from what a model was given, in loops of a tiny language model that note nothing but the loss."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb

VOCABULARY, LENGTH = 20, 8
STEPS = [torch.randint(VOCABULARY, (6, LENGTH), generator=torch.Generator().manual_seed(step)) for step in range(3)]


class Model(nn.Module):
    """One layer of attention over learned positions, which computes its own loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places, self.head = nn.Embedding(VOCABULARY, 8), nn.Embedding(32, 8), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids, position_ids, attention_mask, labels):
        hidden = self.tokens(input_ids) + self.places(position_ids)
        hidden = hidden + F.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=attention_mask)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), ignore_index=-100)


def run(
    folder,
    *,
    first=0,
    shift=0,
    keep=2,
    allowed=True,
    clear=True,
    calls=2,
    again=False,
    lost=False,
    wide=1,
    precision="float32",
):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wb.Recorder(folder, model, optimizer, context={"dp": 1, "precision": precision}) as recorder:
        for ids in STEPS:
            ids = STEPS[0] if again else ids
            labels = torch.where(torch.arange(LENGTH) >= keep, ids.roll(-1 - shift, 1), -100)
            mask = torch.arange(LENGTH) >= (2 if allowed else 0)
            for part in list(zip(ids.chunk(2), labels.chunk(2), strict=True))[:calls]:
                positions = (torch.arange(LENGTH) + first).expand(len(part[0]), LENGTH)
                loss = model(part[0], positions, mask.expand(len(part[0]), wide, LENGTH), part[1]) / 2
                if lost:
                    optimizer.zero_grad()
                loss.backward()
                recorder.note(loss)
            optimizer.step()
            if clear:
                optimizer.zero_grad()
    return folder


@pytest.mark.parametrize(
    ("planted", "cause", "reason"),
    [
        ({"again": True}, "other_data", "those of an earlier step"),
        ({"shift": 1}, "other_targets", "labels: "),
        ({"keep": 0}, "other_mask", "labels: 48 of 48 count, not 36"),
        ({"first": 3}, "position_ids", "positions that the model is given: 48 values are others"),
        ({"allowed": False}, "attention_to_padding", "attention mask: 100% of it allow, not 75%"),
        ({"calls": 1}, "ranks_lost", "24 tokens, with padding, enter the model in 1 calls, not 48 in 2"),
        ({"clear": False}, "gradients_not_cleared", "in step 1 the first backward met a gradient"),
        ({"lost": True}, "ranks_lost", "0 of 1 later backwards met the gradient of those before, not 1"),
    ],
)
def test_what_the_model_was_given_is_named_first_although_nothing_was_noted(planted, cause, reason, tmp_path):
    diagnosis = wb.diagnose(run(tmp_path / "right"), run(tmp_path / "wrong", **planted))
    assert diagnosis.causes[0].name == cause, str(diagnosis)
    assert any(reason in each for each in diagnosis.causes[0].evidence), str(diagnosis)


def test_other_inputs_alone_are_no_difference(tmp_path):
    """The model has no use for the mask of a single place, so its numbers are the same."""
    right, wrong = run(tmp_path / "right"), run(tmp_path / "wrong")
    assert wb.diagnose(right, wrong).equal
    step = (wrong / "steps.jsonl").read_bytes()
    assert b'"inputs"' in step


def test_other_tokens_are_a_difference_although_no_number_differs_beyond_rounding(tmp_path):
    """In bfloat16 the losses of two batches, and the norms of their gradients, may be alike."""
    right, wrong = (run(tmp_path / str(again), again=again, precision="float8") for again in (False, True))
    diagnosis = wb.diagnose(right, wrong)
    assert diagnosis.causes[0].name == "other_data", str(diagnosis)
    assert diagnosis.causes[0].evidence == ("vocabulary ids that enter the model in step 1: 48 values are others",)
    assert diagnosis["no_difference"].score < diagnosis.causes[0].score


def test_other_ids_of_padding_are_no_difference(tmp_path):
    """They leave the loss where it was, but for rounding."""
    right = wb.Record.load(run(tmp_path / "right", precision="float8"))

    def padded(step):
        numbers, counted, rows, values, ordered = step.observed["inputs"]["ids"]
        inputs = step.observed["inputs"] | {"ids": [numbers, counted, rows, values[::-1], ordered]}
        return replace(step, observed=step.observed | {"inputs": inputs}, loss=step.loss * 1.01)

    assert wb.diagnose(right, replace(right, steps=[padded(step) for step in right.steps])).equal


def test_a_mask_of_rows_that_hold_several_documents_is_attention_across_them(tmp_path):
    records = [wb.Record.load(run(tmp_path / str(allowed), allowed=allowed)) for allowed in (True, False)]
    for documents, cause in ((6.0, "attention_to_padding"), (18.0, "attention_across_documents")):
        packed = [
            replace(each, steps=[replace(step, counts={"documents": documents}) for step in each.steps])
            for each in records
        ]
        assert wb.diagnose(*packed).causes[0].name == cause


def test_a_mask_of_pairs_of_tokens_keeps_documents_apart(tmp_path):
    right, wrong = (run(tmp_path / str(allowed), allowed=allowed, wide=LENGTH) for allowed in (True, False))
    causes = [(cause.name, cause.score) for cause in wb.diagnose(right, wrong).causes[:2]]
    assert causes == [("attention_across_documents", 0.7), ("attention_to_padding", 0.45)]


def test_fewer_tokens_of_another_layout_are_no_lost_data(tmp_path):
    right, wrong = run(tmp_path / "right"), run(tmp_path / "wrong", calls=1)
    other = wb.Record.load(wrong)
    changed = wb.Record(dict(other.context) | {"dp": 2}, other.steps, other.name)
    names = [cause.name for cause in wb.diagnose(right, changed).causes]
    assert "other_data" not in names
