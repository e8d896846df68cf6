"""A sample of a long step: it excludes what the whole step excludes, and changes no verdict, cause or sentence."""

from dataclasses import replace

import pytest
import torch

import workbench as wb
from workbench.check import screen as module
from workbench.check.alternatives import loss_alternatives
from workbench.check.numbers import recompute_numbers
from workbench.check.reading import Reading
from workbench.check.recompute import recompute_loss
from workbench.check.screen import Screen
from workbench.dumps.step import StepDump
from workbench.specs.losses import LossSpec

SPEC = LossSpec(name="grpo", kl={"coefficient": 0.01})


def long_step(factor=1.0, documents=80):
    """A step with its own coefficients and losses, times a factor, in a micro-batch on each of two ranks."""
    generator = torch.Generator().manual_seed(1)

    def normal(scale):
        return scale * torch.randn(documents, 9, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, 10, (documents, 1), generator=generator)
    old = -2 - normal(0.5).abs()
    tokens = {
        "loss_mask": torch.arange(9) < lengths,
        "old_logprobs": old,
        "policy_logprobs": old + normal(0.2),
        "sampler_logprobs": old + normal(0.1),
        "ref_logprobs": old + normal(0.1),
    }
    of_documents = {"rows": torch.arange(documents) % 2, "advantages": normal(1.0)[:, 0]}
    more = {"layout": {"dp": 2}, "dtype": "float64", "settings": SPEC.model_dump()}
    step = StepDump.from_rectangle(tokens, of_documents, **more)
    values = recompute_loss(Reading(step, SPEC), metrics=False)
    step = step.with_tokens(coefficients=factor * values["coefficients"], ratios=values["ratios"])
    return replace(step, losses={"total": factor * values["losses/total"]})


@pytest.fixture
def short(monkeypatch):
    """A step of 720 tokens counts as long; one document in eight is in the sample."""
    monkeypatch.setattr(module, "LONG", 100)
    monkeypatch.setattr(module, "SHARE", 8)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_the_result_is_that_of_the_whole_step(factor, monkeypatch):
    step = long_step(factor)
    if factor != 1:  # a second mistake: a cause of one stage alone is not excluded by the other
        ratios_T = (step.tokens["policy_logprobs"] - step.tokens["sampler_logprobs"]).exp()
        step = step.with_tokens(ratios=torch.where(step.loss_mask_T, ratios_T, 0.0))
    whole = wb.check_step(step).as_json()
    monkeypatch.setattr(module, "LONG", 100)
    monkeypatch.setattr(module, "SHARE", 8)
    assert wb.check_step(step).as_json() == whole
    stages = [] if factor == 1 else ["ratios", "coefficients"]
    assert list(dict.fromkeys(cause["stage"] for cause in whole["causes"])) == stages


def test_most_mistakes_are_excluded_and_the_settings_themselves_are_not(short):
    reading = Reading(long_step(), SPEC)
    screen = Screen.of(reading, recompute_numbers(reading))
    assert screen is not None
    assert not screen.excludes(reading)
    excluded = [screen.excludes(one.reading) for one in loss_alternatives(reading) if one.kind in ("shift", "order")]
    assert len(excluded) > 5
    assert sum(excluded) > len(excluded) / 2


def test_a_short_step_and_one_without_values_of_tokens_have_none(short):
    step = long_step()
    bare = Reading(step.with_tokens(coefficients=None, ratios=None), SPEC)
    assert Screen.of(bare, recompute_numbers(bare)) is None
    few = Reading(long_step(documents=12), SPEC)
    assert Screen.of(few, recompute_numbers(few)) is None


def test_a_stage_with_numbers_alone_is_tried_on_the_whole_step(monkeypatch):
    """No mistake explains the coefficients, so the sample excludes all, and one of them explains the loss."""
    step = long_step()
    step = step.with_tokens(coefficients=step.tokens["coefficients"] * torch.linspace(1.1, 1.9, len(step.loss_mask_T)))
    step = replace(step, losses={"total": 2 * step.losses["total"]})
    whole = wb.check_step(step).as_json()
    monkeypatch.setattr(module, "LONG", 100)
    monkeypatch.setattr(module, "SHARE", 8)
    assert wb.check_step(step).as_json() == whole
    assert {cause["stage"] for cause in whole["causes"]} == {"loss"}
