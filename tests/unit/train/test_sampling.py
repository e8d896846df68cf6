"""The committed rollout dataset matches its manifest, and sampling preserves the policy's outputs."""

import copy
import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from workbench.errors import RecordError, SpecError
from workbench.policy.decoder import tiny_qwen3
from workbench.policy.precision import lift_to_float64
from workbench.rollouts import files
from workbench.rollouts.advantages.groups import group_advantages
from workbench.rollouts.sampling import Sampling
from workbench.rollouts.support import SUPPORT
from workbench.rollouts.task import ArithmeticTask
from workbench.train import sampling as recording
from workbench.train.sampling import RolloutSettings, document_logprobs, record_rollouts, sample

DATA = Path(__file__).parents[3] / "data"
TASK = ArithmeticTask()
SMALL = RolloutSettings(
    prompts=2,
    answers=3,
    temperature=0.7,
    max_new_tokens=6,
    success_low=0.0,
    success_high=1.0,
    cool_down_steps=2,
    evaluate_every=2,
    evaluation_problems=4,
    documents_per_step=4,
)


def split(batch, document):
    """Prompt and completion tokens of a document, and where its completion lies in the row."""
    places = torch.nonzero(batch.document_ids_T == document).squeeze(1)
    answer = places[batch.loss_mask_T[places]]
    prompt = places[~batch.loss_mask_T[places]]
    assert prompt.max() < answer.min()
    return batch.tokens_T[prompt].tolist(), batch.tokens_T[answer].tolist(), answer


