"""Losses on whole documents, and denominators: settings of a run with the arguments of the oracle."""

from __future__ import annotations

import random

import numpy as np

from tests.helpers.batches import nasty_documents, near_policy
from tests.oracles import step as paper
from tests.oracles.weights import document_weight, gradient_weight
from workbench.policy.decoder import tiny_qwen3

GSPO = {"name": "gspo", "surrogate": {"clip_low": 0.05, "clip_high": 0.08}}
PPO = {"name": "ppo", "surrogate": {"clip_low": 0.2, "clip_high": 0.28}}

LOSSES = {
    "gspo": (GSPO, paper.gspo(0.05, 0.08), {"denominator": "document"}),
    "gspo_segments": (
        GSPO | {"surrogate": GSPO["surrogate"] | {"level": "segment"}},
        paper.gspo_of_segments(0.05, 0.08),
        {"denominator": "document"},
    ),
    "gspo_kept": (
        {
            "name": "gspo",
            "surrogate": GSPO["surrogate"] | {"advantage_level": "document"},
            "correction": {
                "ratio": "token",
                "gate": "ratio",
                "gate_low": 0.96,
                "gate_high": 1.05,
                "surrogate_over": "kept",
                "further_gates": [{"statistic": "ratio", "level": "document_min", "low": 0.9}],
            },
        },
        paper.gspo_of_kept(0.05, 0.08, 0.96, 1.05, 0.9),
        {"denominator": "document"},
    ),
    "gspo_sum": (GSPO, paper.gspo(0.05, 0.08), {"denominator": "document_sum"}),
    "luspo": ({"name": "luspo", "surrogate": GSPO["surrogate"]}, paper.luspo(0.05, 0.08), {"denominator": "document"}),
    "gmpo": (
        {"name": "gmpo", "surrogate": {"clip_low": 0.2, "clip_high": 0.3}},
        paper.gmpo(0.2, 0.3),
        {"denominator": "document"},
    ),
    "gspo_kl": (
        GSPO
        | {
            "kl": {
                "coefficient": 0.3,
                "against": "sampler",
                "importance": "old",
                "gradient": "score",
                "importance_level": "document",
            }
        },
        paper.gspo_with_kl(0.05, 0.08, 0.3),
        {"denominator": "document"},
    ),
    "vespo": ({"name": "vespo"}, paper.vespo(2.0, 3.0, 3.0, 2.0), {"denominator": "token"}),
    "vespo_of_sampler": (
        {"name": "vespo", "correction": {"ratio": "token", "ratio_high": 1.02, "enters": "sequence_weight"}},
        paper.vespo(2.0, 3.0, 3.0, 2.0, bound=1.02),
        {"denominator": "token"},
    ),
    "sequence_tis_sum": (
        PPO | {"correction": {"kind": "sequence_tis_sum", "ratio_high": 1.1}},
        paper.ppo_with_sequence_weight(0.2, 0.28, 1.1, mean=False),
        {"denominator": "token"},
    ),
    "sequence_tis_mean": (
        PPO | {"correction": {"kind": "sequence_tis_mean", "ratio_high": 1.02}},
        paper.ppo_with_sequence_weight(0.2, 0.28, 1.02, mean=True),
        {"denominator": "token"},
    ),
    "dpo": ({"name": "dpo", "surrogate": {"beta": 0.4}}, paper.dpo(0.4), {"denominator": "document"}),
}
"""name -> (loss settings, the oracle's values, denominator with its settings)."""

DENOMINATORS = {
    name: (PPO, paper.ppo(0.2, 0.28), settings)
    for name, settings in {
        "token": {"denominator": "token"},
        "document": {"denominator": "document"},
        "document_sum": {"denominator": "document_sum"},
        "constant": {"denominator": "constant", "denominator_constant": 24.0},
        "prompt_group": {"denominator": "prompt_group"},
        "rollout": {"denominator": "rollout"},
        "group_length": {"denominator": "group_length"},
        "raw": {"denominator": "raw"},
        "all_documents": {"denominator": "document_sum", "compat": {"documents_counted": "all"}},
        "two_weights": {"denominator": "document_sum", "compat": {"normalize_by_documents": True}},
        "gradient_divisor": {"denominator": "token", "compat": {"gradient_divisor": 3.0}},
    }.items()
}
"""The same for every denominator, under one loss."""


