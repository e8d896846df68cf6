"""What the first step that differs says, as the questions that causes ask.

Letters: S tokens of the source batch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from workbench.diagnose.denominators import AXES, PIECES, Named, Way, names_of, pieces, reproduced, sizes, ways
from workbench.diagnose.evidence import Evidence, Parameter, StepEvidence, shared_tokens
from workbench.diagnose.places import agreement, places
from workbench.diagnose.record import RecordedStep, whole
from workbench.metrics.gradients import parameter_group, parameter_layer

ADVANTAGES = ("advantage/all/mean", "advantage/all/std", "advantage/all/min", "advantage/all/max")
"""Metrics of advantages that depend on nothing else."""
LEFT_BY_SCALING = 1e-5
"""Residue of a gradient that was multiplied with a power of two, whatever its precision, but for sums in float32."""
EXACT = 1e-5
"""A loss that is known better than this, relatively, tells one way of dividing from a hundred others."""
LARGEST_COUNT = 1e5
"""Beyond this, rounding makes any number a ratio of counts."""


@dataclass(frozen=True)
class Facts:
    """The first step that differs, and what the records say of themselves.

    Attributes:
        evidence: all steps.
    """

    evidence: Evidence

    @property
    def step(self) -> StepEvidence:
        """The first step that differs."""
        return self.evidence.first

    @cached_property
    def pair(self) -> tuple[RecordedStep, RecordedStep]:
        """Both records of it."""
        return self.evidence.pair

    @property
    def context(self) -> Mapping[str, Any]:
        """What the suspect says of itself."""
        return self.evidence.suspect.context

    @property
    def counts(self) -> Mapping[str, float]:
        """Of the step, from the suspect, or else from the trusted record, which trained the same documents."""
        return {**self.pair[0].counts, **self.pair[1].counts}

    @cached_property
    def tokens(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Per-token values of both, as far as both go."""
        return shared_tokens(*self.pair)

    # ---- does it differ ----------------------------------------------------------------------------------

    @property
    def loss_same(self) -> bool | None:
        """Whether the losses agree; None if unknown."""
        return self.step.loss_same

    @property
    def loss_shown(self) -> bool | None:
        """True if the losses agree and are not both zero within noise, which proves nothing; None if unknown."""
        return None if "loss" in self.step.silent else self.loss_same

    @property
    def gradient_same(self) -> bool | None:
        """Whether the gradients agree; None if unknown."""
        return self.step.gradient_same

    @property
    def forward_same(self) -> bool | None:
        """Whether the policy said the same of each trained token; from the metrics where no token was recorded."""
        known = self.step.token_same("policy_logprobs")
        return known if known is not None else self._metric_same("logprob/policy/mean")

    @property
    def old_same(self) -> bool | None:
        """Whether the old log-probabilities agree; from the metrics where no token was recorded."""
        known = self.step.token_same("old_logprobs")
        return known if known is not None else self._metric_same("logprob/old/mean")

    @property
    def mask_same(self) -> bool | None:
        """Whether the same tokens trained; from the metrics where no token was recorded."""
        known = self.step.token_same("trained")
        return known if known is not None else self._metric_same("tokens/trained/sum")

    @property
    def inputs_same(self) -> bool:
        """Whether nothing that a loss looks at is known to differ."""
        return False not in (self.forward_same, self.old_same, self.mask_same) and not self.metrics_off(*ADVANTAGES)

    def _metric_same(self, key: str) -> bool | None:
        there = all(key in step.metrics for step in self.pair)
        return key not in self.step.metrics if there else None

    def metrics_off(self, *beginnings: str) -> list[str]:
        """Metrics that differ and begin so."""
        return [key for key in self.step.metrics if key.startswith(beginnings)]

    # ---- the gradient as a whole -------------------------------------------------------------------------

    @cached_property
    def sizes(self) -> dict[str, tuple[float, frozenset[str]]]:
        """What a factor may come from."""
        return sizes(self.context, self.counts)

    @property
    def loss_follows(self) -> bool:
        """Whether the loss is wrong by the factor of the gradient."""
        factor, of_loss = self.step.factor, self.loss_factor
        return bool(
            self.loss_same is False and factor and of_loss and abs(of_loss / factor - 1) <= self.step.noise.gradient
        )

    @property
    def factor(self) -> float | None:
        """Of the whole gradient; the loss's if it is the same, which is rounded less."""
        return self.loss_factor if self.loss_follows and self.step.noise.same_forward else self.step.factor

    @property
    def bar(self) -> float:
        """How near a factor must be to a number to be it; what rounding did to a gradient's elements averages out."""
        noise = self.step.noise
        if self.loss_follows and noise.same_forward:
            return max(1e-6, noise.loss / 2)
        return max(1e-6, noise.gradient / (15 if noise.same_forward else 5))

    @cached_property
    def factor_names(self) -> list[Named]:
        """What the factor of the whole gradient equals, if one factor explains it."""
        factor = self.factor
        return names_of(factor, self.sizes, self.bar) if factor and factor > 0 and self.step.parallel else []

    @property
    def inexact_power(self) -> bool:
        """Whether a factor is a power of two, which rounds nothing, and yet something of the gradient was rounded."""
        factor, noise = self.step.factor, self.step.noise
        same_layout = all(self.context.get(axis) == self.evidence.trusted.context.get(axis) for axis in AXES)
        if not factor or factor <= 0 or not noise.same_forward or not same_layout or not self.scaled:
            return False
        power = math.log2(factor)
        return abs(power - round(power)) <= noise.gradient and (self.step.residue or 0.0) > LEFT_BY_SCALING

    @cached_property
    def loss_names(self) -> list[Named]:
        """What the ratio of the losses equals."""
        losses = self.step.losses
        if losses is None or not losses[0] or losses[1] / losses[0] <= 0:
            return []
        return names_of(losses[1] / losses[0], self.sizes, max(self.bar, self.step.noise.loss / 5))

    @property
    def near_name(self) -> Named | None:
        """What the factor of the gradient equals within its rounding, where the loss is known better and is not that.

        None if the loss's own factor has a name, or the gradient's has none.
        """
        known = self.step.noise.same_forward and self.scaled and self.loss_follows
        if not known or self.factor_names or self.count_ratio is not None:
            return None
        return next(iter(names_of(self.step.factor or 0.0, self.sizes, self.step.noise.gradient / 15)), None)

    @property
    def loss_factor(self) -> float | None:
        """Ratio of the losses."""
        losses = self.step.losses
        return losses[1] / losses[0] if losses and losses[0] else None

    @property
    def norm_factor(self) -> float | None:
        """Ratio of the whole gradients' norms."""
        if not self.step.parameters:
            return None
        shares = self.step.parameters.values()
        mine = sum(p.share**2 for p in shares)
        theirs = sum((p.share * p.ratio) ** 2 for p in shares if not math.isnan(p.ratio))
        return math.sqrt(theirs / mine) if mine else None

    @property
    def scaled(self) -> bool:
        """Whether one factor that is not 1 explains the whole gradient."""
        factor = self.step.factor
        return bool(self.step.parallel and factor and abs(factor - 1) > self.step.noise.gradient)

    @property
    def count_ratio(self) -> tuple[str, int, int] | None:
        """What was counted, how many there are, and how many instead explain the factor of the gradient; None if none.

        A gradient that is divided by n' where n is right is n / n' of the right one; a whole n' is hardly chance.
        """
        factor = self.factor
        if not factor or not self.scaled or not 0.1 < factor < 10:
            return None
        for name in ("trained_tokens", "documents"):
            count = self.counts.get(name)
            for other in (count / factor, count * factor) if count and count < LARGEST_COUNT else ():
                if abs(other - round(other)) <= self.bar * other < 0.05 and round(other) != count:
                    return name.replace("_", " "), int(count), round(other)
        return None

    @property
    def terms(self) -> tuple[list[str], list[str]]:
        """Terms of the loss that differ, and those that agree and are not 0."""
        a, b = self.pair
        known = [key for key in a.metrics if key.startswith("loss/") and key in b.metrics]
        off = [key for key in known if key in self.step.metrics]
        moved = {key: abs(b.metrics[key] / a.metrics[key] - 1) for key in known if a.metrics[key]}
        least = min((moved[key] for key in off if key in moved), default=math.inf)
        return off, [key for key in moved if key not in off and moved[key] <= least / 10]

    @property
    def term_hidden(self) -> bool:
        """Whether one term of the loss is wrong beside right ones, by so little that rounding hides it in the gradient.

        A loss that is reported wrong is wrong as a whole.
        """
        of_loss, (off, right) = self.loss_factor, self.terms
        return (
            bool(self.gradient_same and self.loss_same is False and of_loss and right)
            and bool([key for key in off if not key.startswith("loss/total")])
            and abs(of_loss - 1) < self.step.noise.gradient
        )

    # ---- parameters --------------------------------------------------------------------------------------

    @cached_property
    def off(self) -> dict[str, Parameter]:
        """Parameters whose gradients differ."""
        return {name: p for name, p in self.step.parameters.items() if not p.same}

    @cached_property
    def right(self) -> dict[str, Parameter]:
        """Parameters whose gradients agree."""
        return {name: p for name, p in self.step.parameters.items() if p.same}

    @property
    def clear(self) -> bool:
        """Whether parameters that differ stand out: typically thrice as far as any that agrees within noise."""
        return bool(self.off and self.right) and statistics.median(p.distance for p in self.off.values()) > 3 * max(
            p.distance for p in self.right.values()
        )

    @property
    def gone(self) -> list[str]:
        """Parameters that have a gradient in the trusted record and none in the suspect."""
        return [name for name, p in self.step.parameters.items() if p.ratio == 0]

    @cached_property
    def top_off(self) -> set[str]:
        """What differs in the highest layer in which anything does, by the last module's name.

        Backward runs from the top down, so what is above it is right, and below it everything follows.
        """
        layers = {name: parameter_layer(name) for name in self.off}
        known = [layer for layer in layers.values() if layer is not None]
        return {short(name) for name, layer in layers.items() if known and layer == max(known)}

    @cached_property
    def above_right(self) -> bool:
        """Whether something above the highest layer that differs, or in it, is right."""
        layers = [layer for name in self.off if (layer := parameter_layer(name)) is not None]
        if not layers:
            return bool(self.right)
        return any(
            parameter_group(name) in ("head",)
            or (parameter_layer(name) or 0) >= max(layers)
            or (parameter_layer(name) is None and parameter_group(name) == "norm")
            for name in self.right
        )

    def groups_off(self) -> set[str]:
        """Groups of parameters that differ."""
        return {parameter_group(name) for name in self.off}

    @property
    def all_but_embedding_scaled(self) -> float | None:
        """The factor that all parameters but the embedding share, if it is not 1 and not the embedding's; else None."""
        rest = {name: p for name, p in self.step.parameters.items() if parameter_group(name) != "embedding"}
        own = [p for name, p in self.step.parameters.items() if name not in rest]
        noise = max(1e-6, self.step.noise.gradient)
        if not own or len(rest) < 2 or any(p.cosine is None or p.cosine < 1 - noise for p in rest.values()):
            return None
        factor = statistics.median(p.ratio for p in rest.values())
        if factor <= 0 or abs(factor - 1) <= noise or any(abs(p.ratio / factor - 1) > noise for p in rest.values()):
            return None
        apart = any((p.cosine is not None and p.cosine < 1 - noise) or abs(p.ratio / factor - 1) > noise for p in own)
        return factor if apart else None

    @cached_property
    def elements(self) -> tuple[Tensor, Tensor]:
        """All elements of both gradients that are not 0 in the trusted one."""
        mine, theirs = (whole(step.gradients) for step in self.pair)
        shared = [name for name in mine if name in theirs and mine[name].shape == theirs[name].shape]
        one, two = (
            torch.cat([held[name].double().flatten() for name in shared]) if shared else torch.zeros(0).double()
            for held in (mine, theirs)
        )
        return one[one != 0], two[one != 0]

    @property
    def kept_of_earlier_step(self) -> tuple[float, float] | None:
        """How often the trusted gradient of the step before is in what the suspect's has too much, and what is left."""
        number = self.step.number
        before = next((step for step in self.evidence.suspect.steps if step.number == number - 1), None)
        if before is None or self.gradient_same is not False or self.forward_same is False:
            return None
        earlier, (mine, theirs) = whole(before.gradients), (whole(step.gradients) for step in self.pair)
        shared = [name for name in mine if name in theirs and name in earlier]
        if not shared:
            return None
        old, one, two = (
            torch.cat([held[name].double().flatten() for name in shared]) for held in (earlier, mine, theirs)
        )
        return fit(old, two - one)

    # ---- tokens ------------------------------------------------------------------------------------------

    @cached_property
    def trained(self) -> Tensor | None:
        """[S] bool, tokens that train in the trusted record."""
        return self.tokens[0]["trained"].bool() if "trained" in self.tokens[0] else None

    @cached_property
    def places(self) -> dict[str, Tensor]:
        """Places that a mistake may touch, as the suspect's layout has them."""
        if self.trained is None:
            return {}
        laid = {**self.tokens[0], **self.tokens[1]}
        return places(laid | {"trained": self.trained | laid["trained"].bool()})

    def off_tokens(self, *names: str) -> Tensor | None:
        """[S] bool, tokens of which one of these values differs; None if none was recorded."""
        there = [self.step.tokens[name] for name in names if name in self.step.tokens]
        return torch.stack(there).any(0) if there else None

    def share_off(self, name: str) -> float:
        """Share of the trained tokens of which a value differs."""
        off = self.off_tokens(name)
        if off is None or self.trained is None:
            return 0.0
        return int((off & self.trained).sum()) / max(int(self.trained.sum()), 1)

    def agree(self, place: str, *names: str) -> float:
        """How much better the tokens that differ agree with a place than with all trained tokens; 0 if unknown."""
        off = self.off_tokens(*names)
        if off is None or self.trained is None or place not in self.places:
            return 0.0
        everywhere, there = agreement(off, self.trained), agreement(off, self.places[place])
        return (there - everywhere) / (1 - everywhere) if there > everywhere else 0.0

    @property
    def lost_pieces(self) -> str:
        """What the tokens that no longer train are the whole of, where none is new; "" if they are no such pieces."""
        lost, laid = self.off_tokens("trained"), {**self.tokens[0], **self.tokens[1]}
        if (
            lost is None
            or self.trained is None
            or not bool((lost & self.trained).any())
            or bool((lost & ~self.trained).any())
        ):
            return ""
        for kind, piece in pieces(laid | {"trained": self.trained}, self.context).items():
            gone = torch.isin(piece, piece[lost]) & self.trained
            if kind != "documents" and torch.equal(gone, lost) and int(gone.sum()) < int(self.trained.sum()):
                return f"{PIECES[kind]}s"
        return ""

    @property
    def clips_documents(self) -> bool:
        """Whether the trusted policy is clipped by whole documents, as a ratio of the document has it."""
        tokens, trained = self.tokens[0], self.trained
        if trained is None or not {"clipped", "documents"} <= set(tokens):
            return False
        clipped, documents = tokens["clipped"].bool() & trained, tokens["documents"]
        several = any(int(clipped[documents == one].sum()) > 1 for one in documents[clipped].unique())
        return several and torch.equal(torch.isin(documents, documents[clipped]) & trained, clipped)

    def all_lie_in(self, place: str) -> bool:
        """Whether every trained token lies in a place, so that it cannot be told from everywhere."""
        return self.trained is not None and place in self.places and bool((self.places[place] == self.trained).all())

    def change(self, name: str = "policy_logprobs") -> tuple[Tensor, Tensor] | None:
        """A value of the tokens that train in both, as trusted, and by how much the suspect's is more."""
        if any(name not in tokens or "trained" not in tokens for tokens in self.tokens):
            return None
        both = self.tokens[0]["trained"].bool() & self.tokens[1]["trained"].bool()
        mine, theirs = (tokens[name].double()[both] for tokens in self.tokens)
        return mine, theirs - mine

    @property
    def share_moved(self) -> float:
        """Share of the tokens that another log-probability could be said of, and is.

        The first prediction of a document sees one token alone: what is rounded in positions and keys leaves it.
        """
        change = self.change()
        if change is None:
            return 0.0
        moved = change[1] != 0
        both = self.tokens[0]["trained"].bool() & self.tokens[1]["trained"].bool()
        alone = self.tokens[0].get("positions")
        here = moved if alone is None else moved[alone[both] != 1]
        return float(here.double().mean()) if len(here) else 0.0

    @cached_property
    def distributions_shifted(self) -> int | None:
        """By how many tokens the suspect's entropies are moved within documents, with other log-probabilities.

        None if they are not.
        """
        names = {"policy_logprobs", "entropy_nats", "trained", "documents"}
        if not all(names <= set(tokens) for tokens in self.tokens) or self.forward_same is not False:
            return None
        mine, theirs = self.tokens
        known, documents = mine["trained"].bool() & theirs["trained"].bool(), mine["documents"]
        for shift in (1, -1):
            there = known & known.roll(shift) & (documents.roll(shift) == documents)
            there[0 if shift > 0 else -1] = False
            if int(there.sum()) < 4:
                continue
            left = {
                name: _left_by_shift(mine[name].double(), theirs[name].double(), there, shift)
                for name in ("entropy_nats", "policy_logprobs")
            }
            if left["entropy_nats"] < 0.1 and left["policy_logprobs"] > 0.5:
                return shift
        return None

    @cached_property
    def document_values_cut(self) -> bool:
        """Whether values of tokens follow no ratio of their own, and trained tokens of a document lie on several ranks.

        A token's value is proportional to its ratio if that is its own: within a document its logarithm grows with the
        log ratio at slope 1, and with a document's ratio at slope 0.
        """
        tokens, trained = self.tokens[0], self.trained
        if trained is None or not {"losses", "old_logprobs", "policy_logprobs", "documents", "shards"} <= set(tokens):
            return False
        here = trained & (tokens["losses"] != 0)
        documents, shards = tokens["documents"][here], tokens["shards"][here]
        cut = any(len(shards[documents == one].unique()) > 1 for one in documents.unique())
        said = tokens["policy_logprobs"].double()[here]
        sizes, ratios = tokens["losses"].double()[here].abs().log(), said - tokens["old_logprobs"].double()[here]
        slopes = [_slope_within(documents, each, sizes) for each in (ratios, said.abs().clamp_min(1e-30).log())]
        return cut and all(slope is not None and abs(slope) < 0.5 for slope in slopes)

    @property
    def loss_moves_less(self) -> bool:
        """Whether the loss moves by less than a tenth of what the gradient does, each in parts of itself.

        Ratios are near 1, whatever they are ratios of; what they are differentiated by is another matter.
        """
        factor, norm, of_loss = self.step.factor, self.norm_factor, self.loss_factor
        if factor is None or norm is None or of_loss is None or self.step.cosine is None:
            return False
        return abs(of_loss - 1) < 0.1 * math.sqrt(max(1 - 2 * factor + norm**2, 0.0))

    # ---- the loss, divided otherwise ---------------------------------------------------------------------

    @cached_property
    def ways(self) -> list[Way]:
        """Ways of dividing that give the suspect's loss and are not how the trusted one divides, nearest first."""
        if self.step.losses is None:
            return []
        (a, b), context = self.pair, self.context
        bar = max(1e-9, self.step.noise.loss / (5 if self.step.noise.same_forward else 20))
        mine, right = (
            ways(step, said, exact=bar < EXACT) for step, said in ((b, context), (a, self.evidence.trusted.context))
        )
        trusted, suspect = self.step.losses
        if not right or not mine:
            return []
        values = self.tokens[0]["losses"][self.trained].double()
        if max(abs(trusted), abs(suspect)) <= self.step.noise.loss * float(values.abs().mean()):
            return []  # terms that cancel to nothing do so in every way of dividing them
        sized = 0.1 * float(values.abs().mean())  # a loss may cancel, what rounding does to its terms does not
        usual = {way.words for way in reproduced(right, trusted, bar * max(abs(trusted), sized))}
        hits = reproduced(mine, suspect, bar * max(abs(suspect), sized))
        nearest = sorted(hits, key=lambda way: abs(way.loss - suspect))
        return [way for way in nearest if way.words not in usual] if usual else []


