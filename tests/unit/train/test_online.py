"""Online rollouts: their contents, agreement of all ranks, and training on them as on a rollout dataset."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import online_runs
from tests.helpers.bars import assert_float64_parity
from tests.helpers.online_runs import Digits, Solved, done, fields, online_of, sampled, spec_of
from tests.helpers.ranks import run_ranks
from tests.helpers.same_bits import same_bits
from tests.oracles.truncation import kept
from workbench.diagnose import diagnose
from workbench.errors import SpecError
from workbench.launch.ablation import AblationSpec
from workbench.launch.run import launch
from workbench.losses.terms import LossInputs
from workbench.metrics.evidence import Evidence
from workbench.metrics.step import SAMPLER_MOVED
from workbench.policy.decoder import load_decoder
from workbench.policy.precision import lift_to_float64
from workbench.records.directory import RunDirectory
from workbench.rollouts.batch import Extension, RolloutBatch
from workbench.rollouts.files import load
from workbench.rollouts.sampling import Sampling
from workbench.rollouts.support import MASS, SUPPORT, for_policy
from workbench.sharding.data_parallel import is_shard
from workbench.sharding.mesh import make_mesh, single_process_mesh
from workbench.sharding.simulated import simulate
from workbench.specs.losses import PRESETS, LossSpec
from workbench.specs.run import RunSpec
from workbench.train import step as flow
from workbench.train import weight_sync
from workbench.train.checkpoint import build_policy
from workbench.train.old_pass import document_logprobs, with_advantages
from workbench.train.online import describe, needs_reference, without_ties
from workbench.train.optimizer import build_optimizer
from workbench.train.rows import in_order
from workbench.train.seeds import seed_of
from workbench.train.worker import run_here

TASK = Digits()
LAYOUTS = {
    "dp2": {"dp": 2},
    "cp2": {"cp": 2, "order": "zigzag"},
    "tp2": {"tp": 2},
    "dp2_cp2": {"dp": 2, "cp": 2, "order": "zigzag"},
}


def move(policy, seed=0):
    """Other weights, as training would leave them."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)


# ---- fields of a batch -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def usual():
    """A spec, its first batch and its metrics."""
    spec = spec_of(seed=3, online={"temperature": 0.8})
    return spec, *online_of(spec).sample(0)


def documents(batch):
    """Of each document: prompt, completion, and the completion's slice."""
    for number in range(batch.num_documents):
        places = torch.nonzero(batch.document_ids_T == number).squeeze(1)
        trained = batch.loss_mask_T[places]
        assert trained.sort().values.equal(trained), "the prompt stands first"
        yield batch.tokens_T[places[~trained]].tolist(), batch.tokens_T[places[trained]].tolist(), places[trained]


def test_a_batch_has_prompts_with_their_completions(usual):
    spec, batch, _ = usual
    prompts = [prompt for prompt in TASK.prompts(seed_of(3, 0), 3) for _ in range(3)]
    results = list(documents(batch))
    assert [TASK.decode(prompt) for prompt, _, _ in results] == prompts
    assert batch.group_ids_N.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert batch.temperature == spec.online.temperature == 0.8
    assert {len(answer) for _, answer, _ in results} >= {6}
    for (prompt, answer, places), reward in zip(results, batch.rewards_N.tolist(), strict=True):
        assert reward == TASK.reward(TASK.decode(prompt), TASK.decode(answer))
        cut_off = batch.extensions["truncated"].values[batch.document_ids_T == batch.document_ids_T[places[0]]]
        assert cut_off.unique().tolist() == [float(answer[-1] not in TASK.end_ids)]
        assert len(answer) == 6 or answer[-1] == TASK.end_id
    assert len(set(batch.rewards_N.tolist())) > 3


