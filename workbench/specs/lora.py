"""LoRA settings of a run, under the names of peft's ``LoraConfig``, and the settings in an adapter's own file.

Source: Hu et al., arXiv 2106.09685, section 4.1; rank-stabilised scale: Kalajdzievski, arXiv 2312.03732. Names,
defaults of a file and what matches: peft 0.21, `LoraConfig` and `check_target_module_exists`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from workbench.atomic import read_json
from workbench.errors import SpecError
from workbench.specs.groups import Group
from workbench.specs.reading import parse_spec

ALL_LINEAR = "all-linear"
ADAPTER_CONFIG = "adapter_config.json"
WHERE_FROM = "name a folder that save_pretrained of peft, or a checkpoint of a run with LoRA, has written"

_REFUSED: dict[str, str] = {
    "use_dora": "DoRA scales each row by the norm of the merged weight, which no layout here keeps whole",
    "bias": "only 'none' is known: biases are weights of the base",
    "lora_bias": "an adapter here is B A, without a bias",
    "rank_pattern": "all adapters of a run have one rank",
    "alpha_pattern": "all adapters of a run have one scale",
    "exclude_modules": "name the modules that are adapted, in target_modules",
    "layers_to_transform": "name the layers in target_modules, as a regular expression",
    "layers_pattern": "name the layers in target_modules, as a regular expression",
    "layer_replication": "the adapter is of the layers that the model has",
    "trainable_token_indices": "an embedding is no linear layer",
    "loftq_config": "the base stays as its source has it",
    "use_qalora": "the base is not quantized",
    "use_bdlora": "B A is not block-diagonal here",
    "ensure_weight_tying": "adapters are not tied",
}
"""Fields of peft's `LoraConfig` that change what is computed and are not supported -> the reason."""
_VARIANTS = ("eva_config", "corda_config", "lora_ga_config", "arrow_config", "kasa_config", "monteclora_config",
             "velora_config", "alora_invocation_tokens", "megatron_config")  # fmt: skip
_DEFAULTS: dict[str, Any] = {"bias": "none"}
_DESCRIBE = frozenset(
    {"peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode",
     "megatron_core", "qalora_group_size", "fan_in_fan_out"}
)  # fmt: skip
"""Fields of an adapter's file that change no number here: descriptions, and settings of what is off. The layout of a
weight (``fan_in_fan_out``) is read from its layer, and does not change A and B."""


class LoraSpec(Group):
    """Low-rank adapters of linear layers: only they are trained, and the weights of the model stay those of its source.

    An adapted layer computes x W^T + scale (x A^T) B^T, with A [r, inputs] and B [outputs, r]. Without r and source, no
    LoRA.
    """

    r: int | None = Field(None, ge=1)
    """Rank of the adapters. Turns LoRA on."""
    lora_alpha: float | None = Field(None, gt=0)
    """The scale is lora_alpha / r; None takes r, a scale of 1."""
    use_rslora: bool = False
    """The scale is lora_alpha / sqrt(r) instead."""
    target_modules: str | tuple[str, ...] = ALL_LINEAR
    """The adapted linear layers: all-linear, which leaves out the output head; names, or ends of them at a dot, such as
    [q_proj, lm_head]; or one text, a regular expression of the whole name."""
    target_parameters: tuple[str, ...] = ()
    """Adapted weights of experts, which are parameters and no layers: ends of their names, such as
    [mlp.experts.gate_up_proj, mlp.experts.down_proj]."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained whole next to the adapters, by the ends of their names, such as [lm_head]."""
    init_lora_weights: Literal["kaiming", "gaussian", "random"] = "kaiming"
    """Of A; B starts at 0, and the run at the policy of its source. kaiming (true): uniform, at most 1 / sqrt(inputs).
    gaussian: normal, of standard deviation 1 / r. random (false): as kaiming, and B too, for tests of a gradient."""
    lora_dropout: float | None = Field(None, ge=0, le=1)
    """Only 0: a mask for each rank and micro-batch would make the loss depend on the layout. With a source, 0 trains
    without the dropout of its file."""
    seed: int = 0
    """Of the initial A, the same in every layout."""
    source: str | None = None
    """Folder with an adapter in peft's format, at whose weights the run starts (relative to the project root, or
    absolute). Its adapter_config.json gives all settings above. Turns LoRA on."""
    sampler: Literal["merged", "unmerged", "merged_bfloat16"] = "merged"
    """The weights of an online run's sampler. merged: W + scale B A, computed in float32 at least, and then rounded to
    the precision of the sampler. unmerged: W and the adapters, each rounded. merged_bfloat16: product and sum in
    bfloat16, as where a merge is done in the dtype of the engine."""

    @property
    def on(self) -> bool:
        """True if the run trains adapters."""
        return self.r is not None or self.source is not None

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return lora_scale(self.rank, self.lora_alpha, use_rslora=self.use_rslora)

    @property
    def rank(self) -> int:
        """The rank of settings that have one: with a source, of those in its file."""
        assert self.r is not None, "settings of a source are read from its file"
        return self.r

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        for name in value:
            if name in _REFUSED and value[name] not in (None, False, _DEFAULTS.get(name)):
                raise ValueError(f"{name} = {value[name]!r} is not supported: {_REFUSED[name]}; leave it out")
        initial = value.get("init_lora_weights")
        if isinstance(initial, bool):
            return {**value, "init_lora_weights": "kaiming" if initial else "random"}
        return value

    @model_validator(mode="after")
    def _check_adapters(self) -> LoraSpec:
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        given = [name for name in self.changed if name not in ("source", "sampler", "lora_dropout")]
        if self.lora_dropout:
            yield (
                f"lora_dropout = {self.lora_dropout} is not supported: each rank and micro-batch would draw masks of "
                "its own, and the loss would depend on the layout; set lora_dropout: 0"
            )
        if self.changed and not self.on:
            yield f"{', '.join(self.changed)} without r or source, which turn LoRA on; give lora.r, such as 16"
        if self.source is not None and given:
            yield (
                f"{', '.join(given)} with source = {self.source!r}, whose adapter_config.json gives these settings; "
                "leave them out"
            )
        if self.r is not None and not (self.target_modules or self.target_parameters):
            yield "neither target_modules nor target_parameters: nothing is adapted; take target_modules: all-linear"


