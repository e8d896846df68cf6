"""Tolerances between two correct records."""

import pytest

from workbench.diagnose.noise import Noise


@pytest.mark.parametrize(
    ("first", "second", "like"),
    [("float64", "float32", "float32"), ("bfloat16", "float32", "bfloat16"), ("float64", "bfloat16", "bfloat16")],
)
def test_the_lower_precision_decides(first, second, like):
    alone = Noise.between({"precision": like}, {"precision": like}, 0)
    assert Noise.between({"precision": first}, {"precision": second}, 0) == alone
    assert Noise.between({"precision": second}, {"precision": first}, 0) == alone


def test_an_unknown_precision_is_taken_as_float32():
    assert Noise.between({}, {"precision": "float64"}, 0) == Noise.between({"precision": "float32"}, {}, 0)
    assert Noise.between({"precision": "fp8"}, {}, 0) == Noise.between({}, {}, 0)


def test_it_grows_with_the_steps_and_with_the_precision():
    bars = [
        Noise.between({"precision": name}, {}, step).gradient for name in ("float32", "bfloat16") for step in (0, 1)
    ]
    assert bars == sorted(set(bars))
    exact = Noise.between({"precision": "float64"}, {"precision": "float64"}, 0)
    assert exact.gradient < 1e-9 < bars[0]


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_where_nothing_was_rounded_forward_less_may_differ(name):
    context = {"precision": name}
    usual = Noise.between(context, context, 0)
    same = Noise.between(context, context, 0, same_forward=True)
    assert same.same_forward
    assert same.gradient < usual.gradient
    assert same.loss <= 1e-5 < usual.loss
    assert same.metric < usual.metric


def test_flipped_clips_and_cancelling_tokens_widen_only_gradient_tolerances():
    usual = Noise.between({"precision": "bfloat16"}, {}, 1)
    assert usual.with_flips(0) == usual
    assert usual.with_flips(0.04).gradient == pytest.approx(1.0)
    assert usual.with_flips(0.04).loss == usual.loss
    assert usual.as_tokens_cancel(5).gradient == pytest.approx(5 * usual.gradient)
    assert usual.as_tokens_cancel(0.1) == usual == usual.as_tokens_cancel(float("inf"))


def test_mixed_precision_has_the_tolerance_of_its_fewest_bits():
    bars = {name: Noise.between({"precision": name}, {}, 0) for name in ("bfloat16", "bf16_mixed", "tf32", "float16")}
    assert bars["bf16_mixed"] == bars["bfloat16"]
    assert bars["tf32"] == bars["float16"]
    changed = {"precision": "float32", "mixed_precision.reduction": "bfloat16"}
    assert Noise.between(changed, {}, 0) == bars["bfloat16"]
    assert Noise.between({"precision": "fp8_rowwise"}, {}, 0).gradient > bars["bfloat16"].gradient


def test_the_largest_ratio_is_as_noisy_as_the_log_probability_of_one_token():
    noise = Noise.between({"precision": "bfloat16"}, {}, 0)
    assert noise.of_metric("ratio/policy_old/max") == pytest.approx(0.49, abs=0.01)
    assert noise.of_metric("ratio/policy_old/mean") == noise.metric
    assert Noise.between({"precision": "float32"}, {}, 0).of_metric("ratio/policy_old/min") < 1e-3


def test_the_clip_fraction_proves_nothing_in_low_precision():
    bars = {name: Noise.between({"precision": name}, {"precision": name}, 0) for name in ("float32", "bfloat16")}
    assert bars["bfloat16"].of_metric("clip/region/fraction") == float("inf")
    assert bars["float32"].of_metric("clip/region/fraction") == bars["float32"].metric
    same = Noise.between({"precision": "bfloat16"}, {}, 0, same_forward=True)
    assert same.of_metric("clip/region/fraction") == same.metric < same.of_metric("gradient/norm/global")
