"""Settings of a loss that a context states."""

import pytest

from workbench.diagnose.stated import caps, clip_ranges


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ({"clip": 0.2}, [(0.2, 0.2)]),
        ({"clip": [0.2, 0.28]}, [(0.2, 0.28)]),
        ({"clip_ratio": 0.1, "clip_ratio_high": 0.3}, [(0.1, 0.3)]),
        ({"clip": True, "temperature": 0.7}, []),
    ],
)
def test_clip_ranges(context, expected):
    assert list(clip_ranges(context)) == expected


def test_largest_weights_of_a_correction():
    assert caps({"tis_imp_ratio_cap": 2, "sampler_weight_cap": 1.5, "capacity": 4, "cap": "none", "is": 0.1}) == [
        2,
        1.5,
    ]
