"""The bars of parity, written once (design, section 5)."""

from __future__ import annotations

import math


def assert_float64_parity(actual: dict, expected: dict, *, context: str, bar: float = 1e-12) -> list[str]:
    """Hold every parameter's gradient to ``bar`` of its own norm, or of a stated floor.

    ||a - b|| <= bar * max(||b||, 1e-3 * rms gradient of the model * sqrt(numel)).

    Returns:
        The parameters that the floor judged; they are listed, never skipped.
    """
    assert actual.keys() == expected.keys(), f"{context}: other parameters"
    elements = sum(b.numel() for b in expected.values())
    rms = math.sqrt(sum(float(b.square().sum()) for b in expected.values()) / elements)
    by_floor, broken = [], []
    for name, b in expected.items():
        floor = 1e-3 * rms * math.sqrt(b.numel())
        distance, norm = float((actual[name] - b).norm()), float(b.norm())
        if norm < floor:
            by_floor.append(name)
        if not distance <= bar * max(norm, floor):
            broken.append(f"{name}: distance {distance:.3e}, norm {norm:.3e}, floor {floor:.3e}")
    assert not broken, f"{context}: {len(broken)} of {len(expected)} parameters differ\n" + "\n".join(broken)
    return by_floor
