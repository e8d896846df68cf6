"""Write the dumps in this folder with prime-rl's own `TokenExporter` (`trainer.enable_token_export`).

    git clone https://github.com/PrimeIntellect-ai/prime-rl; git -C prime-rl checkout 559b4477
    pip install torch==2.13.0 prime-pydantic-config wandb beartype jaxtyping loguru
    export PYTHONPATH=prime-rl/src:prime-rl/packages/prime-rl-configs/src
    python tests/dumps/prime_rl/write.py tests/dumps/prime_rl

Two ranks of two micro-batches, two or three packed sequences in each, padding at the end, tool tokens without loss. The
trainer's log-probabilities are shifted to their tokens, as train.py has them when it exports.
"""

import shutil
import sys
from pathlib import Path

import torch
from prime_rl.configs.trainer import DefaultLossConfig
from prime_rl.trainer.rl.token_export import TokenExporter

LENGTHS = (((7, 5), (6, 4, 3)), ((9,), (5, 8)))
"""Lengths of the sequences in each micro-batch of each rank; the first two tokens of each are its prompt."""
PADDING = 3


def micro_batch(lengths: tuple[int, ...], generator: torch.Generator) -> tuple[dict, dict, list[int]]:
    """Return a packed micro-batch, the model's output, and the lengths, of which the last has the padding."""
    total = sum(lengths)
    width = total + PADDING
    old = torch.zeros(1, width)
    old[0, :total] = -1.0 - torch.rand(total, generator=generator)
    mask = torch.zeros(1, width, dtype=torch.bool)
    advantages, positions, start = torch.zeros(1, width), [], 0
    for number, length in enumerate(lengths):
        mask[0, start + 2 : start + length] = True
        if length > 6:
            mask[0, start + 4] = False  # a tool wrote this
        advantages[0, start : start + length] = (-1.0, 0.5, 1.5)[number % 3]
        positions += range(length)
        start += length
    batch = {
        "input_ids": torch.randint(5, 40, (1, width), generator=generator),
        "position_ids": torch.tensor([positions + list(range(PADDING))]),
        "loss_mask": mask,
        "advantages": advantages,
        "inference_logprobs": old,
        "env_names": ["arith"] * total + [""] * PADDING,
    }
    noise = 0.5 * torch.randn(1, width, generator=generator)
    output = {"logprobs": (old + noise).clamp_max(-0.05), "entropy": 1.0 + torch.rand(1, width, generator=generator)}
    return batch, output, [*lengths[:-1], lengths[-1] + PADDING]


def main(folder: Path) -> None:
    """Export one step of both ranks."""
    shutil.rmtree(folder / "token_exports", ignore_errors=True)
    for rank, batches in enumerate(LENGTHS):
        exporter = TokenExporter(folder, rank)
        for micro_step, lengths in enumerate(batches):
            generator = torch.Generator().manual_seed(10 * rank + micro_step)
            batch, output, of_sequences = micro_batch(lengths, generator)
            exporter.export(4, micro_step, batch, output, of_sequences, DefaultLossConfig())
        exporter.mark_stable()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
