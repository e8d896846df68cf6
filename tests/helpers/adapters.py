"""Adapters of tiny decoders, drawn and written in peft's file format without the code under test."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

EXPERTS = ("gate_up_proj", "down_proj")


def adapter_values(model: nn.Module, rank: int, *, seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B of every linear layer, the head and all experts, by the name of the weight; float64, none of them 0."""
    generator, values = torch.Generator().manual_seed(seed), {}

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / 4

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            values[f"{name}.weight"] = draw(rank, module.in_features), draw(module.out_features, rank)
        if name.endswith(".experts"):
            for parameter in EXPERTS:
                count, outputs, inputs = getattr(module, parameter).shape
                values[f"{name}.{parameter}"] = draw(count, rank, inputs), draw(count, outputs, rank)
    return values


def write_peft_folder(folder: Path, values: dict, *, rank: int, alpha: float, **config: object) -> None:
    """Write an adapter as peft 0.21 does; its stacked experts are checked against peft itself in its own test."""
    tensors = {}
    for name, (a, b) in values.items():
        module, _, parameter = name.rpartition(".")
        key = f"base_model.model.{module}"
        if parameter == "gate_up_proj":
            key += ".base_layer"  # the wrapper inside that of down_proj
        if a.dim() == 3:
            a, b = a.reshape(-1, a.shape[2]), torch.stack([b[:, :, k] for k in range(rank)]).permute(2, 0, 1).flatten(1)
        tensors |= {f"{key}.lora_A.weight": a.contiguous(), f"{key}.lora_B.weight": b.contiguous()}
    experts = [p for p in EXPERTS if any(name.endswith(f"experts.{p}") for name in values)]
    layers = {name.split(".")[-2] for name in values if name.endswith(".weight")}
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(layers),
        "target_parameters": [f"mlp.experts.{p}" for p in experts] or None,
        "task_type": "CAUSAL_LM",
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
