"""Log-probabilities and gradient against the checkpoint: what agrees, and the cause of what differs."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.model_step import LENGTHS, MODEL, documents, dump, logprobs, mask, stock
from workbench.check import check_step, read_dump
from workbench.check.model import ModelStep, model_step
from workbench.check.stages import ROUNDING
from workbench.dumps.step import StepDump
from workbench.errors import SpecError
from workbench.losses.build import build_loss
from workbench.rollouts.batch import RolloutBatch
from workbench.sharding.simulated import simulate
from workbench.specs.run import RunSpec
from workbench.train.checkpoint import build_policy
from workbench.train.step import prepare_rows, run_step


def recorded(**changes):
    return torch.cat(logprobs(*documents(), **changes)).detach()


def checked(step, **more):
    return check_step(step, model=MODEL, **more)


@functools.cache
def right():
    """The check of the right step, which several tests read."""
    return checked(dump())


@pytest.mark.parametrize("layout", [None, {"cp": 2, "dp": 2}], ids=str)
def test_a_right_step_agrees_with_its_whole_gradient(layout):
    check = right() if layout is None else checked(dump(), layout=layout)
    assert check.verdict == "agrees", check
    assert [stage.name for stage in check.stages if stage.status == "agrees"] == [
        "log-probabilities",
        "loss",
        "gradient",
    ]
    assert len(check.stages[-1].compared) == 1 + len(list(stock(0).parameters()))
    assert check.of_model.gradient_norm == pytest.approx(dump().gradient_norm, rel=1e-12)


@pytest.mark.parametrize(
    ("values", "kind", "text"),
    [
        (lambda: recorded(temperature=1.0), "temperature", "at temperature 1, not at the stated 0.8: the division"),
        (lambda: recorded(temperature=1.37), "temperature", "at temperature 1.37, not"),
        (lambda: recorded(temperature=1.23456), "temperature", "at temperature 1.23456, not"),
        (lambda: recorded(temperature=1.0, over=0.8), "temperature", "at temperature 1, divided by 0.8"),
        (lambda: recorded(seed=1), "stale", "other weights than this checkpoint"),
        (lambda: recorded().bfloat16().double(), "rounded", "policy_logprobs rounded to bfloat16"),
        (lambda: recorded().roll(1), "shift", "those of the token before"),
        (lambda: recorded().roll(-1), "shift", "those of the token after"),
    ],
)
def test_the_cause_of_other_log_probabilities_is_first(values, kind, text):
    check = checked(dump(recorded=values(), gradients=False))
    assert check.first.name == "log-probabilities"
    assert check.causes[0].kind == kind
    assert text in check.causes[0].description
    assert [cause.kind for cause in check.causes if cause.stage == "log-probabilities"] == [kind]


def test_a_checkpoint_of_the_old_policy_is_told():
    check = checked(dump(recorded=recorded(seed=1), old=recorded(), gradients=False))
    assert (
        check.causes[0].description == "the checkpoint is the one of old_logprobs: policy_logprobs are of other weights"
    )


def test_one_other_token_is_no_other_checkpoint_and_has_its_place():
    values = recorded()
    values[LENGTHS[0] + 1] -= 1e-9
    check = checked(dump(recorded=values, gradients=False))
    assert check.first.name == "log-probabilities"
    assert check.causes == ()
    assert check.places[0].startswith("policy_logprobs at document 1, token 1: recorded ")


def test_without_policy_logprobs_the_old_ones_are_compared():
    step = dump(old=recorded(), gradients=False, losses={}).with_tokens(policy_logprobs=None)
    check = checked(step)
    assert check.stages[0].compared == ("old_logprobs",)
    assert check.verdict == "agrees"
    assert check.of_model.gradient_norm > 1
    assert "gradient: not recorded; the norm is what this step gives" in check.undecided


def test_a_model_is_passed_once_unless_it_gives_what_the_loss_lacks(monkeypatch):
    passes, take = [], ModelStep.take
    monkeypatch.setattr(ModelStep, "take", lambda self, *a, **named: passes.append(named) or take(self, *a, **named))
    step = replace(dump(), losses={}, gradients={}, gradient_norm=None)
    for changes, given in (({}, [True]), ({"policy_logprobs": None}, [False, True]), ({"advantages": None}, [False])):
        passes.clear()
        checked(step.with_tokens(**changes))
        assert ["coefficients_T" in named for named in passes] == given


def test_a_factor_of_the_gradient_has_the_name_of_the_size():
    check = checked(dump(factor=2.0, layout={"cp": 2}))
    assert (check.first.name, check.causes[0].description) == ("gradient", "the gradient times 2 = cp")
    check = checked(dump(factor=2.0, layout={"cp": 2}, gradients=False, gradient_norm=2 * dump().gradient_norm))
    assert check.causes[0].description == "the gradient norm times 2 = cp"


def test_a_factor_and_a_lost_gradient_of_some_parameters_are_told_by_name():
    step = dump()
    name = next(name for name in step.gradients if name.endswith("q_proj.weight"))
    check = checked(replace(step, gradient_norm=None, gradients={**step.gradients, name: step.gradients[name] * 3}))
    assert check.causes[0].description == f"the gradient of {name} times 3"
    check = checked(replace(step, gradient_norm=None, gradients={**step.gradients, name: step.gradients[name] * 0}))
    assert check.causes[0].description == f"no gradient reaches {name}"
    assert f"1 of {len(step.gradients)} parameters differ: {name}" in check.places


def test_the_gradient_is_that_of_the_recorded_coefficients_and_of_the_entropy():
    step = dump(gradients=False)
    zero = step.with_tokens(coefficients=torch.zeros(len(mask()), dtype=torch.float64))
    assert checked(zero).of_model.gradient_norm == 0
    norm, entropies = _with_entropy(0.1)
    with_entropy = replace(step, settings={**step.settings, "entropy_coefficient": 0.1}, losses={})
    with_entropy = with_entropy.with_tokens(entropies=entropies)
    assert checked(with_entropy).of_model.gradient_norm == pytest.approx(norm, rel=1e-10)


def _with_entropy(coefficient):
    """Norm of the gradient of the plain loss minus the mean entropy, and the entropies, with the stock decoder."""
    prompts, completions = documents()
    step, model = dump(), stock(0)
    entropies, values = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        rows = model(input_ids=torch.cat([prompt, completion])[None]).logits[0][len(prompt) - 1 : -1] / 0.8
        rows = rows.log_softmax(-1)
        entropies.append(-(rows.exp() * rows).sum(-1))
        values.append(rows.gather(1, completion[:, None])[:, 0])
    ratio = (torch.cat(values) - step.tokens["old_logprobs"]).exp()
    advantages = step.tokens["advantages"]
    value = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    loss = (value - coefficient * torch.cat(entropies))[mask()].sum() / mask().sum()
    gradients = torch.autograd.grad(loss, tuple(model.parameters()))
    return sum(float(one.square().sum()) for one in gradients) ** 0.5, torch.cat(entropies).detach()


def test_a_loss_that_cannot_be_computed_leaves_its_gradient_open():
    step = dump().with_tokens(advantages=None)
    check = checked(replace(step, losses={}))
    assert (check.stages[-1].status, check.stages[-1].missing) == ("not recomputed", "no advantages")
    assert check.of_model.gradient_norm is None
    assert check.verdict == "agrees"


def test_the_tolerance_is_that_of_the_trainers_precision():
    values = recorded() + 1e-7
    assert checked(dump(recorded=values, gradients=False)).verdict == "differs"
    assert checked(dump(recorded=values, gradients=False), precision="float32").verdict == "agrees"
    check = checked(dump(recorded=recorded() - 3, gradients=False), precision="bfloat16")
    own = model_step(dump(), MODEL).take("bfloat16").logprobs_T - model_step(dump(), MODEL).take().logprobs_T
    assert check.first.mismatches[0].tolerance == pytest.approx(8 * float(own.abs().max()), rel=1e-6)
    assert check.first.mismatches[0].tolerance > ROUNDING["bfloat16"]


def test_a_gradient_without_a_model_is_said_to_be_open():
    assert any(one.startswith("gradient: recorded") for one in check_step(dump()).undecided)
    assert not any("recorded; it is" in one for one in right().undecided)


def test_settings_of_the_pass_without_a_model_are_an_error():
    with pytest.raises(SpecError, match=r"layout or precision without model(.|\n)*--model"):
        check_step(dump(), layout={"cp": 2})
    with pytest.raises(SpecError, match=r"a gradient of module\.x"):
        checked(replace(dump(), gradients={"module.x": torch.zeros(1)}))


TRL = Path("tests/dumps/trl")


def of_trl(**changes):
    step = read_dump(TRL / "with_gradients.pt", "trl")
    return check_step(replace(step, settings={"loss_type": "grpo"}, **changes), model=TRL / "policy")


def test_log_probabilities_and_every_gradient_of_trls_own_backward_agree():
    check = of_trl()
    assert check.verdict == "agrees", check
    assert [check.stages[0].status, check.stages[-1].status] == ["agrees", "agrees"]
    step, passed = read_dump(TRL / "with_gradients.pt", "trl"), check.of_model
    assert step.gradients.keys() == passed.gradients.keys()
    distance = sum(float((step.gradients[n].double() - g).square().sum()) for n, g in passed.gradients.items())
    assert distance**0.5 < 1e-6 * passed.gradient_norm


def test_another_step_of_trl_is_another_checkpoint():
    """The log-probabilities that TRL had before the update, as those of the step."""
    step = read_dump(TRL / "with_gradients.pt", "trl")
    tokens = {**step.tokens, "policy_logprobs": step.tokens["old_logprobs"]}
    check = of_trl(tokens=tokens)
    assert (check.first.name, check.causes[0].kind) == ("log-probabilities", "stale")
    check = of_trl(temperature=0.9)
    assert (check.first.name, check.causes[0].kind) == ("log-probabilities", "temperature")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_step_of_our_own_training_in_float32_in_another_layout_agrees(temperature):
    """A dump of `run_step` in float32 over cp=2: `wb.check_step` with the model in float64 over dp=2."""
    settings = {"name": "grpo", "kl": {"coefficient": 0.0}}
    spec = RunSpec(model={"source": MODEL}, loss=settings, layout={"cp": 2}, device="cpu")
    prompts, completions = documents()
    rewards = (1.0, 0.0, 0.5, 0.25)
    rows = []
    for prompt, completion, reward in zip(prompts, completions, rewards, strict=True):
        mask_of = [0] * len(prompt) + [1] * len(completion)
        ids = torch.cat([prompt, completion])
        rows.append({"tokens": ids, "loss_mask": mask_of, "advantages": reward - 0.4, "old_logprobs": [0.0] * len(ids)})
    batch = RolloutBatch.from_documents(rows, temperature=temperature)

    def rank(mesh):
        policy = build_policy(spec, mesh, Path(), temperature=temperature)
        local, totals = prepare_rows(batch, spec, mesh)
        return run_step(policy, build_loss(spec.loss), local, totals, num_source=batch.num_tokens, keep_gradients=True)

    result = simulate(rank, cp=2)[0]
    trains = batch.loss_mask_T
    tokens = {
        "loss_mask": torch.ones(int(trains.sum()), dtype=torch.bool),
        "token_ids": torch.cat(completions),
        "policy_logprobs": result.tokens["policy_logprobs"][trains].double(),
        "old_logprobs": torch.zeros(int(trains.sum()), dtype=torch.float64),
        "advantages": batch.advantages_T[trains].double(),
    }
    step = StepDump(
        batch.document_ids_T[trains],
        tokens,
        ids={"prompt_ids": prompts},
        gradients=result.gradients,
        gradient_norm=sum(norm**2 for norm in result.norms.values()) ** 0.5,
        settings=settings,
        losses={"total": float(result.loss["total"])},
        temperature=temperature,
    )
    check = checked(step, layout={"dp": 2})
    assert check.verdict == "agrees", check
    other = checked(replace(step, temperature=temperature + 0.1))
    assert other.causes[0].kind == "temperature"
    assert checked(replace(step, gradient_norm=step.gradient_norm * 1.01)).first.name == "gradient"