def coarse(values: Tensor) -> str | None:
    """The lower precision in which every one of these numbers has a place; None if there is none."""
    for dtype in (torch.bfloat16, torch.float16):
        if len(values) and torch.equal(values.to(dtype).to(values.dtype), values):
            return str(dtype).removeprefix("torch.")
    return None


def short(name: str) -> str:
    """The module that a parameter belongs to: ``q_proj`` of ``model.layers.0.self_attn.q_proj.weight``."""
    parts = name.split(".")
    return parts[-2] if len(parts) > 1 and parts[-1] in ("weight", "bias") else parts[-1]


def fit(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Slope of y on x through the origin, and what share of y's squares it leaves."""
    if not float(x.square().sum()) or not float(y.square().sum()):
        return 0.0, 1.0
    slope = float(x @ y) / float(x.square().sum())
    return slope, float((y - slope * x).square().sum()) / float(y.square().sum())


def _left_by_shift(mine: Tensor, theirs: Tensor, there: Tensor, shift: int) -> float:
    """How far the second is from the first after a shift, in parts of how far it is as it stands: medians."""
    shifted, as_is = (float((theirs - each)[there].abs().median()) for each in (mine.roll(shift), mine))
    return shifted / as_is if as_is else math.inf


def _slope_within(labels: Tensor, x: Tensor, y: Tensor) -> float | None:
    """Slope of y on x, both less their means over each label; None if x does not vary within any."""
    _, place = torch.unique(labels, return_inverse=True)
    counts = torch.bincount(place).double()
    x, y = (each - (torch.zeros_like(counts).index_add_(0, place, each) / counts)[place] for each in (x, y))
    return fit(x, y)[0] if float(x.square().sum()) > 1e-12 else None