def test_each_completion_has_its_sampling_log_probabilities(usual):
    _, batch, _ = usual
    model = lift_to_float64(load_decoder("tiny-qwen3").eval())
    for prompt, answer, places in documents(batch):
        with torch.no_grad():
            logits_TV = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0]
        said_TV = torch.log_softmax(logits_TV[len(prompt) - 1 : -1] / 0.8, dim=-1)
        expected = said_TV.gather(1, torch.tensor(answer)[:, None])[:, 0]
        torch.testing.assert_close(batch.sampler_logprobs_T[places], expected, rtol=0, atol=1e-12)
    for logprobs_T in (batch.sampler_logprobs_T, batch.old_logprobs_T):
        assert not logprobs_T[~batch.loss_mask_T].any()
        assert (logprobs_T[batch.loss_mask_T] < 0).all()


def test_advantages_are_those_of_the_estimator(usual):
    _, batch, _ = usual
    rewards_N = batch.rewards_N.tolist()
    for number, (_, _, places) in enumerate(documents(batch)):
        group = [rewards_N[other] for other in range(9) if other // 3 == number // 3 and other != number]
        expected = rewards_N[number] - sum(group) / 2
        assert batch.advantages_T[places].tolist() == pytest.approx([expected] * len(places), abs=1e-12)
    assert not batch.advantages_T[~batch.loss_mask_T].any()


def test_metrics_of_a_sampling():
    """Two prompts, the second with completions of equal rewards."""
    lengths, cut_off = (2, 3, 4, 5), (0.0, 1.0, 0.0, 1.0)
    made = [
        {
            "tokens": [1] * (2 + n),
            "loss_mask": [0, 0] + [1] * n,
            "advantages": 0.0,
            "old_logprobs": [0.0] * (2 + n),
            "reward": torch.tensor(reward, dtype=torch.float64),
            "group_id": number // 2,
        }
        for number, (n, reward) in enumerate(zip(lengths, (0.7, 0.1, 0.1, 0.1), strict=True))
    ]
    batch = RolloutBatch.from_documents(made)
    truncated = Extension(torch.tensor(cut_off)[batch.document_ids_T], "token", "1", "cut off")
    result = describe(replace(batch, extensions={"truncated": truncated}), 0.7, 2)
    assert result == pytest.approx(
        {
            "reward/all/mean": 0.25,
            "reward/all/std": math.sqrt(0.0675),
            "reward/right/fraction": 0.25,
            "reward/mixed_prompts/fraction": 0.5,
            "length/answer/mean": 3.5,
            "length/answer/max": 5.0,
            "length/truncated/fraction": 0.5,
        },
        rel=1e-12,
    )


def test_a_sampling_is_described_with_its_batch(usual):
    _, batch, numbers = usual
    assert numbers["reward/all/mean"] == pytest.approx(float(batch.rewards_N.mean()), rel=1e-12)
    assert numbers["length/answer/mean"] == batch.num_trained_tokens / 9
    assert numbers["time/sample_ms"] > 0
    assert numbers["time/score_ms"] > 0


# ---- old and reference log-probabilities -------------------------------------------------------------------------


def test_the_trainer_matches_the_sampler(usual):
    """Another program on packed rows; weights that moved are handed over before each sampling."""
    online = online_of(spec_of(data={"micro_batches": 2}))
    result = online.sample(0)[0]
    assert not torch.equal(result.old_logprobs_T, result.sampler_logprobs_T), "two programs are never alike to the bit"
    for number in (0, 1):
        batch, _ = online.sample(number)
        assert (batch.old_logprobs_T - batch.sampler_logprobs_T).abs().max() <= 1e-10
        move(online.policy)
    assert (online.sample(1)[0].sampler_logprobs_T.sum() - batch.sampler_logprobs_T.sum()).abs() > 0.1


def test_another_temperature_of_the_trainer_is_seen(usual):
    same, other = sampled(seed=3), sampled(seed=3, policy={"temperature": 0.7})
    assert torch.equal(other.tokens_T, same.tokens_T)
    assert torch.equal(other.sampler_logprobs_T, same.sampler_logprobs_T)
    assert (other.old_logprobs_T - other.sampler_logprobs_T).abs().max() > 0.01


def test_the_old_policy_may_be_the_sampler():
    batch = sampled(online={"old_logprobs": "sampler"})
    assert torch.equal(batch.old_logprobs_T, batch.sampler_logprobs_T)
    lower = sampled(online={"sampler_precision": "bfloat16"})
    assert 1e-4 < (lower.old_logprobs_T - lower.sampler_logprobs_T).abs().max() < 0.5


TOP_P = {"top_p": 0.7, "top_k": 9, "temperature": 0.8}


def test_a_truncated_sampler_records_the_tokens_that_it_kept():
    """Its own program on padded rows against a stock model, one document at a time."""
    batch = sampled(seed=3, online=TOP_P, policy={"support": "recorded"})
    assert batch.sampling == Sampling(9, 0.7, 0.0, "truncated", "truncated")
    ids_TK, mass_T = (batch.extensions[name].values for name in (SUPPORT, MASS))
    model, sizes = lift_to_float64(load_decoder("tiny-qwen3").eval()), []
    for prompt, answer, places in documents(batch):
        with torch.no_grad():
            logits_TV = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0]
        probs_TV = torch.softmax(logits_TV[len(prompt) - 1 : -1] / 0.8, dim=-1)
        for place, token, probs_V in zip(places.tolist(), answer, probs_TV, strict=True):
            support = {token for token in ids_TK[place].tolist() if token >= 0}
            assert support == kept(probs_V.tolist(), top_k=9, top_p=0.7)
            assert token in support
            mass = float(probs_V[sorted(support)].sum())
            assert float(mass_T[place]) == pytest.approx(mass, rel=1e-12)
            expected = math.log(float(probs_V[token]) / mass)
            assert float(batch.sampler_logprobs_T[place]) == pytest.approx(expected, abs=1e-12)
            assert float(batch.old_logprobs_T[place]) == pytest.approx(expected, abs=1e-10), "the trainer's own"
            sizes.append(len(support))
    assert 1 < sum(sizes) / len(sizes) < 9
    assert (ids_TK[~batch.loss_mask_T] == -1).all(), "prompts are not sampled"


