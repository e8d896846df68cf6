"""Smoothed labels give the oracle's loss and gradients in every layout, by every implementation of the head.

The vocabulary of the tiny model is 19: tp ranks hold slices of unequal size, so that a mean of their means is wrong.
"""

import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.helpers.batches import nasty_documents
from tests.oracles.step import exact, likelihood, policy_step, smoothed_logprobs
from tests.parity.cases import step_on
from workbench.policy.decoder import tiny_qwen3
from workbench.sharding.simulated import simulate
from workbench.specs.groups import LayoutSpec

SMOOTHING, TEMPERATURE = 0.3, 0.8
CASES = {
    "one_rank": ({}, {}),
    "tp2_in_stages": ({"pp": 2, "tp": 2}, {}),
    "dp2_tp2_chunked": ({"dp": 2, "tp": 2, "sequence_parallel": True}, {"logprobs": "chunked", "chunk_tokens": 5}),
    "cp2_tp2_fused": ({"cp": 2, "tp": 2, "order": "zigzag"}, {"fused_loss": True, "chunk_tokens": 5}),
    "dp2_cp2_of_documents": ({"dp": 2, "cp": 2}, {"logprobs": "chunked"}),
}


@pytest.fixture(scope="module", params=["token", "document"])
def truth(request):
    documents, denominator = nasty_documents(11), request.param
    model = exact(tiny_qwen3(19, tied=False, seed=3))
    counts = [sum(document["loss_mask"]) for document in documents]

    def weight(number):
        return 1 / sum(counts) if denominator == "token" else 1 / (sum(map(bool, counts)) * counts[number])

    logprobs = smoothed_logprobs(model, documents, smoothing=SMOOTHING, temperature=TEMPERATURE)
    return documents, denominator, policy_step(model, documents, logprobs, likelihood(), weight=weight)


def spec_of(layout, policy, denominator, smoothing=SMOOTHING):
    return {
        "model": {"source": "tiny-qwen3", "tied": False, "seed": 3},
        "precision": "float64",
        "policy": {"temperature": TEMPERATURE} | policy,
        "loss": {"name": "sft", "surrogate": {"label_smoothing": smoothing}, "denominator": denominator},
        "layout": layout,
        "data": {"micro_batches": 2},
    }


@pytest.mark.parametrize("name", CASES)
def test_smoothed_labels_give_the_oracles_gradients(name, truth):
    documents, denominator, (expected_loss, expected) = truth
    layout, policy = CASES[name]
    spec = spec_of(layout, policy, denominator)
    steps = simulate(lambda mesh: step_on(mesh, spec, documents), **LayoutSpec(**layout).mesh_sizes)
    for rank, step in enumerate(steps):
        assert abs(step["loss"] - expected_loss) <= 1e-12 * abs(expected_loss), f"{name}, rank {rank}"
        assert_float64_parity(step["gradients"], expected, context=f"{name}, rank {rank}")


def test_the_value_is_that_of_torch():
    """The convention of torch's cross_entropy, over the whole vocabulary, on one document."""
    document = nasty_documents(11)[0] | {"loss_mask": None}
    document["loss_mask"] = [0] + [1] * (len(document["tokens"]) - 1)
    model = exact(tiny_qwen3(19, tied=False, seed=3))
    logits = model(input_ids=torch.tensor([document["tokens"]]), use_cache=False).logits[0] / TEMPERATURE
    expected = torch.nn.functional.cross_entropy(
        logits[:-1], torch.tensor(document["tokens"][1:]), label_smoothing=SMOOTHING
    )
    (step,) = simulate(lambda mesh: step_on(mesh, spec_of({}, {}, "token"), [document]))
    assert step["loss"] == pytest.approx(expected.item(), rel=1e-12)
