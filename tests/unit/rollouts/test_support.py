from dataclasses import replace

import pytest
import torch

from workbench.errors import RecordError, ShapeError, SpecError
from workbench.rollouts import files
from workbench.rollouts.batch import Extension, RolloutBatch
from workbench.rollouts.manifest import read_manifest
from workbench.rollouts.packing import pack
from workbench.rollouts.sampling import Sampling
from workbench.rollouts.support import MASS, SUPPORT, for_policy, sampler_logprobs_as, with_support
from workbench.rollouts.targets import shift_targets

SETS = [[], [6, 7], [2], [], [9, 4, 1]]
MASSES = torch.tensor([1.0, 0.5, 0.25, 1.0, 0.8], dtype=torch.float64)
TRUNCATED = Sampling(top_p=0.9, sampler_logprobs="truncated", trainer_logprobs="truncated")


def plain(temperature=1.0, **sampling):
    documents = [
        {"tokens": [5, 7, 2], "loss_mask": [0, 1, 1], "advantages": 0.5, "old_logprobs": [0, -1.0, -2.0]},
        {"tokens": [5, 9], "loss_mask": [0, 1], "advantages": -0.5, "old_logprobs": [0, -0.5]},
    ]
    for document in documents:
        document["sampler_logprobs"] = torch.tensor(document["old_logprobs"], dtype=torch.float64) - 1
    return replace(RolloutBatch.from_documents(documents, temperature=temperature), sampling=Sampling(**sampling))


def truncated(sampling=TRUNCATED, mass=MASSES, **more):
    return with_support(plain(**more), SETS, mass_T=mass, sampling=sampling)


# ---- sets are data of their tokens ---------------------------------------------------------------------


def test_a_set_belongs_to_the_sampled_token():
    row = shift_targets(truncated())
    assert row.extensions[SUPPORT].tolist() == [[6, 7, -1], [2, -1, -1], [-1, -1, -1], [9, 4, 1], [-1, -1, -1]]
    assert row.targets_T.tolist() == [7, 2, 0, 9, 0]
    assert row.extensions[MASS].tolist() == [0.5, 0.25, 1.0, 0.8, 1.0]


def test_sets_are_packed_and_padded_with_their_tokens():
    first, second = pack(truncated(), rows=2, multiple_of=4)
    assert first.extensions[SUPPORT].values.tolist() == [[-1, -1, -1], [6, 7, -1], [2, -1, -1], [-1, -1, -1]]
    assert second.extensions[SUPPORT].values[1].tolist() == [9, 4, 1]
    assert second.extensions[MASS].values.tolist() == [1.0, 0.8, 1.0, 1.0]


def test_a_set_without_its_trained_token_is_refused_and_shows_an_offset():
    with pytest.raises(ShapeError, match="3 of 3 trained tokens outside their own support, the first at 1: token 7"):
        with_support(plain(), [[6, 7], [2], [9, 4], [1], [2]])
    untrained = [[1], [7], [2], [1], [9]]
    assert with_support(plain(), untrained).extensions[SUPPORT].values.shape == (5, 1)


@pytest.mark.parametrize(
    ("sets", "mass", "message"),
    [
        (torch.tensor([5, 7, 2, 5, 9]), None, "int64 \\[5\\]"),
        (torch.tensor([[5], [7]]), None, "shape \\(2, 1\\), not \\[5\\]"),
        (torch.zeros(5, 2), None, "float32 \\[5, 2\\]"),
        (torch.full((5, 1), -2), None, "id -2"),
        (SETS, torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0]), "probabilities"),
        (SETS, torch.tensor([1.0, 1.5, 1.0, 1.0, 1.0]), "probabilities"),
    ],
)
def test_what_is_no_set_or_no_probability_is_refused(sets, mass, message):
    with pytest.raises(ShapeError, match=message):
        with_support(plain(), sets, mass_T=mass)


