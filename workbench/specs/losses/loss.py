"""The spec of a loss: its terms, their parameters and denominators. Data only; imports no torch.

A name selects a preset, keys given next to it override the preset's, and the result is explicit: a stored spec has
every parameter that decides a number, and reads back as itself under the presets of any later version.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from workbench.errors import SpecError
from workbench.specs.losses.base import LOCAL_STATISTICS, Settings
from workbench.specs.losses.clipped import PPO
from workbench.specs.losses.correction import CorrectionSpec
from workbench.specs.losses.kl import KLSpec
from workbench.specs.losses.presets import PRESETS
from workbench.specs.losses.scaling import ScalingSpec
from workbench.specs.losses.surrogate import AnySurrogate

GROUPS = ("surrogate", "correction", "kl", "scaling")
KINDS = {"surrogate": "ppo", "correction": "none"}
"""Groups of settings whose kind decides the meaning of the others -> their default kind."""

DENOMINATOR_BREAKS: dict[str, tuple[str, ...]] = {"local_token": ("micro_batch", "packing", "dp")}
"""Denominator -> the invariants that it breaks by definition. (cp ranks share a micro-batch and its count.)"""


class LossSpec(Settings):
    """The policy loss: a preset by name, and the differences from it.

    Example:
        >>> LossSpec(name="dapo").surrogate.clip_high
        0.28
        >>> LossSpec(name="gspo", denominator="token").denominator
        'token'
    """

    name: str = "grpo"
    """The preset that the other keys override; `workbench.specs.losses.presets.PRESETS` lists them."""
    surrogate: AnySurrogate = PPO()
    """The policy term."""
    correction: CorrectionSpec = CorrectionSpec()
    """The correction for the mismatch between sampler and trainer."""
    kl: KLSpec = KLSpec()
    """The KL penalty."""
    signal: Literal["advantages", "rewards"] = "advantages"
    """The factor of the surrogate's ratio."""
    signal_floor: float | None = None
    """Lower bound of the signal; 0 leaves tokens with a negative one silent. None: none."""
    truncated: Literal["train", "silent"] = "train"
    """Documents that the sampler truncated (a document's extension "truncated"): they train like others, or have weight
    0 but stay in every count."""
    old_policy: Literal["recorded", "current"] = "recorded"
    """The old policy: the recorded one, or, as if the policy had not changed since, the policy itself without
    gradient."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus: it is subtracted, so a positive one raises the entropy."""
    entropy_denominator: Literal["penalty", "local_token"] = "penalty"
    """The denominator of the entropy bonus: that of the other penalties, or, as a mean over micro-batches of their own
    means, the tokens of the micro-batch that get it."""
    top_entropy_share: float = Field(1.0, ge=0, le=1)
    """Restrict policy term and entropy bonus to this share of a rank's tokens of a micro-batch, those of highest
    entropy; penalties act on all. 0 leaves one token, the highest."""
    squared_logit_coefficient: float = Field(0.0, ge=0)
    """Weight of the squared log normaliser of the logits (z-loss)."""
    mean_squared_logit_coefficient: float = Field(0.0, ge=0)
    """Weight of the mean over the vocabulary of the squared logits (over temperature)."""
    positive_nll_coefficient: float = Field(0.0, ge=0)
    """Weight of the mean negative log-likelihood of documents whose reward is positive."""

    denominator: Literal[
        "token", "document", "document_sum", "constant", "prompt_group", "rollout", "group_length", "raw", "local_token"
    ] = "token"
    """The denominator of the sum over tokens, counted over the whole optimizer step."""
    denominator_constant: float | None = Field(None, gt=0)
    """constant: the C of 1 / (documents of the step * C)."""
    documents_counted: Literal["trained", "all"] = "trained"
    """The documents that a count of documents, prompts or rollouts includes: those with a trained token, or all."""
    gradient_divisor: float = Field(1.0, gt=0)
    """Divides the gradient, not the reported loss: the effect of an engine that averages where it should sum."""
    normalize_by_documents: bool = False
    """Divide the gradient, and not the reported loss, by the documents of the step once more."""
    scaling: ScalingSpec = ScalingSpec()
    """The scaling of a trainer and its engine between the token sums and the optimizer."""

    @model_validator(mode="after")
    def _check_old_policy(self) -> LossSpec:
        if self.old_policy == "current" and self.correction.needs_step_statistics:
            raise ValueError(
                "old_policy: current is not known before the forward pass, and statistics of the step are "
                "computed with the old policy before it; use population: micro_batch"
            )
        return self

    @model_validator(mode="after")
    def _check_sequence_weight(self) -> LossSpec:
        if self.correction.enters == "sequence_weight" and not self.surrogate.has_sequence_weight:
            raise ValueError(
                "correction.enters: sequence_weight is about the surrogate vespo; "
                f"{self.surrogate.kind!r} has no sequence weight"
            )
        return self

    @model_validator(mode="after")
    def _check_denominator(self) -> LossSpec:
        if self.denominator_constant is not None and self.denominator != "constant":
            raise ValueError(
                f"denominator_constant is not used by the denominator {self.denominator!r}; it belongs to constant"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        name = value.get("name", "grpo")
        if name not in PRESETS:
            near = difflib.get_close_matches(str(name), PRESETS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(PRESETS)}"
            raise ValueError(f"no preset {name!r} ({hint})")
        return {"name": name, **_override(PRESETS[name], value)}

    @property
    def breaks(self) -> tuple[str, ...]:
        """Invariants that this loss breaks by definition; () for almost all."""
        weights = DENOMINATOR_BREAKS.get(self.denominator, ())
        counts = self.normalize_by_documents or self.denominator not in ("token", "raw", "local_token")
        empty = ("masked_rows",) if self.documents_counted == "all" and counts else ()
        bonus = DENOMINATOR_BREAKS[self.entropy_denominator] if self._bonus_is_local else ()
        selection = LOCAL_STATISTICS if self.top_entropy_share < 1 else ()
        return tuple(
            dict.fromkeys(
                (
                    *self.surrogate.breaks,
                    *self.correction.breaks,
                    *weights,
                    *self.scaling.breaks,
                    *empty,
                    *bonus,
                    *selection,
                )
            )
        )

    @property
    def _bonus_is_local(self) -> bool:
        return bool(self.entropy_coefficient) and self.entropy_denominator == "local_token"

    @property
    def counts_live(self) -> bool:
        """True if a denominator counts the tokens that the live policy keeps.

        Not possible in a run, whose weights are data from before the forward pass; possible for a single batch with
        its policy log-probabilities.
        """
        return self.old_policy == "current" and self.correction.denominator != "original"

    @property
    def head_outputs(self) -> tuple[str, ...]:
        """Head outputs besides log-probabilities: those of the metrics, and those that a penalty needs."""
        return ("entropy", "logsumexp", *(["mean_squared_logit"] if self.mean_squared_logit_coefficient else []))

    @property
    def needs_pairs(self) -> bool:
        """True if the loss compares the two documents of a group, which must then be in one row."""
        return self.surrogate.needs_pairs

    def overrides(self) -> dict[str, Any]:
        """Return the name and the differences from its preset, to which another name can be applied.

        `LossSpec(**spec.overrides())` is the same spec.
        """
        preset = LossSpec(name=self.name)
        changed: dict[str, Any] = {"name": self.name}
        for key, value in self:
            if key not in GROUPS:
                changed |= {key: value} if value != getattr(preset, key) else {}
                continue
            base, kind = getattr(preset, key), getattr(value, "kind", None)
            other = kind != getattr(base, "kind", None)
            base = base if not other else type(value)(kind=kind) if key == "correction" else type(value)()
            group = {k: v for k, v in value if v != getattr(base, k) or (other and k == "kind")}
            changed |= {key: group} if group else {}
        return changed


def check_inherited(base: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Raise an error if a loss of another kind would inherit settings that were meant for the first one's.

    A clip length of 0.28 for a token's ratio, inherited by a loss that clips a document's at 0.0004, would be no
    error and no clip.

    Args:
        base: given settings of a loss.
        changes: settings that override them.

    Raises:
        SpecError: the kind of surrogate or of correction changes, and a setting of the first kind would stay.
    """
    for group in KINDS:
        inherited, overrides = _given(base, group), _given(changes, group)
        before, after = _kind(base, group), _kind({**base, **changes, group: {**inherited, **overrides}}, group)
        stay = {
            name: value
            for name, value in inherited.items()
            if before != after and value is not None and name not in ("kind", "coefficient", *overrides)
        }
        if stay:
            settings = ", ".join(f"{name} = {value}" for name, value in stay.items())
            raise SpecError(
                f"the {group} {after!r} over {before!r}",
                found=f"{settings}, given for {before!r}",
                rule=f"settings of a {group} belong to its kind",
                fix=f"give them where {before!r} is named, and give {after!r} its own next to its name",
            )


def _given(loss: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    settings = loss.get(group)
    return settings if isinstance(settings, Mapping) else {}


def _kind(loss: Mapping[str, Any], group: str) -> str:
    preset = PRESETS.get(loss.get("name", "grpo"), {})
    return _given(loss, group).get("kind") or _given(preset, group).get("kind", KINDS[group])


def _override(preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Override a preset by the given keys; a group of another kind than the preset's takes nothing from the preset."""
    # A clip length of one kind must not reach another (DECISIONS.md, row 32).
    merged = {**preset, **given}
    for group in GROUPS:
        changes, base = given.get(group), preset.get(group)
        if isinstance(changes, Mapping) and base and changes.get("kind", base.get("kind")) == base.get("kind"):
            merged[group] = {**base, **changes}
    return merged
