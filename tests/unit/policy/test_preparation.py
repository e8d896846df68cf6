"""A tiny decoder that a process has prepared once is as a new one each time, whatever was done to another."""

import pytest
import torch

from workbench.policy import preparation
from workbench.policy.model import load_policy


@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("source", ["tiny-qwen3", "tiny-qwen3-moe"])
def test_changes_of_one_are_not_seen_in_the_next(source, precision):
    first = load_policy(source, precision=precision)
    before = {name: value.clone() for name, value in first.model.state_dict().items()}
    with torch.no_grad():
        for weight in first.model.parameters():
            weight.add_(1)
    first.model.config.vocab_size = 3
    first.model.model.norm.variance_epsilon = 1.0
    first.model.model.norm.register_forward_hook(lambda *_: None)
    second = load_policy(source, precision=precision)
    assert all(torch.equal(value, before[name]) for name, value in second.model.state_dict().items())
    assert second.model.config.vocab_size == 19
    assert second.model.model.norm.variance_epsilon == 1e-6
    assert not second.model.model.norm._forward_hooks
    assert second.model.lm_head.weight is second.model.model.embed_tokens.weight
    own = {id(one) for one in second.model.modules()}
    bound = [method.__self__ for one in second.model.modules() if (method := vars(one).get("forward")) is not None]
    assert all(id(one) in own for one in bound), "exact norms are those of the copy"


@pytest.mark.parametrize("changed", [{"seed": 1}, {"tied": False}, {"depths": 1}, {"precision": "bfloat16"}], ids=str)
def test_every_setting_has_its_own(changed):
    kept = load_policy("tiny-qwen3").model
    other = load_policy("tiny-qwen3", **changed).model
    preparation._prepared_tiny.cache_clear()
    alone = load_policy("tiny-qwen3", **changed).model
    assert alone.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(value, alone.state_dict()[name]) for name, value in other.state_dict().items())
    names = kept.state_dict().keys()
    assert (names, kept.dtype) != (other.state_dict().keys(), other.dtype) or any(
        not torch.equal(kept.state_dict()[name], other.state_dict()[name]) for name in names
    )


def test_the_second_of_the_same_settings_is_a_copy():
    preparation._prepared_tiny.cache_clear()
    first, second = (load_policy("tiny-qwen3", precision="float64").model for _ in range(2))
    assert first is not second
    kept = preparation._prepared_tiny.cache_info()
    assert (kept.misses, kept.hits) == (1, 1)
