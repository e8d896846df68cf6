"""The workbench's one-rank step equals a stock model walked through the paper, document by document.

Without this, every other parity test only compares our code with itself. By transitivity:
oracle = one rank (here) = every layout (test_layouts).
"""

import functools

import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.helpers.batches import nasty_documents, near_policy
from tests.oracles.step import exact, grpo_step
from tests.parity.cases import one_step
from workbench.policy.decoder import tiny_qwen3

LOSS = {"name": "grpo", "surrogate": {"clip_low": 0.2, "clip_high": 0.28}, "kl": {"coefficient": 0.07}}
PAPER = {"clip_low": 0.2, "clip_high": 0.28, "kl_coefficient": 0.07}
"""The same for the oracle."""


def oracle(documents, *, model=tiny_qwen3, denominator="token", tied=True, temperature=1.0, seed=3, **more):
    exactly = built(model, tied, seed)
    return grpo_step(exactly, documents, **PAPER, denominator=denominator, temperature=temperature, **more)


@functools.lru_cache(maxsize=8)
def built(model, tied, seed):
    """The exact model, which serves many steps: each begins without gradients and changes no weight."""
    return exact(model(19, tied=tied, seed=seed))


def documents_near(seed, *, model=tiny_qwen3, tied=True, temperature=1.0):
    return near_policy(nasty_documents(seed), logprobs_of(seed, model, tied, temperature), seed, spread=0.25)


@functools.lru_cache(maxsize=64)
def logprobs_of(seed, model, tied, temperature):
    """Log-probabilities of the documents of a seed, which most modules of parity begin with."""
    return oracle(nasty_documents(seed), model=model, tied=tied, temperature=temperature)[2]


@pytest.mark.parametrize("denominator", ["token", "document"])
@pytest.mark.parametrize(("tied", "temperature"), [(True, 1.0), (False, 0.7)])
def test_one_rank_step_equals_the_paper(denominator, tied, temperature):
    documents = documents_near(11, tied=tied, temperature=temperature)
    expected_loss, expected, logprobs = oracle(documents, denominator=denominator, tied=tied, temperature=temperature)
    actual = one_step(
        {
            "model": {"source": "tiny-qwen3", "tied": tied, "seed": 3},
            "precision": "float64",
            "policy": {"temperature": temperature},
            "loss": LOSS | {"denominator": denominator},
        },
        documents,
    )
    assert abs(actual["loss"] - expected_loss) <= 1e-12 * max(1, abs(expected_loss))
    assert_float64_parity(actual["gradients"], expected, context="one rank against the oracle")
    flat = torch.tensor([value for document in logprobs for value in document], dtype=torch.float64)
    where = actual["tokens"]["trained"]
    assert 0.1 < actual["metrics"]["clip/policy/fraction"] < 0.6, "the batch must exercise both branches"
    torch.testing.assert_close(actual["tokens"]["policy_logprobs"][where], flat[where], rtol=0, atol=1e-12)


def test_the_oracle_sees_one_token_of_advantage():
    documents = documents_near(11)
    expected_loss, expected, _ = oracle(documents)
    touched = next(d for d in documents if sum(d["loss_mask"]) > 3)
    at = touched["loss_mask"].index(1)
    touched["advantages"] = [a * (1.0001 if t == at else 1) for t, a in enumerate(touched["advantages"])]
    actual = one_step(
        {"model": {"source": "tiny-qwen3", "tied": True, "seed": 3}, "precision": "float64", "loss": LOSS}, documents
    )
    with pytest.raises(AssertionError, match="parameters differ"):
        assert_float64_parity(actual["gradients"], expected, context="perturbed")
    assert abs(actual["loss"] - expected_loss) > 1e-9
