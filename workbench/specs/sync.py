"""Settings of how the weights of an online run's trainer reach its sampler: how late, and what of them.

Two kinds. Those of an asynchronous run (``queue``, ``mixed``, ``in_flight_tokens``, ``cache``, ``max_staleness``) are
known to the trainer: each token records the version of the weights that sampled it. Those of a weight sync that fails
(``lag``, ``late``, ``missing``, ``cast``) are not: the recorded version is the one that should have arrived.

Source: the names elsewhere, read in their documentation. ``queue``: `async_level` of prime-rl, whose step n trains on
        rollouts of the policy max(0, n - k). ``max_staleness``: `max_trajectory_age_steps` of NeMo-RL 0.8,
        `max_head_offpolicyness` of AReaL. ``in_flight_tokens``: `in_flight_weight_updates` of NeMo-RL, in-flight
        updates of PipelineRL. ``cache``: `recompute_kv_cache_after_weight_updates` of NeMo-RL, `clear_cache` of
        vLLM 0.32's `pause_generation`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from workbench.specs.groups import Group

if TYPE_CHECKING:
    from workbench.specs.run import RunSpec


class SyncSpec(Group):
    """Weights of an online run's sampler: how old they are, and what of a new version arrives.

    A version is the number of optimizer steps that made it. The schedule is a function of the settings, so a run is
    repeatable: nothing depends on which process is faster.
    """

    queue: int = Field(0, ge=0)
    """Samplings that wait between sampler and trainer: sampling n is drawn with the weights before sampling n - queue
    was trained on. 0: sampler and trainer take turns."""
    mixed: bool = False
    """Batches of online.prompts_at_once prompts are 0, 1, ..., queue samplings old, in turn, as where completions take
    unequal time; else all are queue samplings old."""
    in_flight_tokens: int | None = Field(None, ge=1)
    """The sampler takes the next version after each this many tokens of a completion, until it has that of the trainer;
    None: a completion has the version with which it began."""
    cache: Literal["kept", "recomputed"] = "kept"
    """Keys and values of the tokens before an update of in_flight_tokens: those of the older weights, or computed
    again."""
    max_staleness: int | None = Field(None, ge=0)
    """Completions with a token whose weights are more optimizer steps older than those of the first update on them are
    not trained on; None: any age. Their rewards stay in the baselines of their groups."""
    lag: int = Field(0, ge=0)
    """A sync that fails: what arrives is this many optimizer steps older than the version that is recorded."""
    late: tuple[str, ...] = ()
    """lag: modules or parameters that are late, by parts of their names such as layers.1 or q_proj; (): all."""
    missing: tuple[str, ...] = ()
    """A sync that fails: modules, parameters or buffers that never arrive, named alike. The sampler keeps those of the
    source."""
    cast: Literal["bfloat16", "float16", "float32"] | None = None
    """A sync that fails: weights are rounded to this dtype on the way, whatever that of the sampler."""
    check: bool = False
    """Hash each tensor on both sides after every sampling, and record those that differ, by layer and how, in
    sync/stepNNNN.json."""

    @property
    def asynchronous(self) -> bool:
        """True if a token may have been sampled by older weights than those that are trained."""
        return self.queue > 0

    @model_validator(mode="after")
    def _check_settings(self) -> SyncSpec:
        rules = (
            (self.mixed and not self.queue, "mixed ages need samplings that wait; give queue"),
            (
                self.in_flight_tokens is not None and not self.queue,
                "in_flight_tokens without queue: the sampler has the newest weights from the start; give queue",
            ),
            (
                self.cache != "kept" and self.in_flight_tokens is None,
                "cache is about updates within a completion; give in_flight_tokens",
            ),
            (bool(self.late) and not self.lag, "late names what arrives lag steps late; give lag"),
        )
        for violated, rule in rules:
            if violated:
                raise ValueError(rule)
        return self


def sync_conflicts(spec: RunSpec) -> Iterator[str]:
    """Yield settings of a run that conflict with those of its sampler's weights, each with its fix."""
    sync, online, loss = spec.sync, spec.online, spec.loss
    if sync.changed and not online.on:
        yield f"sync.{sync.changed[0]} without online.task: nothing is sampled; leave it out"
    if not online.on:
        return
    if sync.max_staleness is not None:
        youngest = 0 if sync.mixed or sync.in_flight_tokens is not None else sync.queue * online.updates
        if youngest > sync.max_staleness:
            yield (
                f"sync.max_staleness = {sync.max_staleness} with sync.queue = {sync.queue} and online.updates = "
                f"{online.updates}: every completion is {youngest} optimizer steps old, so none would be trained on; "
                f"take at least {youngest}, or a shorter queue"
            )
        elif sync.queue * online.updates <= sync.max_staleness:
            yield (
                f"sync.max_staleness = {sync.max_staleness} would leave nothing out: no token is older than sync.queue "
                f"* online.updates = {sync.queue * online.updates} optimizer steps; leave it out, or take less"
            )
    if sync.in_flight_tokens is not None and spec.routing.replay == "recorded" and sync.cache == "recomputed":
        yield (
            "sync.cache 'recomputed' with routing.replay 'recorded': tokens that are fed again choose their experts "
            "again; take cache: kept"
        )
    if online.old_logprobs == "behaviour" and spec.routing.replays:
        yield (
            f"online.old_logprobs 'behaviour' with routing.replay {spec.routing.replay!r}: the old pass runs once for "
            "each version, and routes are those of one; take old_logprobs: trainer"
        )
    if online.old_logprobs == "behaviour" and not sync.asynchronous:
        yield (
            "online.old_logprobs 'behaviour' without sync.queue: every token was sampled with the trainer's weights; "
            "take trainer"
        )
    if loss.old_policy == "interpolated" and online.old_logprobs != "sampler":
        yield (
            f"loss.old_policy 'interpolated' with online.old_logprobs {online.old_logprobs!r}: the old policy is "
            "estimated from sampler and policy, and the pass that computes it would not be read; take old_logprobs: "
            "sampler"
        )
