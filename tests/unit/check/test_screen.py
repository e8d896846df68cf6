"""A sample of a step: it excludes what the whole step excludes, and changes no verdict, cause or sentence."""

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


def checked_in_three_ways(step):
    """The result on the whole step, on a sample of its micro-batches and on one of its documents."""
    results = []
    for of, long in ((lambda reading, null: None, 65_536), (Screen.of, 65_536), (Screen.of, 100)):
        samples = []

        def spied(reading, null, of=of, samples=samples):
            samples.append(of(reading, null))
            return samples[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Screen, "of", spied)
            patch.setattr(module, "LONG", long)
            patch.setattr(module, "SHARE", 8)
            results.append(wb.check_step(step).as_json())
        results[-1]["sample"] = int(samples[0].sample_T.sum()) if samples[0] is not None else 0
    sizes = [result.pop("sample") for result in results]
    assert sizes[0] == 0 < min(sizes[1:]) <= max(sizes[1:]) < len(step.loss_mask_T)
    assert sizes[1] == 360  # one micro-batch of two
    return results


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_the_result_is_that_of_the_whole_step(factor):
    step = long_step(factor)
    if factor != 1:  # a second mistake: a cause of one stage alone is not excluded by the other
        ratios_T = (step.tokens["policy_logprobs"] - step.tokens["sampler_logprobs"]).exp()
        step = step.with_tokens(ratios=torch.where(step.loss_mask_T, ratios_T, 0.0))
    whole, *samples = checked_in_three_ways(step)
    assert samples == [whole, whole]
    stages = [] if factor == 1 else ["ratios", "coefficients"]
    assert list(dict.fromkeys(cause["stage"] for cause in whole["causes"])) == stages


def test_a_denominator_times_an_axis_is_named_on_a_sample():
    """The denominator alone leaves every token of the sample different; its factor is found on the whole step."""
    values = recompute_loss(Reading(long_step(), SPEC.model_copy(update={"denominator": "document"})), metrics=False)
    step = long_step().with_tokens(coefficients=2 * values["coefficients"])
    whole, *samples = checked_in_three_ways(replace(step, losses={}))
    assert samples == [whole, whole]
    texts = [cause["description"] for cause in whole["causes"]]
    assert "the loss is divided by documents, each over its own tokens, times dp" in texts


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
    few = long_step(documents=12)
    few = Reading(replace(few, documents={"advantages": few.documents["advantages"]}, layout={}), SPEC)
    assert Screen.of(few, recompute_numbers(few)) is None


def test_the_sample_of_a_short_step_is_the_micro_batch_with_the_worst_token():
    step = long_step(documents=12)
    rows_T = step.documents["rows"][step.document_ids_T]
    for row in (0, 1):
        at = int(torch.nonzero(step.loss_mask_T & (rows_T == row))[0])
        coefficients = step.tokens["coefficients"].clone()
        coefficients[at] += 1
        reading = Reading(step.with_tokens(coefficients=coefficients), SPEC)
        assert torch.equal(Screen.of(reading, recompute_numbers(reading)).sample_T, rows_T == row)
    most = int(torch.bincount(rows_T[step.loss_mask_T]).argmax())
    right = Reading(step, SPEC)
    assert torch.equal(Screen.of(right, recompute_numbers(right)).sample_T, rows_T == most)
    one = replace(right, dump=replace(step, documents={**step.documents, "rows": torch.zeros(12, dtype=torch.long)}))
    assert Screen.of(one, recompute_numbers(one)) is None


def test_a_stage_with_numbers_alone_is_tried_on_the_whole_step():
    """No mistake explains the coefficients, so the sample excludes all, and one of them explains the loss."""
    step = long_step()
    step = step.with_tokens(coefficients=step.tokens["coefficients"] * torch.linspace(1.1, 1.9, len(step.loss_mask_T)))
    step = replace(step, losses={"total": 2 * step.losses["total"]})
    whole, *samples = checked_in_three_ways(step)
    assert samples == [whole, whole]
    assert {cause["stage"] for cause in whole["causes"]} == {"loss"}
