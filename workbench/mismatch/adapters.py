"""A LoRA adapter in peft's files, on the linear layers of a plain decoder: W x + s B A x, or merged into the weights.

s is lora_alpha / r, with `use_rslora` lora_alpha / sqrt(r).

Source: peft 0.17, `tuners/lora/config.py` and `layer.py` (names, scaling, merge).

Letters: I inputs of a layer | O its outputs | r rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from workbench.errors import RecordError
from workbench.untrusted import parse_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


@dataclass(frozen=True, eq=False)
class Adapter:
    """Factors of each adapted layer.

    Attributes:
        factors: name of the layer -> A [r, I] and B [O, r], float32.
        rank, alpha: of the configuration.
        rslora: the scale is alpha / sqrt(r).
    """

    factors: Mapping[str, tuple[Tensor, Tensor]]
    rank: int
    alpha: float
    rslora: bool

    @property
    def scale(self) -> float:
        """s, as the configuration says."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def scale_of(self, mode: str) -> float:
        """S of a way to apply the adapter; see `workbench.mismatch.settings.Lora`."""
        other = self.alpha / (self.rank if self.rslora else math.sqrt(self.rank))
        return {"doubled": 2 * self.scale, "times_alpha": self.alpha, "rslora": other, "unscaled": 1.0}.get(
            mode, self.scale
        )


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter.

    Raises:
        RecordError: a missing or damaged file, or an adapter that is not plain LoRA of linear layers.
    """
    try:
        config: Any = parse_json((folder / CONFIG).read_text(encoding="utf8"))
        tensors = load_file(folder / WEIGHTS)
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise _refused(folder, f"{type(error).__name__}: {str(error).splitlines()[0]}") from None
    changed = [key for key in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save") if config.get(key)]
    if changed or config.get("bias", "none") != "none":
        raise _refused(folder, ", ".join(changed) or f"bias = {config['bias']!r}")
    factors: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, part = key.removeprefix(PREFIX).removesuffix(".weight").rpartition(".lora_")
        part = part.removesuffix(".default")
        if part not in ("A", "B") or not name:
            raise _refused(folder, f"tensor {key}")
        factors.setdefault(name, {})[part] = value.float()
    if not factors or (odd := [name for name, both in factors.items() if set(both) != {"A", "B"}]):
        raise _refused(folder, f"only one factor of {', '.join(odd)}" if factors else "no factor")
    return Adapter(
        {name: (both["A"], both["B"]) for name, both in factors.items()}, rank, alpha, bool(config.get("use_rslora"))
    )


def apply_adapter(model: Any, adapter: Adapter, mode: str, dtype: torch.dtype) -> Any:
    """Apply an adapter to a float32 model in place, before it is cast to ``dtype``, and return it.

    Raises:
        RecordError: a layer that the model does not have, or of another shape.
    """
    if mode == "dropped":
        return model
    scale = adapter.scale_of(mode)
    layers = dict(model.named_modules())
    for name, (down_rI, up_Or) in adapter.factors.items():
        layer = layers.get(name)
        shape = (up_Or.shape[0], down_rI.shape[1])
        if not isinstance(layer, nn.Linear) or tuple(layer.weight.shape) != shape:
            found = type(layer).__name__ if not isinstance(layer, nn.Linear) else list(layer.weight.shape)
            raise RecordError(
                f"apply the adapter to {name}",
                found=f"{found} in the model, {list(shape)} in the adapter",
                rule="each adapted layer is a linear layer of the model, of the same shape",
                fix="give the adapter of this checkpoint",
            )
        if mode == "merged":
            layer.weight.data += scale * (up_Or @ down_rI)
        elif mode == "merged_rounded":
            delta_OI = (up_Or.to(dtype) @ down_rI.to(dtype)) * scale
            layer.weight.data = (layer.weight.data.to(dtype) + delta_OI.to(dtype)).float()
        else:
            layer.register_parameter("lora_down", nn.Parameter(down_rI.clone(), requires_grad=False))
            layer.register_parameter("lora_up", nn.Parameter(up_Or.clone(), requires_grad=False))
            vars(layer)["lora_scale"] = scale
    return model


def add_updates(model: Any) -> Any:
    """Add the unmerged updates to the outputs of their layers, whatever these compute by now; return the model."""
    for layer in model.modules():
        if hasattr(layer, "lora_scale"):
            layer.forward = functools.partial(_unmerged, layer, layer.forward)
    return model


def update_of(layer: Any, hidden: Tensor) -> Tensor | None:
    """Unmerged update of a layer's output; None if it has none."""
    if not hasattr(layer, "lora_scale"):
        return None
    down, up = layer.lora_down.to(hidden.dtype), layer.lora_up.to(hidden.dtype)
    product: Tensor = ((hidden @ down.T) @ up.T) * layer.lora_scale
    return product


def _unmerged(layer: Any, forward: Any, hidden: Tensor) -> Tensor:
    output: Tensor = forward(hidden)
    update = update_of(layer, hidden)
    assert update is not None
    return output + update


def _refused(folder: Path, found: str) -> RecordError:
    return RecordError(
        f"read the adapter {folder}",
        found=found,
        rule=f"{CONFIG} and {WEIGHTS} of plain LoRA on linear layers, as peft's save_pretrained writes them",
        fix="save the adapter again with PeftModel.save_pretrained",
    )
