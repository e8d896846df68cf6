"""Nasty batches as plain lists, for oracles and for RolloutBatch alike."""

from __future__ import annotations

import random


def nasty_documents(seed: int, *, vocabulary: int = 19, count: int = 9) -> list[dict]:
    """Documents of very unequal lengths and masks.

    One document of a single token, one of two, one with nothing trained, one whose mask is interrupted (tool
    calls), one longer than all others together would need to straddle a shard edge, one that trains on all it can.
    """
    rng = random.Random(seed)
    lengths = [1, 2, 5, 8, 41, 13, 3, 17, 6][:count]
    lengths += [rng.randint(2, 20) for _ in range(count - len(lengths))]
    documents = []
    for number, length in enumerate(lengths):
        mask = [0] + [1 if t > length // 3 else 0 for t in range(1, length)]
        if number == 2:
            mask = [0] * length
        if number == 5:
            mask = [0] + [t % 3 != 0 for t in range(1, length)]
        if number == 7:
            mask = [0] + [1] * (length - 1)
        documents.append(
            {
                "tokens": [rng.randrange(vocabulary) for _ in range(length)],
                "loss_mask": [int(m) for m in mask],
                "advantages": [rng.choice((-1, 1)) * rng.uniform(0.2, 2.0)] * length,
                "old_logprobs": [-rng.uniform(1.5, 3.5) for _ in range(length)],
                "ref_logprobs": [-rng.uniform(1.5, 3.5) for _ in range(length)],
            }
        )
    rng.shuffle(documents)
    return documents


def near_policy(documents: list[dict], logprobs: list[list[float]], seed: int, *, spread: float) -> list[dict]:
    """The same documents with old and reference log-probabilities near a policy's own.

    They are rounded to float32 once, here, so that every precision trains on the same numbers.
    """
    import numpy as np

    rng = random.Random(seed)

    def around(values: list[float]) -> list[float]:
        return [float(np.float32(min(-1e-3, v + rng.gauss(0, spread)))) if v == v else 0.0 for v in values]

    return [
        document
        | {
            "old_logprobs": around(values),
            "ref_logprobs": around(values),
            "advantages": [float(np.float32(a)) for a in document["advantages"]],
        }
        for document, values in zip(documents, logprobs, strict=True)
    ]
