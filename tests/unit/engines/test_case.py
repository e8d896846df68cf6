import pytest
import torch

from workbench.engines.case import (
    EngineCase,
    EngineStep,
    check_step,
    padded,
    read_cases,
    read_step,
    write_cases,
    write_step,
)
from workbench.engines.proof import DOCUMENTS
from workbench.errors import RecordError


def test_cases_and_steps_come_back_from_files(tmp_path):
    cases = [EngineCase(DOCUMENTS, each=8), EngineCase(DOCUMENTS, each=2, ranks=2, clip=0.5, packed=True)]
    write_cases(tmp_path, cases)
    assert read_cases(tmp_path) == cases
    step = EngineStep({"a": torch.ones(2)}, {"a": torch.zeros(2)}, (1.0,), (2.0,), learning_rate=0.5)
    write_step(tmp_path, 3, step)
    again = read_step(tmp_path, 3)
    assert again.update["a"].tolist() == [2.0, 2.0]
    assert (again.losses, again.norms) == ((1.0,), (2.0,))
    with pytest.raises(RecordError, match="step 4 of an engine"):
        read_step(tmp_path, 4)


def test_ranks_share_the_micro_batches_of_each_step():
    case = EngineCase(DOCUMENTS, steps=2, ranks=2, each=1)
    assert case.accumulation == 2
    for step in (0, 1):
        texts = [text for rank in (0, 1) for part in case.micro_batches(step, rank) for text in part]
        assert sorted(map(str, texts)) == sorted(map(str, DOCUMENTS[4 * step : 4 * step + 4]))


def test_padding_is_masked():
    rows = padded(DOCUMENTS[:2], padding=3)
    assert rows["input_ids"].shape == (2, 13)
    assert rows["attention_mask"].sum(1).tolist() == [4, 10]
    assert (rows["labels"] != -100).sum(1).tolist() == [1, 7]


def test_a_step_has_the_same_weights_before_and_after():
    with pytest.raises(RecordError, match="1 parameters before and 0 after"):
        check_step(EngineStep({"a": torch.ones(2)}, {}), "a case")