@pytest.mark.parametrize("quantity", ["raw", "scaled", "truncated"])
def test_what_the_sampler_reports_is_converted_or_refused(quantity):
    """One sampling in three modes: the same completions; at temperature 1 raw and scaled are one."""
    hot, same = {**TOP_P, "sampler_logprobs": quantity}, {**TOP_P, "sampler_logprobs": quantity, "temperature": 1.0}
    at_one, usual = (
        sampled(seed=3, online=online | {"old_logprobs": "sampler"}, policy={"support": "recorded"})
        for online in (same, {**TOP_P, "temperature": 1.0})
    )
    assert torch.equal(at_one.tokens_T, usual.tokens_T)
    torch.testing.assert_close(at_one.old_logprobs_T, usual.old_logprobs_T, rtol=0, atol=1e-12)
    for support in ("recorded", "whole"):
        if quantity == "raw":
            with pytest.raises(SpecError, match=r"raw ones, at temperature 0\.8"):
                sampled(seed=3, online=hot, policy={"support": support})
            continue
        batch = sampled(seed=3, online=hot, policy={"support": support})
        ready = for_policy(batch, support)
        assert (ready.old_logprobs_T - ready.sampler_logprobs_T).abs().max() <= 1e-10, "one quantity on both sides"


def test_supports_that_no_sampler_records_are_refused():
    with pytest.raises(ValueError, match="draws from the whole vocabulary: it records no supports"):
        spec_of(policy={"support": "recorded"})


def test_the_reference_is_the_policy_at_the_start():
    """Only where a loss looks at it."""
    assert sampled().ref_logprobs_T is None
    spec = spec_of(loss={"kl": {"coefficient": 0.1}})
    online = online_of(spec)
    first, _ = online.sample(0)
    assert torch.equal(first.ref_logprobs_T, first.old_logprobs_T)
    move(online.policy)
    later, _ = online.sample(1)
    assert (later.ref_logprobs_T - later.old_logprobs_T).abs().max() > 0.01
    untouched = build_policy(spec, single_process_mesh(), Path(), temperature=1.0)
    assert torch.equal(document_logprobs(untouched, later, spec, untouched.mesh), later.ref_logprobs_T)


