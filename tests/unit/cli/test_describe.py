"""`workbench describe` and `schema`: every kind of name, the nearest of a misspelt one, and the schema as a file."""

import json

import pytest

from workbench.cli import main
from workbench.cli.describe import description
from workbench.errors import SpecError
from workbench.faults import fault_names
from workbench.launch.ablation import AblationSpec
from workbench.launch.schema import ablation_schema, settings_by_name
from workbench.specs.losses import PRESETS


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "loss.surrogate.clip_high",
            ["kind number, at least 0", "default gspo: 0.0004", "--loss.surrogate.clip-high VALUE", "upper clip bound"],
        ),
        ("layout", ["sequence_parallel Between tensor-parallel layers"]),
        ("layout.order", ["choices contiguous, zigzag, striped", "default contiguous"]),
        ("steps", ["meaning Optimizer steps.", "kind integer, at least 1"]),
        ("truth", ["is key of an ablation file", "float64 run"]),
        ("dapo", ["is preset: the value of loss.name", "surrogate.clip_high: 0.28"]),
        ("bf16_mixed", ["is preset: a value of precision", 'weights: "float32"', 'compute: "bfloat16"']),
        ("bf16_pure", ["is preset: a value of precision", 'weights: "bfloat16"']),
        ("missing_cp_factor", ["is fault: a value of faults", "seam sum_gradients"]),
        ("vacuous", ["is verdict", "nothing was trained"]),
        ("kl/old_policy/k3_mean", ["is metric", "unit nats"]),
        ("", ["layout The parallel layout", "steps Optimizer steps."]),
    ],
)
def test_a_name_is_explained(capsys, name, lines):
    assert main(["describe", *([name] if name else [])]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert [line for line in lines if line not in text] == []


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("clip_hgih", "'loss.surrogate.clip_high'"),
        ("lr", "'optimizer.learning_rate'"),
        ("layout.ordr", "'layout.order'"),
        ("vacuos", "'vacuous'"),
        ("missing_cp_facto", "'missing_cp_factor'"),
    ],
)
def test_a_misspelt_name_names_the_nearest(name, nearest):
    with pytest.raises(SpecError) as caught:
        description(name)
    assert f"did you mean {nearest}" in caught.value.parts["found"]


def test_every_name_of_a_kind_is_explained():
    for name in (*settings_by_name(), *AblationSpec.model_fields, *PRESETS):
        assert description(name)["name"] == name
    assert description(fault_names()[0])["what"]


def test_the_schema_is_printed_or_written(tmp_path, capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == ablation_schema()
    assert main(["schema", str(tmp_path / "mine.json")]) == 0
    assert json.loads((tmp_path / "mine.json").read_text()) == ablation_schema()
    assert capsys.readouterr().out == f"schema: {tmp_path / 'mine.json'}\n"
