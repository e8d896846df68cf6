"""What two correct records may differ by."""

import pytest

from workbench.compare.diagnose.noise import Noise


@pytest.mark.parametrize(("first", "second", "like"), [
    ("float64", "float32", "float32"), ("bfloat16", "float32", "bfloat16"), ("float64", "bfloat16", "bfloat16")])
def test_the_lower_precision_decides(first, second, like):
    alone = Noise.between({"precision": like}, {"precision": like}, 0)
    assert Noise.between({"precision": first}, {"precision": second}, 0) == alone
    assert Noise.between({"precision": second}, {"precision": first}, 0) == alone


def test_who_does_not_say_is_taken_for_float32():
    assert Noise.between({}, {"precision": "float64"}, 0) == Noise.between({"precision": "float32"}, {}, 0)
    assert Noise.between({"precision": "fp8"}, {}, 0) == Noise.between({}, {}, 0)


def test_it_grows_with_the_steps_and_with_the_precision():
    bars = [Noise.between({"precision": name}, {}, step).gradient
            for name in ("float32", "bfloat16") for step in (0, 1)]
    assert bars == sorted(set(bars))
    exact = Noise.between({"precision": "float64"}, {"precision": "float64"}, 0)
    assert exact.gradient < 1e-9 < bars[0]
