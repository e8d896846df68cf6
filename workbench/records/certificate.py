"""A certificate of a step: one hash of its loss, log-probabilities, gradients and weights, bit for bit.

It combines a fingerprint of each tensor (`workbench.reproducible.fingerprints`), which no layout changes, so two runs
have the same certificate exactly if all of these bits are the same. The hash is in the step record under
``certificate``, its fingerprints in ``certificates/step0000.json``, in the order in which the step computes the
tensors:

    logprobs           of all predicted tokens, in the order of the rollout dataset
    loss/<term>/sum    as in the step record
    gradient/<name>    whole, after all sums and before clipping, from the output head back to the embedding
    weight/<name>      after the optimizer's step
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.atomic import from_json
from workbench.errors import RecordError
from workbench.records.directory import RunDirectory
from workbench.records.integrity import RESTORE
from workbench.specs.run import RunSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Certificate:
    """Fingerprints of one step's results.

    Attributes:
        fingerprints: dtype and sixteen hexadecimal digits, by the name of the tensor, in the order of computation.
        differing_replicas: tensors that differ between ranks that should agree; their fingerprints mean nothing.

    Example:
        >>> one, two = (Certificate({"logprobs": "float32 00", "loss/total/sum": fingerprint})
        ...             for fingerprint in ("float64 01", "float64 02"))
        >>> one.hash == two.hash, one.differing(two)
        (False, ['loss/total/sum'])
    """

    fingerprints: Mapping[str, str]
    differing_replicas: tuple[str, ...] = ()

    @property
    def hash(self) -> str:
        """SHA-256 of all fingerprints, in hexadecimal."""
        lines = [f"{name} {fingerprint}" for name, fingerprint in self.fingerprints.items()]
        lines += [f"unlike {name}" for name in self.differing_replicas]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def differing(self, other: Certificate) -> list[str]:
        """Tensors that differ between the two, in the order of computation; those that only the other has come last."""
        unlike = {*self.differing_replicas, *other.differing_replicas}
        return [
            name
            for name in {**self.fingerprints, **other.fingerprints}
            if self.fingerprints.get(name) != other.fingerprints.get(name) or name in unlike
        ]


def compared_bitwise(spec: RunSpec, reference: RunSpec) -> bool:
    """True if two runs are compared bit for bit: both reproducible, with certificates."""
    return all(each.reproducible.on and each.certified for each in (spec, reference))


def write_certificate(run: RunDirectory, number: int, certificate: Certificate) -> None:
    """Write the fingerprints behind a step's hash, before the line of the step."""
    run.write_json(
        _file(number),
        {
            "certificate": certificate.hash,
            "fingerprints": dict(certificate.fingerprints),
            "unlike": list(certificate.differing_replicas),
        },
    )


def read_certificate(run: RunDirectory, number: int) -> Certificate | None:
    """Return the certificate of a step; None if none was requested.

    Raises:
        RecordError: damaged, or its fingerprints have another hash.
    """
    path = run.path / _file(number)
    try:
        read = from_json(path.read_bytes())
        certificate = Certificate(read["fingerprints"], tuple(read["unlike"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(run, path.name, f"{type(error).__name__}: {error}") from None
    if certificate.hash != read["certificate"]:
        raise _damaged(run, path.name, "fingerprints that have another hash")
    return certificate


def fingerprint_label(values: Any) -> str:
    """Dtype and fingerprint of a whole tensor, as in a certificate.

    Example:
        >>> import torch
        >>> fingerprint_label(torch.zeros(1)).partition(" ")[0]
        'float32'
    """
    from workbench.reproducible.fingerprints import fingerprint

    return label(values.dtype, fingerprint(values))


def check_certificate(gradients: Mapping[str, Tensor], certificate: Certificate, *, where: str) -> None:
    """Refuse stored gradients whose bits do not match the step's certificate.

    Raises:
        RecordError: a gradient with another fingerprint, or dtype.
    """
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
                fix=f"the file is damaged: {RESTORE}",
            )


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
    """A dtype and a fingerprint, as in a certificate."""
    return f"{str(dtype).removeprefix('torch.')} {number:016x}"
