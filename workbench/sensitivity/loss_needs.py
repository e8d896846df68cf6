"""Facts that faults need of a loss, of advantages and of an optimizer, and of what a clean run has met."""

from __future__ import annotations

from collections.abc import Callable

from workbench.rollouts.advantages.registry import WITHOUT_BASELINE
from workbench.sensitivity.data_needs import VARIED_LENGTHS
from workbench.sensitivity.facts import SAME, Facts
from workbench.sensitivity.need import Need

CLIPPED = Need("no token is clipped", lambda f: f.observed.clipped > 0, "other old log-probabilities", True)
CLIPPED_BELOW = Need(
    "no token is clipped at the lower bound that a bound of epsilon would free",
    lambda f: (
        (low := getattr(f.spec.loss.surrogate, "clip_low", 0.5)) != 0.5 and f.observed.ratio_below > min(low, 1 - low)
    ),
    "other old log-probabilities",
    True,
)
OWN_CLIP = Need("clip decisions are those of another run", lambda f: f.spec.frozen_clip is None)
MOVED = Need(
    "the ratio is 1 in every step", lambda f: f.observed.old_distance > SAME, "other old log-probabilities", True
)


def _clips(factor: Callable[[Facts], float]) -> Need:
    """A norm, or one that is too large by a factor, over the clip: below it a wrong norm changes no weight."""

    def over(facts: Facts) -> bool:
        bound = facts.spec.optimizer.max_grad_norm
        return bound is not None and facts.observed.largest_norm * factor(facts) > bound

    return Need("no gradient norm is over the clip", over, "a clip of the gradient norm", True)


CLIPS = _clips(lambda f: 1.0)
CLIPS_MICRO_BATCHES = _clips(lambda f: max(len(step.rows) for step in f.steps) / f.spec.layout.dp)
CLIPS_REPLICAS = _clips(lambda f: f.spec.layout.tp**0.5)
CLIPS_EXPERTS = _clips(lambda f: (f.spec.layout.dp * f.spec.layout.cp / f.spec.layout.ep) ** 0.5)

_RATIO_KINDS_WITHOUT_OLD = ("reinforce", "gpg", "on_policy", "sft", "ref_kl", "dpo")
READS_OLD = Need(
    "a loss without recorded old log-probabilities",
    lambda f: (
        f.spec.loss.old_policy == "recorded"
        and (f.spec.loss.surrogate.kind not in _RATIO_KINDS_WITHOUT_OLD or f.spec.loss.correction.kind != "none")
    ),
)
RECORDED_OLD = Need("the old policy is the current one", lambda f: f.spec.loss.old_policy == "recorded")
_DOCUMENT_KINDS = ("gspo", "gspo_token", "luspo", "gmpo", "vespo", "dpo")
READS_DOCUMENTS = Need(
    "a loss on tokens",
    lambda f: (
        f.spec.loss.surrogate.kind in _DOCUMENT_KINDS
        or getattr(f.spec.loss.surrogate, "level", "token") != "token"
        or f.spec.loss.correction.ratio not in ("none", "token", "given")
    ),
    "one ratio for each document",
)
READS_SAMPLER = Need(
    "no correction for the sampler",
    lambda f: (
        f.any_step(lambda s: s.has_sampler)
        and (
            f.spec.loss.correction.kind != "none"
            or getattr(f.spec.loss.surrogate, "anchor", "old") == "sampler"
            or (f.spec.loss.kl.coefficient != 0 and f.spec.loss.kl.against == "sampler")
        )
    ),
    "truncated importance sampling",
)


def _denominator(*names: str, change: str = "") -> Need:
    return Need(f"the denominator is not {' or '.join(names)}", lambda f: f.spec.loss.denominator in names, change)


NO_TOKEN_MEAN = Need("the denominator is token already", lambda f: f.spec.loss.denominator != "token")
TOKEN_MEAN = _denominator("token", change="a mean over tokens")
CONSTANT = _denominator("constant", change="a constant denominator")
DOCUMENT_SUM = _denominator("document_sum", change="a mean of sums over documents")
COUNTS_DOCUMENTS = _denominator("document", "document_sum", "constant", change="a mean over documents")
ROLLOUT = _denominator("rollout", change="a mean over rollouts")


def of_kind(kind: str) -> Need:
    """Return the need of a surrogate of one kind."""
    return Need(f"the loss is not {kind}", lambda f: f.spec.loss.surrogate.kind == kind, f"loss {kind}")


