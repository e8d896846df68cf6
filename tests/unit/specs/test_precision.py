"""Presets of mixed precision, single changes, and what does not go together."""

import re

import pytest

from workbench.errors import SpecError
from workbench.specs.precision import ALIASES, PRESETS, MixedPrecisionSpec, dtypes_of, resolve, same
from workbench.specs.run import RunSpec


def dtypes(name, **changes):
    found = RunSpec(precision=name, mixed_precision=changes).dtypes
    return found.weights, found.compute, found.gradients, found.reduction, found.moments


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bf16_mixed", ("float32", "bfloat16", "float32", "float32", "float32")),
        ("megatron_bf16", ("float32", "bfloat16", "float32", "float32", "float32")),
        ("fsdp2_bf16", ("float32", "bfloat16", "float32", "bfloat16", "float32")),
        ("deepspeed_bf16", ("float32", "bfloat16", "bfloat16", "bfloat16", "float32")),
        ("fp16_amp", ("float32", "float16", "float32", "float32", "float32")),
        ("bf16_pure", ("bfloat16",) * 5),
        ("fp32", ("float32",) * 5),
    ],
)
def test_presets(name, expected):
    assert dtypes(name) == expected


def test_one_setting_of_a_preset_changes():
    assert dtypes("bf16_mixed", reduction="bfloat16") == dtypes("fsdp2_bf16")
    assert resolve("fp16_amp", MixedPrecisionSpec(loss_scale=8.0)).loss_scale == 8.0


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_is_the_same_run(alias, name):
    assert RunSpec(precision=alias).precision == name
    assert RunSpec(precision=alias).content_hash() == RunSpec(precision=name).content_hash()


def test_a_run_without_mixed_precision_keeps_its_identity():
    assert "mixed_precision" not in RunSpec(precision="bfloat16").canonical()
    assert "mixed_precision" in RunSpec(precision="bf16_mixed", mixed_precision={"moments": "bfloat16"}).canonical()


@pytest.mark.parametrize(
    ("name", "coarsest"), [("bf16_mixed", "bfloat16"), ("fp16_amp", "float16"), ("fp32", "float32")]
)
def test_the_coarsest_dtype_of_a_step_sets_its_tolerance(name, coarsest):
    assert RunSpec(precision=name).dtypes.coarsest == coarsest


def test_moments_do_not_decide_whether_a_run_is_a_ground_truth():
    assert RunSpec(precision="float64", mixed_precision={"moments": "bfloat16"}).in_float64
    assert not RunSpec(precision="float64", mixed_precision={"reduction": "float32"}).in_float64
    assert same("float64").in_float64


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"precision": "bf16_mixed", "mixed_precision": {"compute": "float64"}}, "set both to float64, or neither"),
        (
            {"precision": "bf16_mixed", "mixed_precision": {"gradients": "float64"}},
            "gradients in float64: torch accumulates them in the dtype of compute (bfloat16) or of weights (float32)",
        ),
        ({"precision": "fp16_amp", "mixed_precision": {"moments": "float16"}}, "float16 underflow in one step"),
        (
            {"precision": "bf16_mixed", "mixed_precision": {"stochastic_rounding": True}},
            "stochastic_rounding is of bfloat16 weights, and these are in float32",
        ),
        (
            {"precision": "bf16_mixed", "mixed_precision": {"loss_scale_interval": 5}},
            "loss_scale_interval without loss_scale",
        ),
        (
            {"precision": "deepspeed_bf16", "layout": {"dp": 2, "shard_parameters": True}},
            "gradients in bfloat16 with layout.shard_parameters",
        ),
        (
            {"layout": {"dp": 2, "shard_parameters": True}, "mixed_precision": {"reduction_order": "ranks"}},
            "mixed_precision.reduction_order with layout.shard_parameters",
        ),
        (
            {"precision": "bf16_mixed", "reproducible": {"block_tokens": 8}},
            "precision bf16_mixed with the reproducible mode",
        ),
        (
            {"loss": {"name": "losses.py:own", "engine": "mean"}, "mixed_precision": {"loss": "bfloat16"}},
            "mixed_precision.loss is for a loss of per-token terms",
        ),
        ({"precision": "bf16_mixed", "layout": {"kernel": "flex"}, "policy": {"fp32_head": True}}, None),
        ({"precision": "bf16"}, "precision"),
    ],
)
def test_what_does_not_go_together_is_named_with_a_fix(settings, found):
    if found is None:
        RunSpec.model_validate(settings)
        return
    with pytest.raises(SpecError, match=re.escape(found)):
        RunSpec(**settings)


@pytest.mark.parametrize("part", ["loss", "router", "norms"])
def test_a_part_in_bfloat16_sets_the_tolerance(part):
    assert RunSpec(precision="float64", mixed_precision={part: "bfloat16"}).dtypes.coarsest == "bfloat16"
    assert RunSpec(precision="bf16_mixed", mixed_precision={part: "float32"}).dtypes.coarsest == "bfloat16"


def test_contexts_of_records_know_their_dtypes():
    assert dtypes_of({"precision": "bf16_mixed"}) == PRESETS["bf16_mixed"]
    assert dtypes_of({"precision": "bf16_pure"}) == same("bfloat16")
    assert dtypes_of({"precision": "float64", "mixed_precision.reduction": "bfloat16"}).coarsest == "bfloat16"
    assert dtypes_of({"precision": "float8"}) is None
    assert dtypes_of({}) is None
