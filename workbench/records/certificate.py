"""A certificate of a step: one hash of its loss, log-probabilities, gradients and weights, bit for bit.

It is made of a fingerprint of each tensor (`workbench.reproducible.fingerprints`), which no layout changes, so two runs
have one certificate exactly where every one of these bits is the same. The hash stands in the step record under
``certificate``; the fingerprints that it was made of in ``certificates/step0000.json``, in the order in which the step
computes the tensors:

    logprobs           of all predicted tokens, in the order of the recording
    loss/<term>/sum    as the step record has it
    gradient/<name>    whole, after all sums and before clipping, from the output head back to the embedding
    weight/<name>      after the optimizer's step
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.atomic import from_json
from workbench.errors import RecordError
from workbench.records.directory import RunDirectory
from workbench.specs.run import RunSpec


@dataclass(frozen=True)
class Certificate:
    """What one step came to.

    Attributes:
        fingerprints: dtype and sixteen hexadecimal digits, by the name of the tensor, in the order of computation.
        unlike: tensors of which ranks that should hold the same hold something else; their fingerprints say nothing.

    Example:
        >>> one, two = (Certificate({"logprobs": "float32 00", "loss/total/sum": said})
        ...             for said in ("float64 01", "float64 02"))
        >>> one.hash == two.hash, one.differing(two)
        (False, ['loss/total/sum'])
    """

    fingerprints: Mapping[str, str]
    unlike: tuple[str, ...] = ()

    @property
    def hash(self) -> str:
        """SHA-256 of it all, in hexadecimal."""
        lines = [f"{name} {said}" for name, said in self.fingerprints.items()]
        return hashlib.sha256("\n".join([*lines, *(f"unlike {name}" for name in self.unlike)]).encode()).hexdigest()

    def differing(self, other: Certificate) -> list[str]:
        """Tensors that are not the same in both, in the order of computation; what only the other has comes last."""
        found = [
            name
            for name, said in self.fingerprints.items()
            if other.fingerprints.get(name) != said or name in (*self.unlike, *other.unlike)
        ]
        return found + [name for name in other.fingerprints if name not in self.fingerprints]


def held_by_bits(spec: RunSpec, reference: RunSpec) -> bool:
    """Whether two runs are held against each other bit for bit: both reproducible, with certificates."""
    return all(each.reproducible.on and each.certified for each in (spec, reference))


def write_certificate(run: RunDirectory, number: int, certificate: Certificate) -> None:
    """Write what a step's hash was made of, before its line in the record."""
    run.write_json(
        _file(number),
        {
            "certificate": certificate.hash,
            "fingerprints": dict(certificate.fingerprints),
            "unlike": list(certificate.unlike),
        },
    )


def read_certificate(run: RunDirectory, number: int) -> Certificate | None:
    """The certificate of a step; None where none was asked for.

    Raises:
        RecordError: damaged, or not what the hash was made of.
    """
    path = run.path / _file(number)
    try:
        read = from_json(path.read_bytes())
        found = Certificate(read["fingerprints"], tuple(read["unlike"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(run, path.name, f"{type(error).__name__}: {error}") from None
    if found.hash != read["certificate"]:
        raise _damaged(run, path.name, "fingerprints that have another hash")
    return found


def fingerprint_label(values: Any) -> str:
    """A tensor's dtype and fingerprint as a certificate has them; the tensor is whole.

    Example:
        >>> import torch
        >>> fingerprint_label(torch.zeros(1)).partition(" ")[0]
        'float32'
    """
    from workbench.reproducible.fingerprints import fingerprint

    return label(values.dtype, fingerprint(values))


def _damaged(run: RunDirectory, name: str, found: str) -> RecordError:
    return RecordError(
        f"read {run.path.name}/certificates/{name}",
        found=found,
        rule="a certificate as it was written",
        fix="run the configuration again",
    )


def _file(number: int) -> str:
    return f"certificates/step{number:04d}.json"


def label(dtype: Any, number: int) -> str:
    """A dtype and a fingerprint as a certificate has them."""
    return f"{str(dtype).removeprefix('torch.')} {number:016x}"
