"""Online runs whose sampler has older weights = an oracle that keeps every version and samples every token alone."""

import itertools

import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.helpers.online_runs import Digits, done, spec_of
from tests.oracles import asynchronous
from workbench.policy.decoder import load_decoder
from workbench.rollouts.files import load
from workbench.rollouts.versions import STALENESS, VERSION
from workbench.train.seeds import seed_of

STEPS = 3
USUAL = {
    "optimizer": {"name": "sgd", "learning_rate": 3.0},
    "loss": {"denominator": "token", "kl": {"coefficient": 0.0}, "correction": {"kind": "none"}},
    "online": {"temperature": 0.9, "max_new_tokens": 4, "answers": 2},
    "record": {"gradients": "full"},
}
TIS = {"correction": {"kind": "tis"}}


def rounded(version, weights):
    return {name: value.to(torch.bfloat16).double() for name, value in weights(version).items()}


def late(version, weights):
    old = weights(version - 2)
    return {name: old[name] if ".layers.1." in name else value for name, value in weights(version).items()}


def missing(version, weights):
    first = weights(0)
    return {name: first[name] if "q_proj" in name else value for name, value in weights(version).items()}


CASES = {
    # decoupled PPO: the ratio to the policy before the update, the weight of that policy against the sampler
    "decoupled": ({"sync": {"queue": 2}, "loss": TIS}, {"queue": 2, "cap": 2.0}),
    "interpolated": (
        {
            "sync": {"queue": 2, "mixed": True, "in_flight_tokens": 2},
            "online": {"old_logprobs": "sampler"},
            "loss": {"old_policy": "interpolated", **TIS},
        },
        {"queue": 2, "mixed": True, "in_flight": 2, "old": "interpolated", "cap": 2.0},
    ),
    "in_flight_recomputed": (
        {
            "sync": {"queue": 1, "in_flight_tokens": 1, "cache": "recomputed"},
            "online": {"old_logprobs": "behaviour", "updates": 2, "prompts": 2},
            "data": {"documents_per_step": 2},
            "loss": TIS,
        },
        {"queue": 1, "in_flight": 1, "recompute": True, "updates": 2, "old": "behaviour", "cap": 2.0},
    ),
    "too_old": (
        {
            "sync": {"queue": 2, "mixed": True, "max_staleness": 1},
            "loss": {"correction": {"kind": "tis", "staleness_high": 0}},
        },
        {"queue": 2, "mixed": True, "max_staleness": 1, "cap": 2.0, "oldest": 0},
    ),
    "late": (
        {"sync": {"lag": 2, "late": ["layers.1"]}, "online": {"old_logprobs": "sampler"}},
        {"arrives": late, "old": "sampler"},
    ),
    "cast": ({"sync": {"cast": "bfloat16"}, "loss": TIS}, {"arrives": rounded, "cap": 2.0}),
    "missing": (
        {"sync": {"missing": ["q_proj"]}, "online": {"old_logprobs": "sampler"}},
        {"arrives": missing, "old": "sampler"},
    ),
}


def oracle(spec, **settings):
    task, online = Digits(), spec.online
    texts = {number: task.prompts(seed_of(spec.seed, number), online.prompts) for number in range(STEPS)}

    def uniforms(number, prompt):
        generator = torch.Generator().manual_seed(seed_of(spec.seed, number, prompt))
        return torch.rand(online.answers, online.max_new_tokens, generator=generator, dtype=torch.float64).tolist()

    return asynchronous.train(
        load_decoder(spec.model.source),
        lambda number: [task.encode(text) for text in texts[number]],
        uniforms,
        lambda number, at, tokens: task.reward(texts[number][at], task.decode(tokens)),
        steps=STEPS,
        at_once=online.prompts_at_once,
        temperature=online.temperature,
        ends=task.end_ids,
        learning_rate=spec.optimizer.learning_rate,
        **settings,
    )


DEFAULT = ("decoupled", "interpolated", "late")
"""A sample for the default suite: queue, updates in flight, and a sync that fails."""


@pytest.mark.parametrize("name", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_older_weights_sample_and_train_as_the_oracle(name, tmp_path):
    settings, of_oracle = CASES[name]
    changes = {**USUAL, **{key: USUAL.get(key, {}) | value for key, value in settings.items()}}
    run = done(tmp_path, steps=STEPS, **changes)
    spec, updates = spec_of(**changes), of_oracle.get("updates", 1)
    seen = set()
    for step, (documents, gradients) in enumerate(oracle(spec, **of_oracle)):
        batch = load(run.path / "rollouts" / f"step{step - step % updates:04d}")
        assert batch.tokens_T.tolist() == list(itertools.chain(*(d["prompt"] + d["tokens"] for d in documents)))
        sampled_S = batch.positions_T >= torch.tensor([len(d["prompt"]) for d in documents])[batch.document_ids_T]
        expected_S = torch.tensor(list(itertools.chain(*(d["sampler"] for d in documents))), dtype=torch.float64)
        assert (batch.sampler_logprobs_T[sampled_S] - expected_S).abs().max() <= 1e-12
        if "queue" in of_oracle:
            versions = list(itertools.chain(*(d["versions"] for d in documents)))
            assert batch.extensions[VERSION].values[sampled_S].tolist() == versions
            assert batch.extensions[STALENESS].values[sampled_S].tolist() == list(
                itertools.chain(*(d["ages"] for d in documents))
            )
            seen |= {step - step % updates - version for version in versions}
        trains = [d["trains"] for d in documents for _ in d["tokens"]]
        assert batch.loss_mask_T[sampled_S].tolist() == trains
        if of_oracle.get("old") != "interpolated":
            old_S = torch.tensor(list(itertools.chain(*(d["old"] for d in documents))), dtype=torch.float64)
            assert (batch.old_logprobs_T[sampled_S] - old_S)[torch.tensor(trains)].abs().max() <= 1e-12
        actual = run.read_tensors(f"step{step:04d}.gradients")
        assert_float64_parity(actual, gradients, context=f"{name}, step {step}")
    if "queue" in of_oracle:
        assert len(seen) > 1, "tokens of several ages"
