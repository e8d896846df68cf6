"""Responses of engines: llama.cpp's recorded from its server; vLLM's and SGLang's written by their documentation."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch

from workbench.errors import RecordError
from workbench.policy.decoder import tiny_qwen3
from workbench.rollouts.engine_responses import (
    alternative_logprob,
    completion_logprobs,
    prompt_logprobs,
    records_of_responses,
)
from workbench.rollouts.importers import load_rollouts
from workbench.rollouts.sampling import Sampling

FOLDER = Path(__file__).parent / "engine_responses"
LLAMA_CPP, VLLM, SGLANG = (
    json.loads((FOLDER / f"{name}.json").read_text()) for name in ("llama_cpp", "vllm", "sglang")
)
PROMPT = VLLM["prompt_ids"]


def response(engine, call):
    return copy.deepcopy(engine["calls"][call]["response"])


@pytest.mark.parametrize(("engine", "call"), [(VLLM, "scored"), (VLLM, "scored_chat"), (SGLANG, "scored")])
def test_scores_of_a_prompt(engine, call):
    assert prompt_logprobs("here", response(engine, call), PROMPT) == [0.0, -2.5, -0.75, -1.25]


@pytest.mark.parametrize(
    ("engine", "call"), [(VLLM, "completion"), (VLLM, "completion_with_ids"), (VLLM, "chat"), (SGLANG, "completion")]
)
def test_generated_tokens(engine, call):
    first, *more = completion_logprobs("here", response(engine, call))
    assert first == ([9, 3], [-2.5, -0.5], None)
    assert [tuple(other) for other in more] == ([([7], [-1.5], None)] if (engine, call) == (VLLM, "completion") else [])


def logits_of(tokens):
    """[C, V] logits of a stock model at the places of a completion of the recorded prompt."""
    prompt = LLAMA_CPP["prompt_ids"]
    with torch.no_grad():
        model = tiny_qwen3(19, seed=3)
        return model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()


def test_recorded_log_probabilities_of_llama_cpp_are_raw():
    for call in ("raw", "openai"):
        [(tokens, logprobs, supports)] = completion_logprobs("here", response(LLAMA_CPP, call))
        own_CV = torch.log_softmax(logits_of(tokens), dim=-1)
        assert supports is None
        for token, reported, own_V in zip(tokens, logprobs, own_CV, strict=True):
            assert reported == pytest.approx(float(own_V[token]), abs=1e-5)
    assert LLAMA_CPP["calls"]["raw"]["request"]["temperature"] == 0.7


def test_recorded_probabilities_after_llama_cpps_samplers_are_truncated():
    [(tokens, logprobs, supports)] = completion_logprobs("here", response(LLAMA_CPP, "truncated"))
    for token, reported, support, logits_V in zip(tokens, logprobs, supports, logits_of(tokens) / 0.7, strict=True):
        assert len(support) <= 5
        assert token in support
        expected = float(logits_V[token] - torch.logsumexp(logits_V[support], dim=0))
        assert reported == pytest.approx(expected, abs=1e-5)


def test_any_token_can_be_looked_up_among_all_alternatives():
    found = [alternative_logprob("here", response(LLAMA_CPP, "alternatives"), token) for token in range(19)]
    assert math.fsum(map(math.exp, found)) == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(RecordError, match="none of token 19"):
        alternative_logprob("here", response(LLAMA_CPP, "alternatives"), 19)


# ---- what is refused -----------------------------------------------------------------------------------


def changed(engine, call, path, value):
    result = response(engine, call)
    *keys, last = path
    at = result
    for key in keys:
        at = at[key]
    at[last] = value
    return result


CHOICE = ("choices", 0)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (response(VLLM, "completion"), "missing; the response has"),
        (changed(VLLM, "scored", (*CHOICE, "prompt_logprobs", 1), {"4": {"logprob": -1.0}}), "id 4 where 3 was sent"),
        (changed(VLLM, "scored", (*CHOICE, "prompt_logprobs"), [None]), "1 tokens"),
        (changed(VLLM, "scored", (*CHOICE, "prompt_logprobs", 2), None), "only the first token of a prompt has none"),
        (changed(VLLM, "scored", (*CHOICE, "prompt_logprobs", 2), {"7": {"logprob": 8.5}}), "these may be logits"),
        (changed(SGLANG, "scored", ("meta_info", "input_token_logprobs", 1), [-2.5, 4, None]), "4 where 3 was sent"),
        (changed(SGLANG, "scored", ("meta_info", "input_token_logprobs", 1), [-2.5]), "\\[logprob, id, text\\]"),
        ({"error": {"message": "no such model"}}, "no such model"),
        ({"choices": []}, "a list of objects, at least one"),
    ],
)
def test_scores_that_are_not_those_of_the_prompt_are_refused(response, message):
    with pytest.raises(RecordError, match=message):
        prompt_logprobs("here", response, PROMPT)


LOGPROBS = (*CHOICE, "logprobs")


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (changed(VLLM, "completion", LOGPROBS, None), "log-probabilities of the generated tokens"),
        (changed(VLLM, "completion", (*LOGPROBS, "tokens", 0), "j"), "text does not tell which token it was"),
        (changed(VLLM, "completion", (*LOGPROBS, "token_logprobs"), [-1.0]), "1 log-probabilities for 2 tokens"),
        (changed(VLLM, "completion_with_ids", (*CHOICE, "token_ids"), [9]), "2 log-probabilities for 1 tokens"),
        (changed(VLLM, "chat", (*LOGPROBS, "content", 0, "logprob"), float("-inf")), "a finite number"),
        (changed(LLAMA_CPP, "truncated", ("completion_probabilities", 0, "prob"), 0.0), "a probability that is not 0"),
        (
            changed(LLAMA_CPP, "truncated", ("completion_probabilities", 0, "top_probs"), None),
            "request a large n_probs",
        ),
        (
            changed(LLAMA_CPP, "truncated", ("completion_probabilities", 0, "top_probs"), [{"id": 5, "prob": 0.3}]),
            "1 tokens without 9, which was drawn",
        ),
        (changed(LLAMA_CPP, "raw", ("completion_probabilities", 0), {"token": "j"}), "id, and logprob or prob"),
    ],
)
def test_generated_tokens_without_ids_or_values_are_refused(response, message):
    with pytest.raises(RecordError, match=message):
        completion_logprobs("here", response)


def test_a_vocabulary_stands_for_missing_ids():
    texts = changed(VLLM, "completion", (*LOGPROBS, "tokens"), ["j", "d"])
    texts["choices"] = texts["choices"][:1]
    [generated] = completion_logprobs("here", texts, {"j": 9, "d": 3})
    assert generated.tokens == [9, 3]


# ---- records -------------------------------------------------------------------------------------------


def test_lines_of_requests_and_responses_become_rollouts():
    lines = [
        ("line 1", {"prompt_ids": PROMPT, "response": response(VLLM, "completion"), "reward": [1, 0], "group_id": "a"}),
        ("line 2", {"prompt_ids": PROMPT, "response": response(SGLANG, "completion"), "reward": 1, "group_id": "b"}),
    ]
    batch = load_rollouts(record for _, record in records_of_responses(lines))
    assert batch.num_documents == 3
    assert batch.rewards_N.tolist() == [1.0, 0.0, 1.0]
    assert batch.tokens_T[batch.loss_mask_T].tolist() == [9, 3, 7, 9, 3]
    assert batch.sampler_logprobs_T[batch.loss_mask_T].tolist() == [-2.5, -0.5, -1.5, -2.5, -0.5]
    assert torch.equal(batch.old_logprobs_T, batch.sampler_logprobs_T)


def test_supports_of_a_response_become_those_of_the_rollouts():
    line = {"prompt_ids": LLAMA_CPP["prompt_ids"], "response": response(LLAMA_CPP, "truncated"), "advantage": 1.0}
    [(_, record)] = records_of_responses([("line 1", line)])
    assert load_rollouts([record]).extensions["support_ids"].values.shape[1] == 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([1], "a request's tokens and the engine's response"),
        ({"prompt_ids": [1]}, "a request's tokens and the engine's response"),
        ({"prompt_ids": [1], "response": "text"}, "the JSON object that the engine returned"),
        ({"prompt_ids": PROMPT, "response": response(VLLM, "completion"), "reward": [1]}, "one for each of 2 choices"),
    ],
)
def test_lines_that_are_none_are_refused(line, message):
    with pytest.raises(RecordError, match=message):
        list(records_of_responses([("line 1", line)]))


def test_a_file_of_responses_is_imported_like_one_of_records(tmp_path):
    path = tmp_path / "responses.jsonl"
    line = {"prompt_ids": LLAMA_CPP["prompt_ids"], "response": response(LLAMA_CPP, "truncated"), "advantage": 1.0}
    path.write_text(f"{json.dumps(line)}\n\n{json.dumps(line)}\n")
    batch = load_rollouts(path, temperature=0.7, sampling=Sampling(5, 0.9, sampler_logprobs="truncated"))
    assert batch.num_documents == 2
    assert batch.tokens_T[batch.loss_mask_T].tolist() == [9, 3, 9] * 2
    assert batch.sampling.sampler_logprobs == "truncated"
    path.write_text(json.dumps(line | {"response": {"choices": [{}]}}))
    with pytest.raises(RecordError, match=r"responses.jsonl, line 1: logprobs"):
        load_rollouts(path)
