"""A recorder refuses what it cannot see."""

import pytest
from torch import nn

from workbench.errors import SpecError
from workbench.records.unsupported import cleared_buffers, no_gradient, refuse_unsupported
from workbench.sharding.given_parameters import GivenParameters


class FullyShardedDataParallel(nn.Linear):
    """A module of the name of FSDP1's."""


class Config:
    use_distributed_optimizer = True


def distributed():
    model = nn.Linear(2, 2)
    model.ddp_config = Config()
    return model


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (FullyShardedDataParallel(2, 2), "flat shards"),
        (distributed(), "main_grad is reduced in this rank's shard of the buffer alone"),
        (nn.Tanh(), "no parameter that takes a gradient"),
    ],
)
def test_models_whose_gradients_cannot_be_read(model, found):
    with pytest.raises(SpecError) as caught:
        refuse_unsupported(model, dict(model.named_parameters()), GivenParameters())
    assert caught.value.parts["found"] == found


def test_gradients_in_shards_of_buffers_are_read_by_one_that_says_so():
    class Gathered(GivenParameters):
        reads_buffer_shards = True

    model = distributed()
    parameters = dict(model.named_parameters())
    assert refuse_unsupported(model, parameters, Gathered()) is None
    with pytest.raises(SpecError, match=r"attach\.megatron\.record"):
        refuse_unsupported(model, parameters, GivenParameters())


def test_errors_name_the_step_and_what_was_seen():
    assert "in a, b, c and 2 more" in no_gradient(3, list("abcde")).parts["found"]
    assert "step 3" in no_gradient(3, ["a"]).parts["requested"]
    assert cleared_buffers(0, 4, []).parts["found"].endswith("no loss was noted")
    assert cleared_buffers(0, 4, [0.5, 2.0]).parts["found"].endswith("losses 0.5, 2")
