"""Every contender that runs here trains the same loss, and names where it comes from."""

from __future__ import annotations

import pytest
import torch

from experiments.head.contenders import BOTH, FORWARD, one_gemm, part_of
from experiments.head.workloads import DOCUMENT, Size, Truth, Workload, relative_error


@pytest.fixture(scope="module")
def work():
    return Workload.make(Size("small", 2 * DOCUMENT, 16, 50), torch.device("cpu"), torch.float64)


@pytest.mark.parametrize(
    "contender", [c for c in BOTH if c.kind == "ours" or c.name == "plain torch"], ids=lambda contender: contender.name
)
def test_trains_the_loss_that_it_names(work, contender):
    work.hidden_TD.grad = work.weight_VD.grad = None
    truth = Truth.of(work, part_of(work, contender.loss))
    logprobs_T = contender.make(work)()
    # Plain torch takes its softmax in float32, whatever the operands are.
    bar = 1e-5 if contender.name == "plain torch" else 1e-12
    assert relative_error(logprobs_T.detach(), truth.logprobs_T) < bar
    assert relative_error(work.hidden_TD.grad, truth.hidden_TD) < bar
    assert relative_error(work.weight_VD.grad, truth.weight_VD) < bar


def test_a_pass_forward_leaves_no_gradient(work):
    work.hidden_TD.grad = work.weight_VD.grad = None
    for contender in FORWARD:
        if contender.kind == "ours":
            assert not contender.make(work)().requires_grad
    assert one_gemm(work)() is None
    assert work.hidden_TD.grad is None


def test_a_package_that_is_not_here_has_no_version():
    versions = {contender.name: contender.version for contender in BOTH}
    assert versions["fused_loss"] == torch.__version__
    assert len(versions) == len(BOTH)
    assert all(contender.package is None or contender.kind != "ours" for contender in BOTH)