@pytest.mark.parametrize("name", [*PRESETS, "kl_sampler"])
def test_a_reference_is_made_exactly_where_a_loss_looks_at_one(name):
    """Without one, such a loss raises an error."""
    spec = LossSpec.model_validate(
        {"name": name} if name in PRESETS else {"kl": {"coefficient": 0.1, "against": "sampler"}}
    )
    mask_T, zeros_T = torch.tensor([True, True]), torch.zeros(2)
    inputs = LossInputs(zeros_T - 1, zeros_T - 1, zeros_T + 1, zeros_T - 1, None, loss_mask_T=mask_T)
    try:
        flow.build_loss(spec)(inputs)
        asked = False
    except SpecError as error:
        asked = "uses the ref policy" in str(error)
    except (TypeError, AttributeError):  # further fields that the loss reads
        asked = False
    assert needs_reference(spec) == (asked or spec.needs_pairs)


# ---- several updates ---------------------------------------------------------------------------------------------


def test_documents_are_taken_in_order_and_around():
    batch = RolloutBatch.from_documents(
        [{"tokens": [n, n], "loss_mask": [0, 1], "advantages": 0.0, "old_logprobs": [0.0, 0.0]} for n in range(5)]
    )
    taken = in_order(batch, 2, first=1)
    assert [next(taken).tokens_T[::2].tolist() for _ in range(3)] == [[2, 3], [4, 0], [1, 2]]
    assert next(in_order(batch, None, first=7)) is batch


def test_each_update_takes_its_share_with_advantages_of_the_whole_sampling():
    """The estimator divides by a spread over all that it is given."""
    spec = spec_of(
        online={"updates": 2, "prompts": 2},
        data={"documents_per_step": 4, "advantages": {"name": "reinforce_plus_plus"}},
    )
    online = online_of(spec)
    taken = online.steps(0)
    steps = [next(taken) for _ in range(4)]
    assert [step.fresh for step in steps] == [True, False, True, False]
    assert steps[0].source is steps[1].source
    timed = {"time/sample_ms", "time/score_ms"}
    assert {name: value for name, value in steps[0].numbers.items() if name not in timed} == steps[1].numbers
    for step, chosen in zip(steps, ([0, 1, 2, 3], [4, 5, 0, 1]) * 2, strict=True):
        expected = step.source.select(chosen)
        for name, values in fields(expected).items():
            assert torch.equal(fields(step.documents)[name], values), name
        rows, _ = flow.prepare_rows(step.documents, with_advantages(spec), single_process_mesh())
        mask_T, source_T = rows[0].row.loss_mask_T, rows[0].row.source_T
        assert torch.equal(rows[0].row.advantages_T[mask_T], step.source.advantages_T[source_T[mask_T]])
    alone = flow.compute_advantages(steps[0].documents, spec)
    assert not torch.allclose(alone.advantages_T, steps[0].documents.advantages_T)


def test_a_run_resumes_with_its_next_sampling():
    online = online_of(spec_of(online={"updates": 2}))
    taken = online.steps(0)
    steps = [next(taken) for _ in range(3)]
    assert not torch.equal(steps[2].source.tokens_T, steps[0].source.tokens_T)
    assert torch.equal(next(online.steps(2)).source.tokens_T, steps[2].source.tokens_T)


# ---- sources of randomness ---------------------------------------------------------------------------------------


def test_seed_step_and_prompt_determine_the_draws():
    online = online_of(spec_of())
    first = online.sample(0)[0]
    assert torch.equal(online.sample(0)[0].tokens_T, first.tokens_T)
    drawn = [online._uniforms(number, prompt) for number in (0, 1) for prompt in (0, 1)]
    drawn.append(online_of(spec_of(seed=1))._uniforms(0, 0))
    values = torch.stack(drawn).flatten()
    assert values.unique().numel() == values.numel() == 5 * 3 * 6
    assert 0 <= values.min() < values.max() < 1
    other = online.sample(1)[0], sampled(seed=1)
    assert all(batch.tokens_T[:12].tolist() != first.tokens_T[:12].tolist() for batch in other)


class Again(Digits):
    """Returns the same prompts always."""

    def prompts(self, seed, count):
        return ["^1+2="] * count


