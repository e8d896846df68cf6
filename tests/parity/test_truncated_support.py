"""Log-probabilities over the sampler's truncated support, in a step: the oracle's loss and gradients, in every layout.

The oracle normalises each token over a list of ids, in float64, one document at a time. Heads: all logits at once, in
chunks, with the gradient in the forward pass, and with the vocabulary split over tp.
"""

import random

import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.helpers.batches import nasty_documents, near_policy
from tests.helpers.ranks import run_ranks
from tests.oracles.step import exact
from tests.oracles.truncation import kept
from tests.parity.cases import many_steps, one_step
from tests.parity.test_layouts import LAYOUTS, settings
from tests.parity.test_oracle import oracle
from workbench.policy.decoder import tiny_qwen3
from workbench.policy.lora import merged_weights
from workbench.policy.model import load_policy
from workbench.specs.groups import LayoutSpec
from workbench.specs.run import RunSpec

RECORDED = {"support": "recorded"}
FULL = {"record": {"metrics": "full"}}
HEADS = {
    "all_logits": {"policy": RECORDED} | FULL,
    "fused": {"policy": RECORDED | {"fused_loss": True, "chunk_tokens": 7}} | FULL,
}
VOCABULARY = 19


def truncated_documents(seed):
    """Documents whose tokens were drawn from sets of every size: the whole vocabulary, one token, and between."""
    documents, generator = nasty_documents(seed), random.Random(seed)
    for document in documents:
        sets = []
        for token in document["tokens"]:
            size = generator.choice([0, 0, 1, 2, 5, 9, VOCABULARY])
            others = generator.sample(range(VOCABULARY), size)
            sets.append(sorted({token, *others}) if size else [])
        document["supports"] = sets
    _, _, logprobs = oracle(documents)
    return near_policy(documents, logprobs, seed, spread=0.25)


@pytest.fixture(scope="module")
def truth():
    documents = truncated_documents(11)
    return documents, oracle(documents)


def check(actual, expected_loss, expected, logprobs, context):
    assert abs(actual["loss"] - expected_loss) <= 1e-12 * max(1, abs(expected_loss)), context
    assert_float64_parity(actual["gradients"], expected, context=context)
    flat = torch.tensor([value for document in logprobs for value in document], dtype=torch.float64)
    where = actual["tokens"]["trained"]
    torch.testing.assert_close(actual["tokens"]["policy_logprobs"][where], flat[where], rtol=0, atol=1e-12)


@pytest.mark.parametrize("head", [*HEADS, "chunked"])
def test_one_rank_step_is_the_oracle_over_the_support(head, truth):
    documents, expected = truth
    more = HEADS.get(head) or {"policy": RECORDED | {"logprobs": "chunked", "chunk_tokens": 7}}
    actual = one_step(settings({}) | more, documents)
    check(actual, *expected, head)
    assert 0.1 < actual["metrics"]["clip/policy/fraction"] < 0.6, "the batch must exercise both branches"
    whole = one_step(settings({}), [{k: v for k, v in d.items() if k != "supports"} for d in documents])
    assert abs(whole["loss"] - expected[0]) > 1e-3, "the truncation must matter"


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_loss_of_whole_documents_is_the_same_with_the_fused_head(micro_batches, truth):
    """Documents are longer than a chunk, whose loss assumes the log-probabilities of the rest."""
    documents, _ = truth
    loss = {"name": "gspo", "surrogate": {"clip_low": 0.05, "clip_high": 0.08}}
    shared = settings({}, data={"micro_batches": micro_batches}) | {"loss": loss}
    plain, fused = (one_step(shared | more, documents) for more in HEADS.values())
    assert abs(fused["loss"] - plain["loss"]) <= 1e-12 * max(1, abs(plain["loss"]))
    assert_float64_parity(fused["gradients"], plain["gradients"], context=f"gspo, {micro_batches} micro-batches")
    assert not fused["fallbacks"]


