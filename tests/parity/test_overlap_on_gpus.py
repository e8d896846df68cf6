"""Transfers that overlap with compute, on two GPUs: the same step and the same attention as without overlap."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.attention_case import DOCUMENTS, SCALE, plan, tensors
from tests.helpers.bars import assert_float64_parity
from tests.helpers.ranks import run_ranks
from tests.parity.cases import step_on
from tests.parity.test_early_sums import starts_noted
from tests.parity.test_layouts import settings
from tests.parity.test_oracle import documents_near
from workbench.sharding import gradients
from workbench.sharding.attention import gathered, sharded_attention
from workbench.sharding.attention.shard import AttentionShard
from workbench.sharding.mesh import Mesh, axis_of, single_process_mesh


def nccl_axis(name):
    import torch.distributed as dist

    torch.cuda.set_device(dist.get_rank())
    return axis_of(dist.new_group(backend="nccl"), name), torch.device("cuda", dist.get_rank())


def both_steps(documents):
    """Gradients of a step with sums in backward and of one with sums after it, and where the first's sums started."""
    axis, device = nccl_axis("dp")
    alone = single_process_mesh(device)
    over_dp = {name: replace(axis, name=name) for name in ("dp", "dp_cp", "edp", "shard")}
    mesh, case = Mesh(alone.axes | over_dp, device), settings({"dp": 2}, data={"micro_batches": 2})
    with starts_noted() as started:
        during = step_on(mesh, case, documents)["gradients"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "overlaps", lambda group: False)
        return list(started), during, step_on(mesh, case, documents)["gradients"]


def both_parts():
    """Ulysses with heads in one part and in two: output and gradients."""
    axis, device = nccl_axis("cp")
    lay = plan("document_zigzag", 2)
    shard = AttentionShard.make(lay, torch.tensor(DOCUMENTS), axis, algorithm="ulysses", kernel="plain")
    outcome = []
    for limit in (10**9, 1):
        gathered.PARTS_FROM_TOKENS = limit
        places = lay.positions(axis.rank)
        *leaves, d_out = (x[None, :, places].to(device).requires_grad_() for x in tensors(8, 4))
        out, _ = sharded_attention(None, *leaves, None, shard=shard, scaling=SCALE)
        outcome.append([out.detach(), *torch.autograd.grad(out, leaves, d_out.transpose(1, 2))])
    return [[value.cpu() for value in values] for values in outcome]


@pytest.mark.gpus(2)
def test_sums_in_backward_are_those_after_it(tmp_path):
    for started, during, after in run_ranks(both_steps, 2, tmp_path, documents_near(11)):
        assert len(started) > 3
        assert all(inside for _, inside in started)
        assert_float64_parity(during, after, context="sums in backward")


@pytest.mark.gpus(2)
def test_heads_in_two_parts_are_those_in_one(tmp_path):
    for one, two in run_ranks(both_parts, 2, tmp_path):
        for whole, in_parts in zip(one, two, strict=True):
            torch.testing.assert_close(in_parts, whole, rtol=0, atol=1e-12)