def test_a_repeated_prompt_gets_new_completions():
    online = online_of(spec_of(), task=Again())
    answers = [tuple(answer) for number in (0, 1) for _, answer, _ in documents(online.sample(number)[0])]
    assert len(set(answers)) == len(answers) == 18


def test_completions_do_not_depend_on_the_batch_size():
    one, all_at_once = (sampled(online={"prompts_at_once": count}) for count in (1, 8))
    assert torch.equal(one.tokens_T, all_at_once.tokens_T)
    torch.testing.assert_close(one.sampler_logprobs_T, all_at_once.sampler_logprobs_T, rtol=0, atol=1e-12)


# ---- layouts -----------------------------------------------------------------------------------------------------


def one_step(spec, mesh=None):
    """The batch of the first sampling, and the gradients of the step on it after the weights have moved."""
    online = online_of(spec, mesh)
    batch, _ = online.sample(0)
    spec, policy = with_advantages(spec), online.policy
    optimizer = build_optimizer(policy, spec)
    for _ in range(2):
        rows, totals = flow.prepare_rows(batch, spec, policy.mesh)
        result = flow.run_step(policy, flow.build_loss(spec.loss), rows, totals, keep_gradients=True)
        optimizer.step()
    return fields(batch), result.gradients, online.sample(1)[0].tokens_T


TRAINED = {
    "optimizer": {"name": "sgd", "learning_rate": 1.0},
    "loss": {"kl": {"coefficient": 0.1}},
    "online": {"temperature": 0.9},
}


TRUNCATED = {**TRAINED, "online": TOP_P, "policy": {"support": "recorded"}}


@pytest.fixture(scope="module")
def truth():
    return one_step(spec_of(**TRAINED))


def test_supports_reach_every_rank():
    """On four ranks one has nothing to write, and the largest support is on one of them."""
    everyone_samples_and_trains_the_same("dp2_cp2", one_step(spec_of(**TRUNCATED)), TRUNCATED)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_of_every_layout_samples_and_trains_the_same(name, truth):
    """Three batches of prompts: on four ranks one has nothing to write."""
    everyone_samples_and_trains_the_same(name, truth, TRAINED)


def everyone_samples_and_trains_the_same(name, truth, settings):
    layout, (batch, gradients, after) = LAYOUTS[name], truth
    sizes = {axis: layout.get(axis, 1) for axis in ("dp", "cp", "tp")}
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-4
    for rank, (result, actual, found_after) in enumerate(
        simulate(lambda mesh: one_step(spec_of(**settings, layout=layout), mesh), **sizes)
    ):
        assert result.keys() == batch.keys()
        for field, values in batch.items():
            exact = field not in ("old_logprobs_T", "ref_logprobs_T")
            torch.testing.assert_close(result[field], values, rtol=0, atol=0 if exact else 1e-12, msg=field)
        assert_float64_parity(actual, gradients, context=f"{name}, rank {rank}")
        assert torch.equal(found_after, after)


# ---- every kind of need ------------------------------------------------------------------------------------------

NEEDS = {
    "dpo": ({"name": "dpo"}, {"online": {"answers": 2, "prompts": 4}}),
    "kl in the loss": ({"kl": {"coefficient": 0.1}}, {}),
    "kl in the reward": (
        {"kl": {"coefficient": 0.1, "placement": "reward"}},
        {"data": {"advantages": {"name": "reinforce_plus_plus"}}},
    ),
    "correction": ({"correction": {"kind": "tis", "ratio_high": 2.0}}, {"online": {"sampler_precision": "bfloat16"}}),
    "truncated": ({"truncated": "silent"}, {}),
    "current": ({"old_policy": "current"}, {}),
    "distilled": ({"surrogate": {"kind": "ref_kl"}}, {}),
    "groups": ({"name": "grpo"}, {"data": {"keep_groups": True, "micro_batches": 2}}),
}


