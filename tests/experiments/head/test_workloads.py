"""A workload resembles a language model's, and its float64 ground truth matches autograd."""

from __future__ import annotations

import pytest
import torch

from experiments.head.contenders import TOKEN
from experiments.head.workloads import DOCUMENT, Size, Truth, Workload, exact_logprobs, relative_error
from workbench.policy.logprobs import TokenLogprobs

SMALL = Size("small", 2 * DOCUMENT, 16, 50)


@pytest.fixture(scope="module")
def work():
    return Workload.make(SMALL, torch.device("cpu"), torch.float64)


def test_a_workload_looks_like_a_language_model_s(work):
    exact_T = exact_logprobs(work.hidden_TD, work.weight_VD, work.targets_T, torch.float64)
    assert -3.0 < float(exact_T.mean()) < -0.01
    assert 0.02 < float((work.old_logprobs_T - exact_T).abs().mean()) < 0.06
    assert work.advantages_T.unique().numel() == 2


def test_the_ground_truth_matches_autograd(work):
    part = work.loss_of(TOKEN)
    truth = Truth.of(work, part, rows=300)
    documents = work.documents(DOCUMENT)
    assert documents.tolist() == [0] * DOCUMENT + [1] * DOCUMENT
    hidden_TD, weight_VD = (value.detach().clone().requires_grad_() for value in (work.hidden_TD, work.weight_VD))
    logprobs_T = torch.log_softmax(hidden_TD @ weight_VD.T, -1).gather(1, work.targets_T[:, None])[:, 0]
    part.whole(logprobs_T).backward()
    assert float((truth.logprobs_T - logprobs_T).detach().abs().max()) < 1e-12
    assert relative_error(hidden_TD.grad, truth.hidden_TD) < 1e-12
    assert relative_error(weight_VD.grad, truth.weight_VD) < 1e-12


def test_a_part_s_share_adds_up_to_the_whole(work):
    part = work.loss_of(TOKEN)
    logprobs_T = work.old_logprobs_T + 0.1
    shares = [part(TokenLogprobs(logprobs_T[index]), index) for index in torch.arange(2 * DOCUMENT).split(700)]
    assert float((sum(shares) - part.whole(logprobs_T)).abs()) < 1e-12