GATE = {"kind": "icepop", "ratio_low": 0.97, "ratio_high": 1.04}
CORRECTIONS = {
    "survivors_token": (
        PPO | {"correction": GATE | {"denominator": "survivors"}},
        paper.ppo_with_token_gate(0.2, 0.28, 0.97, 1.04),
        {"denominator": "token", "kept": True},
    ),
    "survivors_document": (
        PPO | {"correction": GATE | {"denominator": "survivors"}},
        paper.ppo_with_token_gate(0.2, 0.28, 0.97, 1.04),
        {"denominator": "document", "kept": True},
    ),
    "original": (
        PPO | {"correction": GATE},
        paper.ppo_with_token_gate(0.2, 0.28, 0.97, 1.04),
        {"denominator": "token"},
    ),
    "batch_normalized": (
        PPO | {"correction": {"kind": "batch_normalized", "ratio_high": 1.03}},
        paper.ppo_with_normalised_weight(0.2, 0.28, 1.03),
        {"denominator": "token"},
    ),
}
"""Corrections whose denominators count survivors, or that need a number of the whole step. ``kept``: for the oracle."""


class Oracle:
    """A batch of documents and, once walked through, the loss and gradients of any case on it."""

    def __init__(self, seed: int) -> None:
        self.model = paper.exact(tiny_qwen3(19, tied=True, seed=3))
        documents = nasty_documents(seed, count=10)
        near = near_policy(documents, self._plain(documents), seed, spread=0.15)
        self.documents = with_groups(near, seed)
        self.logprobs = paper.document_logprobs(self.model, self.documents)

    def _plain(self, documents):
        return [
            [float("nan") if v is None else v.item() for v in row]
            for row in paper.document_logprobs(self.model, documents)
        ]

    def __call__(self, case):
        """Loss and gradients of a case."""
        _, values, settings = case
        settings = dict(settings)
        if settings.pop("kept", False):
            settings["kept"] = [paper.inside(d, GATE["ratio_low"], GATE["ratio_high"]) for d in self.documents]
        settings = {"constant" if k == "denominator_constant" else k: v for k, v in settings.items()}
        settings |= settings.pop("compat", {})
        further = {k: settings.pop(k) for k in ("gradient_divisor", "normalize_by_documents") if k in settings}
        return paper.policy_step(
            self.model,
            self.documents,
            self.logprobs,
            values,
            weight=lambda d: document_weight(self.documents, d, **settings),
            gradient_weight=lambda d: gradient_weight(self.documents, d, **further, **settings),
        )


def with_groups(documents: list[dict], seed: int) -> list[dict]:
    """The same documents with sampler log-probabilities, advantages that vary inside, groups, rewards and rollouts.

    Trained documents come in pairs of different rewards; untrained ones have groups of their own.
    """
    rng = random.Random(seed)
    order = [d for d, document in enumerate(documents) if any(document["loss_mask"])]
    assert len(order) % 2 == 0, "the trained documents must make pairs"
    rng.shuffle(order)
    results = []
    for number, document in enumerate(documents):
        place = order.index(number) if number in order else None
        results.append(
            document
            | {
                "group_id": 100 + number if place is None else place // 2,
                "reward": 0.5 if place is None else float(place % 2),
                "rollout_id": number // 3,
                "sampler_logprobs": [
                    float(np.float32(min(-1e-3, v + rng.gauss(0, 0.05)))) for v in document["old_logprobs"]
                ],
                "advantages": [
                    float(np.float32(a * rng.uniform(0.5, 1.5) * rng.choice((1, 1, 1, -1))))
                    for a in document["advantages"]
                ],
            }
        )
    return results


def settings(layout: dict, case, **more) -> dict:
    """The run of a case in a layout."""
    loss, _, denominator = case
    denominator = {key: value for key, value in denominator.items() if key != "kept"}
    return {
        "model": {"source": "tiny-qwen3", "tied": True, "seed": 3},
        "precision": "float64",
        "loss": loss | denominator,
        "layout": layout,
    } | more