@pytest.mark.parametrize("name", NEEDS)
def test_losses_with_all_kinds_of_needs_train(name):
    loss, more = NEEDS[name]
    spec = spec_of(**more, loss=loss)
    online = online_of(spec)
    move(online.policy)
    data = next(online.steps())
    rows, totals = flow.prepare_rows(data.documents, with_advantages(spec), online.mesh)
    result = flow.run_step(
        online.policy,
        flow.build_loss(spec.loss),
        rows,
        totals,
        level="full",
        loss_spec=spec.loss,
        num_source=data.source.num_tokens,
    )
    assert math.isfinite(float(result.loss["total"]))
    assert max(result.norms.values()) > 1e-6
    if name == "truncated":
        silent = torch.cat([row.weights["policy"].loss_T == 0 for row in rows])
        cut_off = torch.cat([row.row.extensions["truncated"] > 0 for row in rows])
        mask = torch.cat([row.row.loss_mask_T for row in rows])
        assert 0 < int(cut_off[mask].sum()) < int(mask.sum())
        assert torch.equal(silent[mask], cut_off[mask])


def test_pairs_of_which_neither_is_better_train_nothing():
    """With equal rewards nothing is left, and nothing fails."""
    made = [
        {
            "tokens": [1, 2],
            "loss_mask": [0, 1],
            "advantages": 0.0,
            "old_logprobs": [0.0, -1.0],
            "reward": reward,
            "group_id": number // 2,
        }
        for number, reward in enumerate((1.0, 0.0, 0.5, 0.5, 0.0, 1.0))
    ]
    assert without_ties(RolloutBatch.from_documents(made)).loss_mask_T[1::2].tolist() == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]
    spec = spec_of(loss={"name": "dpo"}, online={"answers": 2})
    online = online_of(spec, task=Solved())
    batch, numbers = online.sample(0)
    assert batch.rewards_N.unique().numel() == 1
    assert numbers["length/answer/mean"] > 1
    rows, totals = flow.prepare_rows(batch, with_advantages(spec), online.mesh)
    assert float(flow.run_step(online.policy, flow.build_loss(spec.loss), rows, totals).loss["total"]) == 0.0


def test_a_non_finite_policy_is_reported():
    online = online_of(spec_of())
    with torch.no_grad():
        online.policy.model.get_input_embeddings().weight[3] = math.nan
    with pytest.raises(SpecError, match=r"sampling 2, from the policy after 2 steps\n  found: log-probabilities that"):
        online.sample(2)


# ---- whole runs --------------------------------------------------------------------------------------------------

TIMES = ("time/", "memory/")


def records(run):
    return [{key: value for key, value in record.items() if not key.startswith(TIMES)} for record in run.steps()]


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    return done(tmp_path_factory.mktemp("runs"), steps=3, online={"updates": 2}, data={"documents_per_step": 5})


def test_a_run_records_its_samples_next_to_its_steps(three_steps):
    steps = three_steps.steps()
    assert [path.name for path in sorted((three_steps.path / "rollouts").iterdir())] == ["step0000", "step0002"]
    for name in (
        "reward/all/mean",
        "reward/right/fraction",
        "length/answer/mean",
        "length/truncated/fraction",
        "kl/policy_sampler/k3_mean",
    ):
        assert all(name in record for record in steps)
    assert [record["documents/trained/sum"] for record in steps] == [5, 5, 5]
    for name in ("time/sample_ms", "time/score_ms"):
        assert [name in record for record in steps] == [True, False, True], "where it was sampled"
    assert steps[0]["kl/policy_sampler/k3_mean"] < 1e-12
    assert steps[1]["kl/policy_sampler/k3_mean"] > 1e-9
    assert steps[0]["reward/all/mean"] == steps[1]["reward/all/mean"] != steps[2]["reward/all/mean"]
    first = load(three_steps.path / "rollouts" / "step0000")
    tokens = three_steps.read_tensors("step0001.tokens")
    trained = torch.isin(first.document_ids_T, torch.tensor([5, 6, 7, 8, 0])) & first.loss_mask_T
    assert torch.equal(tokens["trained"], trained), "in the order of the whole sampling"
    assert torch.equal(tokens["old_logprobs"][trained], first.old_logprobs_T[trained])


