"""Keys and values side by side, and apart again."""

import torch

from workbench.sharding.attention.key_values import pack_key_value, unpack_key_value


def test_they_stand_token_by_token_and_come_apart_as_views():
    key, value = torch.randn(2, 1, 3, 5, 4)
    both = pack_key_value(key, value)
    assert both.shape == (5, 6, 4)
    assert torch.equal(both[2], torch.cat([key[0, :, 2], value[0, :, 2]]))
    again = unpack_key_value(both)
    assert torch.equal(torch.stack(again), torch.stack([key, value]))
    assert {x.untyped_storage().data_ptr() for x in again} == {both.untyped_storage().data_ptr()}


def test_they_may_be_widened_on_the_way():
    key = torch.randn(1, 3, 5, 4).bfloat16()
    assert torch.equal(pack_key_value(key, key, torch.float32), pack_key_value(key.float(), key.float()))
