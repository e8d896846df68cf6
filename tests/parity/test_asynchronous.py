"""Online runs whose sampler has older weights = an oracle that keeps every version and samples every token alone."""

import itertools

import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.helpers.online_runs import Digits, done, spec_of
from tests.oracles import asynchronous
from workbench.launch.ablation import AblationSpec
from workbench.launch.run import launch
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
            ages = list(itertools.chain(*(d["ages"] for d in documents)))
            record = run.steps()[step]
            assert record["staleness/token/mean"] == pytest.approx(sum(ages) / len(ages), rel=1e-12)
            assert record["staleness/token/max"] == max(ages)
            if "max_staleness" in of_oracle:
                left_out = sum(not d["trains"] for d in documents) / len(documents)
                assert record["staleness/left_out/fraction"] == pytest.approx(left_out, abs=1e-12)
        trains = [d["trains"] for d in documents for _ in d["tokens"]]
        assert batch.loss_mask_T[sampled_S].tolist() == trains
        if of_oracle.get("old") != "interpolated":
            old_S = torch.tensor(list(itertools.chain(*(d["old"] for d in documents))), dtype=torch.float64)
            assert (batch.old_logprobs_T[sampled_S] - old_S)[torch.tensor(trains)].abs().max() <= 1e-12
        actual = run.read_tensors(f"step{step:04d}.gradients")
        assert_float64_parity(actual, gradients, context=f"{name}, step {step}")
    if "queue" in of_oracle:
        assert len(seen) > 1, "tokens of several ages"


AGED = {
    **USUAL,
    "sync": {"queue": 1, "mixed": True, "in_flight_tokens": 2, "lag": 1, "late": ["q_proj"]},
    "online": {**USUAL["online"], "old_logprobs": "behaviour", "prompts": 2},
    "loss": USUAL["loss"] | TIS,
}


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2},
        pytest.param({"tp": 2}, marks=pytest.mark.slow),
        pytest.param({"cp": 2, "order": "zigzag"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_versions_are_the_same_in_every_layout(layout, tmp_path):
    """Each rank holds whole versions, and gives its shard of the policy the weights of one and takes them back."""
    one, many = (done(tmp_path / name, steps=STEPS, layout=of, **AGED) for name, of in (("one", {}), ("many", layout)))
    for step in range(STEPS):
        batches = [load(run.path / "rollouts" / f"step{step:04d}") for run in (one, many)]
        assert torch.equal(batches[0].tokens_T, batches[1].tokens_T)
        assert torch.equal(batches[0].extensions[VERSION].values, batches[1].extensions[VERSION].values)
        assert (batches[0].old_logprobs_T - batches[1].old_logprobs_T).abs().max() <= 1e-12
        gradients = [run.read_tensors(f"step{step:04d}.gradients") for run in (one, many)]
        assert_float64_parity(gradients[1], gradients[0], context=f"{layout}, step {step}")


@pytest.mark.slow
def test_sharded_parameters_take_the_weights_of_a_version_and_give_them_back(tmp_path):
    one = done(tmp_path, "one", steps=STEPS, **AGED)
    spec = spec_of(steps=STEPS, layout={"dp": 2, "shard_parameters": True}, **AGED)
    base = spec.model_dump(mode="json") | {"loss": spec.loss.overrides()}
    ablation = AblationSpec(reference="two", base=base, configurations={"two": {}})
    [run] = launch(ablation, tmp_path / "experiment", where="processes", project=tmp_path).wait(240)
    assert run.status == "succeeded", run.failure()
    for step in range(STEPS):
        gradients = [of.read_tensors(f"step{step:04d}.gradients") for of in (one, run)]
        assert_float64_parity(gradients[1], gradients[0], context=f"step {step}")
