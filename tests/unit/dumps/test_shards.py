"""Shards of ranks become the whole step; overlaps and gaps are refused with document and token."""

from dataclasses import replace

import pytest
import torch

from workbench.dumps.shards import Shard, join, join_ids
from workbench.errors import RecordError

LENGTHS = (4, 2, 3)
IDS = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
PLACES = torch.cat([torch.arange(length) for length in LENGTHS])
VALUES = torch.arange(9.0)


def shard(index, name="rank", documents=(0, 1, 2), **more):
    index, numbers = torch.tensor(index), torch.tensor(documents)
    given = {"rewards": 10.0 * numbers}
    return Shard(name, IDS[index], PLACES[index], {"values": VALUES[index]}, numbers, more.get("of_documents", given))


@pytest.mark.parametrize("parts", [[range(9)], [[0, 3, 5, 7], [1, 2, 4, 6, 8]], [[8, 6], [7], [5, 4, 3, 2, 1, 0]]])
def test_any_deal_of_tokens_is_the_whole_step(parts):
    ids_T, tokens, documents = join([shard(list(part), f"rank{n}") for n, part in enumerate(parts)], "a step")
    assert torch.equal(ids_T, IDS)
    assert torch.equal(tokens["values"], VALUES)
    assert documents["rewards"].tolist() == [0, 10, 20]


def test_padding_is_left_out():
    padded = Shard(
        "rank", torch.tensor([0, -1]), torch.tensor([0, 0]), {"values": torch.ones(2)}, torch.tensor([0]), {}
    )
    assert len(join([padded], "a step")[0]) == 1


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]], "1 tokens twice, first document 1, token 0, in rank0 and rank1"),
        ([[0, 1, 3, 4], [5, 6, 7, 8]], "no token 2 of document 0"),
        ([[0, 1, 2, 3], [6, 7, 8]], "no token of document 1"),
        ([[0, 1, 2, 3], [5, 6, 7, 8]], "no token 0 of document 1"),
    ],
)
def test_overlaps_and_gaps_are_refused(parts, message):
    with pytest.raises(RecordError, match=message):
        join([shard(part, f"rank{n}") for n, part in enumerate(parts)], "a step")


def test_ranks_agree_on_documents_and_names():
    first, other = shard([0, 1, 2, 3], "a", (0,)), {"rewards": torch.tensor([5.0, 10.0, 20.0])}
    with pytest.raises(RecordError, match="two values of rewards of document 0, one in b"):
        join([first, shard([4, 5, 6, 7, 8], "b", of_documents=other)], "a step")
    with pytest.raises(RecordError, match="no rewards of document 1"):
        join([first, shard([4, 5, 6, 7, 8], "b", (2,))], "a step")
    with pytest.raises(RecordError, match="rewards in a or b, but not in both"):
        join([first, shard([4, 5, 6, 7, 8], "b", of_documents={})], "a step")


def test_ids_of_documents_are_put_together_and_agree():
    def with_ids(name, documents, *ids):
        rank = shard([0, 1, 2, 3], name, documents)
        return replace(rank, ids={"prompt_ids": [torch.tensor(one) for one in ids]})

    ranks = [with_ids("a", (1, 0), [5], [6, 7]), with_ids("b", (2, 0), [], [6, 7])]
    assert [one.tolist() for one in join_ids(ranks, 3, "a step")["prompt_ids"]] == [[6, 7], [5], []]
    with pytest.raises(RecordError, match="two values of prompt_ids of document 0, in a and b"):
        join_ids([ranks[0], with_ids("b", (2, 0), [], [6])], 3, "a step")
    with pytest.raises(RecordError, match="no prompt_ids of document 3"):
        join_ids(ranks, 4, "a step")
    with pytest.raises(RecordError, match="no prompt_ids in c"):
        join_ids([*ranks, shard([0], "c")], 3, "a step")
