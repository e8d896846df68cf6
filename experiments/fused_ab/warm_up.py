"""Train the policy of this experiment: a decoder that solves arithmetic some of the time.

    python experiments/fused_ab/warm_up.py                 on the local GPU, about a minute; into this folder
    python experiments/fused_ab/warm_up.py FOLDER --tiny   a few steps of a small one on CPU, as a smoke test

FOLDER/policy is a transformers checkpoint, FOLDER/warm_up.json the record of its training.
"""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import asdict
from pathlib import Path

import torch
from task import WideArithmetic
from transformers import Qwen3Config, Qwen3ForCausalLM

from workbench.atomic import to_json, write_whole
from workbench.records.provenance import project_root, provenance
from workbench.train.sampling import RolloutSettings, warm_up

HERE = Path(__file__).parent
SIZES = {
    "vocab_size": 32768,
    "hidden_size": 512,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
}
SETTINGS = RolloutSettings(
    max_new_tokens=40,
    success_low=0.2,
    success_high=0.8,
    max_warm_up_steps=2500,
    cool_down_steps=25,
    evaluate_every=25,
    documents_per_step=128,
    learning_rate=1e-3,
)
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
}
TINY_SETTINGS = RolloutSettings(
    max_new_tokens=8,
    success_low=0.0,
    success_high=1.0,
    cool_down_steps=2,
    evaluate_every=2,
    evaluation_problems=8,
    documents_per_step=8,
)


def make(folder: Path, sizes: dict[str, int], settings: RolloutSettings, device: str) -> None:
    """Warm up a policy and save it."""
    task = WideArithmetic()
    torch.manual_seed(settings.seed)
    policy = (
        Qwen3ForCausalLM(
            Qwen3Config(
                tie_word_embeddings=True,
                max_position_embeddings=512,
                attention_dropout=0.0,
                dtype="float32",
                bos_token_id=None,
                eos_token_id=None,
                pad_token_id=None,
                **sizes,
            )
        )
        .eval()
        .to(device)
    )
    result = warm_up(task, settings, print, policy=policy)
    for config in (policy.config, policy.generation_config):
        config.bos_token_id, config.eos_token_id = task.start_id, task.end_id
    policy.cpu().save_pretrained(folder / "policy")
    weights = (folder / "policy" / "model.safetensors").read_bytes()
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    write_whole(
        folder / "warm_up.json",
        to_json(
            {
                "steps": result.steps,
                "success_rate": result.success_rate,
                "seconds": round(result.seconds, 1),
                "parameters": parameters,
                "parameters_beside_embedding": parameters - sizes["vocab_size"] * sizes["hidden_size"],
                "sizes": sizes,
                "settings": asdict(settings),
                "policy_sha256": hashlib.sha256(weights).hexdigest(),
                "provenance": provenance(project_root()),
            }
        ),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=HERE)
    parser.add_argument("--tiny", action="store_true", help="a small policy on CPU")
    options = parser.parse_args()
    if options.tiny:
        make(options.folder, TINY, TINY_SETTINGS, "cpu")
    else:
        make(options.folder, SIZES, SETTINGS, "cuda" if torch.cuda.is_available() else "cpu")
