"""The choice of a kernel, and the message if none can run."""

import pytest
import torch

from workbench.errors import ShardingError
from workbench.sharding.attention import kernels
from workbench.sharding.attention.shard import Block

X, ROW = torch.zeros(1, 2, 3, 4), torch.arange(3)
BLOCK = Block(ROW, ROW, ROW * 0, ROW * 0)


class Picky:
    def __init__(self, name, why=None, least_scores=0):
        self.name, self.why, self.least_scores = name, why, least_scores

    def refusal(self, query, key, block):
        return self.why


def test_auto_takes_the_first_that_can(monkeypatch):
    monkeypatch.setattr(kernels, "KERNELS", (Picky("quick", "it is Saturday"), Picky("steady"), Picky("slow")))
    assert kernels.choose("auto", X, X, BLOCK).name == "steady"
    assert kernels.choose("slow", X, X, BLOCK).name == "slow"


def test_auto_skips_compiled_kernels_for_little_work(monkeypatch):
    monkeypatch.setattr(kernels, "KERNELS", (Picky("compiled", least_scores=2 * 3 * 3 + 1), Picky("steady")))
    assert kernels.choose("auto", X, X, BLOCK).name == "steady"
    assert kernels.choose("compiled", X, X, BLOCK).name == "compiled"
    assert kernels.choose("auto", X.repeat(1, 2, 1, 1), X, BLOCK).name == "compiled"


def test_a_named_kernel_that_cannot_run_states_the_reason(monkeypatch):
    monkeypatch.setattr(kernels, "KERNELS", (Picky("quick", "it is Saturday"), Picky("steady")))
    with pytest.raises(ShardingError, match=r"attention kernel 'quick'(.|\n)*it is Saturday"):
        kernels.choose("quick", X, X, BLOCK)


def test_an_unknown_name_is_refused_with_the_valid_names():
    with pytest.raises(ShardingError, match=r"'quick'(.|\n)*no kernel of this name(.|\n)*plain"):
        kernels.choose("quick", X, X, BLOCK)


def test_on_a_cpu_the_plain_one_computes_float64():
    assert kernels.choose("auto", X.double(), X.double(), BLOCK).name == "plain"
