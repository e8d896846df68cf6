"""The spec of a loss: its terms, their parameters and denominators. Data only; imports no torch.

A name selects a preset, keys given next to it override the preset's, and the result is explicit: a stored spec has
every parameter that decides a number, and reads back as itself under the presets of any later version.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from workbench.errors import SpecError, did_you_mean
from workbench.specs.losses.base import LOCAL_STATISTICS, Settings
from workbench.specs.losses.clipped import PPO
from workbench.specs.losses.compat import CompatSpec
from workbench.specs.losses.corrections import CorrectionSpec
from workbench.specs.losses.direct import SFT
from workbench.specs.losses.kl import KLSpec
from workbench.specs.losses.own import OwnLoss
from workbench.specs.losses.surrogate import AnySurrogate
from workbench.user_file import place_of

GROUPS = ("surrogate", "correction", "kl", "compat")
KINDS = {"surrogate": "ppo", "correction": "none"}
"""Groups of settings whose kind decides the meaning of the others -> their default kind."""

DENOMINATOR_BREAKS: dict[str, tuple[str, ...]] = {"local_token": ("micro_batch", "packing", "dp")}
"""Denominator -> the invariants that it breaks by definition. (cp ranks share a micro-batch and its count.)"""

PRESETS: dict[str, dict[str, Any]] = {
    # token-level clipping
    "grpo": {"surrogate": {"kind": "ppo"}},  # the paper's weights: denominator "document"
    "ppo": {"surrogate": {"kind": "ppo"}},
    "dual_clip": {"surrogate": {"kind": "ppo", "dual_clip": 3.0}},
    "two_sided": {"surrogate": {"kind": "ppo", "delta": 4.0}},
    "dapo": {"surrogate": {"kind": "ppo", "clip_high": 0.28}},
    "dr_grpo": {"surrogate": {"kind": "ppo"}, "denominator": "constant"},
    "bnpo": {"surrogate": {"kind": "ppo"}, "denominator": "local_token"},
    "vapo": {"surrogate": {"kind": "ppo", "clip_high": 0.28}, "positive_nll_coefficient": 0.1},
    # no clipping of the gradient
    "reinforce": {"surrogate": {"kind": "reinforce"}},
    "on_policy": {"surrogate": {"kind": "on_policy"}},
    "importance_sampling": {"surrogate": {"kind": "importance_sampling"}},
    "gpg": {"surrogate": {"kind": "gpg"}},
    "cispo": {"surrogate": {"kind": "cispo"}},
    "cispo_absolute": {"surrogate": {"kind": "cispo", "bounds": "absolute", "clip_high": 5.0}},
    "truncated_reinforce": {"surrogate": {"kind": "cispo", "clip_high": 0.2}},
    "dro": {"surrogate": {"kind": "dro"}},
    "sapo": {"surrogate": {"kind": "sapo"}, "denominator": "document"},
    # one ratio per document
    "gspo": {"surrogate": {"kind": "gspo"}, "denominator": "document"},
    "gspo_token": {"surrogate": {"kind": "gspo_token"}, "denominator": "document"},
    "luspo": {"surrogate": {"kind": "luspo"}, "denominator": "document"},
    "gmpo": {"surrogate": {"kind": "gmpo"}, "denominator": "document"},
    "vespo": {"surrogate": {"kind": "vespo"}},
    # trust regions in probability
    "dppo_tv": {"surrogate": {"kind": "dppo_tv"}},
    "dppo_kl": {"surrogate": {"kind": "dppo_kl"}},
    "ipo": {"surrogate": {"kind": "ipo"}, "kl": {"estimator": "squared", "against": "sampler", "coefficient": 1e-3}},
    "prime_rl": {
        "surrogate": {"kind": "dppo_tv", "threshold_low": 0.2, "threshold_high": 0.2},
        "kl": {"estimator": "squared", "against": "sampler", "coefficient": 1e-3},
    },
    "ref_kl": {
        "surrogate": {"kind": "ref_kl"},
        "kl": {"estimator": "squared", "against": "sampler", "coefficient": 1e-3},
    },
    # selections by covariance
    "clip_cov": {"surrogate": {"kind": "clip_cov"}},
    "kl_cov": {"surrogate": {"kind": "kl_cov"}},
    # without rewards
    "sft": {"surrogate": {"kind": "sft"}},
    "dpo": {"surrogate": {"kind": "dpo"}, "denominator": "document"},
}
"""Name -> its settings; workbench/losses/README.md has the paper or trainer that each constant is of."""


class LossSpec(Settings):
    """The policy loss: a preset by name, and the differences from it.

    Example:
        >>> LossSpec(name="dapo").surrogate.clip_high
        0.28
        >>> LossSpec(name="gspo", denominator="token").denominator
        'token'
    """

    name: str = "grpo"
    """The preset that the other keys override (`workbench.specs.losses.loss.PRESETS` lists them), or FILE.py:NAME, a
    function of a file, whose `settings` and `engine` stand next to it; see `workbench.losses.own`."""
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
    old_policy: Literal["recorded", "current", "interpolated"] = "recorded"
    """The old policy: the recorded one; or, as if the policy had not changed since, the policy itself without
    gradient; or estimated in logs between sampler and policy, by the age of the token's weights, which saves its
    pass."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus: it is subtracted, so a positive one raises the entropy."""
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
    compat: CompatSpec = CompatSpec()
    """Additional settings of other systems' losses."""

    @model_validator(mode="after")
    def _check_settings(self) -> LossSpec:
        if self.old_policy != "recorded" and self.correction.needs_step_statistics:
            raise ValueError(
                f"old_policy: {self.old_policy} is not known before the forward pass, and statistics of the step are "
                "computed with the old policy before it; use population: micro_batch"
            )
        if self.correction.enters == "sequence_weight" and not self.surrogate.has_sequence_weight:
            raise ValueError(
                "correction.enters: sequence_weight is about the surrogate vespo; "
                f"{self.surrogate.kind!r} has no sequence weight"
            )
        if isinstance(self.surrogate, OwnLoss) and self.surrogate.function != self.name:
            raise ValueError(
                f"surrogate.kind own is the function that loss.name names, and that is {self.name!r}; write "
                f"name: {self.surrogate.function or 'FILE.py:NAME'}"
            )
        if isinstance(self.surrogate, OwnLoss) and self.surrogate.engine is not None:
            ignored = [name for name in self.overrides() if name not in ("name", "surrogate")]
            ignored += ["surrogate.coefficient"] if self.surrogate.coefficient != 1 else []
            if ignored:
                raise ValueError(
                    f"loss.{ignored[0]} would be ignored: with engine {self.surrogate.engine!r} the function of "
                    f"{self.name!r} divides and penalises by itself; leave it out, or write a function of LossInputs "
                    "and leave engine out"
                )
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
        if isinstance(name, str) and place_of(name):
            return {"name": name, **_override(_own(name), _with_own_settings(value))}
        if own := [key for key in ("settings", "engine") if key in value]:
            raise ValueError(
                f"loss.{own[0]} is about a function of a file, and {name!r} is none; write name: FILE.py:NAME, or give "
                "the settings of a preset by their own names, such as surrogate: {clip_high: 0.28}"
            )
        if not isinstance(name, str) or name not in PRESETS:
            hint = did_you_mean(name, PRESETS, otherwise=f"known: {', '.join(PRESETS)}, or FILE.py:NAME")
            raise ValueError(f"no preset {name!r} ({hint})")
        return {"name": name, **_override(PRESETS[name], value)}

    @property
    def breaks(self) -> tuple[str, ...]:
        """Invariants that this loss breaks by definition; () for almost all."""
        weights = DENOMINATOR_BREAKS.get(self.denominator, ())
        compat = self.compat
        of_kl = bool(self.kl.coefficient) and compat.kl_denominator == "document"
        counts = compat.normalize_by_documents or of_kl or self.denominator not in ("token", "raw", "local_token")
        empty = ("masked_rows",) if compat.documents_counted == "all" and counts else ()
        local_bonus = self.entropy_coefficient and compat.entropy_denominator == "local_token"
        bonus = DENOMINATOR_BREAKS["local_token"] if local_bonus else ()
        selection = LOCAL_STATISTICS if self.top_entropy_share < 1 else ()
        parts = (self.surrogate.breaks, self.correction.breaks, weights, compat.scaling.breaks, empty, bonus, selection)
        return tuple(dict.fromkeys(itertools.chain(*parts)))

    @property
    def counts_live(self) -> bool:
        """True if a denominator counts the tokens that the live policy keeps; possible for single batches only."""
        return self.old_policy != "recorded" and self.correction.denominator != "original"

    @property
    def head_outputs(self) -> tuple[str, ...]:
        """Head outputs besides log-probabilities: those of the metrics, and those that a penalty needs."""
        squares = ("mean_squared_logit",) if self.mean_squared_logit_coefficient else ()
        return ("entropy", "logsumexp", *squares, *(("mean_logit",) if self.label_smoothing else ()))

    @property
    def label_smoothing(self) -> float:
        """Share of a token's label that is spread over the vocabulary; that of preference labels is dpo's own."""
        return self.surrogate.label_smoothing if isinstance(self.surrogate, SFT) else 0.0

    @property
    def row_at_once(self) -> bool:
        """True if the loss must see all tokens of a row together; a function of a file may take any statistic of it."""
        return bool(self.surrogate.breaks) or self.surrogate.kind == "own"

    @property
    def needs_pairs(self) -> bool:
        """True if the loss compares the two documents of a group, which must then be in one row."""
        return self.surrogate.needs_pairs

    def overrides(self) -> dict[str, Any]:
        """Return the name and the differences from its preset, to which another name can be applied.

        `LossSpec(**spec.overrides())` is the same spec.
        """
        return {"name": self.name, **_changes(LossSpec(name=self.name), self)}


