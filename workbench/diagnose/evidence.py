"""Differences between two records, step by step, without their causes.

The first step in which they differ is the most informative: until then both had the same weights. Of each step: loss,
factor and cosine of the gradient (whole, or from norms alone), parameters and tokens that differ, metrics that differ.

Letters: S tokens of the source batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.diagnose.gradient_evidence import Parameter, compare_gradients, typical_norm, whole_norm
from workbench.diagnose.noise import SCATTER, Noise
from workbench.diagnose.record import Record, RecordedStep, shared_tokens, trained_in_both, whole
from workbench.records.certificate import check_certificate
from workbench.records.integrity import check_gradients

ARBITRARY = 1.0
"""At this relative tolerance a gradient may be any other."""
EXACTLY_SAME = 0.1
"""If more tokens than this share are bitwise identical, the tolerance of the others is a hundredth."""
PARTS = ("loss", "gradient", "metrics", "tokens")
TOKEN_VALUES = (
    *("policy_logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs"),
    *("entropy_nats", "ratios", "trained", "clipped", "advantages", "rewards", "targets", "positions"),
)
OWN = (
    *("advantage", "clip", "correction", "documents", "entropy", "gradient", "kl", "length", "logit", "logprob"),
    *("loss", "ratio", "reward", "sampler", "segments", "tokens"),
)
"""First words of the workbench's own metric keys, ``loss/policy/sum``. The keys of other trainers may be of a
micro-batch, or smoothed: alone they are no difference."""


@dataclass(frozen=True)
class StepEvidence:
    """One step of both records.

    Attributes:
        losses: trusted and suspect; None where one is unknown.
        loss_same: within noise; None if unknown.
        parameters: by name; {} if no gradient was recorded.
        factor: of the whole gradient: its projection, or the median ratio of norms.
        cosine: of the whole gradient; None if only norms are known.
        residue: ||g_b - factor g_a|| / ||g_b||; from norms the greatest deviation of a ratio from the factor.
        gradient_same: within noise; None if unknown, or zero in both.
        metrics: those that differ, trusted and suspect.
        compared_metrics: number of metrics compared.
        foreign_metrics: those with other keys than the workbench's that differ.
        tokens: for each per-token value, [S] bool where it differs, of the tokens that train in both.
        not_finite: values of the suspect that are not finite although the trusted ones are.
        silent: parts that both have and that are zero in both, within noise: their agreement proves nothing.
    """

    number: int
    noise: Noise
    losses: tuple[float, float] | None = None
    loss_same: bool | None = None
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    factor: float | None = None
    cosine: float | None = None
    residue: float | None = None
    gradient_same: bool | None = None
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    compared_metrics: int = 0
    foreign_metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    not_finite: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()

    @property
    def known(self) -> tuple[str, ...]:
        """Parts that both records have."""
        gradient = self.gradient_same is not None or "gradient" in self.silent
        known = (self.losses is not None, gradient, self.compared_metrics, self.tokens)
        return tuple(itertools.compress(PARTS, known))

    @property
    def telling(self) -> tuple[str, ...]:
        """Parts that both records have and whose agreement is informative."""
        return tuple(part for part in self.known if part not in self.silent)

    @property
    def differs(self) -> tuple[str, ...]:
        """Parts that differ."""
        if self.not_finite:
            return PARTS
        tokens = any(bool(where_S.any()) for where_S in self.tokens.values())
        off = (self.loss_same is False, self.gradient_same is False, self.metrics, tokens)
        return tuple(itertools.compress(PARTS, off))

    @property
    def parallel(self) -> bool:
        """True if one factor explains the whole gradient."""
        return self.residue is not None and self.residue <= max(
            1e-7, (2 - self.noise.same_forward) * self.noise.gradient
        )

    def token_same(self, name: str) -> bool | None:
        """True if a per-token value is the same everywhere; None if unknown."""
        return None if name not in self.tokens else not bool(self.tokens[name].any())


@dataclass(frozen=True)
class Evidence:
    """Comparison of two records.

    Attributes:
        steps: those that both have.
    """

    trusted: Record
    suspect: Record
    steps: tuple[StepEvidence, ...]

    @property
    def first(self) -> StepEvidence:
        """The first step that differs, or the first of all."""
        return next((step for step in self.steps if step.differs), self.steps[0])

    def not_recorded(self, names: Iterable[str]) -> list[str]:
        """Per-token values that one of the two records of the first step that differs does not have."""
        tokens = [whole(step.tokens) for step in self.pair]
        unused = _OF_POLICIES if all(map(_is_likelihood, tokens)) else ()
        return [name for name in names if name not in unused and any(name not in each for each in tokens)]

    @property
    def pair(self) -> tuple[RecordedStep, RecordedStep]:
        """Both records of the first step that differs."""
        number = self.first.number
        trusted, suspect = (
            next(step for step in record.steps if step.number == number) for record in (self.trusted, self.suspect)
        )
        return trusted, suspect


def compare_records(trusted: Record, suspect: Record) -> Evidence:
    """Compare two records step by step, as far as both may have the same weights.

    The last step is one in which rounding flipped so many clip decisions that a right gradient may be any other:
    weights after it differ by a whole step.

    Raises:
        RecordError: stored gradients that do not match their recorded norms or certificate.
    """
    suspect_steps = {step.number: step for step in suspect.steps}
    pairs = [(step, suspect_steps[step.number]) for step in trusted.steps if step.number in suspect_steps]
    steps, largest = [], 0.0
    for place, (a, b) in enumerate(pairs):
        norm, largest = whole_norm(a), max(largest, whole_norm(a))
        noise = _noise(trusted, suspect, place, a, b)
        gradients = _gradients(trusted, a), _gradients(suspect, b)
        steps.append(_step(a, b, noise.as_tokens_cancel(largest / norm if norm else 1.0), gradients))
        if not noise.same_forward and noise.with_flips(_flipped(a, b)).gradient >= ARBITRARY > noise.gradient:
            break
    return Evidence(trusted, suspect, tuple(steps))


def _noise(trusted: Record, suspect: Record, place: int, a: RecordedStep, b: RecordedStep) -> Noise:
    """Tolerances of a step: narrow where all that the loss is computed from is bitwise identical, or is another number.

    What is computed from log-probabilities of other forward passes that differ by rounding is as rough as these.
    """
    tokens = shared_tokens(a, b)
    pair = trained_in_both(tokens, "policy_logprobs")
    same = pair is not None and len(pair[0]) > 0 and torch.equal(pair[0].double(), pair[1].double())
    noise = Noise.between(trusted.context, suspect.context, place, same_forward=same)
    if not same:
        return noise
    if any(_rounded(tokens, name, noise) for name in other_forwards(tokens)):
        return Noise.between(trusted.context, suspect.context, 0)  # equal policies: no weight has parted yet
    of_workbench = trusted.of_workbench and suspect.of_workbench  # their inputs are all recorded
    known = of_workbench or _rounded(tokens, "losses", noise) is False
    return noise if known else noise.with_inputs_rounded(critic=all(map(_of_critic, tokens)))


def other_forwards(tokens: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]) -> list[str]:
    """Per-token values that another forward pass than the policy's gives, or what is computed from it.

    Ratios are such where what they divide by was not noted, advantages where a critic gives each token its own.
    """
    names = ["old_logprobs", "ref_logprobs", "sampler_logprobs"]
    if not all("old_logprobs" in each for each in tokens):
        names.append("ratios")
    if all(_of_critic(each) for each in tokens):
        names += ["advantages", "rewards"]
    return [name for name in names if all(name in each for each in tokens)]


def _of_critic(tokens: Mapping[str, Tensor]) -> bool:
    """True if advantages vary within documents."""
    if not {"advantages", "documents", "trained"} <= set(tokens) or not bool(tokens["trained"].any()):
        return False
    here = tokens["trained"].bool()
    documents, values = tokens["documents"][here], tokens["advantages"].double()[here]
    most = torch.full((int(documents.max()) + 1,), -math.inf, dtype=torch.float64)
    least = -most
    most.scatter_reduce_(0, documents.clamp_min(0).long(), values, "amax")
    least.scatter_reduce_(0, documents.clamp_min(0).long(), values, "amin")
    return bool((most > least).any())


def _rounded(tokens: tuple[Mapping[str, Tensor], Mapping[str, Tensor]], name: str, noise: Noise) -> bool | None:
    """True if a value differs in tokens that train in both, and by no more than rounding; None if it was not noted."""
    if (pair := trained_in_both(tokens, name)) is None or not len(pair[0]):
        return None
    one, other = (values.double() for values in pair)
    apart = (one - other).abs() / (1 + one.abs())
    scatter = float(apart.square().mean().sqrt())
    return 0 < scatter <= noise.other_nats / SCATTER and bool((apart <= noise.other_nats).all())


def _gradients(record: Record, step: RecordedStep) -> Mapping[str, Tensor]:
    """The stored gradients of a step, checked against its certificate if there is one, and else against their norms."""
    gradients = whole(step.gradients)
    where = f"record {record.name or 'without a name'}: tensors/step{step.number:04d}.gradients"
    if gradients and step.certificate is not None:
        check_certificate(gradients, step.certificate, where=where)
    elif gradients:
        check_gradients(gradients, step.gradient_norms, where=where)
    return gradients


def _step(
    a: RecordedStep, b: RecordedStep, noise: Noise, gradients: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
) -> StepEvidence:
    tokens = _tokens(a, b, noise)
    if not noise.same_forward and "policy_logprobs" in tokens and not tokens["policy_logprobs"].any():
        noise = noise.with_flips(_flipped(a, b))
    values: dict = {"number": a.number, "noise": noise}
    broken, silent = [], []
    if a.loss is not None and b.loss is not None:
        summed = _summed_size(a)
        bar = noise.loss * max(abs(a.loss), whole_norm(a), summed if noise.same_forward else 0.0)
        if not summed:  # inputs of the loss besides the log-probabilities may be rounded otherwise: a reference's
            bar = max(bar, noise.unknown_inputs * abs(a.loss))
        values |= {"losses": (a.loss, b.loss), "loss_same": abs(a.loss - b.loss) <= bar}
        if max(abs(a.loss), abs(b.loss)) <= bar:  # any other loss as small would agree as well
            silent.append("loss")
        broken += ["loss"] if math.isfinite(a.loss) and not math.isfinite(b.loss) else []
    norms = [name for name in a.gradient_norms if name in b.gradient_norms]
    broken += [
        name for name in norms if math.isfinite(a.gradient_norms[name]) and not math.isfinite(b.gradient_norms[name])
    ]
    if not broken:
        measured = compare_gradients(gradients, a, b, norms, noise)
        values |= measured or {}
        silent += ["gradient"] if measured is None else []
    parts, others = set(a.partial_metrics), set(b.partial_metrics)
    partial = parts ^ others if _same_division(a, b) else parts | others  # of the step in one run, of a part in another
    shared = [key for key in a.metrics if key in b.metrics and key not in partial]
    off = {
        key: (a.metrics[key], b.metrics[key])
        for key in shared
        if _apart(a.metrics[key], b.metrics[key], noise.metric_floor) > noise.of_metric(key)
    }
    if values.get("gradient_same") and values.get("cosine") is not None:  # a norm that differs was reported wrong
        off |= {
            f"gradient/norm/{name}": (a.gradient_norms[name], b.gradient_norms[name])
            for name in norms
            if _apart(a.gradient_norms[name], b.gradient_norms[name], typical_norm(a)) > noise.gradient
        }
    foreign = {key: pair for key, pair in off.items() if not _own(key)}
    return StepEvidence(
        **values,
        metrics={key: pair for key, pair in off.items() if key not in foreign},
        foreign_metrics=foreign,
        compared_metrics=len(shared),
        tokens=tokens,
        not_finite=tuple(broken),
        silent=tuple(silent),
    )


def _same_division(a: RecordedStep, b: RecordedStep) -> bool:
    """True if the same tokens are known to lie in the same micro-batches, so that metrics of parts are of the same."""
    one, other = (whole(step.tokens) for step in (a, b))
    return {"rows", "documents"} <= set(one) & set(other) and all(
        torch.equal(one[name], other[name])
        for name in ("rows", "documents", "targets")
        if name in one and name in other
    )


def _is_likelihood(tokens: Mapping[str, Tensor]) -> bool:
    """True if the noted loss of every trained token is its negative log-likelihood, which has no other input."""
    if not {"losses", "policy_logprobs", "trained"} <= set(tokens) or not bool(tokens["trained"].any()):
        return False
    losses, logprobs = (tokens[name].double()[tokens["trained"].bool()] for name in ("losses", "policy_logprobs"))
    return torch.allclose(losses, -logprobs, rtol=EXACTLY_SAME / 1000, atol=1e-6)


_OF_POLICIES = ("old_logprobs", "advantages")


def _own(key: str) -> bool:
    return "/" in key and key.partition("/")[0] in OWN


def _flipped(a: RecordedStep, b: RecordedStep) -> float:
    """Tokens that one of two policies clips and the other does not, as a share of those that neither clips."""
    if (pair := trained_in_both(shared_tokens(a, b), "clipped")) is None:
        return 0.0
    one, other = (clipped.bool() for clipped in pair)
    return int((one ^ other).sum()) / max(int((~one & ~other).sum()), 1)


def _summed_size(step: RecordedStep) -> float:
    """Mean absolute per-token loss: the loss itself may cancel, its rounding error does not."""
    tokens = whole(step.tokens)
    if not {"losses", "trained"} <= set(tokens) or not bool(tokens["trained"].any()):
        return 0.0
    return float(tokens["losses"].double()[tokens["trained"].bool()].abs().mean())


def _apart(a: float, b: float, floor: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    far = abs(a - b) / max(abs(a), floor)
    return math.inf if math.isnan(far) else far


def _tokens(a: RecordedStep, b: RecordedStep, noise: Noise) -> dict[str, Tensor]:
    trusted, suspect = shared_tokens(a, b)
    masked = "trained" in trusted and "trained" in suspect
    both_S = trusted["trained"].bool() & suspect["trained"].bool() if masked else None
    differing = {}
    for name in TOKEN_VALUES:
        if name not in trusted or name not in suspect or (name == "clipped" and not noise.same_forward):
            continue
        if trusted[name].dtype == torch.bool:
            differing[name] = trusted[name] ^ suspect[name]
            continue
        one_S, two_S = trusted[name].double(), suspect[name].double()
        apart_S = (one_S - two_S).abs()
        off_S = ~(apart_S <= noise.logprob_nats * (1 + one_S.abs()))
        off_S = off_S if both_S is None else off_S & both_S
        if off_S.any() and both_S is not None and float((apart_S == 0)[both_S].double().mean()) > EXACTLY_SAME:
            off_S = both_S & ~(apart_S <= noise.logprob_nats / 100 * (1 + one_S.abs()))
        few = int(off_S.sum()) <= noise.outliers * int(off_S.numel() if both_S is None else both_S.sum())
        differing[name] = torch.zeros_like(off_S) if few else off_S
    return differing