@pytest.fixture(autouse=True)
def one_thread():
    """Many tiny forward passes: on a busy machine two threads wait for each other ten times longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def committed():
    return files.load(DATA / "arithmetic" / "rollouts")


@pytest.fixture(scope="module")
def policy():
    model = tiny_qwen3(TASK.vocab_size, seed=99)
    weights = load_file(DATA / "arithmetic" / "policy" / "model.safetensors")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied to the embedding
    return model


def test_data_fits_in_a_megabyte():
    sizes = {path: path.stat().st_size for path in DATA.rglob("*") if path.is_file()}
    assert len(sizes) >= 5
    assert sum(sizes.values()) <= 1_000_000


def test_the_policy_is_the_one_that_sampled():
    weights = (DATA / "arithmetic" / "policy" / "model.safetensors").read_bytes()
    provenance = files.read_manifest(DATA / "arithmetic" / "rollouts").provenance
    assert hashlib.sha256(weights).hexdigest() == provenance["policy_sha256"]


def test_the_dataset_has_right_and_wrong_completions(committed):
    right = (committed.rewards_N == 1.0).double().mean().item()
    assert 0.25 <= right <= 0.6
    groups = committed.rewards_N.view(12, 6)
    assert torch.equal(committed.group_ids_N, torch.arange(12).repeat_interleave(6))
    assert int((groups.amax(1) > groups.amin(1)).sum()) >= 8
    trained = committed.advantages_T[committed.loss_mask_T]
    assert int((trained > 0.1).sum()) > 100
    assert int((trained < -0.1).sum()) > 100


def test_documents_differ_in_length(committed):
    assert 1200 <= committed.num_tokens <= 2400
    assert committed.lengths_N.max() >= 3 * committed.lengths_N.min()


def test_prompts_rewards_and_advantages_follow_from_the_tokens(committed):
    problems = TASK.problems(recording.PROMPT_SEED, 12)
    expected_rewards = []
    for document in range(committed.num_documents):
        prompt, answer, places = split(committed, document)
        assert TASK.decode(prompt) == problems[document // 6].prompt
        expected_rewards.append(TASK.reward(TASK.decode(prompt), TASK.decode(answer)))
        assert committed.advantages_T[places].unique().numel() == 1
    assert committed.rewards_N.tolist() == pytest.approx(expected_rewards)
    expected = group_advantages(torch.tensor(expected_rewards), committed.group_ids_N)
    actual = torch.stack([committed.advantages_T[split(committed, d)[2][0]] for d in range(72)])
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("lift", "bar", "every"), [(lambda model: model, 1e-5, 1), (lift_to_float64, 1e-6, 5)])
def test_the_policy_gives_the_old_logprobs(committed, policy, lift, bar, every):
    model = lift(copy.deepcopy(policy))
    for document in range(0, committed.num_documents, every):
        prompt, answer, places = split(committed, document)
        actual = document_logprobs(model, prompt, answer, temperature=committed.temperature)
        ratio = (actual.double() - committed.old_logprobs_T[places].double()).exp()
        assert (ratio - 1).abs().max() <= bar


def test_sampler_and_reference_are_their_own_numbers(committed):
    mask = committed.loss_mask_T
    sampler = (committed.sampler_logprobs_T - committed.old_logprobs_T)[mask]
    assert 0 < sampler.abs().max() < 1e-4
    reference = (committed.ref_logprobs_T - committed.old_logprobs_T)[mask].double()
    assert 0.005 < (reference.exp() - 1 - reference).mean() < 0.2


def test_sampled_logprobs_are_those_of_the_document_at_the_temperature():
    model = tiny_qwen3(TASK.vocab_size, seed=5)
    prompts = ["^12+3=", "^4+5=", "^66-6=", "^12+3="]
    settings = RolloutSettings(temperature=0.5, max_new_tokens=9)
    answers = sample(model, TASK, prompts, settings, torch.Generator().manual_seed(3))
    assert answers[0].tokens != answers[3].tokens
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = document_logprobs(model, TASK.encode(prompt), answer.tokens, temperature=0.5)
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected, rtol=0, atol=1e-5)


def test_a_completion_ends_with_its_end_symbol_or_at_the_limit():
    model = tiny_qwen3(TASK.vocab_size, seed=5)
    settings = RolloutSettings(temperature=1.0, max_new_tokens=9)
    answers = sample(model, TASK, ["^4+5="] * 40, settings, torch.Generator().manual_seed(3))
    ended = [answer.tokens for answer in answers if TASK.end_id in answer.tokens]
    assert 0 < len(ended) < 40
    assert all(tokens.index(TASK.end_id) == len(tokens) - 1 for tokens in ended)
    assert all(len(answer.tokens) == 9 for answer in answers if TASK.end_id not in answer.tokens)
    assert all(len(answer.tokens) == len(answer.logprobs) for answer in answers)


def test_a_small_rollout_dataset_end_to_end(tmp_path):
    lines = []
    numbers = record_rollouts(tmp_path / "a", SMALL, on_event=lines.append)
    batch = files.load(tmp_path / "a" / "rollouts")
    assert batch.num_documents == 6
    assert batch.temperature == 0.7
    assert batch.group_ids_N.tolist() == [0, 0, 0, 1, 1, 1]
    assert numbers["warm_up_steps"] == 4
    assert [line.partition(":")[0] for line in lines] == ["warm-up step 2", "warm-up step 4"]
    manifest = files.read_manifest(tmp_path / "a" / "rollouts")
    assert manifest.provenance["numbers"] == numbers

    # The saved policy gives the recorded log-probabilities; the reference, two steps earlier, gives others.
    model = tiny_qwen3(TASK.vocab_size)
    model.load_state_dict(load_file(tmp_path / "a" / "policy" / "model.safetensors"), strict=False)
    for document in range(6):
        prompt, answer, places = split(batch, document)
        actual = document_logprobs(model, prompt, answer, temperature=0.7)
        torch.testing.assert_close(actual, batch.old_logprobs_T[places], rtol=0, atol=1e-5)
        torch.testing.assert_close(actual, batch.sampler_logprobs_T[places], rtol=0, atol=1e-5)
        assert (batch.ref_logprobs_T[places] - actual).abs().max() > 1e-4

    record_rollouts(tmp_path / "b", SMALL)
    assert files.read_manifest(tmp_path / "b" / "rollouts").tensors == manifest.tensors  # the seed decides


def test_a_truncated_sampler_records_its_supports_and_log_probabilities_within_them():
    settings = replace(SMALL, top_p=0.6, top_k=8)
    policy, reference = (tiny_qwen3(TASK.vocab_size, seed=seed) for seed in (0, 1))
    batch, _ = recording.sample_batch(recording.WarmUp(policy, reference, 0, 0.5, 0.0), TASK, settings)
    assert batch.sampling == Sampling(8, 0.6, 0.0, "truncated", "truncated")
    models = {"old_logprobs_T": policy, "ref_logprobs_T": reference}
    for name, model in models.items():
        exact = lift_to_float64(copy.deepcopy(model)).requires_grad_(False)
        for document in range(batch.num_documents):
            prompt, answer, places = split(batch, document)
            logits_TV = exact(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1] / 0.7
            for place, token, logits_V in zip(places, answer, logits_TV, strict=True):
                ids = [i for i in batch.extensions[SUPPORT].values[place].tolist() if i >= 0]
                expected = float(logits_V[token] - torch.logsumexp(logits_V[ids], dim=0))
                assert float(getattr(batch, name)[place]) == pytest.approx(expected, abs=1e-6), "float32, rounded once"
    sizes = (batch.extensions[SUPPORT].values >= 0).sum(dim=1)[batch.loss_mask_T]
    assert 1 < sizes.double().mean() <= 8
    gap_T = (batch.sampler_logprobs_T - batch.old_logprobs_T)[batch.loss_mask_T].abs()
    assert gap_T.max() < 1e-5, "the sampler's own, in float32"


def test_an_existing_rollout_dataset_is_refused_before_the_warm_up(tmp_path, monkeypatch):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "manifest.json").touch()
    monkeypatch.setattr(recording, "warm_up", lambda *_: pytest.fail("warmed up"))
    with pytest.raises(RecordError, match="not overwritten by accident"):
        record_rollouts(tmp_path, SMALL)


def test_a_warm_up_that_never_succeeds_is_reported():
    settings = RolloutSettings(
        max_warm_up_steps=1,
        evaluate_every=1,
        evaluation_problems=1,
        documents_per_step=1,
        max_new_tokens=2,
        success_low=0.5,
    )
    with pytest.raises(SpecError, match=r"success rate of 0\.5\n  found: less after 1 steps"):
        recording.warm_up(TASK, settings)


def test_a_warm_up_that_succeeds_too_well_is_reported(monkeypatch):
    monkeypatch.setattr(recording, "_success_rate", lambda *_: 0.9)
    settings = RolloutSettings(evaluate_every=1, cool_down_steps=1, documents_per_step=1)
    with pytest.raises(SpecError, match=r"at most 0\.6\n  found: 0\.9"):
        recording.warm_up(TASK, settings)


def test_a_policy_of_ones_own_is_warmed_up_in_place(monkeypatch):
    model = tiny_qwen3(TASK.vocab_size, seed=7)
    before, asked = copy.deepcopy(model), []
    answered = recording.generate
    monkeypatch.setattr(
        recording,
        "generate",
        lambda policy, prompts, *a, **k: asked.append(prompts) or answered(policy, prompts, *a, **k),
    )
    warmed = recording.warm_up(TASK, SMALL, policy=model)
    assert warmed.policy is model
    assert not torch.equal(model.model.embed_tokens.weight, before.model.embed_tokens.weight)
    assert [len(prompts) for prompts in asked] == [SMALL.evaluation_problems] * 2
    assert len({len(prompt) for prompt in asked[0]}) > 1  # of several lengths, all of them at once


def test_prompts_of_all_lengths_together_draw_from_the_same_distribution():
    model = tiny_qwen3(TASK.vocab_size, seed=5)
    prompts = ["^12+3=", "^4+5=", "^66-6+10="]
    settings = RolloutSettings(temperature=0.5, max_new_tokens=9)
    answers = sample(model, TASK, prompts, settings, torch.Generator().manual_seed(3), padded=True)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = document_logprobs(model, TASK.encode(prompt), answer.tokens, temperature=0.5)
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("settings", [{"answers": 0}, {"temperature": 0.0}, {"success_low": 0.7}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(SpecError, match=f"{next(iter(settings))[:7]}"):
        RolloutSettings(**settings)
