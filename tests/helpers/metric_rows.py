"""Documents as plain lists, for the oracle of metrics, and the same as inputs of the workbench's."""

from __future__ import annotations

import math
import random

import torch

from workbench.losses.terms import LossInputs

PRESENT = ("policy", "old", "sampler", "ref")


def nasty_documents(seed: int, *, count: int = 7, infinite: bool = True) -> list[dict]:
    """Documents of 1 to 9 tokens: nothing trained, one token, interrupted masks, ratios from 1e-3 to 1e3, advantages
    of 0, NaN and infinity where nothing counts, and log-probabilities of -inf where something does.
    """
    rng = random.Random(seed)
    documents = []
    for number in range(count):
        length = (4, 1, 1, 9)[number] if number < 4 else rng.randint(2, 8)
        mask = [int(rng.random() < 0.7) for _ in range(length)]
        if number < 3:
            mask = [(0, 1, 0)[number]] * length
        if number == 3:
            mask = [1, 1, 0, 1, 0, 0, 1, 1, 1]
        document = {
            "mask": mask,
            "advantage": [rng.choice((-1.5, -0.3, 0.0, 0.7))] * length,
            "entropy": [rng.uniform(0.1, 3) for _ in range(length)],
            "policy": [-rng.uniform(0.1, 4) for _ in range(length)],
        }
        for who, spread in (("old", 0.3), ("sampler", 0.2), ("ref", 1.0)):
            document[who] = [value + rng.gauss(0, spread) for value in document["policy"]]
        if number == 3:
            document["old"][0] = document["policy"][0] + math.log(1e3)
            document["old"][1] = document["policy"][1] - math.log(1e3)
            if infinite:
                document["sampler"][3] = document["ref"][6] = -math.inf
                document["policy"][7] = document["old"][7] = -math.inf
        for t, keep in enumerate(mask):
            if not keep:
                for name in (*PRESENT, "advantage", "entropy"):
                    document[name][t] = rng.choice((math.nan, math.inf, -math.inf, 1e30))
        documents.append(document)
    return documents


def inputs_of(documents: list[dict], places: list[int] | None = None) -> tuple[LossInputs, torch.Tensor]:
    """The documents as one row, or the tokens of it at some places; document ids and lengths are those of the whole.

    Returns:
        Inputs in float64, and the mask.
    """
    places = list(range(sum(len(d["mask"]) for d in documents))) if places is None else places
    index = torch.tensor(places, dtype=torch.long)

    def column(name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.tensor([value for d in documents for value in d[name]], dtype=dtype)[index]

    ids = torch.tensor([n for n, d in enumerate(documents) for _ in d["mask"]], dtype=torch.long)
    lengths = torch.tensor([max(1, sum(d["mask"])) for d in documents for _ in d["mask"]], dtype=torch.float64)
    optional = {f"{who}_logprobs_T": column(who) for who in ("sampler", "ref") if who in documents[0]}
    if "entropy" in documents[0]:
        optional["entropy_T"] = column("entropy")
    return LossInputs(
        column("policy"),
        column("old"),
        column("advantage"),
        document_ids_T=ids[index],
        lengths_T=lengths[index],
        **optional,
    ), column("mask", torch.bool)


def segment_lengths(documents: list[dict], places: list[int] | None = None) -> torch.Tensor:
    """[T] trained tokens of each token's unbroken run, 0 where nothing counts."""
    lengths = []
    for document in documents:
        mask, t = document["mask"], 0
        while t < len(mask):
            end = t
            while end < len(mask) and mask[end] == mask[t]:
                end += 1
            lengths += [(end - t) * mask[t]] * (end - t)
            t = end
    whole = torch.tensor(lengths, dtype=torch.float64)
    return whole if places is None else whole[torch.tensor(places, dtype=torch.long)]
