from types import SimpleNamespace

import pytest
import torch

from tests.helpers.stand_in import stand_in
from workbench.policy.logprobs.exp_epilogue import tiles

CUDA = torch.device("cuda", 0)


@pytest.fixture
def device(monkeypatch):
    """A GPU with so much shared memory, in kilobytes."""

    def with_shared_memory(kilobytes):
        properties = SimpleNamespace(shared_memory_per_block_optin=kilobytes * 1024, multi_processor_count=132)
        monkeypatch.setattr(
            tiles, "torch", stand_in(torch, cuda=stand_in(torch.cuda, get_device_properties=lambda _: properties))
        )
        return CUDA

    def forget():
        tiles.processors.cache_clear()
        tiles.shared_memory.cache_clear()

    forget()
    yield with_shared_memory
    forget()


@pytest.mark.parametrize(
    ("kilobytes", "dtype"),
    [(227, torch.bfloat16), (227, torch.float16), (99, torch.bfloat16), (163, torch.float32)],
)
def test_stages_and_outputs_fit_into_shared_memory(device, kilobytes, dtype):
    tile = tiles.choose_tile(dtype, device(kilobytes))
    loaded = (tile.rows + tile.columns) * tile.depth * dtype.itemsize
    stored = tile.rows * (tile.columns // 2) * dtype.itemsize
    assert tile.stages * loaded + stored <= kilobytes * 1024


def test_float32_is_not_multiplied_in_fewer_bits(device):
    assert tiles.choose_tile(torch.float32, device(227)).precision in ("ieee", "bf16x6")


def test_there_is_a_program_for_each_multiprocessor(device):
    assert tiles.processors(device(227)) == 132
