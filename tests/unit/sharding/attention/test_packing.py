"""Buffers of heads for collectives: which head is where, and copies of 16 bytes at a time."""

import pytest
import torch

from workbench.sharding.attention import packing
from workbench.sharding.attention.packing import (
    copy_rows,
    empty_heads,
    pack_key_value,
    pack_part,
    unpack_key_value,
    unpack_part,
)


def test_keys_and_values_are_interleaved_per_token_and_unpacked_as_views():
    key, value = torch.randn(2, 1, 3, 5, 4)
    both = pack_key_value(key, value)
    assert both.shape == (5, 6, 4)
    assert torch.equal(both[2], torch.cat([key[0, :, 2], value[0, :, 2]]))
    again = unpack_key_value(both)
    assert torch.equal(torch.stack(again), torch.stack([key, value]))
    assert {x.untyped_storage().data_ptr() for x in again} == {both.untyped_storage().data_ptr()}


@pytest.mark.parametrize("features", [4, 8])
def test_they_may_be_widened_on_the_way(features):
    key = torch.randn(1, 3, 5, features).bfloat16()
    assert torch.equal(pack_key_value(key, key, torch.float32), pack_key_value(key.float(), key.float()))


def labelled(heads, tokens, features=8):
    """[1, H, t, d]: of every value its head and its token."""
    return (torch.arange(heads)[:, None] * 1000 + torch.arange(tokens))[None, ..., None].expand(-1, -1, -1, features)


@pytest.mark.parametrize("token_major", [True, False])
@pytest.mark.parametrize(("ranks", "parts"), [(2, 1), (2, 2), (3, 2)])
def test_adjacent_heads_are_a_ranks_and_of_them_adjacent_ones_a_parts(ranks, parts, token_major):
    query, key = labelled(2 * ranks * parts, 5), 100_000 + labelled(ranks * parts, 5)
    if token_major:
        query, key = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in (query, key))
    again = [empty_heads(one, one.shape[1], 5) for one in (query, key)]
    for part in range(parts):
        packed = pack_part((query, key), part, ranks, parts)
        assert packed.shape == (ranks, 5, 3, 8)
        assert packed.is_contiguous()
        for rank in range(ranks):
            at = rank * parts + part
            expected = torch.cat([query[0, 2 * at : 2 * at + 2], key[0, at : at + 1]]).transpose(0, 1)
            assert torch.equal(packed[rank], expected)
        unpack_part(packed, again, part, parts)
    assert torch.equal(again[0], query)
    assert torch.equal(again[1], key)
    assert all(one.transpose(1, 2).is_contiguous() for one in again)


@pytest.fixture
def word_copies(monkeypatch):
    """Number of copies that moved 16 bytes at a time."""
    counted, plain = [], packing._in_words

    def watched(rows):
        counted.append(plain(rows))
        return counted[-1]

    monkeypatch.setattr(packing, "_in_words", watched)
    return counted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8])
def test_rows_of_words_are_copied_bit_by_bit(dtype, word_copies):
    bits = torch.randint(-128, 128, (6, 5, 64), dtype=torch.int8)
    bits[0, 0] = -1  # NaN of every kind of float
    rows = bits.view(dtype)[:, :3].transpose(0, 1)
    into = torch.zeros(3, 8, rows.shape[-1], dtype=dtype)[:, 1:7]
    copy_rows(into, rows)
    assert torch.equal(into.contiguous().view(torch.int8), rows.contiguous().view(torch.int8))
    assert word_copies == [True, True]


@pytest.mark.parametrize(
    "rows",
    [
        torch.randn(4, 3, 6).bfloat16(),  # 12 bytes a row
        torch.randn(4, 3, 12).bfloat16()[..., :8],  # a row every 24
        torch.randn(4, 3, 9).bfloat16()[..., 1:],  # which does not begin at a word
        torch.randn(4, 8, 3).bfloat16().transpose(1, 2),  # values apart
        torch.randn(4, 3, 16).bfloat16()[..., ::2],
    ],
)
def test_others_are_copied_value_by_value(rows, word_copies):
    into = torch.zeros(rows.shape, dtype=rows.dtype)
    copy_rows(into, rows)
    assert torch.equal(into, rows)
    assert not all(word_copies)


def test_a_buffer_may_begin_anywhere_in_memory():
    memory = torch.randn(4 * 8 + 3).bfloat16()
    rows = memory[3:].view(4, 8)
    into = torch.empty(4, 8).bfloat16()
    copy_rows(into, rows)
    assert torch.equal(into, rows)


def test_a_row_at_a_word_is_copied_also_from_memory_that_does_not_begin_at_one(word_copies):
    memory = bytearray(8 * 64)
    begin = 8 if torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % 16 == 0 else 0
    rows = torch.frombuffer(memory, dtype=torch.float64, offset=begin)[1:33].view(4, 8).fill_(3.0)
    into = torch.empty(4, 8, dtype=torch.float64)
    copy_rows(into, rows)  # torch views such memory in no other dtype
    assert torch.equal(into, rows)
    assert word_copies == [True, False]
