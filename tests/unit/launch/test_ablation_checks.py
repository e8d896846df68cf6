"""Refusals of an ablation as a whole; those of files are in `test_ablation`."""

import pytest

from workbench.errors import SpecError
from workbench.launch import ablation_checks
from workbench.launch.ablation import AblationSpec


def test_a_misspelt_part_is_left_to_the_validation():
    ablation_checks.check_structure("here", {"refrence": "a", "configurations": {"a": {}}}, AblationSpec.model_fields)
    with pytest.raises(SpecError, match="reference is missing"):
        ablation_checks.check_structure("here", {"configurations": {"a": {}}}, AblationSpec.model_fields)


def test_an_unknown_name_has_the_nearest_first_and_not_all():
    error = ablation_checks.unknown("here", "reference", "run77x", [f"run{number}" for number in range(500)])
    assert error.parts["found"].startswith("run77, ")
    assert error.parts["found"].endswith("and 480 more")
    assert error.parts["fix"] == "did you mean 'run77'?"
