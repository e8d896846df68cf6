"""Number formatting: few digits, a unit, and never a rounding that hides a difference."""

from __future__ import annotations

import math
from datetime import UTC, datetime

NONE = "–"
LOSS, GRADIENT_NORM, REWARD = "loss/total/sum", "gradient/norm/global", "reward/all/mean"
"""Numbers of a step that every view of a run shows."""

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def power_of_ten(exponent: int) -> str:
    """Format 10 to an integer power.

    Example:
        >>> power_of_ten(-12)
        '10⁻¹²'
    """
    return "10" + str(exponent).translate(SUPERSCRIPTS)


def significant(value: float | None, digits: int = 3) -> str:
    """Format a number with so many significant digits; powers of ten outside 0.001 to 100000.

    Example:
        >>> significant(0.031415), significant(5.2e11, 2), significant(0), significant(None)
        ('0.0314', '5.2 × 10¹¹', '0', '–')
    """
    if value is None:
        return NONE
    value = float(value)
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    power = int(exponent)
    text = f"{value:.{max(0, digits - 1 - power)}f}" if -3 <= power < 5 else f"{mantissa} × {power_of_ten(power)}"
    return text.replace("-", "−")


def near_one(value: float | None) -> str:
    """Format a ratio; close to 1 as its distance from 1, so that nothing is rounded away.

    Example:
        >>> near_one(2.0312), near_one(1.004), near_one(1 - 3e-10), near_one(1.0)
        ('2.03', '1.0040', '1 − 3.0 × 10⁻¹⁰', '1')
    """
    if value is None or not math.isfinite(value):
        return significant(value)
    rest = value - 1
    if rest == 0:
        return "1"
    if abs(rest) >= 5e-4:
        return significant(value, 3 if abs(rest) >= 0.05 else 5)
    return f"1 {'+' if rest > 0 else '−'} {significant(abs(rest), 2)}"


def share(value: float | None) -> str:
    """Format a distance as a multiple of its budget.

    Example:
        >>> share(0.034), share(4.1e11), share(0)
        ('0.034', '4.1 × 10¹¹', '0')
    """
    return significant(value, 2)


def milliseconds(value: float | None) -> str:
    """Format a duration given in milliseconds.

    Example:
        >>> milliseconds(38.27), milliseconds(12300)
        ('38.3 ms', '12.3 s')
    """
    if value is None or not math.isfinite(value):
        return significant(value)
    return f"{significant(value)} ms" if value < 10_000 else f"{significant(value / 1000)} s"


def mebibytes(value: float | None) -> str:
    """Format a size given in bytes, in MiB (2**20 bytes).

    Example:
        >>> mebibytes(3 * 2**20)
        '3.00 MiB'
    """
    if value is None or not math.isfinite(value):
        return significant(value)
    return f"{significant(value / 2**20)} MiB"


def moment(nanoseconds: int | None) -> str:
    """Format a moment given in nanoseconds since 1970, in UTC.

    Example:
        >>> moment(1_795_221_277_246_059_365)
        '2026-11-21 00:34:37 UTC'
    """
    if nanoseconds is None:
        return NONE
    return datetime.fromtimestamp(nanoseconds // 10**9, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def duration(seconds: float | None) -> str:
    """Format a duration.

    Example:
        >>> duration(3.0), duration(3.25), duration(75.2), duration(7260), duration(None)
        ('3 s', '3.2 s', '1 min 15 s', '2 h 1 min', '–')
    """
    if seconds is None:
        return NONE
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds == int(seconds) else f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
