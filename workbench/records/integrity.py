"""Checks that a record is whole, and that stored gradients are the ones that were recorded, before a verdict uses them.

A safetensors file has no checksum: one flipped bit of an exponent makes another gradient, which would be taken for the
run's. Two numbers were written elsewhere at the time: the norm of each gradient, and its fingerprint if the step has a
certificate. Norms detect damage that moves a norm beyond rounding; fingerprints detect any flipped bit.

Norms that a trainer reports wrongly are not damage, and are for the diagnosis: every norm is then off by the same
factor, or those of some parameters are (replicas that are counted, a division too many). A flipped bit moves one
parameter by a factor of its own. A wrong norm therefore means damage only if no other parameter shares its ratio, and
it is not that of a slice of the gradient, which a norm has that misses the slices of other ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.atomic import tensor_names
from workbench.errors import RecordError

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.records.directory import RunDirectory

FIX = "run the configuration again; the run's other files are not affected"
"""Fix of a damaged file of a run."""

STEP_KEYS = ("loss/total/sum", "gradient/norm/global")
NUMBERS = (*STEP_KEYS, "time/step_ms", "memory/peak_bytes")
"""Numbers that every step record of a run has, or none."""

NORM_ULPS = 4
"""Units in the last place of the stored dtype that a norm may be off: the norm itself may be rounded to that dtype, or
taken before the gradient was cast to it, at half a unit each; twice that is allowed.

Gradients and norms of the workbench and of its recorder are measured on the same bits in float64 and agree far better;
records of other origin may use `torch.linalg.vector_norm`.
"""

SAME_RATIO = 1e-3
"""Two wrong norms are off by the same factor if the logarithms of their factors agree to this share (and rounding): a
wrong factor in a program is exact, and independent flips agree this well by chance in one of some thousand pairs."""

MOST_PIECES = 8
"""Ranks of tensor parallelism of one host."""

RESTORE = "restore the file from a copy, or record the run again"


def refuse_incomplete(path: Path, records: Sequence[Mapping[str, Any]], expected: int) -> None:
    """Refuse the step records of a run that succeeded if they are not those of all its steps.

    Raises:
        RecordError: a step is missing, or lacks a number that every step has: the message names the file and the line.
    """
    problem = "no such file" if not path.exists() else ""
    if path.exists() and len(records) != expected:
        lines = path.read_bytes().split(b"\n")
        torn = bool(lines[-1]) or len([line for line in lines if line]) > len(records)
        problem = f"{len(records)} whole records" + ("; the last line is cut or damaged" if torn else "")
    everywhere = [key for key in STEP_KEYS if any(key in record for record in records)]
    for number, record in enumerate(records) if not problem else ():
        if record.get("step") != number:
            problem = f"line {number + 1} is of step {record.get('step')!r}, not {number}"
        elif missing := [key for key in everywhere if not isinstance(record.get(key), int | float)]:
            problem = f"line {number + 1} has no {', '.join(missing)}"
        if problem:
            break
    if problem:
        raise RecordError(
            f"read {path.parent.name}/{path.name}",
            found=problem,
            rule=f"a run that succeeded has {expected} step record(s), one of each step, with the same numbers",
            fix=FIX,
        )


def refuse_other_types(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Raise for a number of `NUMBERS` that is none, in a line whose checksum is right.

    Raises:
        RecordError: with file, line and key.
    """
    for line, record in enumerate(records, start=1):
        for key in NUMBERS:
            value = record.get(key, 0.0)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise RecordError(
                    f"read {path.parent.name}/{path.name}",
                    found=f"line {line}: {key} is {value!r}"[:200],
                    rule="a number",
                    fix=FIX,
                )


def check_whole(run: RunDirectory) -> None:
    """Check that a run that succeeded still has every file that its step records and its settings imply.

    Only the header of a tensor file is read, for its names and for bytes missing at its end.

    Raises:
        RecordError: a step record or a file of tensors is missing, cut or damaged; the message names it.
    """
    tokens = any((run.path / "tensors").glob("step*.tokens.safetensors"))
    for number, record in enumerate(run.steps()):
        if run.spec.record.gradients == "full" and "gradient_norms" in record:
            _check_names(run, f"step{number:04d}.gradients.safetensors", record["gradient_norms"])
        if run.spec.record.tokens and tokens:
            _check_names(run, f"step{number:04d}.tokens.safetensors", ())


def _check_names(run: RunDirectory, file: str, names: Iterable[str]) -> None:
    requested = f"read {run.path.name}/tensors/{file}"
    stored = tensor_names(run.path / "tensors" / file, requested=requested, fix=FIX)
    if missing := [name for name in names if name not in stored]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise RecordError(
            requested,
            found=f"no {', '.join(missing[:3])}{more}",
            rule="a gradient of every parameter that the step's record has a norm of",
            fix=FIX,
        )


def check_gradients(gradients: Mapping[str, Tensor], norms: Mapping[str, float], *, where: str) -> None:
    """Refuse stored gradients whose norms are not those that were recorded, within rounding.

    The tolerance is relative: `NORM_ULPS` units in the last place of the stored dtype, and one of the accumulating
    dtype (float64 for float64, float32 below) for each doubling of the elements, which is how pairwise sums round. NaN
    equals NaN, and infinity infinity. Parameters that only one of the two has are ignored. A norm that a mistake of the
    trainer explains is no damage: one factor of several parameters, or the norm of one of equal pieces of the gradient.

    Raises:
        RecordError: a gradient with another norm.

    Example:
        >>> import torch
        >>> stored = {"w": torch.tensor([3.0, 4.0])}
        >>> check_gradients(stored, {"w": 5.0}, where="record mine: tensors/step0000.gradients")
    """
    numbers = {
        name: (_norm(values), float(norms[name]), _tolerance(values))
        for name, values in gradients.items()
        if name in norms
    }
    off = {name: each for name, each in numbers.items() if not _near(*each)}
    alone = [name for name in off if not _shared(name, off) and not piece_of_norm(gradients[name], norms[name])]
    if alone:
        norm, recorded, tolerance = off[alone[0]]
        more = f", and {len(alone) - 1} more do not agree" if len(alone) > 1 else ""
        raise RecordError(
            f"read {where}",
            found=f"parameter {alone[0]} has norm {norm!r}, recorded {recorded!r}{more}",
            rule="a stored gradient has the norm that was recorded of it, to a relative "
            f"{tolerance:.1e}: rounding of its dtype",
            fix=f"the file is damaged: {RESTORE}",
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


def piece_of_norm(values: Tensor, recorded: float) -> tuple[int, int] | None:
    """Dimension and number of equal pieces of a gradient, if a recorded norm is that of the first; None if it is not.

    A norm that misses the slices of other ranks is that of a slice exactly; a damaged file or number is not. Of a
    gated projection the first piece is that of both halves.
    """
    for dim, pieces, halves in itertools.product(range(values.dim()), range(2, MOST_PIECES + 1), (1, 2)):
        if values.shape[dim] % (pieces * halves) == 0:
            piece = values.unflatten(dim, (halves, pieces, -1)).select(dim + 1, 0)
            if recorded and _near(_norm(piece), float(recorded), min(_tolerance(values), SAME_RATIO)):
                return dim, pieces
    return None


def _near(norm: float, recorded: float, tolerance: float) -> bool:
    return math.isclose(norm, recorded, rel_tol=tolerance) or (math.isnan(norm) and math.isnan(recorded))


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
