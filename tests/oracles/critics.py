"""The error of a critic, one number at a time.

Sources: the clip is that of PPO's code (openai/baselines ppo2); huber: Huber (1964).
"""

from __future__ import annotations


def error(u, kind, delta):
    if kind == "mse" or abs(u) <= delta:
        return u * u / 2
    return delta * (abs(u) - delta / 2)


def slope(u, kind, delta):
    if kind == "mse" or abs(u) <= delta:
        return u
    return delta if u > 0 else -delta


def value_error(value, target, old=None, clip=None, kind="mse", delta=10.0):
    """Return (error, its slope in the value, whether the clipped error is the greater)."""
    plain = error(value - target, kind, delta)
    if clip is None:
        return plain, slope(value - target, kind, delta), False
    clamped = max(old - clip, min(value, old + clip))
    pessimistic = error(clamped - target, kind, delta)
    if pessimistic > plain:
        return pessimistic, (slope(clamped - target, kind, delta) if clamped == value else 0.0), True
    return plain, slope(value - target, kind, delta), False