def _own(name: str) -> dict[str, Any]:
    """The preset of a function of a file."""
    return {"surrogate": {"kind": "own", "function": name}}


def _with_own_settings(value: Mapping[str, Any]) -> dict[str, Any]:
    """Move the settings and the engine of a function of a file from next to its name to the surrogate.

    They change those of the surrogate key by key, as an ablation's configuration changes its base.
    """
    own = {key: value[key] for key in ("settings", "engine") if key in value}
    rest = {key: each for key, each in value.items() if key not in own}
    surrogate = rest.get("surrogate") or {}
    if not own or not isinstance(surrogate, Mapping):
        return rest
    before, given = surrogate.get("settings"), own.get("settings")
    if isinstance(before, Mapping) and isinstance(given, Mapping):
        own["settings"] = {**before, **given}
    return {**rest, "surrogate": {**surrogate, **own}}


def inherited_loss(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a loss that another one inherits; an error if some were meant for the first one's kind.

    A clip length of 0.28 for a token's ratio, inherited by a loss that clips a document's at 0.0004, would be no
    error and no clip. The settings and the engine of a function of a file stay behind if another function or preset
    is named.

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
    renamed = "name" in changes and changes["name"] != base.get("name", "grpo")
    return {key: value for key, value in base.items() if not renamed or key not in ("settings", "engine")}


def _changes(base: Settings, settings: Settings) -> dict[str, Any]:
    """Return the settings that differ from the base, group by group; of a group of another kind, from that kind's."""
    changed: dict[str, Any] = {}
    for key, value in settings:
        before = getattr(base, key)
        if isinstance(value, Settings):
            kind = getattr(value, "kind", None)
            other = {"kind": kind} if kind != getattr(before, "kind", None) else {}
            if group := {**other, **_changes(type(value)(**other) if other else before, value)}:
                changed[key] = group
        elif value != before:
            changed[key] = value
    return changed


def _given(loss: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    settings = loss.get(group)
    return settings if isinstance(settings, Mapping) else {}


def _kind(loss: Mapping[str, Any], group: str) -> str:
    name = loss.get("name", "grpo")
    preset = _own(name) if isinstance(name, str) and place_of(name) else PRESETS.get(name, {})
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
