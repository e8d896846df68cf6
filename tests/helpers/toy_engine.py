"""An engine in this process, of bigrams, with mistakes that can be switched on."""

import torch
from torch.nn.functional import cross_entropy

from workbench.engines.case import VOCABULARY, EngineStep, padded
from workbench.engines.driver import Refused

MISTAKES = {
    "mean of micro-batch": {"accumulation", "partners", "ranks"},
    "sum over ranks": {"ranks"},
    "padding counted": {"accumulation", "partners", "padding", "ranks"},
    "packed borders trained": {"packing"},
    "loss doubled": {"loss_of_update"},
    "norm doubled": {"norm_of_update"},
    "clip ignored": {"clip"},
    "last documents dropped": {"effect"},
    "moments lost": {"resume"},
}
"""Mistake -> the invariants that it breaks."""


class ToyEngine:
    """Gradients of the mean over the step's tokens, in float64."""

    def __init__(self, mistake=""):
        self.mistake, self.starts = mistake, 0

    def __call__(self, cases):
        self.starts += 1
        return [self.run(case) for case in cases]

    def run(self, case):
        generator = torch.Generator().manual_seed(0)
        weight = 0.5 * torch.randn(VOCABULARY, VOCABULARY, generator=generator).double()
        if case.weights:
            from safetensors.torch import load_file

            weight = load_file(case.weights)["table"]
        weight = weight.clone().requires_grad_()
        before, moment, losses, norms = weight.detach().clone(), 0.0, [], []
        for step in range(case.steps):
            loss = self.loss(weight, case, step)
            (gradient,) = torch.autograd.grad(loss, weight)
            size = float(gradient.norm())
            if case.clip is not None and self.mistake != "clip ignored":
                gradient = gradient * min(1.0, case.clip / size)
            moment = (0.9 * moment if case.optimizer == "adamw" else 0.0) + gradient
            with torch.no_grad():
                weight -= case.learning_rate * moment
            if case.resume_after == step + 1 and self.mistake == "moments lost":
                moment = 0.0
            losses.append(float(loss.detach()) * (2 if self.mistake == "loss doubled" else 1))
            norms.append(size * (2 if self.mistake == "norm doubled" else 1))
        after = {"table": weight.detach().clone()}
        return EngineStep({"table": before}, after, tuple(losses), tuple(norms), learning_rate=case.learning_rate)

    def loss(self, weight, case, step):
        tokens = sum(len(each.completion) for each in case.step(step))
        parts = [part for rank in range(case.ranks) for part in case.micro_batches(step, rank)]
        if self.mistake == "last documents dropped":
            parts[-1] = parts[-1][:-2] if len(parts[-1]) > 2 else ()
        losses = [self.part(weight, part, case, tokens, len(parts)) for part in parts if part]
        return sum(losses) * (case.ranks if self.mistake == "sum over ranks" else 1)

    def part(self, weight, texts, case, tokens, parts):
        rows = padded(texts, padding=case.padding)
        labels = rows["labels"][:, 1:]
        logits = weight[rows["input_ids"][:, :-1]]
        total = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        if case.packed and self.mistake == "packed borders trained":
            borders = torch.tensor([each.completion[-1] for each in texts])
            total = total + cross_entropy(weight[borders[:-1]], borders[1:], reduction="sum")
        if self.mistake == "mean of micro-batch":
            return total / (labels != -100).sum() / parts
        return total / (labels.numel() * parts if self.mistake == "padding counted" else tokens)


def refusing(cases):
    """An engine that offers nothing on two ranks, and fails in a case that is packed."""
    steps = ToyEngine()(cases)
    return [
        EngineStep(refused=str(Refused("one rank alone")))
        if case.ranks > 1
        else EngineStep(error="ValueError: no")
        if case.packed
        else step
        for case, step in zip(cases, steps, strict=True)
    ]
