"""The spec of a loss: which terms, with which parameters, divided by what. Data only; importing it costs no torch.

A name picks a preset, keys given beside it win over the preset's, and what comes out is explicit: a stored spec
says every parameter that decides a number, and reads back as itself whatever a later version's presets say.
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
"""Groups of settings whose kind decides what the others mean, and their kind where none is said."""

DENOMINATOR_BREAKS: dict[str, tuple[str, ...]] = {"local_token": ("micro_batch", "packing", "dp")}
"""Denominator -> the invariance laws that it breaks by definition. (cp ranks share a micro-batch and its count.)"""


class LossSpec(Settings):
    """The policy loss: a preset by name, and what differs from it.

    Example:
        >>> LossSpec(name="dapo").surrogate.clip_high
        0.28
        >>> LossSpec(name="gspo", denominator="token").denominator
        'token'
    """

    name: str = "grpo"
    """The preset that the other keys start from; `workbench.specs.losses.presets.PRESETS` lists them."""
    surrogate: AnySurrogate = PPO()
    """The policy term."""
    correction: CorrectionSpec = CorrectionSpec()
    """What is done about the mismatch between sampler and trainer."""
    kl: KLSpec = KLSpec()
    """The KL penalty."""
    signal: Literal["advantages", "rewards"] = "advantages"
    """What the surrogate's ratio is multiplied with."""
    signal_floor: float | None = None
    """Lower bound of the signal; 0 leaves tokens with a negative one silent. None: none."""
    truncated: Literal["train", "silent"] = "train"
    """Documents that the sampler cut off (a document's extension "truncated"): whether they train like others, or weigh
    nothing though they stay in every count."""
    old_policy: Literal["recorded", "current"] = "recorded"
    """Who the old policy is: the one that was recorded, or, as if nothing had moved since, the policy itself without
    gradient."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus: it is subtracted, so a positive one raises the entropy."""
    entropy_denominator: Literal["penalty", "local_token"] = "penalty"
    """What the entropy bonus is divided by: what the other penalties are, or, as a mean over micro-batches of their own
    means, the tokens of the micro-batch that get it."""
    top_entropy_share: float = Field(1.0, ge=0, le=1)
    """Share of the tokens that a rank holds of a micro-batch, those of highest entropy, to which policy term and
    entropy bonus are confined; penalties act on all. Of 0 the highest is left."""
    squared_logit_coefficient: float = Field(0.0, ge=0)
    """Weight of the squared log normaliser of the logits (z-loss)."""
    mean_squared_logit_coefficient: float = Field(0.0, ge=0)
    """Weight of the mean over the vocabulary of the squared logits (over temperature)."""
    positive_nll_coefficient: float = Field(0.0, ge=0)
    """Weight of the mean negative log-likelihood of documents whose reward is positive."""

    denominator: Literal[
        "token", "document", "document_sum", "constant", "prompt_group", "rollout", "group_length", "raw", "local_token"
    ] = "token"
    """What the sum over tokens is divided by, counted over the whole optimizer step."""
    denominator_constant: float | None = Field(None, gt=0)
    """constant: the C of 1 / (documents of the step * C)."""
    documents_counted: Literal["trained", "all"] = "trained"
    """Which documents are counted where documents, prompts or rollouts are: those in which a token counts, or all."""
    gradient_divisor: float = Field(1.0, gt=0)
    """Divides the gradient, not the loss that is reported: what an engine does that averages where it should add."""
    normalize_by_documents: bool = False
    """Divide the gradient, and not the loss that is reported, by the documents of the step once more."""
    scaling: ScalingSpec = ScalingSpec()
    """What a trainer and its engine do between the token sums and the optimizer."""

    @model_validator(mode="after")
    def _old_policy_is_known_in_time(self) -> LossSpec:
        if self.old_policy == "current" and self.correction.needs_step_statistics:
            raise ValueError(
                "old_policy: current is not known before the forward pass, and statistics of the step are "
                "found with the old policy before it; use population: micro_batch"
            )
        return self

    @model_validator(mode="after")
    def _weights_enter_where_they_can(self) -> LossSpec:
        if self.correction.enters == "sequence_weight" and not self.surrogate.has_sequence_weight:
            raise ValueError(
                "correction.enters: sequence_weight is about the surrogate vespo; "
                f"{self.surrogate.kind!r} has no sequence weight"
            )
        return self

    @model_validator(mode="after")
    def _denominator_has_its_settings(self) -> LossSpec:
        if self.denominator_constant is not None and self.denominator != "constant":
            raise ValueError(
                f"denominator_constant is not used by the denominator {self.denominator!r}; it belongs to constant"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _preset_under_what_is_given(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        name = value.get("name", "grpo")
        if name not in PRESETS:
            near = difflib.get_close_matches(str(name), PRESETS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(PRESETS)}"
            raise ValueError(f"no preset {name!r} ({hint})")
        return {"name": name, **_laid_over(PRESETS[name], value)}

    @property
    def breaks(self) -> tuple[str, ...]:
        """Invariance laws that this loss breaks by definition; () for almost all."""
        weights = DENOMINATOR_BREAKS.get(self.denominator, ())
        counts = self.normalize_by_documents or self.denominator not in ("token", "raw", "local_token")
        empty = ("masked_rows",) if self.documents_counted == "all" and counts else ()
        bonus = DENOMINATOR_BREAKS[self.entropy_denominator] if self._bonus_is_local else ()
        chosen = LOCAL_STATISTICS if self.top_entropy_share < 1 else ()
        return tuple(
            dict.fromkeys(
                (
                    *self.surrogate.breaks,
                    *self.correction.breaks,
                    *weights,
                    *self.scaling.breaks,
                    *empty,
                    *bonus,
                    *chosen,
                )
            )
        )

    @property
    def _bonus_is_local(self) -> bool:
        return bool(self.entropy_coefficient) and self.entropy_denominator == "local_token"

    @property
    def counts_live(self) -> bool:
        """Whether a denominator counts what the live policy keeps.

        A run cannot: its weights are data from before the forward pass. Who holds one batch and what the policy says
        of it can.
        """
        return self.old_policy == "current" and self.correction.denominator != "original"

    @property
    def head_outputs(self) -> tuple[str, ...]:
        """What the output head says besides log-probabilities: for metrics always, and what a penalty is made of."""
        return ("entropy", "logsumexp", *(["mean_squared_logit"] if self.mean_squared_logit_coefficient else []))

    @property
    def needs_pairs(self) -> bool:
        """Whether the loss compares the two documents of a group, which must then lie in one row."""
        return self.surrogate.needs_pairs

    def overrides(self) -> dict[str, Any]:
        """The name, and only what differs from its preset: what another name can be put over.

        `LossSpec(**spec.overrides())` is the spec again.
        """
        preset = LossSpec(name=self.name)
        changed: dict[str, Any] = {"name": self.name}
        for key, value in self:
            if key not in GROUPS:
                changed |= {key: value} if value != getattr(preset, key) else {}
                continue
            start, kind = getattr(preset, key), getattr(value, "kind", None)
            other = kind != getattr(start, "kind", None)
            start = start if not other else type(value)(kind=kind) if key == "correction" else type(value)()
            group = {k: v for k, v in value if v != getattr(start, k) or (other and k == "kind")}
            changed |= {key: group} if group else {}
        return changed


def check_carried(base: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Refuse to lay a loss of another kind over settings that were meant for the first one's.

    A clip length of 0.28 for a token's ratio, taken over by a loss that clips a document's at 0.0004, would be no
    error and no clip.

    Args:
        base: settings of a loss, as far as they are given.
        changes: settings that are laid over them.

    Raises:
        SpecError: the kind of surrogate or of correction changes, and a setting of the first kind would stay.
    """
    for group in KINDS:
        mine, theirs = _given(base, group), _given(changes, group)
        before, after = _kind(base, group), _kind({**base, **changes, group: {**mine, **theirs}}, group)
        stay = {
            name: value
            for name, value in mine.items()
            if before != after and value is not None and name not in ("kind", "coefficient", *theirs)
        }
        if stay:
            said = ", ".join(f"{name} = {value}" for name, value in stay.items())
            raise SpecError(
                f"the {group} {after!r} over {before!r}",
                found=f"{said}, said for {before!r}",
                rule=f"settings of a {group} belong to its kind",
                fix=f"say them where {before!r} is named, and give {after!r} its own beside its name",
            )


def _given(loss: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    settings = loss.get(group)
    return settings if isinstance(settings, Mapping) else {}


def _kind(loss: Mapping[str, Any], group: str) -> str:
    preset = PRESETS.get(loss.get("name", "grpo"), {})
    return _given(loss, group).get("kind") or _given(preset, group).get("kind", KINDS[group])


def _laid_over(preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that are given win; a group of another kind than the preset's takes nothing from the preset."""
    out = {**preset, **given}
    for group in GROUPS:
        mine, theirs = given.get(group), preset.get(group)
        if isinstance(mine, Mapping) and theirs and mine.get("kind", theirs.get("kind")) == theirs.get("kind"):
            out[group] = {**theirs, **mine}
    return out