def test_a_dataset_keeps_sets_masses_and_settings(tmp_path):
    batch = truncated(temperature=0.7)
    batch.save(tmp_path / "with")
    again = files.load(tmp_path / "with")
    assert again.sampling == TRUNCATED
    assert torch.equal(again.extensions[SUPPORT].values, batch.extensions[SUPPORT].values)
    assert torch.equal(again.extensions[MASS].values, batch.extensions[MASS].values)
    plain().save(tmp_path / "without")
    assert '"sampling"' not in (tmp_path / "without" / "manifest.json").read_text(), "readable by earlier versions"
    assert files.load(tmp_path / "without").sampling == Sampling()
    manifest = tmp_path / "with" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"top_p": 0.9', '"top_p": 1.9'))
    with pytest.raises(RecordError, match=r"top_p = 1\.9"):
        read_manifest(tmp_path / "with")


# ---- quantities ----------------------------------------------------------------------------------------


def test_scaled_and_truncated_differ_by_the_log_of_the_mass():
    scaled = replace(truncated(), sampling=replace(TRUNCATED, sampler_logprobs="scaled"))
    converted = sampler_logprobs_as(scaled, "truncated")
    trained = scaled.loss_mask_T
    expected = (scaled.sampler_logprobs_T - MASSES.log()).clamp_max(0)
    torch.testing.assert_close(converted.sampler_logprobs_T[trained], expected[trained])
    assert converted.sampling.sampler_logprobs == "truncated"
    back = sampler_logprobs_as(converted, "scaled")
    torch.testing.assert_close(back.sampler_logprobs_T, scaled.sampler_logprobs_T)


def test_quantities_that_are_the_same_number_are_not_converted():
    at_one = replace(truncated(), sampling=replace(TRUNCATED, sampler_logprobs="raw"))
    scaled = sampler_logprobs_as(at_one, "scaled")
    assert torch.equal(scaled.sampler_logprobs_T, at_one.sampler_logprobs_T), "raw is scaled at temperature 1"
    whole = plain(temperature=0.7, sampler_logprobs="truncated")
    assert torch.equal(sampler_logprobs_as(whole, "scaled").sampler_logprobs_T, whole.sampler_logprobs_T)
    per_token = Extension(torch.ones(5), "token", "1", "of sampling", pad=1.0)
    at_one = replace(at_one, temperature=0.7, extensions={**at_one.extensions, "temperature_T": per_token})
    assert sampler_logprobs_as(at_one, "scaled").sampling.sampler_logprobs == "scaled"


def test_raw_ones_at_another_temperature_are_refused():
    for quantity in ("scaled", "truncated"):
        batch = replace(truncated(temperature=0.7), sampling=replace(TRUNCATED, sampler_logprobs="raw"))
        with pytest.raises(SpecError, match=r"raw ones, at temperature 0.7(.|\n)*two normalizers"):
            sampler_logprobs_as(batch, quantity)


def test_without_a_mass_they_are_refused():
    with pytest.raises(SpecError, match="no extension support_mass"):
        sampler_logprobs_as(truncated(mass=None), "scaled")


def test_a_policy_over_the_support_gets_truncated_ones_and_the_sets():
    batch = replace(truncated(), sampling=replace(TRUNCATED, sampler_logprobs="scaled"))
    ready = for_policy(batch, "recorded")
    assert SUPPORT in ready.extensions
    assert ready.sampling.sampler_logprobs == "truncated"
    with pytest.raises(SpecError, match="rollouts without the extension support_ids"):
        for_policy(plain(), "recorded")
    with pytest.raises(SpecError, match="old_logprobs and ref_logprobs as truncated"):
        for_policy(replace(batch, sampling=replace(TRUNCATED, trainer_logprobs="scaled")), "recorded")


def test_a_policy_over_the_vocabulary_gets_scaled_ones_and_no_sets():
    batch = replace(truncated(), sampling=replace(TRUNCATED, trainer_logprobs="scaled"))
    ready = for_policy(batch, "whole")
    assert SUPPORT not in ready.extensions
    assert ready.sampling.sampler_logprobs == "scaled"
    expected = batch.sampler_logprobs_T + MASSES.log()
    torch.testing.assert_close(ready.sampler_logprobs_T[batch.loss_mask_T], expected[batch.loss_mask_T])
    with pytest.raises(SpecError, match=r"old_logprobs and ref_logprobs as scaled(.|\n)*policy.support: recorded"):
        for_policy(truncated(), "whole")
    untouched = plain()
    assert for_policy(untouched, "whole").sampler_logprobs_T is untouched.sampler_logprobs_T
