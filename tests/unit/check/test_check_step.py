"""The public function: paths, systems, settings of the dump and of the call."""

import pytest

import workbench as wb
from tests.helpers.dumped_step import ADVANTAGES, SETTINGS, dump
from tests.unit.dumps.test_interchange import the_writer
from workbench.errors import SpecError

NAMES = ("loss_mask", "policy_logprobs", "old_logprobs", "sampler_logprobs", "ref_logprobs", "coefficients")


@pytest.fixture
def folder(tmp_path):
    step = dump()
    tensors = {name: step.tokens[name].reshape(8, 7) for name in NAMES} | dict(step.documents)
    write_step, _ = the_writer()
    about = {"settings": SETTINGS, "advantages": ADVANTAGES, "losses": dict(step.losses), "dtype": "float64"}
    write_step(tmp_path / "step", tensors, **about)
    return tmp_path / "step"


def test_a_folder_of_the_interchange_format(folder):
    assert wb.check_step(folder).ok
    assert wb.check_step(folder / "step.json").ok


def test_settings_of_the_call_replace_those_of_the_dump(folder):
    check = wb.check_step(folder, settings={**SETTINGS, "denominator": "document"})
    assert check.first.name == "coefficients"
    assert check.causes[0].description == "the loss is divided by all trained tokens of the step"
    check = wb.check_step(folder, advantages={"name": "rloo"})
    assert check.first.name == "advantages"


def test_each_wrong_call_is_an_error(folder, tmp_path):
    with pytest.raises(SpecError, match="no system"):
        wb.check_step(tmp_path / "a.pt")
    with pytest.raises(SpecError, match="its files are not read"):
        wb.check_step(tmp_path / "a.pt", system="liger")
    with pytest.raises(SpecError, match="its estimators are not translated"):
        wb.check_step(folder, system="liger", settings={}, advantages={"a": 1})
    with pytest.raises(SpecError, match="system 'verk'"):
        wb.check_step(tmp_path / "a.pt", system="verk")
    with pytest.raises(SpecError, match="pass a StepDump"):
        wb.check_step(3)
    with pytest.raises(SpecError, match="denominater"):
        wb.check_step(folder, settings={"denominater": "token"})