def test_a_sampling_with_equal_rewards_trains_nothing_and_is_reported(tmp_path, capfd):
    run = done(tmp_path, online={"task": f"{online_runs.__file__}:Solved", "prompts": 2}, steps=2)
    assert Evidence.of_steps(run.steps()).nothing == "no document has a gradient"
    text = capfd.readouterr()
    assert text.err.splitlines() == [
        f"step {number}: nothing is trained: no document has a gradient; the completions of each prompt earned the "
        "same reward"
        for number in range(2)
    ]
    assert text.out == ""
    assert diagnose(run, run).verdict == "vacuous"


def test_a_step_that_trains_reports_nothing(tmp_path, capfd):
    run = done(tmp_path, steps=1)
    assert Evidence.of_steps(run.steps()).gradient_documents > 0
    assert capfd.readouterr().err == ""


def test_samples_are_a_rollout_dataset_like_any_other(three_steps, tmp_path):
    """Its advantages are those of whole groups, which a step of five documents cuts."""
    replayed = RunSpec.model_validate(
        {
            "model": {"source": "tiny-qwen3"},
            "precision": "float64",
            "device": "cpu",
            "optimizer": {"learning_rate": 1e-2},
            "data": {"path": str(three_steps.path / "rollouts" / "step0000"), "documents_per_step": 5},
            "steps": 2,
        }
    )
    run = RunDirectory.create(tmp_path, "replayed", replayed)
    run_here(run, tmp_path)
    assert len(records(run)) == 2
    for mine, theirs in zip(records(run), records(three_steps), strict=False):
        assert {name: theirs[name] for name in mine} == mine


