"""Wrong divisors of a loss that no setting expresses, as factors of each token's weight.

A weight is 1 over a count of tokens, of documents, or a product of both. A mistake counts others, or counts within a
rank or a micro-batch and averages.

Letters: T tokens | N documents.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from workbench.check.reading import Reading, Scale
from workbench.check.recompute import weights_of
from workbench.errors import WorkbenchError

BY_TOKENS, BY_LENGTHS = ("token",), ("document",)
"""Denominators that count the step's tokens, and those that count a document's."""


def wrong_divisors(reading: Reading) -> Iterator[tuple[str, str, Reading]]:
    """Yield (kind, description, reading) of the wrong divisors that a step's loss can have."""
    right_T = weights_of(reading)
    for text, other_T, counts in _counts(reading, right_T):
        for of, whose in (("", "the loss"), ("penalty", "the KL penalty"), ("policy", "the policy term")):
            if (of and not reading.spec.kl.coefficient) or (not of and "its own micro-batch" in text):
                continue  # the second is a setting: `workbench.check.alternatives`
            factor_T = _factor(reading, right_T, other_T, of)
            changed = replace(reading, scale=Scale(factor_T, of=of), counts=counts if of == "" else {})
            yield "denominator", f"{whose} is divided {text}", changed
    yield from _of_terms(reading, right_T)
    yield from _lost_pieces(reading)


def _factor(reading: Reading, right_T: Tensor, other_T: Tensor, of: str) -> Tensor:
    """[T] factor that turns the weights of a term into others; the penalty's may differ from the policy's."""
    base_T = weights_of(reading, of) if of == "penalty" and reading.spec.compat.kl_denominator != "penalty" else right_T
    return torch.where(base_T > 0, other_T / base_T.clamp_min(1e-300), 1.0)


def _counts(reading: Reading, right_T: Tensor) -> Iterator[tuple[str, Tensor, dict[str, float]]]:
    """Yield (what it is divided by, [T] weights, the counts that are recorded with them)."""
    dump, name = reading.dump, reading.spec.denominator
    mask_T, ids_T, number = dump.loss_mask_T, dump.document_ids_T, dump.num_documents
    lengths_N = torch.bincount(ids_T[mask_T], minlength=number).double()
    widths_N = torch.bincount(ids_T, minlength=number).double()
    all_T = dump.tokens.get("token_mask", torch.ones_like(mask_T))
    everything_N = torch.bincount(ids_T[all_T], minlength=number).double()
    trained, documents = float(lengths_N.sum()), float((lengths_N > 0).sum())
    acting_N = _acting(reading)
    tokens = {
        "by all tokens of completions, a tool's and masked documents' too": float(everything_N.sum()),
        "by all tokens and padding": float(widths_N.sum()),
        "by trained tokens, and one for each document without a trained token": float(lengths_N.clamp_min(1).sum()),
        "by the tokens whose advantage is not 0": float(lengths_N[acting_N].sum()),
        "by trained tokens twice": trained * trained,
    }
    of_documents = {
        "by all documents, those without a trained token too": float(number),
        "by documents whose advantage is not 0": float(acting_N.sum()),
        "by documents twice": documents * documents,
    }
    if (groups_N := dump.documents.get("group_ids")) is not None:
        of_documents["by prompts, not by documents"] = float(groups_N.unique().numel())
    if name == "token" and trained:
        for text, count in tokens.items():
            if count and count != trained:
                yield text, right_T * (trained / count), {"tokens": count}
    elif documents:
        for text, count in of_documents.items():
            if count and count != documents:
                yield text, right_T * (documents / count), {"documents": count}
    if name == "document":
        lengths = {
            "by documents, each over all its tokens, a tool's too": everything_N,
            "by documents, each over its padded width": widths_N,
            "by documents, each over the step's mean length": torch.full_like(lengths_N, trained / max(documents, 1)),
        }
        for text, other_N in lengths.items():
            ratio_N = lengths_N / other_N.clamp_min(1)
            if not bool((ratio_N[lengths_N > 0] == 1).all()):
                yield text, right_T * ratio_N[ids_T], {}
    if name == "constant" and reading.spec.denominator_constant:
        for text, width in _widths(reading, everything_N, widths_N).items():
            yield text, right_T * (reading.spec.denominator_constant / width)[ids_T], {}
    yield from _pieces(reading, lengths_N, right_T)


def _acting(reading: Reading) -> Tensor:
    """[N] True for documents with a trained token whose advantage is not 0."""
    dump = reading.dump
    given_T = dump.advantages_T
    assert given_T is not None, "can_evaluate"
    acts_T = dump.loss_mask_T & (given_T != 0)
    return torch.bincount(dump.document_ids_T[acts_T], minlength=dump.num_documents) > 0


def _widths(reading: Reading, everything_N: Tensor, widths_N: Tensor) -> dict[str, Tensor]:
    """Lengths in the place of a constant one."""
    longest = float(everything_N.max())
    out = {
        f"by documents times the longest completion {longest:g}": torch.full_like(widths_N, longest),
        "by documents, each over its padded width": widths_N,
    }
    if (rows_N := reading.dump.documents.get("rows")) is not None:
        longest_N = torch.stack([everything_N[rows_N == row].max() for row in rows_N])
        out["by documents times the longest completion of the micro-batch"] = longest_N
    return out


