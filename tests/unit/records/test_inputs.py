"""Fingerprints of what a model was given: which differences they show, and which they do not."""

import pytest
import torch
from torch import nn

from tests.helpers.ranks import run_ranks
from workbench.records import trainer_files as files
from workbench.records.inputs import Inputs, of_all_ranks, positional_names
from workbench.records.recorder import Recorder

IDS = torch.tensor([[5, 6, 7, 0], [8, 9, 1, 2], [3, 3, 4, 0], [1, 5, 9, 2]])


def seen(*calls, **named):
    inputs = Inputs()
    for call in calls:
        inputs.see(call if isinstance(call, tuple) else (call,), named)
    return of_all_ranks([inputs.finish()])


def test_neither_the_order_of_rows_nor_their_division_shows():
    whole = seen(IDS)["ids"]
    assert whole[:3] == [16, 16, 4]
    assert seen(IDS[[2, 0, 3, 1]])["ids"] == whole
    assert seen(IDS[:1], IDS[1:])["ids"] == whole
    ranks = [Inputs(), Inputs()]
    ranks[0].see((IDS[:3],), {})
    ranks[1].see((IDS[3:],), {})
    assert of_all_ranks(each.finish() for each in ranks)["ids"] == whole


@pytest.mark.parametrize("place", [(0, 0), (3, 3), (2, 1)])
def test_another_id_shows_in_both_sums(place):
    other = IDS.clone()
    other[place] += 1
    one, two = seen(IDS)["ids"], seen(other)["ids"]
    assert one[:3] == two[:3]
    assert one[3] != two[3]
    assert one[4] != two[4]


def test_another_order_within_a_row_shows_in_the_sum_of_rows_alone():
    one, two = seen(IDS)["ids"], seen(IDS.flip(1))["ids"]
    assert one[3] == two[3]
    assert one[4] != two[4]


def test_two_ids_that_swap_their_rows_show():
    other = IDS.clone()
    other[0, 1], other[1, 1] = IDS[1, 1], IDS[0, 1]
    assert seen(other)["ids"][3] == seen(IDS)["ids"][3]
    assert seen(other)["ids"][4] != seen(IDS)["ids"][4]


def test_arguments_have_roles_by_name_or_by_order():
    labels = torch.where(IDS > 4, IDS, -100)
    named = seen(
        (), input_ids=IDS, labels=labels, attention_mask=(IDS > 0).long(), use_cache=False, embeds=torch.ones(2)
    )
    assert named.keys() == {"calls", "ids", "labels", "mask"}
    assert named["labels"][1] == int((IDS > 4).sum())
    ordered = seen((IDS, torch.arange(4).expand(4, 4), IDS > 0, torch.ones(3)))
    assert ordered.keys() == {"calls", "ids", "positions", "mask"}
    assert ordered["mask"][1] == int((IDS > 0).sum())
    additive = torch.where(torch.ones(4, 4).tril().bool(), 0.0, -torch.inf)
    assert seen((IDS,), attention_mask=additive)["mask"][:2] == [16, 10]


def test_positional_arguments_have_the_names_of_the_forward():
    class Model(nn.Module):
        def forward(self, positions, labels, input_ids, *, use_cache=False):
            return input_ids

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = Model()

        def forward(self, *arguments, **named):
            return self.module(*arguments, **named)

    assert positional_names(Wrapper()) == ("positions", "labels", "input_ids")
    inputs = Inputs(positional_names(Wrapper()))
    inputs.see((torch.arange(4).expand(4, 4), torch.where(IDS > 4, IDS, -100), IDS), {})
    assert of_all_ranks([inputs.finish()])["ids"] == seen(IDS)["ids"]
    assert inputs.finish()["labels"][1] == int((IDS > 4).sum())


def test_calls_without_a_gradient_are_none_of_training():
    inputs = Inputs()
    with torch.no_grad():
        inputs.see((IDS,), {})
    assert inputs.finish() == {"calls": 0}


def _rank(folder):
    rank = torch.distributed.get_rank()
    model = nn.Sequential(nn.Embedding(10, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(folder, model, optimizer):
        model(IDS[2 * rank : 2 * rank + 2]).sum().backward()
        optimizer.step()


def test_a_recorder_adds_up_what_its_ranks_were_given(tmp_path):
    run_ranks(_rank, 2, tmp_path, tmp_path / "mine")
    [step] = files.read_steps(tmp_path / "mine")
    assert step["observed"]["inputs"] == seen(IDS) | {"calls": 2}
