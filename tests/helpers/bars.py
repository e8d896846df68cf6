"""The bars of parity, written once (design, section 5)."""

from __future__ import annotations

import math


def distances(actual: dict, expected: dict) -> dict[str, float]:
    """Return the distance of every parameter's gradient from the expected one.

    ||a - b|| / max(||b||, 1e-3 * rms gradient of the model * sqrt(numel)); the second is the floor, for gradients that
    are zero by symmetry.
    """
    floors = _floors(expected)
    results = {}
    for name, b in expected.items():
        distance, scale = float((actual[name] - b).norm()), max(float(b.norm()), floors[name])
        results[name] = distance / scale if scale else 0.0 if distance == 0 else math.inf
    return results


def assert_float64_parity(actual: dict, expected: dict, *, context: str, bar: float = 1e-12) -> list[str]:
    """Compare every parameter's gradient with ``bar`` times its own norm, or a stated floor; see `distances`.

    Returns:
        The parameters that the floor judged; they are listed, never skipped.
    """
    assert actual.keys() == expected.keys(), f"{context}: other parameters"
    floors = _floors(expected)
    broken = [
        f"{name}: distance {distance:.3e} of norm {float(expected[name].norm()):.3e} or floor {floors[name]:.3e}"
        for name, distance in distances(actual, expected).items()
        if not distance <= bar
    ]
    assert not broken, f"{context}: {len(broken)} of {len(expected)} parameters differ\n" + "\n".join(broken)
    return [name for name, b in expected.items() if float(b.norm()) < floors[name]]


def _floors(expected: dict) -> dict[str, float]:
    elements = sum(b.numel() for b in expected.values())
    rms = math.sqrt(sum(float(b.square().sum()) for b in expected.values()) / elements)
    return {name: 1e-3 * rms * math.sqrt(b.numel()) for name, b in expected.items()}
