import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.oracles.truncation import kept
from workbench.policy.logprobs.recomputed import outside_support
from workbench.rollouts.sampling import Sampling
from workbench.sharding.mesh import make_mesh

SAMPLING = Sampling(top_k=12, top_p=0.8, min_p=0.02)


def problem():
    generator = torch.Generator().manual_seed(5)
    hidden_TD, weight_VD = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (30, 23))
    return hidden_TD, weight_VD, torch.randn(23, generator=generator).double(), torch.arange(30) % 23


def expected():
    hidden_TD, weight_VD, bias_V, targets_T = problem()
    logits_TV = 3 * torch.tanh((hidden_TD @ weight_VD.T + bias_V) * 0.5 / 3)
    probs_TV = torch.softmax(logits_TV / 0.6, dim=-1)
    sets = [kept(probs_V.tolist(), top_k=12, top_p=0.8, min_p=0.02) for probs_V in probs_TV]
    return torch.tensor([token not in ids for token, ids in zip(targets_T.tolist(), sets, strict=True)])


HOW = {"temperature": 0.6, "logit_scale": 0.5, "soft_cap": 3.0, "chunk_tokens": 7}


def test_targets_outside_are_the_oracles():
    hidden_TD, weight_VD, bias_V, targets_T = problem()
    outside_T = outside_support(hidden_TD, weight_VD, targets_T, SAMPLING, bias_V=bias_V, **HOW)
    assert torch.equal(outside_T, expected())
    assert 0.2 < outside_T.float().mean() < 0.95
    per_token = {**HOW, "temperature": torch.full((30,), 0.6, dtype=torch.float64)}
    assert torch.equal(
        outside_support(hidden_TD, weight_VD, targets_T, SAMPLING, bias_V=bias_V, **per_token), outside_T
    )
    padded = torch.cat([weight_VD, weight_VD[:2] + 9]), torch.cat([bias_V, bias_V[:2] + 50])
    again = outside_support(hidden_TD, padded[0], targets_T, SAMPLING, bias_V=padded[1], valid=23, **HOW)
    assert torch.equal(again, outside_T), "padded rows of the head have probability 0"


def split():
    axis = make_mesh(tp=2)["tp"]
    hidden_TD, weight_VD, bias_V, targets_T = problem()
    own = slice(0, 9) if axis.rank == 0 else slice(9, 23)
    return outside_support(
        hidden_TD,
        weight_VD[own],
        targets_T,
        SAMPLING,
        bias_V=bias_V[own],
        axis=axis,
        first_token=own.start,
        **HOW,
    )


def test_a_split_vocabulary_gives_the_same(tmp_path):
    for outside_T in run_ranks(split, 2, tmp_path):
        assert torch.equal(outside_T, expected())


def test_no_token_is_outside_a_sampler_that_keeps_all():
    hidden_TD, weight_VD, _, targets_T = problem()
    assert not outside_support(hidden_TD, weight_VD, targets_T, Sampling(top_k=23)).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_head_in_less_precision_is_taken(dtype):
    hidden_TD, weight_VD, _, targets_T = problem()
    outside_T = outside_support(hidden_TD.to(dtype), weight_VD.to(dtype), targets_T, SAMPLING, fp32_head=True)
    assert outside_T.dtype == torch.bool