def test_a_reproducible_run_samples_and_trains_the_same_bits_in_two_layouts(tmp_path):
    """Certificates are of loss, log-probabilities, gradients and weights; completions are drawn from those weights."""
    changes = {
        "precision": "float32",
        "steps": 2,
        "loss": {"kl": {"coefficient": 0.05}},
        "reproducible": {"block_tokens": 8, "weight_chunks": 2},
    }
    expected = done(tmp_path, "one", **changes, data={"micro_batches": 2})
    assert expected.steps()[1]["gradient/norm/global"] > 1e-3
    for name, layout in {"dp2_cp2": {"dp": 2, "cp": 2, "order": "zigzag"}, "tp2": {"tp": 2}}.items():
        run = done(tmp_path, name, **changes, layout=layout, data={"micro_batches": 2 // layout.get("dp", 1)})
        assert [record["certificate"] for record in run.steps()] == [
            record["certificate"] for record in expected.steps()
        ], name
        assert records(run) == records(expected)
        for number in range(2):
            mine, theirs = (fields(load(one.path / "rollouts" / f"step{number:04d}")) for one in (run, expected))
            assert [field for field in theirs if not same_bits(mine[field], theirs[field])] == []


def scored_and_stepped(reshard_after_forward):
    """Return whether parameters are shards after scoring, and the norms of the same step twice, after a read."""
    layout = {"dp": 2, "shard_parameters": True, "reshard_after_forward": reshard_after_forward}
    online = online_of(spec := spec_of(layout=layout, online={"old_logprobs": "sampler"}), make_mesh(dp=2))
    policy, spec = online.policy, with_advantages(spec)
    batch, _ = online.sample(0)
    document_logprobs(policy, batch, spec, policy.mesh)
    shards, norms = all(is_shard(parameter) for parameter in policy.model.parameters()), []
    for _ in range(2):
        rows, totals = flow.prepare_rows(batch, spec, policy.mesh)
        with torch.no_grad():
            rows[0].hidden_states(policy)
        norms.append(flow.run_step(policy, flow.build_loss(spec.loss), rows, totals).norms)
    return shards, norms


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_looking_without_a_backward_leaves_no_gradient_behind(reshard_after_forward, tmp_path):
    """Gathered parameters that are not resharded are others than those of the optimizer."""
    for shards, (first, second) in run_ranks(scored_and_stepped, 2, tmp_path, reshard_after_forward):
        assert shards
        assert second == pytest.approx(first, rel=1e-12)


def test_real_processes_with_sharded_parameters_train_as_one_rank(tmp_path):
    changes = {"steps": 2, "record": {"checkpoint_every": 2}, "loss": {"kl": {"coefficient": 0.05}}}
    one = done(tmp_path, "one", **changes)
    spec = spec_of(**changes, layout={"dp": 2, "shard_parameters": True})
    ablation = AblationSpec(
        reference="two", base=spec.model_dump(mode="json") | {"loss": spec.loss.overrides()}, configurations={"two": {}}
    )
    [run] = launch(ablation, tmp_path / "experiment", where="processes", project=tmp_path).wait(120)
    assert run.status == "succeeded", run.failure()
    for number, (mine, theirs) in enumerate(zip(run.steps(), one.steps(), strict=True)):
        for name in (
            "loss/total/sum",
            "gradient/norm/global",
            "reward/all/mean",
            "length/answer/mean",
            "entropy/policy/mean",
        ):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-9, abs=1e-13), (number, name)
        batches = [load(of.path / "rollouts" / f"step{number:04d}") for of in (run, one)]
        assert torch.equal(batches[0].tokens_T, batches[1].tokens_T)
    for name in ("weights", "optimizer"):
        kept, expected = (load_file(of.checkpoints()[2] / f"{name}.safetensors") for of in (run, one))
        assert kept.keys() == expected.keys()
        for tensor, values in expected.items():
            torch.testing.assert_close(kept[tensor], values, rtol=1e-6, atol=1e-9, msg=tensor)


@pytest.mark.parametrize(
    ("precision", "sampler", "rate", "low", "high"),
    [
        ("bf16_mixed", None, 1e-6, 0.001, 0.1),
        ("bf16_mixed", None, 1e-3, 0.8, 1.0),
        ("bf16_mixed", "float32", 1e-6, None, None),
    ],
)
def test_the_share_of_updates_that_reach_the_sampler_is_recorded_and_a_small_one_told(
    precision, sampler, rate, low, high, tmp_path, capsys
):
    online = {"sampler_precision": sampler} if sampler else {}
    run = done(tmp_path, precision=precision, steps=2, optimizer={"learning_rate": rate}, online=online)
    first, second = run.steps()
    assert "sampler/moved/fraction" not in first
    told = "do not reach it" in capsys.readouterr().err
    if low is None:
        assert "sampler/moved/fraction" not in second, "a float32 sampler sees every update"
        assert not told
        return
    assert low <= second["sampler/moved/fraction"] <= high
    assert told == (high < 0.5)


# ---- adapters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["merged", "unmerged", "merged_bfloat16"])
def test_the_sampler_has_the_adapters_of_the_policy(how, tmp_path):
    """In float64, merged and unmerged weights are the policy; a merge in bfloat16 is another one, as records say."""
    lora = {"r": 2, "init_lora_weights": "random", "target_modules": ["q_proj", "down_proj", "lm_head"], "sampler": how}
    run = done(tmp_path, steps=2, lora=lora)
    for step in run.steps():
        gap = abs(step["kl/sampler_old/k3_mean"])
        assert gap > 1e-8 if how == "merged_bfloat16" else gap < 1e-24


def test_a_sampler_whose_adapters_never_arrive_is_seen(tmp_path, monkeypatch):
    """As in verl-project/verl#7495: the weights that are sent are those of the base."""
    monkeypatch.setattr(
        weight_sync, "sampler_weights", lambda lora, weights: {n: w for n, w in weights.items() if ".lora_" not in n}
    )
    lora = {"r": 2, "init_lora_weights": "random", "target_modules": ["q_proj"]}
    assert done(tmp_path, steps=1, lora=lora).steps()[0]["kl/sampler_old/k3_mean"] > 1e-3


def test_the_share_that_moved_is_of_adapted_weights(tmp_path):
    """Others never move, and would hide a merge that reaches the sampler."""
    shares = {}
    for how in ("merged", "unmerged"):
        lora = {"r": 2, "init_lora_weights": "random", "target_modules": ["q_proj"], "sampler": how}
        run = done(tmp_path / how, steps=2, precision="bfloat16", lora=lora)
        shares[how] = run.steps()[1][SAMPLER_MOVED]
    assert shares["merged"] > 0.5
    assert 0 < shares["unmerged"] <= 1
