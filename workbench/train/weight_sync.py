"""Weights on their way from the trainer of an online run to its sampler: which version, what of it arrives, what did.

A version is the number of optimizer steps that made the weights. `Schedule` says which version samples each token;
`WeightSync` keeps the versions that are still needed, loads them into the sampler as `workbench.specs.sync` says, and
compares hashes of both sides. Its state is part of a checkpoint, so a resumed run samples as an uninterrupted one.

Letters: N documents of a sampling | T packed tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.errors import RecordError, SpecError
from workbench.policy.lora import merged_weights, sampler_weights
from workbench.policy.model import DTYPES, Policy
from workbench.policy.sampling import Sampler, Update
from workbench.policy.tensor_plan import of_prediction
from workbench.records.weight_hashes import EXACT, ROUNDED, HashLedger, by_layer, hash_weights
from workbench.sharding.gradients import copy_local_part, full_weights
from workbench.specs.run import RunSpec
from workbench.specs.sync import SyncSpec
from workbench.train.checkpoint import FRESH, router_biases

DIFFERING = "sync/differing/fraction"
"""Step record: share of the sampler's tensors that are not what the settings of the run mean them to be."""
SYNC = "sync"
"""Folder of a run directory: hashes of both sides that differ, one file for each sampling."""


@dataclass(frozen=True)
class Schedule:
    """The version of the weights that samples each token.

    Attributes:
        sync: its settings.
        updates: optimizer steps on each sampling.

    Example:
        >>> schedule = Schedule(SyncSpec(queue=2, in_flight_tokens=4), updates=1)
        >>> [schedule.version(5, 0, place) for place in (0, 3, 4, 8, 12)]
        [3, 3, 4, 5, 5]
    """

    sync: SyncSpec
    updates: int

    def trained(self, number: int) -> int:
        """The version that the first update on a sampling trains."""
        return number * self.updates

    def begin(self, number: int, share: int) -> int:
        """The version with which the completions of a share of a sampling's prompts begin."""
        queue = self.sync.queue
        return self.trained(max(0, number - (share % (queue + 1) if self.sync.mixed else queue)))

    def version(self, number: int, share: int, place: int) -> int:
        """The version that samples the token at a place of a completion, from 0."""
        begin, every = self.begin(number, share), self.sync.in_flight_tokens
        return begin if every is None else min(begin + place // every, self.trained(number))

    @property
    def span(self) -> int:
        """Versions before the newest one that may still be needed."""
        return self.sync.queue * self.updates + self.sync.lag


class WeightSync:
    """The weights of a sampler during training; see the module docstring.

    Every rank holds whole weights, of the versions that its sampler may still need.
    """

    def __init__(self, spec: RunSpec, policy: Policy, sampler: Sampler) -> None:
        self.sync, self.policy, self.sampler = spec.sync, policy, sampler
        self.schedule = Schedule(spec.sync, spec.online.updates)
        self.ledger = HashLedger() if spec.sync.check else None
        precision = spec.online.sampler_precision or spec.dtypes.compute
        self._meant = {f"rounded to {precision}"} if precision in ROUNDED else set()
        self._dtype = DTYPES[precision]
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._newest = self._loaded = -1
        self._moved: float | None = None
        self._current: dict[str, Tensor] = {}
        buffers = {name: dict(sampler.model.named_buffers())[name] for name in router_biases(policy)}
        names = dict(sampler.model.named_parameters()) | buffers
        self._late = _chosen(names, spec.sync.late, "sync.late") if spec.sync.late else set(names)
        self._of_source = {
            name: names[name].detach().clone() for name in _chosen(names, spec.sync.missing, "sync.missing")
        }

    # ---- versions --------------------------------------------------------------------------------------------------

    def note(self, version: int) -> None:
        """Take the policy's weights as a version. Collective; before each optimizer step, in order."""
        policy = self.policy
        self._current = full_weights(policy.model, policy.shards, policy.mesh) | router_biases(policy)
        self._newest, self._loaded = version, -1
        if self.schedule.span:
            moved = {name: self._current[name].clone() for name in (*self._trained, *router_biases(policy))}
            self._kept[version] = moved
            self._current = self._current | moved  # copies: `policy_at` changes the policy's own
            self._kept = {old: kept for old, kept in self._kept.items() if old >= version - self.schedule.span}
        if self.ledger is not None:
            self.ledger.note(version, self._as_sampled(self._current, "merged"), self._forms())

    @property
    def _trained(self) -> tuple[str, ...]:
        policy = self.policy
        return tuple(dict(policy.model.named_parameters()) if policy.lora is None else policy.lora.trained)

    def _whole(self, version: int) -> dict[str, Tensor]:
        """Whole parameters of the policy, and buffers that training moves, of a version."""
        if version == self._newest:
            return self._current
        if version not in self._kept:
            raise SpecError(
                f"weights of version {version}",
                found=f"those of versions {', '.join(map(str, sorted({*self._kept, self._newest})))}",
                rule=f"samplings are drawn in order: {self.schedule.span} versions before the newest are kept",
                fix="take the steps of `Online.steps` one after another",
            )
        return self._current | self._kept[version]

    def _as_sampled(self, whole: Mapping[str, Tensor], how: str | None = None) -> dict[str, Tensor]:
        """Weights by the names of the sampler, adapters merged or not; ``how`` replaces the way in which they merge.

        The sampler is a stock decoder, without the layers that predict further tokens.
        """
        lora, whole = self.policy.lora, {name: value for name, value in whole.items() if not of_prediction(name)}
        if lora is None:
            return dict(whole)
        if how is not None and lora.spec.sampler != "unmerged":
            return merged_weights(lora, whole, how)
        return sampler_weights(lora, whole)

    # ---- delivery --------------------------------------------------------------------------------------------------

    def deliver(self, version: int) -> float | None:
        """Load a version into the sampler, as far as it arrives; see `Sampler.load_weights` for the result."""
        if version == self._loaded:
            return self._moved
        sync, weights = self.sync, self._as_sampled(self._whole(version))
        if sync.lag:
            older = self._as_sampled(self._whole(max(0, version - sync.lag)))
            weights = {name: older[name] if name in self._late else weight for name, weight in weights.items()}
        if sync.cast is not None:
            dtype = getattr(torch, sync.cast)
            weights = {name: weight.to(dtype).to(weight.dtype) for name, weight in weights.items()}
        self._loaded, self._moved = version, self.sampler.load_weights(weights | self._of_source)
        return self._moved

    def in_flight(self, number: int, share: int) -> Update | None:
        """Updates of the sampler's weights while it samples; None if there are none."""
        if self.sync.in_flight_tokens is None:
            return None

        def update(place: int) -> bool:
            version = self.schedule.version(number, share, place)
            if version == self._loaded:
                return False
            self.deliver(version)
            return self.sync.cache == "recomputed"

        return update

    @contextmanager
    def policy_at(self, version: int) -> Iterator[None]:
        """Give the trained policy the weights of a version, and take them back."""
        self._load_policy(self._whole(version))
        try:
            yield
        finally:
            self._load_policy(self._current)

    @torch.no_grad()
    def _load_policy(self, whole: Mapping[str, Tensor]) -> None:
        policy = self.policy
        policy.reshard()
        parameters = dict(policy.model.named_parameters())
        for name in self._trained:
            copy_local_part(parameters[name], whole[name], policy.shards[name], policy.mesh)
        for name, bias in router_biases(policy).items():
            bias.copy_(whole[name])

    # ---- hashes ----------------------------------------------------------------------------------------------------

    def report(self) -> tuple[dict[str, float], dict[str, object]]:
        """Compare the sampler with the version that it should have: numbers for a step record, and a file.

        ({}, {}) without `check`. A difference is *meant* if the settings of the run ask for it: the dtype of the
        sampler, the way in which adapters merge.
        """
        if self.ledger is None:
            return {}, {}
        here = dict(self.sampler.model.named_parameters())
        buffers = dict(self.sampler.model.named_buffers())
        expected = self.ledger.versions[self._loaded][EXACT]
        hashes = hash_weights(here | {name: value for name, value in buffers.items() if name in expected})
        lora = self.policy.lora
        differences = self.ledger.differences(self._loaded, hashes)
        meant = self._meant if lora is None else {*self._meant, f"adapter {lora.spec.sampler}"}
        unmeant = [each for each in differences if each.how not in meant]
        report = {
            "version": self._loaded,
            "tensors": len(expected),
            "meant": by_layer(each for each in differences if each.how in meant),
            "differing": by_layer(unmeant),
            "hashes": {each.name: {"trainer": each.trainer, "sampler": each.sampler} for each in unmeant},
        }
        return {DIFFERING: len(unmeant) / len(expected)}, report

    def _forms(self) -> dict[str, dict[str, Tensor]]:
        """Further forms in which the current weights may arrive: adapters merged in another way, or not at all."""
        lora, whole = self.policy.lora, self._current
        if lora is None or lora.spec.sampler == "unmerged":
            return {}
        exact = merged_weights(lora, whole)
        ways = {
            "adapter merged_bfloat16": merged_weights(lora, whole, "merged_bfloat16"),
            "adapter dropped": {each.weight: whole[each.base] for each in lora.adapted},
        }
        return {how: {name: value.to(self._dtype) for name, value in (exact | of).items()} for how, of in ways.items()}

    # ---- state -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Tensors from which a resumed run continues: kept versions, and hashes of versions as numbers."""
        state = {f"{version}/{name}": value for version, of in self._kept.items() for name, value in of.items()}
        for version, of_form in ({} if self.ledger is None else self.ledger.versions).items():
            for form, hashes in of_form.items():
                numbers = [int.from_bytes(bytes.fromhex(text), "big", signed=True) for text in hashes.values()]
                state[f"hashes/{version}/{form}"] = torch.tensor(numbers)
        return state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take the state of a checkpoint.

        Raises: RecordError: it is that of other settings.
        """
        kept: dict[int, dict[str, Tensor]] = {}
        hashes = {key: value for key, value in state.items() if key.startswith("hashes/")}
        for key in state.keys() - hashes.keys():
            version, _, name = key.partition("/")
            kept.setdefault(int(version), {})[name] = state[key].to(self.policy.mesh.device)
        if any(of.keys() != {*self._trained, *router_biases(self.policy)} for of in kept.values()):
            raise RecordError(
                "resume with the weights that a sampler still needs",
                found="those of another model",
                rule="a run resumes with the settings of its checkpoint",
                fix=FRESH,
            )
        self._kept = kept
        if self.ledger is not None:
            policy = self.policy
            whole = full_weights(policy.model, policy.shards, policy.mesh) | router_biases(policy)
            names = list(self._as_sampled(whole, "merged"))
            for key, numbers in hashes.items():
                _, version, form = key.split("/")
                texts = [number.to_bytes(8, "big", signed=True).hex() for number in numbers.tolist()]
                self.ledger.versions.setdefault(int(version), {})[form] = dict(zip(names, texts, strict=True))


def _chosen(names: Mapping[str, Tensor], parts: tuple[str, ...], setting: str) -> set[str]:
    """Names that have a run of whole components; each part chooses at least one."""
    chosen: set[str] = set()
    for part in parts:
        matching = {name for name in names if f".{part}." in f".{name}."}
        if not matching:
            raise SpecError(
                f"{setting}: {part!r}",
                found="no parameter or buffer of the sampler with this in its name, of " + ", ".join(sorted(names)[:4]),
                rule="a name is whole components of a parameter's or buffer's, such as layers.1, q_proj or lm_head",
                fix="correct the name",
            )
        chosen |= matching
    return chosen
