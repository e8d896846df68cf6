"""A setting may be infinite (no clip): it reaches disk as standard JSON and comes back as it was."""

import json
import math

import pytest

from workbench.atomic import from_json, to_json
from workbench.records.directory import RunDirectory
from workbench.specs.losses import LossSpec
from workbench.specs.reading import parse_spec
from workbench.specs.run import RunSpec

UNCLIPPED = RunSpec(loss={"surrogate": {"clip_high": math.inf}})


def refuse(constant):
    raise ValueError(f"{constant} is no standard JSON")


def test_an_infinite_setting_is_standard_json_and_comes_back():
    written = json.loads(UNCLIPPED.canonical(), parse_constant=refuse)
    assert written["loss"]["surrogate"]["clip_high"] == {"float": "inf"}
    assert parse_spec(RunSpec, from_json(UNCLIPPED.canonical()), where="test") == UNCLIPPED
    assert RunSpec.model_validate(from_json(to_json(UNCLIPPED.model_dump(mode="json")))) == UNCLIPPED


def test_a_run_directory_keeps_an_infinite_setting(tmp_path):
    run = RunDirectory.create(tmp_path, "unclipped", UNCLIPPED)
    json.loads((run.path / "config.json").read_text(), parse_constant=refuse)
    assert RunDirectory.open(run.path).spec == UNCLIPPED


def test_finite_settings_keep_the_text_that_their_hash_is_made_of():
    plain = json.loads(RunSpec().canonical())
    assert RunSpec().canonical() == json.dumps(plain, sort_keys=True, separators=(",", ":"))
    assert UNCLIPPED.content_hash() != RunSpec().content_hash()


@pytest.mark.parametrize("bound", [math.inf, 0.28])
def test_a_loss_comes_back_from_its_own_json(bound):
    spec = LossSpec(surrogate={"clip_high": bound})
    assert LossSpec.model_validate_json(spec.model_dump_json()) == spec
