"""Both serializations of a `DataProto` that verl wrote give its tensors, without verl."""

import sys
from pathlib import Path

import pytest
import torch

from workbench.dumps.tensordicts import KNOWN, DataProto
from workbench.errors import RecordError
from workbench.rollouts.torch_files import read_restricted

DUMPS = Path(__file__).parents[2] / "dumps/verl"


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean_numpy"])
def test_a_data_proto_is_read_without_its_packages(name):
    proto = read_restricted(DUMPS / f"{name}.pkl", known=KNOWN)
    assert isinstance(proto, DataProto)
    assert not {"verl", "tensordict"} & {*sys.modules}
    assert proto.non_tensors["uid"].tolist() == [f"prompt-{n // 3}" for n in range(6)]
    assert proto.meta["global_steps"] == 3
    mask = proto.batch["response_mask"]
    assert mask.dtype is torch.int64
    assert mask.sum(1).tolist() == [7, 4, 5, 2, 6, 3]
    rewards = proto.batch["token_level_rewards"]
    assert rewards.dtype is torch.float32
    assert rewards.sum(1).tolist() == [1.0, 0.0, 0.5, 0.0, 1.0, 1.0]
    ids = torch.cat([proto.batch["prompts"], proto.batch["responses"]], 1)
    assert torch.equal(proto.batch["input_ids"], ids)


def test_without_constructors_the_class_is_refused_by_name():
    with pytest.raises(RecordError, match=r"verl\.protocol\.DataProto"):
        read_restricted(DUMPS / "token_mean.pkl")


def test_a_damaged_data_proto_is_an_error():
    whole = (DUMPS / "token_mean.pkl").read_bytes()
    for end in range(0, len(whole), 311):
        with pytest.raises(RecordError):
            read_restricted(whole[:end], known=KNOWN)
