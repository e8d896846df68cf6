"""Arrays of another system as rows for the evaluator: checked, reshaped, cast and named, nothing else.

The arrays are next-token aligned: position t holds the values of the token that is predicted there. They are
rectangles with one document per row, or flat with a document index.

The arrays that each system's functions take are data; any other array is an error. It would be ignored silently, and
the replay would return other numbers than the system. An array that a function takes may still have no effect under
some options (a reference with a KL coefficient of 0): the system ignores it, too. Several systems pass their functions
the whole batch and read a part of it: the log-probabilities, advantages and values of a batch are accepted there.

Letters: T packed tokens | B rows | V vocabulary | D model dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from workbench.errors import ShapeError, SpecError, did_you_mean
from workbench.losses.corrections import CORRECTION_WEIGHTS
from workbench.policy.logprobs import TokenLogprobs
from workbench.rollouts.targets import TrainingRow
from workbench.systems.registry import HEAD, Settings, load_system, parse_settings

TOKEN_SHAPED = ("logprobs", "targets", "mask", "values", "old_logprobs", "rollout_logprobs")
"""Inputs with the shape of the tokens; the first one present defines it."""


class Options(Mapping[str, Any]):
    """Options of a case that record the names that were ``read``: all once a settings model took the whole mapping."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options, self.read = dict(options), dict[str, None]()

    def __getitem__(self, name: str) -> Any:
        self.read[name] = None
        return self._options[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)


@dataclass(frozen=True)
class Case:
    """One call of a function of another system, see `workbench.systems.replays.replay`; arrays are float64 or int64."""

    system: str
    kind: str
    function: str
    config: Mapping[str, Any]
    inputs: Mapping[str, Tensor]

    @classmethod
    def of(cls, system: str, kind: str, function: str, config: Mapping[str, Any], inputs: Mapping[str, Any]) -> Case:
        """Build a case from numpy arrays, tensors or lists."""
        cast = {name: _as_tensor(value) for name, value in inputs.items() if value is not None}
        return cls(system, kind, function, dict(config), cast)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.inputs:
            raise self._missing(f"input {name!r}", "this kind of case needs it", "pass the array")
        return self.inputs[name]

    def _missing(self, subject: str, rule: str, fix: str) -> SpecError:
        return SpecError(f"{self.system}, {self.kind}: {subject}", found=", ".join(self.inputs), rule=rule, fix=fix)

    def get(self, name: str) -> Tensor | None:
        """Return an input, or None if it is missing."""
        return self.inputs.get(name)

    def leaf(self, name: str) -> Tensor:
        """Return a copy of an input that collects its gradient."""
        return self[name].clone().requires_grad_()

    def options(self, model: type[Settings]) -> Any:
        """Return the options, validated against their model."""
        return parse_settings(model, self.config, where=self.system)

    @cached_property
    def shape(self) -> torch.Size:
        """Shape of the per-token arrays: [B, T] or [T]."""
        for name in TOKEN_SHAPED:
            if name in self.inputs:
                return self.inputs[name].shape
        rule = f"one of {', '.join(TOKEN_SHAPED)} defines it"
        raise self._missing("the shape of its tokens", rule, "pass that array")

    @cached_property
    def document_ids_T(self) -> Tensor:
        """[T] document of the token: from the document index, or its row if there is none."""
        if "document_index" in self.inputs:
            return self["document_index"].reshape(-1)
        if len(self.shape) == 1:
            return torch.zeros(self.shape, dtype=torch.long)
        return torch.arange(self.shape[0]).repeat_interleave(self.shape[1:].numel())

    @cached_property
    def loss_mask_T(self) -> Tensor:
        """[T] bool, the token counts. A sample mask excludes whole rows, a negative target its token."""
        mask = self.get("mask")
        counts = torch.ones(self.shape, dtype=torch.bool) if mask is None else mask.bool()
        if "targets" in self.inputs:
            counts = torch.logical_and(counts, torch.ge(self["targets"], 0))
        if "sample_mask" in self.inputs:
            counts = torch.logical_and(counts, self.spread("sample_mask").bool())
        return counts.reshape(-1)

    @cached_property
    def targets_T(self) -> Tensor:
        """[T] vocabulary ids; 0 where there is none."""
        return self["targets"].reshape(-1).clamp_min(0)

    def spread(self, name: str) -> Tensor:
        """Broadcast an input to the shape of the tokens; a value per row goes to every token of the row."""
        value = self[name]
        if value.shape == self.shape:
            return value
        if value.dim() < len(self.shape):
            value = value.reshape(*value.shape, *(1,) * (len(self.shape) - value.dim()))
        try:
            return value.expand(self.shape)
        except RuntimeError:
            raise ShapeError(
                f"{self.system}, {self.kind}: input {name!r}",
                found=f"shape {list(self[name].shape)}, tokens {list(self.shape)}",
                rule="one value per token or one per row",
                fix="reshape the array",
            ) from None

    def of_documents(self, name: str) -> Tensor:
        """Return [T] an input with one value per document or per token, on every token."""
        value = self[name]
        if value.dim() == 1 and len(value) == int(self.document_ids_T.max()) + 1:
            return value.index_select(0, self.document_ids_T)
        return self.spread(name).reshape(-1)

    def tokens(self, name: str) -> Tensor | None:
        """Return [T] an input on tokens that count, and 0 on all others; None if it is missing."""
        if name not in self.inputs:
            return None
        value_T = self.spread(name).reshape(-1)
        return torch.where(self.loss_mask_T, value_T, torch.zeros_like(value_T))

    def counted(self, logits: Tensor) -> Tensor:
        """Return [T, V] logits of the tokens that count, and 0 on all others."""
        logits_TV = logits.reshape(-1, logits.shape[-1])
        return torch.where(self.loss_mask_T[:, None], logits_TV, torch.zeros_like(logits_TV))

    def everywhere(self, name: str) -> Tensor | None:
        """Return [T] an input on every token, also on those that do not count; None if it is missing."""
        return None if name not in self.inputs else self.spread(name).reshape(-1)

    def shaped(self, values_T: Tensor) -> Tensor:
        """Reshape [T] to the shape of the tokens, detached."""
        return values_T.detach().reshape(self.shape)

    def row(self, **changes: Any) -> TrainingRow:
        """Return the tokens as one training row, with documents in which nothing counts.

        Old log-probabilities that are missing are those of the live policy, detached: `replay` fills them in. Changes
        are fields that differ by the system's own convention.
        """
        ids_T, counts_T = self.document_ids_T, self.loss_mask_T
        zeros_T = torch.zeros(ids_T.shape, dtype=torch.float64)
        fields: dict[str, Any] = {
            "tokens_T": torch.zeros_like(ids_T),
            "positions_T": torch.zeros_like(ids_T),
            "document_ids_T": ids_T,
            "targets_T": self.targets_T if "targets" in self.inputs else torch.zeros_like(ids_T),
            "loss_mask_T": counts_T,
            "advantages_T": self.tokens("advantages") if "advantages" in self.inputs else zeros_T,
            "old_logprobs_T": self.tokens("old_logprobs") if "old_logprobs" in self.inputs else zeros_T,
            "sampler_logprobs_T": self.tokens("rollout_logprobs"),
            "ref_logprobs_T": self.tokens("ref_logprobs"),
            "source_T": torch.arange(ids_T.numel()),
            "lengths_T": self._lengths(),
            "rewards_T": self.everywhere("rewards"),
            "group_ids_T": self.everywhere("group_ids"),
        }
        if "is_weights" in self.inputs:
            fields["extensions"] = {CORRECTION_WEIGHTS: self.tokens("is_weights")}
        return TrainingRow(**(fields | changes))

    def _lengths(self) -> Tensor:
        """Return [T] trained tokens of the token's whole document, of which only a part may be present."""
        for name in ("label_counts", "num_labels"):
            if name in self.inputs:
                return self.spread(name).reshape(-1).double().clamp_min(1)
        return torch.bincount(self.document_ids_T, weights=self.loss_mask_T.double())[self.document_ids_T].clamp_min(1)


