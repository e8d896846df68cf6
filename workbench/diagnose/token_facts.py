"""Facts about single tokens of the first step that differs: what differs, and where it lies.

A mistake of shifting, packing or splitting affects tokens in particular places: at the end of a shard, at the start of
a document, in every document of a row but the first. `agreement` compares the tokens that differ with each such set.

Letters: S tokens of the source batch; index s stands for the prediction of token s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from workbench.diagnose.denominators import PIECES, pieces
from workbench.diagnose.evidence import Evidence, StepEvidence
from workbench.diagnose.places import agreement, places
from workbench.diagnose.record import Record, RecordedStep, shared_tokens, trained_in_both, whole


@dataclass(frozen=True)
class TokenFacts:
    """Per-token values of the first step that differs, of the evidence of all."""

    evidence: Evidence

    @property
    def step(self) -> StepEvidence:
        """The first step that differs."""
        return self.evidence.first

    @cached_property
    def pair(self) -> tuple[RecordedStep, RecordedStep]:
        """Both records of that step."""
        return self.evidence.pair

    def not_recorded(self, names: Iterable[str]) -> list[str]:
        """See `Evidence.not_recorded`."""
        return self.evidence.not_recorded(names)

    @property
    def suspect(self) -> Record:
        """The suspect record."""
        return self.evidence.suspect

    @property
    def context(self) -> Mapping[str, Any]:
        """The suspect's context."""
        return self.evidence.suspect.context

    @cached_property
    def tokens(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Per-token values of both, cut to the shorter one."""
        return shared_tokens(*self.pair)

    @cached_property
    def other_documents(self) -> str:
        """Clause for documents that have other lengths in the two records; "" if they have not, or if it is unknown."""
        if not all("documents" in tokens for tokens in self.tokens):
            return ""
        lengths = [
            tokens["documents"][tokens["documents"] >= 0].unique_consecutive(return_counts=True)[1].sort().values
            for tokens in (whole(step.tokens) for step in self.pair)
        ]
        if len(lengths[0]) == len(lengths[1]) and torch.equal(lengths[0], lengths[1]):
            return ""
        texts = [f"{len(each)} documents of {int(each.sum())} tokens" for each in lengths]
        return f"the step has {texts[1]}, not {texts[0]}"

    @property
    def forward_same(self) -> bool | None:
        """True if log-probabilities of all trained tokens agree; from the metrics where no token was recorded."""
        return self._same("policy_logprobs", "logprob/policy/mean")

    @property
    def old_same(self) -> bool | None:
        """True if the old log-probabilities agree; from the metrics where no token was recorded."""
        return self._same("old_logprobs", "logprob/old/mean")

    @property
    def mask_same(self) -> bool | None:
        """True if the same tokens trained; from the metrics where no token was recorded."""
        return self._same("trained", "tokens/trained/sum")

    def _same(self, value: str, key: str) -> bool | None:
        known = self.step.token_same(value)
        if known is not None or not all(key in step.metrics for step in self.pair):
            return known
        return key not in self.step.metrics

    @cached_property
    def trained(self) -> Tensor | None:
        """[S] bool, tokens that train in the trusted record."""
        return self.tokens[0]["trained"].bool() if "trained" in self.tokens[0] else None

    @cached_property
    def places(self) -> dict[str, Tensor]:
        """Places that a mistake may touch, in the suspect's layout."""
        if self.trained is None:
            return {}
        merged = {**self.tokens[0], **self.tokens[1]}
        return places(merged | {"trained": self.trained | merged["trained"].bool()})

    def off_tokens(self, *names: str) -> Tensor | None:
        """[S] bool, tokens of which one of these values differs; None if none was recorded."""
        masks = [self.step.tokens[name] for name in names if name in self.step.tokens]
        return torch.stack(masks).any(0) if masks else None

    def share_off(self, name: str) -> float:
        """Share of the trained tokens of which a value differs."""
        off = self.off_tokens(name)
        if off is None or self.trained is None:
            return 0.0
        return int((off & self.trained).sum()) / max(int(self.trained.sum()), 1)

    def agree(self, place: str, *names: str) -> float:
        """Agreement of the tokens that differ with a place, in excess of that with all trained tokens; 0 if unknown."""
        off = self.off_tokens(*names)
        if off is None or self.trained is None or place not in self.places:
            return 0.0
        everywhere, there = agreement(off, self.trained), agreement(off, self.places[place])
        return (there - everywhere) / (1 - everywhere) if there > everywhere else 0.0

    @cached_property
    def rows_moved(self) -> tuple[list[int], list[int]] | None:
        """Micro-batches in which nearly all trained tokens have other log-probabilities, and those in which none has.

        None if the micro-batches are not known, or some have both.
        """
        off = self.off_tokens("policy_logprobs")
        if off is None or self.trained is None or "rows" not in self.tokens[1] or "rows" not in self.tokens[0]:
            return None
        shares = self._shares(off, self.tokens[1]["rows"])
        moved = [row for row, share in shares.items() if share > 0.9]
        still = [row for row, share in shares.items() if share == 0]
        return (moved, still) if moved and still and len(moved) + len(still) == len(shares) else None

    @cached_property
    def padded_moved(self) -> float:
        """Agreement of the documents that differ with those that are shorter than the longest of their micro-batch."""
        off, tokens = self.off_tokens("policy_logprobs"), {**self.tokens[0], **self.tokens[1]}
        if off is None or self.trained is None or not {"documents", "rows"} <= set(tokens):
            return 0.0
        documents, rows = tokens["documents"], tokens["rows"]
        shares = self._shares(off, documents)
        lengths = {one: int((documents == one).sum()) for one in shares}
        of_row = {one: int(rows[documents == one][0]) for one in shares}
        longest = {row: max(lengths[one] for one in shares if of_row[one] == row) for row in of_row.values()}
        padded = {one for one in shares if lengths[one] < longest[of_row[one]]}
        moved = {one for one, share in shares.items() if share > 0.5}
        if not padded or not moved or len(moved) == len(shares) or moved - padded:
            return 0.0
        return len(moved) / len(padded)

    def _shares(self, off: Tensor, labels: Tensor) -> dict[int, float]:
        """Label -> share of its tokens that train in both and that differ."""
        both = self.tokens[0]["trained"].bool() & self.tokens[1]["trained"].bool() & (labels >= 0)
        return {int(one): float(off[both & (labels == one)].double().mean()) for one in labels[both].unique()}

    @cached_property
    def absent(self) -> str:
        """Clause for trained tokens of the trusted record that the suspect has not noted; "" if there are none."""
        trusted, suspect = (whole(step.tokens) for step in self.pair)
        if not all({"trained", "documents"} <= set(tokens) for tokens in (trusted, suspect)):
            return ""
        end = len(suspect["documents"])
        gone = trusted["trained"].bool() & (trusted["documents"] >= 0)
        gone[:end] &= suspect["documents"][: len(gone)] < 0
        if not bool(gone.any()):
            return ""
        rows, text = trusted.get("rows"), f"{int(gone.sum())} of {int(trusted['trained'].sum())} trained tokens"
        if rows is not None and not bool((trusted["trained"].bool() & torch.isin(rows, rows[gone]) & ~gone).any()):
            return f"{text} are missing, all of {len(rows[gone].unique())} micro-batches"
        return f"{text} are missing"

    @cached_property
    def added(self) -> str:
        """Clause for documents with trained tokens that only the suspect has noted; "" if there are none."""
        trusted, suspect = (whole(step.tokens) for step in self.pair)
        if not all({"trained", "documents"} <= set(tokens) for tokens in (trusted, suspect)):
            return ""
        known, others = (tokens["documents"][tokens["trained"].bool()].unique() for tokens in (trusted, suspect))
        noted = trusted["documents"].unique()  # those of which nothing trains are no data that was added
        more = others[(others >= 0) & ~torch.isin(others, noted)]
        return (
            f"{len(more)} documents train that the trusted run has not"
            if len(more) and len(others) > len(known)
            else ""
        )

    @property
    def lost_pieces(self) -> str:
        """Kind of pieces that the tokens that no longer train fill completely; "" if none, or if new tokens train."""
        lost, merged = self.off_tokens("trained"), {**self.tokens[0], **self.tokens[1]}
        if lost is None or self.trained is None or not (lost & self.trained).any() or (lost & ~self.trained).any():
            return ""
        for kind, piece in pieces(merged | {"trained": self.trained}, self.context).items():
            gone = torch.isin(piece, piece[lost]) & self.trained
            if kind != "documents" and torch.equal(gone, lost) and int(gone.sum()) < int(self.trained.sum()):
                return f"{PIECES[kind]}s"
        return ""

    @property
    def clips_documents(self) -> bool:
        """True if the trusted policy is clipped by whole documents, as a document-level ratio does."""
        tokens, trained = self.tokens[0], self.trained
        if trained is None or not {"clipped", "documents"} <= set(tokens):
            return False
        clipped, documents = tokens["clipped"].bool() & trained, tokens["documents"]
        several = any(int(clipped[documents == one].sum()) > 1 for one in documents[clipped].unique())
        return several and torch.equal(torch.isin(documents, documents[clipped]) & trained, clipped)

    def all_lie_in(self, place: str) -> bool:
        """True if every trained token lies in a place, so that it cannot be distinguished from everywhere."""
        return self.trained is not None and place in self.places and bool((self.places[place] == self.trained).all())

    def change(self, name: str = "policy_logprobs") -> tuple[Tensor, Tensor] | None:
        """A value of the tokens that train in both: the trusted one, and suspect minus trusted."""
        if (pair := trained_in_both(self.tokens, name)) is None:
            return None
        trusted, suspect = (values.double() for values in pair)
        return trusted, suspect - trusted

    @property
    def share_moved(self) -> float:
        """Share of tokens whose log-probability differs, of those where rounding could change it.

        The first prediction of a document sees a single token: rounding of positions and keys does not affect it.
        """
        if (change := self.change()) is None:
            return 0.0
        moved, positions = change[1] != 0, self.tokens[0].get("positions")
        both = self.tokens[0]["trained"].bool() & self.tokens[1]["trained"].bool()
        here = moved if positions is None else moved[positions[both] != 1]
        return float(here.double().mean()) if len(here) else 0.0

    @cached_property
    def distributions_shifted(self) -> int | None:
        """Shift, in tokens, of the suspect's entropies within documents, if log-probabilities do not shift along.

        None if there is no shift.
        """
        names = {"policy_logprobs", "entropy_nats", "trained", "documents"}
        if not all(names <= set(tokens) for tokens in self.tokens) or self.forward_same is not False:
            return None
        trusted, suspect = self.tokens
        known, documents = trusted["trained"].bool() & suspect["trained"].bool(), trusted["documents"]
        for shift in (1, -1):
            there = known & known.roll(shift) & (documents.roll(shift) == documents)
            there[0 if shift > 0 else -1] = False
            if int(there.sum()) < 4:
                continue
            left = {
                name: _left_by_shift(trusted[name].double(), suspect[name].double(), there, shift)
                for name in ("entropy_nats", "policy_logprobs")
            }
            if left["entropy_nats"] < 0.1 and left["policy_logprobs"] > 0.5:
                return shift
        return None

    @cached_property
    def document_values_cut(self) -> bool:
        """True if token values do not follow their own ratios, and trained tokens of a document lie on several ranks.

        With token-level ratios a token's value is proportional to its ratio: within a document its logarithm grows with
        the log ratio at slope 1; with a document-level ratio at slope 0.
        """
        tokens, trained = self.tokens[0], self.trained
        if trained is None or not {"losses", "old_logprobs", "policy_logprobs", "documents", "shards"} <= set(tokens):
            return False
        here = trained & (tokens["losses"] != 0)
        documents, shards = tokens["documents"][here], tokens["shards"][here]
        cut = any(len(shards[documents == one].unique()) > 1 for one in documents.unique())
        logprobs = tokens["policy_logprobs"].double()[here]
        sizes, ratios = tokens["losses"].double()[here].abs().log(), logprobs - tokens["old_logprobs"].double()[here]
        slopes = [_slope_within(documents, each, sizes) for each in (ratios, logprobs.abs().clamp_min(1e-30).log())]
        return cut and all(slope is not None and abs(slope) < 0.5 for slope in slopes)


def fit(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Slope of y on x through the origin, and the unexplained share of y's sum of squares."""
    if not float(x.square().sum()) or not float(y.square().sum()):
        return 0.0, 1.0
    slope = float(x @ y) / float(x.square().sum())
    return slope, float((y - slope * x).square().sum()) / float(y.square().sum())


def _left_by_shift(trusted: Tensor, suspect: Tensor, there: Tensor, shift: int) -> float:
    """Median distance of the two after a shift, relative to that without a shift."""
    shifted, as_is = (float((suspect - each)[there].abs().median()) for each in (trusted.roll(shift), trusted))
    return shifted / as_is if as_is else math.inf


def _slope_within(labels: Tensor, x: Tensor, y: Tensor) -> float | None:
    """Slope of y on x, both less their means over each label; None if x does not vary within any."""
    _, place = torch.unique(labels, return_inverse=True)
    counts = torch.bincount(place).double()
    x, y = (each - (torch.zeros_like(counts).index_add_(0, place, each) / counts)[place] for each in (x, y))
    return fit(x, y)[0] if float(x.square().sum()) > 1e-12 else None