def _pieces(reading: Reading, lengths_N: Tensor, right_T: Tensor) -> Iterator[tuple[str, Tensor, dict[str, float]]]:
    """Counts of a rank or a micro-batch, averaged over these."""
    dump, name = reading.dump, reading.spec.denominator
    rows_N = dump.documents.get("rows")
    if rows_N is None:
        return
    micro_batches, dp = dump.size("micro_batches"), dump.size("dp")
    of_ranks, passes = (
        ("rank", rows_N // micro_batches, dp),
        ("pass of all ranks", rows_N % micro_batches, micro_batches),
    )
    known = [of_ranks, passes] if dp > 1 and micro_batches > 1 else []
    if dp > 1 and micro_batches == 1:
        known = [("rank", rows_N, dp)]
    elif dp == 1:
        known = [("micro-batch", rows_N, micro_batches)]
    else:
        known.append(("micro-batch of each rank", rows_N, dp * micro_batches))
    trains_N = (lengths_N > 0).double()
    for one, pieces_N, number in known:

        def within(values_N: Tensor, pieces_N: Tensor = pieces_N, number: int = number) -> Tensor:
            return values_N.new_zeros(number).index_add(0, pieces_N, values_N).clamp_min(1)[pieces_N]

        trained_N, documents_N = within(lengths_N), within(trains_N)
        weights = {
            f"by the trained tokens of its own {one}, then averaged": 1 / trained_N / number,
            f"by the documents of its own {one}, each over its own tokens, then averaged": 1
            / (documents_N * lengths_N.clamp_min(1) * number),
            f"by the documents of its own {one}, then averaged": 1 / documents_N / number,
        }
        for text, weights_N in weights.items():
            yield text, torch.where(right_T > 0, weights_N[dump.document_ids_T], 0.0), {}
        if name == "token":
            mean = float(lengths_N.sum()) / max(float(trains_N.sum()), 1)
            weights_N = documents_N / (trained_N * float(trains_N.sum()))
            text = f"by the trained tokens of its own {one}, weighed by its share of documents"
            if mean and one != "pass of all ranks":
                yield text, torch.where(right_T > 0, weights_N[dump.document_ids_T], 0.0), {}


def _of_terms(reading: Reading, right_T: Tensor) -> Iterator[tuple[str, str, Reading]]:
    """One term with another denominator than the other."""
    if not reading.spec.kl.coefficient:
        return
    texts = {
        "token": "by all trained tokens of the step",
        "document": "by documents, each over its own tokens",
        "document_sum": "by documents",
        "raw": "by nothing",
    }
    spec, own = reading.spec, reading.spec.compat.kl_denominator
    present = {"policy": spec.denominator, "penalty": spec.denominator if own == "penalty" else own}
    for name, text in texts.items():
        with contextlib.suppress(ValidationError, WorkbenchError):
            changes: dict[str, Any] = {"denominator": name, "denominator_constant": None}
            other_T = weights_of(reading.changed(**changes))
            for of, whose in (("penalty", "the KL penalty"), ("policy", "the policy term")):
                if name == present[of]:
                    continue
                factor_T = _factor(reading, right_T, other_T, of)
                text_of = f"{whose} is divided {text}, the other term is not"
                yield "denominator", text_of, replace(reading, scale=Scale(factor_T, of=of))


def _lost_pieces(reading: Reading) -> Iterator[tuple[str, str, Reading]]:
    """Gradients, or gradients and loss, of only some micro-batches, ranks or documents."""
    dump = reading.dump
    ids_T = dump.document_ids_T
    kept: dict[str, Tensor] = {}
    if (rows_N := dump.documents.get("rows")) is not None:
        micro_batches, dp = dump.size("micro_batches"), dump.size("dp")
        if micro_batches > 1:
            kept["only the last micro-batch of each rank trains"] = rows_N % micro_batches == micro_batches - 1
            kept["only the first micro-batch of each rank trains"] = rows_N % micro_batches == 0
            kept["the last micro-batch of each rank does not train"] = rows_N % micro_batches != micro_batches - 1
            kept["the first micro-batch of each rank does not train"] = rows_N % micro_batches != 0
        if dp > 1:
            for rank in range(min(dp, 16)):
                kept[f"only rank {rank} trains"] = rows_N // micro_batches == rank
                if dp > 2:
                    kept[f"rank {rank} does not train"] = rows_N // micro_batches != rank
    ones_T = torch.ones(len(ids_T), dtype=torch.float64)
    for text, kept_N in kept.items():
        kept_T = kept_N[ids_T].double()
        yield "mask", f"{text}: gradients of the others are lost", replace(reading, scale=Scale(ones_T, kept_T))
        yield "mask", f"{text}: loss and gradients of the others are lost", replace(reading, scale=Scale(kept_T))
        whose = text.split(" trains")[0]
        if text.startswith("only"):
            reported = f"the reported loss is that of {whose.removeprefix('only ')} alone"
            yield "mask", reported, replace(reading, scale=Scale(kept_T, ones_T))
            size = dump.size("dp") if "only rank" in text else dump.size("micro_batches")
            yield "mask", f"{reported}, times {size}", replace(reading, scale=Scale(kept_T * size, ones_T))
        for name, size in (("dp", dump.size("dp")), ("micro_batches", dump.size("micro_batches"))):
            if size > 1 and (name == "dp") == ("rank" in text.split(" of ")[0]):
                more = f"{text}, times {name} ({size})"
                yield "mask", more, replace(reading, scale=Scale(ones_T, kept_T * size))