AUXILIARY = Need(
    "no auxiliary loss",
    lambda f: bool(f.spec.loss.squared_logit_coefficient or f.spec.loss.mean_squared_logit_coefficient),
    "an auxiliary loss",
)
PREDICTS = Need("no prediction of further tokens", lambda f: f.spec.prediction.on)
NOTES_ROUTES = Need("no routes that are noted", lambda f: f.spec.routing.on)
SMOOTHED = Need("no label smoothing", lambda f: f.spec.loss.label_smoothing != 0)
LIKELIHOOD = Need("no likelihood term", lambda f: f.spec.loss.positive_nll_coefficient != 0, "loss vapo")
ENTROPY = Need("no entropy bonus", lambda f: f.spec.loss.entropy_coefficient != 0)
KL = Need("no KL penalty", lambda f: f.spec.loss.kl.coefficient != 0, "a KL penalty")
SCORE = Need("a penalty without its score", lambda f: f.spec.loss.kl.gradient == "score", "a penalty with its score")
CLAMPED_KL = Need("no clamp of the penalty", lambda f: f.spec.loss.kl.input_clamp is not None, "a clamped penalty")
ODD_KL = Need("an even estimator", lambda f: f.spec.loss.kl.estimator != "k2")
POLICY_TERM = Need(
    "every advantage is 0",
    lambda f: not f.spec.loss.surrogate.reads_advantages or f.any_step(lambda s: s.any_advantage),
)
LOGPROB_TERM = Need(
    "every advantage is 0, and no other term reads log-probabilities",
    lambda f: any(need.holds(f) for need in (POLICY_TERM, KL, LIKELIHOOD, AUXILIARY, SMOOTHED, PREDICTS)),
)
MEAN_TERM = Need(
    "every advantage is 0, and no other term is divided by the tokens of the step",
    lambda f: any(need.holds(f) for need in (POLICY_TERM, KL, ENTROPY, AUXILIARY, SMOOTHED, PREDICTS)),
)
COTANGENTS = Need(
    "all tokens of a rank's row weigh the same",
    lambda f: (
        (f.spec.loss.surrogate.reads_advantages and f.any_row(lambda r: r.varied_shards > 0))
        or (
            f.spec.loss.surrogate.kind not in _RATIO_KINDS_WITHOUT_OLD
            and f.observed.old_distance > f.resolution
            and POLICY_TERM.holds(f)
        )
        or f.spec.loss.kl.coefficient != 0
        or (f.spec.loss.denominator != "token" and VARIED_LENGTHS.holds(f))
    ),
    observed=True,
)
DOCUMENT_GRADIENT = Need(
    "no gradient through a sum over a document",
    lambda f: (
        f.spec.loss.surrogate.kind in {*_DOCUMENT_KINDS} - {"gspo_token"}
        or getattr(f.spec.loss.surrogate, "level", "token") != "token"
    ),
    "one ratio for each document",
)
UNLIKE_RATIOS = Need(
    "each part of a document has the gradient that the ratio of the whole gives it",
    lambda f: f.observed.ratios_of_parts > f.resolution,
    "other old log-probabilities",
    True,
)
TOKEN_CORRECTION = Need(
    "a correction without a weight of tokens",
    lambda f: f.spec.loss.correction.ratio == "token",
    "truncated importance sampling",
)
DOCUMENT_MEAN_CORRECTION = Need(
    "a correction without a mean over documents",
    lambda f: f.spec.loss.correction.ratio == "document_mean",
    "a mean over documents in the correction",
)
COUNTS_SURVIVORS = Need(
    "the denominator does not count survivors",
    lambda f: f.spec.loss.correction.denominator == "survivors",
    "icepop with narrow bounds",
)


def _rejects(facts: Facts) -> bool:
    """True if a correction has a token whose weight old / sampler is outside its bounds."""
    low, high = facts.spec.loss.correction.ratio_low, facts.spec.loss.correction.ratio_high
    return facts.any_step(
        lambda s: (low is not None and s.least_weight < low) or (high is not None and s.largest_weight > high)
    )


REJECTED = Need("no token is rejected", _rejects, "another sampler")
DOCUMENT_ADVANTAGE = Need(
    "each token keeps its advantage", lambda f: getattr(f.spec.loss.surrogate, "advantage_level", "") == "document"
)
CHUNKED = Need(
    "the head is not chunked",
    lambda f: f.spec.policy.logprobs == "chunked" or f.spec.policy.fused_loss,
    "a chunked head",
)
UNFUSED = Need("a fused head, which computes trained tokens only", lambda f: not f.spec.policy.fused_loss)


def _advantages(missing: str, test: Callable[[str], bool], change: str) -> Need:
    return Need(missing, lambda f: test(f.spec.data.advantages.name), change)


ESTIMATED = _advantages("recorded advantages", lambda name: name != "recorded", "advantages rloo")
GROUPED = _advantages(
    "advantages without a group", lambda name: name != "recorded" and name not in WITHOUT_BASELINE, "advantages grpo"
)
OF_GRPO = _advantages("advantages are not those of grpo", lambda name: name == "grpo", "advantages grpo")
WHITENED = _advantages(
    "advantages are not whitened over the step",
    lambda name: name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "grpo_whitened"),
    "advantages reinforce_plus_plus",
)
ADAM = Need("an optimizer without moments", lambda f: f.spec.optimizer.name == "adamw", "adamw")
WIDE_WEIGHTS = Need("weights of eight bits", lambda f: f.spec.dtypes.weights != "bfloat16")
LEARNS = Need("a learning rate of 0", lambda f: f.spec.optimizer.learning_rate > 0)
LOSS_SCALE = Need("no loss scale", lambda f: (f.spec.dtypes.loss_scale or 1.0) != 1.0)
OVERFLOW = Need("no scaled gradient overflows", lambda f: not f.observed.finite, observed=True)
