"""Hashes of the weights of trainer and sampler, tensor by tensor, and how the ones that differ came about.

Each side hashes what it has, where it is. Only hashes travel, as JSON, so the two may be different programs on
different machines. The trainer also hashes each tensor as rounded to narrower dtypes, and keeps the hashes of earlier
versions: a tensor of the sampler that differs is recognised as an older version, a rounded one, or one of the source.

Example:
    >>> import torch
    >>> before, now = {"layers.0.weight": torch.zeros(2)}, {"layers.0.weight": torch.ones(2)}
    >>> ledger = HashLedger()
    >>> ledger.note(3, before), ledger.note(4, now)
    (None, None)
    >>> [difference] = ledger.differences(4, hash_weights(before))
    >>> difference.layer, difference.how
    ('layer 0', 'version 3, 1 step older')
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from workbench.errors import SpecError
from workbench.metrics.step import parameter_layer

if TYPE_CHECKING:
    from torch import Tensor

EXACT = ""
ROUNDED = ("float32", "bfloat16", "float16")
"""Dtypes in which a tensor of the trainer is recognised if it was rounded on its way."""


@dataclass(frozen=True)
class WeightDifference:
    """A tensor that differs between trainer and sampler.

    Attributes:
        name: of the tensor.
        how: what the sampler has in its place.
        trainer: hash of the trainer's; None if it has no such tensor.
        sampler: hash of the sampler's; None if it has no such tensor.
    """

    name: str
    how: str
    trainer: str | None
    sampler: str | None

    @property
    def layer(self) -> str:
        """The decoder layer of the tensor, or its module outside the layers."""
        number = parameter_layer(self.name)
        return self.name.split(".")[-2:][0] if number is None else f"layer {number}"


def hash_weight(value: Tensor) -> str:
    """Hash of a tensor's values: 16 hexadecimal digits of SHA-256 over its shape and its values in float64.

    Values and not bytes are hashed: a rounded tensor in a wider dtype has the hash of its values.
    """
    exact = value.detach().double().cpu().contiguous()
    return hashlib.sha256(repr(tuple(exact.shape)).encode() + exact.numpy().tobytes()).hexdigest()[:16]


def hash_weights(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Hash of each tensor, by name: one side's file."""
    return {name: hash_weight(value) for name, value in weights.items()}


@dataclass
class HashLedger:
    """Hashes of the trainer's weights, version by version.

    Attributes:
        keep: versions that are remembered besides the first one noted, which is the source's; older ones are not
            recognised.
        versions: version -> form of the weights ("" for the trainer's own) -> hashes by name.
    """

    # well beyond what asynchronous runs allow: prime-rl runs 2 versions apart by default, the docs of AReaL set 4
    keep: int = 16
    versions: dict[int, dict[str, dict[str, str]]] = field(default_factory=dict)

    def note(
        self, version: int, weights: Mapping[str, Tensor], forms: Mapping[str, Mapping[str, Tensor]] | None = None
    ) -> None:
        """Remember weights as this version, rounded to each of `ROUNDED`, and in further forms by what they are."""
        import torch

        rounded = {f"rounded to {d}": {n: w.to(getattr(torch, d)) for n, w in weights.items()} for d in ROUNDED}
        every = {EXACT: weights, **rounded, **(forms or {})}
        self.versions[version] = {form: hash_weights(of_form) for form, of_form in every.items()}
        for old in sorted(self.versions)[1 : -self.keep]:
            del self.versions[old]

    def differences(self, version: int, sampler: Mapping[str, str]) -> list[WeightDifference]:
        """Tensors of a sampler that are not bit for bit those of a version, in the order of the trainer.

        ``sampler`` are its hashes, from `hash_weights`.

        Raises:
            SpecError: the version is not, or no longer, remembered.
        """
        if version not in self.versions:
            raise SpecError(
                f"compare a sampler with version {version}",
                found=f"hashes of versions {', '.join(map(str, sorted(self.versions))) or 'none'}",
                rule="the trainer has noted the version with which a sampler is compared",
                fix="note it before it is sent, or keep more versions",
            )
        expected = self.versions[version][EXACT]
        differing = (name for name in {**expected, **sampler} if expected.get(name) != sampler.get(name))
        return [WeightDifference(n, self._how(version, n, sampler), expected.get(n), sampler.get(n)) for n in differing]

    def _how(self, version: int, name: str, sampler: Mapping[str, str]) -> str:
        """Return what the sampler has in place of a tensor: of several explanations that of the newest version."""
        if name not in sampler:
            return "absent in the sampler"
        if name not in self.versions[version][EXACT]:
            return "unknown to the trainer"
        for old in sorted((known for known in self.versions if known <= version), reverse=True):
            for form, hashes in self.versions[old].items():
                if hashes.get(name) == sampler[name]:
                    age = [_older(old, version, source=old == min(self.versions))] if old < version else []
                    return ", ".join([*age, *filter(None, [form])])
        return "other values"


def _older(old: int, version: int, *, source: bool) -> str:
    steps = version - old
    return f"version {old}{' (the source)' if source else ''}, {steps} step{'s' * (steps > 1)} older"


def by_layer(differences: Iterable[WeightDifference]) -> dict[str, dict[str, list[str]]]:
    """Names of differing tensors by layer, and by what the sampler has in their place."""
    layers: dict[str, dict[str, list[str]]] = {}
    for each in differences:
        layers.setdefault(each.layer, {}).setdefault(each.how, []).append(each.name)
    return layers


def describe_layers(differences: Iterable[WeightDifference]) -> Iterator[str]:
    """Yield a line for each layer whose tensors differ: how, and how many."""
    for layer, ways in by_layer(differences).items():
        yield f"{layer}: " + "; ".join(f"{how} ({len(names)} tensors)" for how, names in ways.items())
