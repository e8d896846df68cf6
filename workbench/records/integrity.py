"""Checks that stored gradients are the ones that were recorded, before a verdict uses them.

A safetensors file has no checksum: one flipped bit of an exponent makes another gradient, which would be taken for the
run's. Two numbers were written elsewhere at the time: the norm of each gradient, and its fingerprint if the step has a
certificate. Norms detect damage that moves a norm beyond rounding; fingerprints detect any flipped bit.

Norms that a trainer reports wrongly are not damage, and are for the diagnosis: every norm is then off by the same
factor, or those of some parameters are (replicas that are counted, a division too many). A flipped bit moves one
parameter by a factor of its own. A wrong norm therefore means damage only if no other parameter shares its ratio.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from workbench.errors import RecordError

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.records.certificate import Certificate

NORM_ULPS = 4
"""Units in the last place of the stored dtype that a norm may be off: the norm itself may be rounded to that dtype, or
taken before the gradient was cast to it, at half a unit each; twice that is allowed.

Gradients and norms of the workbench and of its recorder are measured on the same bits in float64 and agree far better;
records of other origin may use `torch.linalg.vector_norm`.
"""

SAME_RATIO = 1e-3
"""Two wrong norms are off by the same factor if the logarithms of their factors agree to this share (and rounding): a
wrong factor in a program is exact, and independent flips agree this well by chance in one of some thousand pairs."""

_FIX = "restore the file from a copy, or record the run again"


def check_gradients(gradients: Mapping[str, Tensor], norms: Mapping[str, float], *, where: str) -> None:
    """Refuse stored gradients whose norms are not those that were recorded, within rounding.

    The tolerance is relative: `NORM_ULPS` units in the last place of the stored dtype, and one of the accumulating
    dtype (float64 for float64, float32 below) for each doubling of the elements, which is how pairwise sums round. NaN
    equals NaN, and infinity infinity. Parameters that only one of the two has are ignored.

    Args:
        gradients: as they are stored, whole, by parameter.
        norms: L2 norms that were recorded of them.
        where: the record and file, for the message, such as "record mine: tensors/step0000.gradients".

    Raises:
        RecordError: a gradient with another norm.

    Example:
        >>> import torch
        >>> stored = {"w": torch.tensor([3.0, 4.0])}
        >>> check_gradients(stored, {"w": 5.0}, where="record mine: tensors/step0000.gradients")
    """
    off: dict[str, tuple[float, float, float]] = {}
    for name, values in gradients.items():
        if name not in norms:
            continue
        norm, recorded, tolerance = _norm(values), float(norms[name]), _tolerance(values)
        if not _near(norm, recorded, tolerance):
            off[name] = (norm, recorded, tolerance)
    alone = [name for name in off if not _shared(name, off)]
    if alone:
        norm, recorded, tolerance = off[alone[0]]
        more = f", and {len(alone) - 1} more do not agree" if len(alone) > 1 else ""
        raise RecordError(
            f"read {where}",
            found=f"parameter {alone[0]} has norm {norm!r}, recorded {recorded!r}{more}",
            rule="a stored gradient has the norm that was recorded of it, to a relative "
            f"{tolerance:.1e}: rounding of its dtype",
            fix=f"the file is damaged: {_FIX}",
        )


def check_certificate(gradients: Mapping[str, Tensor], certificate: Certificate, *, where: str) -> None:
    """Refuse stored gradients whose bits do not match the step's certificate.

    Args:
        gradients: as they are stored, whole, by parameter.
        certificate: of the step, from `workbench.records.certificate.read_certificate`.
        where: the record and file, for the message.

    Raises:
        RecordError: a gradient with another fingerprint, or dtype.
    """
    from workbench.records.certificate import fingerprint_label

    for name, values in gradients.items():
        key = f"gradient/{name}"
        if key not in certificate.fingerprints or key in certificate.differing_replicas:
            continue  # the fingerprint of differing replicas means nothing
        label = fingerprint_label(values)
        if label != certificate.fingerprints[key]:
            raise RecordError(
                f"read {where}",
                found=f"parameter {name} has fingerprint {label}, certified {certificate.fingerprints[key]}",
                rule="a stored gradient has every bit that its step's certificate was made of",
                fix=f"the file is damaged: {_FIX}",
            )


def _norm(values: Tensor) -> float:
    """L2 norm in float64, of which only a piece exists at a time."""
    pieces = values.detach().reshape(-1).split(2**24)  # 128 MiB each in float64
    return math.sqrt(sum(float(piece.double().square().sum()) for piece in pieces))


def _tolerance(values: Tensor) -> float:
    import torch

    dtype = values.dtype if values.is_floating_point() else torch.float32
    summed = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    return NORM_ULPS * torch.finfo(dtype).eps + math.log2(max(values.numel(), 2)) * summed


def _near(norm: float, recorded: float, tolerance: float) -> bool:
    if not (math.isfinite(norm) and math.isfinite(recorded)):
        return norm == recorded or (math.isnan(norm) and math.isnan(recorded))
    return abs(norm - recorded) <= tolerance * max(abs(norm), abs(recorded))


def _shared(name: str, off: Mapping[str, tuple[float, float, float]]) -> bool:
    """True if another parameter's norm is off by the same factor."""
    factor = _log_factor(off[name])
    if factor is None:
        return False
    allowed = SAME_RATIO * abs(factor) + off[name][2]
    others = (_log_factor(numbers) for other, numbers in off.items() if other != name)
    return any(other is not None and abs(other - factor) <= allowed for other in others)


def _log_factor(numbers: tuple[float, float, float]) -> float | None:
    """Logarithm of the recorded norm over the stored one; None if one is zero or not finite: no factor explains it."""
    norm, recorded, _ = numbers
    usable = norm and recorded and math.isfinite(norm) and math.isfinite(recorded)
    return math.log(recorded / norm) if usable else None
