"""A step names every broken rule, with document and token."""

import pytest
import torch

from workbench.dumps.step import StepDump, as_value
from workbench.errors import RecordError

MASK = torch.tensor([[1, 1, 0], [0, 1, 1]]).bool()


def step(**changes):
    tokens = {"loss_mask": MASK, "old_logprobs": torch.full((2, 3), -1.0).double()}
    return StepDump.from_rectangle({**tokens, **changes.pop("tokens", {})}, **changes)


def test_tokens_have_places():
    dump = step()
    assert dump.num_documents == 2
    assert dump.positions_T.tolist() == [0, 1, 2, 0, 1, 2]
    assert dump.place(4) == "document 1, token 1"


def test_advantages_are_of_tokens_or_documents():
    assert step().advantages_T is None
    of_documents = step(documents={"advantages": torch.tensor([1.0, -2.0])})
    assert of_documents.advantages_T.tolist() == [1, 1, 1, -2, -2, -2]
    values = torch.arange(6.0).reshape(2, 3)
    assert step(tokens={"advantages": values}).advantages_T.tolist() == list(range(6))


def filled(at, value):
    values = torch.full((2, 3), -1.0)
    values[at] = value
    return values


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": {"old_logprob": torch.zeros(2, 3)}}, "unknown value of a token: old_logprob .*'old_logprobs'"),
        ({"tokens": {"loss_mask": MASK.float()}}, "loss_mask: dtype torch.float32"),
        ({"tokens": {"old_logprobs": filled((1, 1), float("nan"))}}, "old_logprobs: nan at document 1, token 1"),
        ({"tokens": {"old_logprobs": filled((0, 1), 0.5)}}, "old_logprobs: 0.5, above 0, at document 0, token 1"),
        ({"tokens": {"token_mask": torch.tensor([[1, 1, 1], [1, 0, 1]]).bool()}}, "first document 1, token 1"),
        ({"documents": {"rewards": torch.ones(3)}}, r"rewards: shape \[3\] for 2 documents"),
        ({"documents": {"rewards": torch.tensor([1.0, torch.inf])}}, "rewards: not finite in document 1"),
        ({"layout": {"dp": 2}}, "no rows, with dp"),
        ({"layout": {"dp": 2}, "documents": {"rows": torch.tensor([0, 2])}}, "rows: 0 to 2, of dp"),
        ({"tokens": {"old_logprobs": torch.zeros(2, 2)}}, r"\[2, 2\]"),
    ],
)
def test_each_broken_rule_is_named(changes, message):
    with pytest.raises(RecordError, match=message):
        step(**changes)


def test_padding_may_hold_anything():
    dump = step(tokens={"old_logprobs": filled((0, 2), float("nan"))})
    assert dump.tokens["old_logprobs"].isnan().sum() == 1


def test_documents_are_numbered_in_order():
    with pytest.raises(RecordError, match="which are not 0, 1"):
        StepDump(torch.tensor([0, 2]), {"loss_mask": torch.ones(2).bool()})
    with pytest.raises(RecordError, match="no loss_mask"):
        StepDump(torch.tensor([0, 1]), {})


def test_values_get_the_type_of_their_kind():
    assert as_value("loss_mask", torch.tensor([0, 1])).dtype is torch.bool
    assert as_value("loss_mask", torch.tensor([0, 2])).dtype is torch.int64  # refused as no mask
    assert as_value("rewards", torch.tensor([1], dtype=torch.bfloat16)).dtype is torch.float64
    assert as_value("group_ids", torch.tensor([1], dtype=torch.int32)).dtype is torch.int64
