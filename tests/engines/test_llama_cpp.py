"""llama.cpp's HTTP server with the weights of a tiny policy: what it reports, and what the trainer makes of it."""

import subprocess
from dataclasses import replace

import pytest
import torch

from tests.engines.engine import LOOPS, ROOT
from tests.parity.cases import step_on
from workbench.policy.decoder import tiny_qwen3
from workbench.policy.precision import lift_to_float64
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.engine_client import EngineClient, score
from workbench.rollouts.sampling import Sampling
from workbench.rollouts.support import with_support
from workbench.sharding.mesh import single_process_mesh

pytestmark = pytest.mark.engines
PROMPT, TEMPERATURE = [16, 3, 7, 10, 8, 5], 0.7
TRUNCATED = Sampling(top_k=9, top_p=0.8, sampler_logprobs="truncated")
ROUNDING = 5e-6
"""Nats, of float32 in llama.cpp against float64: the largest of 60 completions of 12 tokens is 9.2e-7."""


@pytest.fixture(scope="module")
def policy():
    return tiny_qwen3(19, seed=3)


@pytest.fixture(scope="module")
def engine(policy, tmp_path_factory):
    python = ROOT / ".engines" / "llama_cpp" / "bin" / "python"
    if not python.is_file():
        pytest.skip("no environment of llama_cpp: make engines ENGINES=llama_cpp")
    folder = tmp_path_factory.mktemp("llama_cpp")
    policy.save_pretrained(folder)
    command = [str(python), str(LOOPS / "of_llama_cpp.py"), str(folder)]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        lines = iter(process.stdout.readline, "")
        address = next((line.split()[-1] for line in lines if line.startswith("serving at ")), None)
        assert address, (folder / "log").read_text()[-3000:]
        yield EngineClient(address, "llama_cpp")
        process.stdin.close()
        process.kill()  # its threads do not end with the main one


def logits(policy, tokens):
    """[C, V] of the places that predict the completion, in float64."""
    with torch.no_grad():
        exact = lift_to_float64(policy)
        return exact(input_ids=torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]


def chosen(logprobs_CV, tokens):
    return logprobs_CV.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def test_it_reports_raw_log_probabilities_at_any_temperature(policy, engine):
    for temperature in (1.0, TEMPERATURE):
        result = engine.sample(PROMPT, sampling=Sampling(), temperature=temperature, max_new_tokens=12, seed=1)
        logits_CV, reported = logits(policy, result.tokens), torch.tensor(result.logprobs, dtype=torch.float64)
        raw, scaled = (chosen(torch.log_softmax(logits_CV / t, -1), result.tokens) for t in (1.0, TEMPERATURE))
        assert (reported - raw).abs().max() < ROUNDING
        assert (reported - scaled).abs().max() > 0.1


def test_after_its_samplers_it_reports_the_truncated_support(policy, engine):
    sizes = []
    for seed in range(6):
        result = engine.sample(PROMPT, sampling=TRUNCATED, temperature=TEMPERATURE, max_new_tokens=12, seed=seed)
        for logits_V, token, support, reported in zip(
            logits(policy, result.tokens) / TEMPERATURE, result.tokens, result.supports, result.logprobs, strict=True
        ):
            expected = float(logits_V[token] - torch.logsumexp(logits_V[support], dim=0))
            assert reported == pytest.approx(expected, abs=ROUNDING)
            sizes.append(len(support))
    assert 1 <= min(sizes) < max(sizes) <= 9


def test_a_trainer_over_its_supports_starts_at_a_ratio_of_one_and_one_over_the_vocabulary_does_not(policy, engine):
    documents, supports = [], []
    for seed in range(8):
        result = engine.sample(PROMPT, sampling=TRUNCATED, temperature=1.0, max_new_tokens=12, seed=seed)
        count, zeros = len(result.tokens), [0.0] * len(PROMPT)
        documents.append(
            {
                "tokens": PROMPT + result.tokens,
                "loss_mask": [0] * len(PROMPT) + [1] * count,
                "advantages": [0.0] * len(PROMPT) + [1.0 - 2 * (seed % 2)] * count,
                "old_logprobs": torch.tensor(zeros + result.logprobs, dtype=torch.float64),
            }
        )
        supports.append([[]] * len(PROMPT) + result.supports)
    settings = {"model": {"source": "tiny-qwen3", "seed": 3}, "precision": "float64"}
    with_supports = [document | {"supports": ids} for document, ids in zip(documents, supports, strict=True)]
    replayed, whole = (
        step_on(single_process_mesh(), settings | {"policy": {"support": support}}, given)["metrics"]
        for support, given in (("recorded", with_supports), ("whole", documents))
    )
    assert replayed["ratio/policy_old/mean"] == pytest.approx(1.0, abs=ROUNDING)
    assert whole["ratio/policy_old/mean"] == pytest.approx(replayed["support/mass/mean"], abs=1e-3)
    assert whole["ratio/policy_old/mean"] < 0.9, "each ratio is the mass of its support"


def test_it_scores_recorded_documents(policy, engine):
    tokens = [*PROMPT, 4, 9, 0, 17]
    document = {"tokens": tokens, "loss_mask": [0] * 6 + [1] * 4, "advantages": 1.0, "old_logprobs": [0.0] * 10}
    batch = score(RolloutBatch.from_documents([document]), engine)
    assert batch.sampling == replace(Sampling(), sampler_logprobs="raw")
    expected = chosen(torch.log_softmax(logits(policy, tokens[6:]), -1), tokens[6:])
    assert (batch.sampler_logprobs_T[6:].double() - expected).abs().max() < ROUNDING
    assert with_support(batch, [[]] * 10).num_trained_tokens == 4
