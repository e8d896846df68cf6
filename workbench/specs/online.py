"""Settings of rollouts that a run samples from its own policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from workbench.specs.groups import DataSpec, Group

if TYPE_CHECKING:
    from workbench.specs.run import RunSpec


class OnlineSpec(Group):
    """Rollouts sampled from the policy during the run, for a task with a checkable reward."""

    task: str | None = None
    """arithmetic, or FILE.py:NAME, a custom class (see `workbench.rollouts.task.Task`). None: rollouts come from
    data.path."""
    prompts: int = Field(16, ge=1)
    """Prompts of a sampling."""
    # as num_generations of TRL 1.16's GRPOConfig
    answers: int = Field(8, ge=1)
    """Completions of each prompt; they are a group."""
    # the distribution of the model itself, as in TRL and verl
    temperature: float = Field(1.0, gt=0)
    """Divides the sampler's logits. The trainer's are divided by policy.temperature, which defaults to this."""
    top_k: int | None = Field(None, ge=1)
    """The sampler draws from this many most probable tokens; None: from all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """The sampler draws from the smallest set of most probable tokens with this probability; 1: from all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """The sampler draws from tokens with this share of the largest probability at least; 0: from all."""
    truncation_order: Literal["transformers", "vllm"] = "transformers"
    """Order of the three, as an engine has it: top_k, top_p, min_p; or min_p, top_k, top_p. Each sees what those before
    it left."""
    sampler_logprobs: Literal["raw", "scaled", "truncated"] | None = None
    """Quantity that the sampler reports: log-probabilities before the temperature, after it, or in the truncated
    support, which a run converts to its own or refuses. None: truncated if it truncates, else scaled."""
    # the longest document of the shipped rollout dataset, prompt included, has 38 tokens
    max_new_tokens: int = Field(64, ge=1)
    """Length limit of a completion."""
    updates: int = Field(1, ge=1)
    """Optimizer steps on the completions of one sampling. Each takes data.documents_per_step of them, in order and
    cyclically; all of them if that is left out."""
    sampler_precision: Literal["float64", "float32", "bfloat16", "float16"] | None = None
    """Of the sampler's weights and activations; None takes that in which the run computes."""
    old_logprobs: Literal["trainer", "sampler", "behaviour"] = "trainer"
    """Source of the old policy's log-probabilities: the trainer, in a forward pass before the first update; the
    sampler; or, for behaviour, the trainer with the weights that sampled each token (sync.queue)."""
    prompts_at_once: int = Field(8, ge=1)
    """Prompts whose completions are sampled in one batch. Batches, and not prompts, are assigned to ranks, so that they
    are the same in every layout. A rank without a batch waits for the others, no longer than timeout_s."""

    @property
    def on(self) -> bool:
        """True if the run samples its own rollouts."""
        return self.task is not None

    @property
    def truncates(self) -> bool:
        """True if the sampler draws from less than the whole vocabulary."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0

    @property
    def documents(self) -> int:
        """Completions of a sampling."""
        return self.prompts * self.answers

    @model_validator(mode="after")
    def _check_task(self) -> OnlineSpec:
        if not self.on and self.changed:
            raise ValueError(
                f"{', '.join(self.changed)} without a task, which turns online rollouts on; give online.task, "
                "such as arithmetic"
            )
        if "truncation_order" in self.changed and not (self.top_p < 1 and self.min_p):
            raise ValueError("truncation_order matters where both top_p and min_p truncate; leave it out")
        return self


_NOT_SAMPLED = {
    "gae": "critic values",
    "vapo": "critic values",
    "gdpo": "reward components",
    "remax": "rewards of greedy completions",
    "optimal_token_baseline": "squared probabilities",
}
"""Advantage estimators that need more than rewards -> the inputs that they need."""


def online_conflicts(spec: RunSpec) -> Iterator[str]:
    """Yield settings that conflict with online rollouts, each with its fix."""
    data, online, every = spec.data, spec.online, spec.record.checkpoint_every
    if data.path != DataSpec().path:
        yield f"data.path = {data.path!r} would not be read: online.task samples the rollouts; leave one of them out"
    if data.advantages.name == "recorded":
        yield "a task gives rewards and no advantages; name an estimator in data.advantages, such as {name: grpo}"
    if data.documents_per_step is not None and data.documents_per_step > online.documents:
        yield (
            f"data.documents_per_step = {data.documents_per_step} is more than a sampling has ({online.prompts} "
            f"prompts with {online.answers} completions); a step takes each document at most once"
        )
    if spec.loss.needs_pairs and online.answers != 2:
        yield f"loss {spec.loss.name!r} compares pairs, and online.answers = {online.answers}; take answers: 2"
    elif data.documents_per_step is not None and data.documents_per_step * online.updates < online.documents:
        yield (
            f"online.updates = {online.updates} of data.documents_per_step = {data.documents_per_step} train on "
            f"{online.updates * data.documents_per_step} of the {online.documents} completions of a sampling, and "
            "never on the others; take more updates or documents, or sample less"
        )
    together = data.keep_groups or spec.loss.needs_pairs
    if together and data.documents_per_step is not None and data.documents_per_step % online.answers:
        yield (
            f"data.documents_per_step = {data.documents_per_step} splits groups of {online.answers} completions, "
            "which must share a row; take a multiple of online.answers"
        )
    if missing := _NOT_SAMPLED.get(data.advantages.name):
        yield (
            f"data.advantages {data.advantages.name!r} needs {missing}, which online runs do not produce; take an "
            "estimator of rewards, such as grpo or rloo"
        )
    elif online.answers == 1 and data.advantages.name not in ("recorded", "reinforce_plus_plus"):
        yield (
            f"one completion per prompt is no group, and data.advantages {data.advantages.name!r} would be 0 "
            "everywhere; take more online.answers, or reinforce_plus_plus"
        )
    if spec.frozen_clip is not None:
        yield "frozen_clip takes decisions of another run, which has other tokens; leave it out"
    yield from (
        f"fault {name!r} does nothing where advantages are computed before a step's rows; plant it in a run "
        "on a rollout dataset"
        for name in spec.faults
        if name in ("baseline_per_micro_batch", "whitening_per_rank")
    )
    if every is not None and every % online.updates:
        yield (
            f"record.checkpoint_every = {every} lies between samplings, which come every {online.updates} steps; "
            "take a multiple of online.updates"
        )