def lora_scale(rank: int, alpha: float | None, *, use_rslora: bool) -> float:
    """Return the factor of B A: alpha / r, or alpha / sqrt(r).

    Example:
        >>> lora_scale(16, 32, use_rslora=False), lora_scale(16, 32, use_rslora=True)
        (2.0, 8.0)
    """
    alpha = rank if alpha is None else alpha
    return alpha / math.sqrt(rank) if use_rslora else alpha / rank


def from_peft(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in an adapter_config.json as those of `LoraSpec`, which refuses what it does not know.

    Raises:
        ValueError: another method than LoRA, or a field that is neither known nor without effect.
    """
    if (kind := config.get("peft_type")) != "LORA":
        raise ValueError(f"peft_type = {kind!r}, and only LORA is known")
    settings: dict[str, Any] = {}
    for name, value in config.items():
        if name in _DESCRIBE or value is None:
            continue
        if name in ("target_modules", "target_parameters", "modules_to_save"):
            settings[name] = value if isinstance(value, str) else tuple(sorted(value))
        elif name == "init_lora_weights" or (name == "lora_dropout" and not value):
            continue  # how it started: its values are in the file
        elif name in LoraSpec.model_fields and name not in ("seed", "source", "sampler"):
            settings[name] = value
        elif name in _REFUSED:
            if value not in (False, {}, [], _DEFAULTS.get(name)):
                settings[name] = value  # refused by name
        elif value not in (False, {}, []):
            reason = "a variant of LoRA that is not supported" if name in _VARIANTS else "an unknown field"
            raise ValueError(f"{name} = {value!r}: {reason}")
    # peft's own defaults, for files that leave them out
    return {"r": 8, "lora_alpha": 8, "target_modules": (), **settings}


def read_settings(folder: Path, spec: LoraSpec) -> LoraSpec:
    """Return the settings of the adapter in a folder, which ``spec`` names as its source.

    Raises:
        SpecError: no adapter, or one that is not supported; names the field.
    """
    requested = f"lora.source = {spec.source!r}"
    if not (folder / ADAPTER_CONFIG).is_file():
        raise SpecError(
            requested, found=f"no {ADAPTER_CONFIG} in {folder.resolve()}", rule="an adapter of peft", fix=WHERE_FROM
        )
    config = read_json(folder / ADAPTER_CONFIG, requested=requested, fix=WHERE_FROM)
    try:
        settings = from_peft(config if isinstance(config, Mapping) else {})
    except ValueError as error:
        raise SpecError(
            requested, found=str(error), rule="an adapter that LoRA here computes as peft does", fix="merge it first"
        ) from None
    if spec.lora_dropout is not None:
        settings["lora_dropout"] = spec.lora_dropout
    read: LoraSpec = parse_spec(LoraSpec, settings | {"sampler": spec.sampler}, where=str(folder / ADAPTER_CONFIG))
    return read


def to_peft(spec: LoraSpec, *, base: str, targets: tuple[str, ...], parameters: tuple[str, ...]) -> dict[str, Any]:
    """Return the adapter_config.json of settings, with the names of the adapted layers and expert parameters.

    ``base`` is the source of the model that is adapted. Whole names, so that no other rule of matching applies.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": spec.rank,
        "lora_alpha": spec.rank if spec.lora_alpha is None else spec.lora_alpha,
        "use_rslora": spec.use_rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": False,
        "init_lora_weights": True,
        "target_modules": list(targets),
        "target_parameters": list(parameters) or None,
        "modules_to_save": list(spec.modules_to_save) or None,
    }