def test_metrics_of_the_support_are_those_of_the_stock_model(truth):
    documents, _ = truth
    model, masses, sizes, outside = exact(tiny_qwen3(19, tied=True, seed=3)), [], [], []
    for document in documents:
        logits = model(input_ids=torch.tensor([document["tokens"]]), use_cache=False).logits[0].detach()
        for t, token in enumerate(document["tokens"]):
            if document["loss_mask"][t]:
                probabilities, support = torch.softmax(logits[t - 1], dim=0), document["supports"][t]
                masses.append(float(probabilities[support].sum()) if support else 1.0)
                sizes.append(len(support) or VOCABULARY)
                outside.append(token not in kept(probabilities.tolist(), top_p=0.9))
    for more in HEADS.values():
        metrics = one_step(settings({}) | more, documents)["metrics"]
        assert metrics["support/mass/mean"] == pytest.approx(sum(masses) / len(masses), rel=1e-12)
        assert metrics["support/mass/min"] == pytest.approx(min(masses), rel=1e-12)
        assert metrics["support/size/mean"] == pytest.approx(sum(sizes) / len(sizes))
        assert metrics["support/outside/fraction"] == pytest.approx(sum(outside) / len(outside))
        assert 0 < metrics["support/outside/fraction"] < 1
    basic = one_step(settings({}) | {"policy": RECORDED}, documents)["metrics"]
    assert "support/mass/mean" in basic
    assert "support/outside/fraction" not in basic, "it takes a GEMM with the head"


def test_the_measure_of_supports_is_of_an_adapted_head(truth):
    documents, _ = truth
    lora = {"r": 2, "lora_alpha": 40, "target_modules": "lm_head", "init_lora_weights": "random"}
    run = {"model": {"source": "tiny-qwen3", "seed": 3, "tied": False}, "lora": lora, "policy": RECORDED} | FULL
    spec = RunSpec.model_validate(settings({}) | run)
    policy = load_policy("tiny-qwen3", precision="float64", tied=False, seed=3, lora=spec.lora)
    merged = merged_weights(policy.lora, {name: p.detach() for name, p in policy.model.named_parameters()})
    model = exact(tiny_qwen3(19, tied=False, seed=3))
    plain, adapted = (outside_of(model, documents, head) for head in (None, merged["lm_head.weight"]))
    assert one_step(settings({}) | run, documents)["metrics"]["support/outside/fraction"] == pytest.approx(adapted)
    assert plain != adapted, "the adapter must matter"


def outside_of(model, documents, head):
    """Share of trained tokens outside the nucleus of a model, with another head if one is given."""
    if head is not None:
        model.lm_head.weight.data.copy_(head)
    outside = []
    for document in documents:
        logits = model(input_ids=torch.tensor([document["tokens"]]), use_cache=False).logits[0].detach()
        for t, token in enumerate(document["tokens"]):
            if document["loss_mask"][t]:
                outside.append(token not in kept(torch.softmax(logits[t - 1], dim=0).tolist(), top_p=0.9))
    return sum(outside) / len(outside)


def ranks(name, truth, folder):
    documents, expected = truth
    layout = LAYOUTS[name]
    cases = [(settings(layout) | more, documents) for more in HEADS.values()]
    of_one_rank = one_step(settings({}) | HEADS["all_logits"], documents)["metrics"]
    of_support = {key: value for key, value in of_one_rank.items() if key.startswith("support/")}
    assert len(of_support) == 4
    for rank, answers in enumerate(run_ranks(many_steps, LayoutSpec(**layout).world_size, folder, cases)):
        for head, actual in zip(HEADS, answers, strict=True):
            check(actual, *expected, f"{name}, {head}, rank {rank}")
            actual_of_support = {key: actual["metrics"][key] for key in of_support}
            assert actual_of_support == pytest.approx(of_support, rel=1e-12), f"{name}, {head}, rank {rank}"


@pytest.mark.parametrize("name", ["tp2", "cp2_zigzag"])
def test_a_layout_gives_the_oracles_gradients(name, truth, tmp_path):
    ranks(name, truth, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*LAYOUTS} - {"tp2", "cp2_zigzag"}))
def test_every_layout_gives_the_oracles_gradients(name, truth, tmp_path):
    ranks(name, truth, tmp_path)
