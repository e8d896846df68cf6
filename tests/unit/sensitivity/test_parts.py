"""Change of a loss's gradient if each rank takes a document's ratio over its own part, against closed forms."""

import math

import pytest
import torch

from workbench.records.directory import RunDirectory
from workbench.rollouts.batch import RolloutBatch
from workbench.sensitivity.parts import change_by_ratios_of_parts
from workbench.specs.run import RunSpec

WIDE = {"kind": "gspo", "clip_low": 0.5, "clip_high": 0.5}


def change(tmp_path, log_ratios, advantage=1.0, surrogate=WIDE, cp=2):
    """The relative change of one document of five tokens, all trained but the first."""
    document = {"tokens": [3] * 5, "loss_mask": [0, 1, 1, 1, 1], "advantages": advantage, "old_logprobs": [-1.0] * 5}
    batch = RolloutBatch.from_documents([document])
    spec = RunSpec.model_validate({"steps": 1, "loss": {"surrogate": surrogate}, "layout": {"cp": cp}})
    run = RunDirectory.create(tmp_path, "clean", spec)
    policy_S = torch.tensor([0.0, *(ratio - 1.0 for ratio in log_ratios)], dtype=torch.float64)
    tokens = {"policy_logprobs": policy_S, "old_logprobs": torch.full((5,), -1.0, dtype=torch.float64)}
    run.write_tensors("step0000.tokens", {**tokens, "clipped": torch.zeros(5, dtype=torch.bool)})
    return change_by_ratios_of_parts(run, batch, spec, tmp_path)


@pytest.mark.parametrize("surrogate", [WIDE, {**WIDE, "kind": "gspo_token"}, {"kind": "gmpo"}])
def test_each_part_has_the_ratio_of_its_own_tokens(tmp_path, surrogate):
    # targets are one place earlier: three of them on the first rank, one on the second
    measured = change(tmp_path, [0.1, 0.1, 0.1, -0.3], surrogate=surrogate)
    assert measured == pytest.approx(1 - math.exp(-0.3), rel=1e-9)


def test_equal_ratios_one_rank_and_losses_on_tokens_have_no_parts(tmp_path):
    assert change(tmp_path / "equal", [0.2] * 4) == pytest.approx(0.0, abs=1e-12)
    assert change(tmp_path / "one", [0.1, 0.1, 0.1, -0.3], cp=1) == 0.0
    assert change(tmp_path / "token", [0.1, 0.1, 0.1, -0.3], surrogate={"kind": "ppo"}) == 0.0
    assert change(tmp_path / "lengths", [0.0] * 4, surrogate={"kind": "luspo"}) == pytest.approx(0.75)


def test_a_document_that_is_clipped_as_a_whole_and_in_each_part_has_no_gradient(tmp_path):
    narrow = {"kind": "gspo"}
    assert change(tmp_path / "both", [-0.1, -0.1, -0.1, -0.3], -1.0, narrow) == 0.0
    assert change(tmp_path / "one", [-0.1, -0.1, -0.1, 0.5], -1.0, narrow) == pytest.approx(1.0), "the first part alone"
