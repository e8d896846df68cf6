"""A small causal transformer in plain torch, and its loss, for engines that bring neither."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from workbench.engines.case import EPSILON, VOCABULARY, EngineCase, Text, padded
from workbench.engines.driver import Refused

WIDTH, PLACES = 16, 64


class Decoder(nn.Module):
    """Embeddings, one block of causal attention, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(PLACES, WIDTH)
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of each row's next tokens; rows are padded on the right."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        parts = self.project(self.attention_norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).flatten(2))
        return self.head(x + self.mlp(x))


def nll(model: nn.Module, texts: Sequence[Text], case: EngineCase) -> tuple[Tensor, int]:
    """Return the sum of negative log-probabilities of the trained tokens, and their number."""
    if case.packed:
        raise Refused("packing is the caller's: the engine takes any batch")
    rows = padded(texts, padding=case.padding)
    labels = rows["labels"][:, 1:]
    logits = model(rows["input_ids"])[:, :-1].float()
    total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, int((labels != -100).sum())


def tokens(texts: Sequence[Text]) -> int:
    """Return the number of trained tokens."""
    return sum(len(text.completion) for text in texts)


def micro_batch_loss(kind: str, model: nn.Module, texts: Sequence[Text], case: EngineCase, step: int) -> Tensor:
    """Return the loss of a micro-batch for an engine that averages over ranks and over accumulation.

    ``step``: its share of the mean over the tokens of the step. ``mean``: the mean over its own tokens, as in the
    engines' first examples.
    """
    total, count = nll(model, texts, case)
    if kind == "mean":
        return total / count
    return total * (case.ranks * case.accumulation) / tokens(case.step(step))


def optimizer_of(case: EngineCase, parameters) -> torch.optim.Optimizer:
    """Return the case's optimizer."""
    if case.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=case.learning_rate)
    return torch.optim.AdamW(parameters, lr=case.learning_rate, weight_decay=0.0, eps=EPSILON)
