"""Number formatting: different numbers must not look the same, missing ones must not look like 0."""

import math

import pytest

from workbench.report.numbers import (
    mebibytes,
    milliseconds,
    moment,
    near_one,
    power_of_ten,
    share,
    significant,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (None, "–"),
        (math.nan, "not a number"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (1.0, "1.00"),
        (-0.5, "−0.500"),
        (12345.678, "12346"),
        (0.001234, "0.00123"),
        (0.0009991, "9.99 × 10⁻⁴"),
        (99999.6, "1.00 × 10⁵"),
        (-5.2e-13, "−5.20 × 10⁻¹³"),
    ],
)
def test_significant(value, text):
    assert significant(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1"),
        (2.031, "2.03"),
        (0.5, "0.500"),
        (1.004, "1.0040"),
        (1 + 2e-4, "1 + 2.0 × 10⁻⁴"),
        (1 - 2**-52, "1 − 2.2 × 10⁻¹⁶"),
        (None, "–"),
        (math.inf, "∞"),
    ],
)
def test_a_ratio_close_to_one_keeps_its_distance_from_one(value, text):
    assert near_one(value) == text


def test_units_are_shown():
    assert milliseconds(38.25) == "38.2 ms"
    assert milliseconds(12_345) == "12.3 s"
    assert mebibytes(3 * 2**20) == "3.00 MiB"
    assert (milliseconds(None), mebibytes(None), share(None)) == ("–", "–", "–")
    assert moment(1_795_221_277_246_059_365) == "2026-11-21 00:34:37 UTC"
    assert moment(None) == "–"
    assert power_of_ten(-12) == "10⁻¹²"
