"""Rows under torch's context parallelism: shifted before they are cut, refused where torch's ring would be wrong."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.pretended_ring import RING, head_and_tail
from tests.helpers.ranks import run_ranks
from workbench.errors import ShapeError, ShardingError
from workbench.parallel_loss.align import align_loss
from workbench.parallel_loss.rows import shifted
from workbench.policy.attention import with_torch_attention
from workbench.policy.decoder import tiny_qwen3
from workbench.sharding.mesh import make_mesh

ALONE = align_loss(engine="sum")
TOKENS = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 1, 0]], dtype=torch.bool)


def test_token_values_are_shifted_to_the_predicting_position():
    old = torch.tensor([[9.0, 1.0, torch.nan, 3.0], [torch.inf, 5.0, 6.0, 7.0]])
    result = shifted(TOKENS, MASK, old_logprobs=old, ref_logprobs=None)
    assert result["targets"].tolist() == [[6, 0, 8, 0], [0, 3, 0, 0]]
    assert result["mask"].tolist() == [[True, False, True, False], [False, True, False, False]]
    assert result["old_logprobs"].tolist() == [[1.0, 0.0, 3.0, 0.0], [0.0, 6.0, 0.0, 0.0]]
    assert result["positions"].tolist() == [[0, 1, 2, 3]] * 2
    assert "ref_logprobs" not in result
    assert MASK[0, 0], "what was given is as it was"


def rows(**more):
    given = {"tokens": TOKENS, "mask": MASK, "old_logprobs": torch.zeros(2, 4), "advantages": torch.tensor([2.0, -1.0])}
    return ALONE.torch_context_parallel(**given | more)


def test_log_probabilities_and_loss_are_of_the_targets():
    logits = torch.randn(2, 4, 11, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with rows() as local:
        result = local.logprobs(logits, temperature=0.5)
        loss = local.policy_loss("reinforce", logits=logits, temperature=0.5)
        assert local.policy_loss("reinforce", logprobs=result).item() == pytest.approx(loss.item())
    output = (logits / 0.5).log_softmax(-1)
    expected = [output[0, 0, 6], output[0, 2, 8], output[1, 1, 3]]
    assert result[result != 0].tolist() == pytest.approx([float(value) for value in expected])
    assert loss.item() == pytest.approx(float(-(2 * expected[0] + 2 * expected[1] - expected[2]) / 3))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"positions": torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])}, "packed documents"),
        ({"positions": torch.tensor([[0, 0, 1, 2], [0, 1, 2, 3]])}, "left-padded rows"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])}, "padding before tokens"),
    ],
)
def test_packed_rows_are_refused(more, said):
    with pytest.raises(ShardingError, match=said), rows(**more):
        pass


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"mask": MASK.long()}, "mask of torch.int64"),
        ({"old_logprobs": torch.zeros(2, 3)}, "old_logprobs [(]2, 3[)]"),
        ({"advantages": torch.zeros(3)}, "advantages [(]3,[)]"),
    ],
)
def test_other_shapes_are_refused(more, said):
    with pytest.raises(ShapeError, match=said), rows(**more):
        pass


def test_a_loss_needs_its_inputs():
    with rows(advantages=None) as local, pytest.raises(ShapeError, match="without old_logprobs or advantages"):
        local.policy_loss(logprobs=torch.zeros(2, 4))
    with rows() as local, pytest.raises(ShapeError, match="one of them"):
        local.policy_loss()


def in_and_out():
    align = align_loss(make_mesh(cp=2), engine="sum")
    tokens = torch.arange(256).view(2, 128) % 19
    given = {"tokens": tokens, "mask": tokens % 3 > 0, "old_logprobs": torch.zeros(2, 128), "advantages": torch.ones(2)}
    model = with_torch_attention(tiny_qwen3(19))
    with align.torch_context_parallel(**given, ring=RING) as local:
        loss = local.policy_loss(logits=model(**local.model_inputs).logits)
    try:
        loss.backward()
    except ShardingError as error:
        text = str(error)
    places = head_and_tail(align.cp.rank, 2, 128)
    return text, local.tensors["targets"].tolist() == shifted(tokens, given["mask"])["targets"][:, places].tolist()


def test_backward_belongs_inside(tmp_path):
    for text, same in run_ranks(in_and_out, 2, tmp_path):
        assert "call loss.backward() inside the with block" in text
        assert same