def flags_of_logits(case: Case) -> list[str]:
    """Return the names of the inputs, except the logits, with one value per logit."""
    shape = None if case.get("logits") is None else case["logits"].shape
    return [name for name, values in case.inputs.items() if name != "logits" and values.shape == shape]


def logprobs_only(logprobs_T: Tensor, entropy_T: Tensor | None = None) -> TokenLogprobs:
    """Return the output of a head that gives log-probabilities, and entropies if the case has them."""
    return TokenLogprobs(logprobs_T, entropy_T, None)


def _as_tensor(value: Any) -> Tensor:
    if hasattr(value, "copy"):  # torch rejects negative strides and warns about read-only arrays
        value = value.copy()
    real = torch.as_tensor(value).is_floating_point()
    return torch.as_tensor(value, dtype=torch.float64 if real else torch.int64).detach().cpu()


# ---- arrays that a function takes --------------------------------------------------------------------------------


def inputs_of(system: str, kind: str) -> tuple[str, ...]:
    """Return the names of the arrays that a system's function takes, by the kind of case.

    Raises:
        SpecError: unknown system, or the system has no such kind.
    """
    declared = load_system(system)
    if kind in declared.arrays_of:
        return declared.arrays_of[kind]
    if kind == "logprobs":
        return ("logits", "targets", "cotangent_logprobs", "cotangent_entropy")
    tokens = ("advantages", "mask", "document_index", *declared.arrays)
    before = ("grad_logits_in",) if system == "fast_llm" else ()
    policy = {
        "policy_loss": ("logprobs",),
        "policy_loss_packed": ("logprobs",),
        "policy_loss_logits": ("logits", "targets", *before),
        "fused_linear_policy_loss": HEAD,
    }
    if kind not in policy:
        raise SpecError(
            f"arrays of {kind!r} of {system}",
            rule=f"one of {', '.join([*policy, 'logprobs', *declared.arrays_of])}",
            fix="choose one of them",
        )
    return (*policy[kind], *tokens)


def check_arrays(case: Case) -> None:
    """Raise an error for arrays that the function of a case does not take.

    Raises:
        SpecError: there is one; the message names it, the accepted arrays, and the closest of their names.
    """
    accepted = inputs_of(case.system, case.kind)
    if case.system == "slime" and case.config.get("keep_mask"):  # flags of all logits, under any name
        accepted = (*accepted, *flags_of_logits(case)[:1])
    elif "keep_mask" in accepted:
        accepted = tuple(name for name in accepted if name != "keep_mask")
    unused = [name for name in case.inputs if name not in accepted]
    if not unused:
        return
    free = [name for name in accepted if name not in case.inputs]
    suggestions = [did_you_mean(name, free).replace("?", f" for {name!r}?") for name in unused]
    instead = load_system(case.system).unsupported_arrays
    reasons = [instead[name] for name in unused if name in instead]
    raise SpecError(
        f"replay of {case.kind} of {case.system} with {', '.join(map(repr, unused))}",
        found=f"nothing in this replay uses {', '.join(unused)}: the result would be the same",
        rule=f"its arrays are {', '.join(accepted)}",
        fix="; ".join(filter(None, [*reasons, *suggestions]))
        or "leave the array out, or pass it under one of these names",
    )
