"""Online rollouts: sample completions of a task's prompts from the policy, score them, and build the batch of a step.

README.md has the order. `workbench.train.step` trains on them as on a rollout dataset: any loss, head, layout,
precision and correction. Neither the layout nor an interruption changes the random numbers of a prompt; weights that
differ in their last bits can change completions.

Letters: P prompts | G completions of a prompt | N = P G documents | M length limit of a completion | S sampled tokens.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.metrics.step import SAMPLER_MOVED
from workbench.policy.model import Policy
from workbench.policy.sampling import (
    Completion,
    Sampler,
    by_uniforms,
    completion_routes,
    with_completion_supports,
)
from workbench.rollouts.batch import Extension, RolloutBatch
from workbench.rollouts.sampling import Sampling
from workbench.rollouts.support import for_policy
from workbench.rollouts.task import Task, named_task
from workbench.rollouts.versions import STALENESS, VERSION, with_versions, without_stale
from workbench.specs.losses import LossSpec
from workbench.specs.mixtures import RoutingSpec
from workbench.specs.run import RunSpec
from workbench.train import step as flow
from workbench.train.checkpoint import build_policy
from workbench.train.completions import gather_completions
from workbench.train.old_pass import document_logprobs, old_pass
from workbench.train.routes import with_routes
from workbench.train.rows import StepData, in_order
from workbench.train.seeds import seed_of
from workbench.train.task_reader import TaskReader
from workbench.train.weight_sync import WeightSync

MIXED_PROMPTS = "reward/mixed_prompts/fraction"
"""Step record: share of the prompts whose completions earned different rewards, and so have an advantage."""


class Online:
    """Sampler of the policy during training.

    Every rank holds the sampler's full weights, samples completions of its share of the prompts, and gets the others'.

    Relative paths in the spec begin at ``project``; without ``task`` the spec names it.

    Example:
        >>> from workbench.sharding.mesh import single_process_mesh
        >>> spec = RunSpec(model={"source": "tiny-qwen3"}, data={"advantages": {"name": "grpo"}},
        ...                online={"task": "arithmetic", "prompts": 2, "answers": 3, "max_new_tokens": 5})
        >>> policy = make_policy(spec, single_process_mesh(), Path(), temperature=1.0)
        >>> batch, numbers = Online(spec, policy, Path()).sample(0)
        >>> batch.num_documents, batch.group_ids_N.tolist(), batch.sampler_logprobs_T is None
        (6, [0, 0, 0, 1, 1, 1], False)
    """

    def __init__(self, spec: RunSpec, policy: Policy, project: Path, *, task: Task | None = None) -> None:
        self.spec, self.policy, self.mesh = spec, policy, policy.mesh
        self.project = project
        self.task = task or named_task(spec.online.task or "", project)
        model = spec.model
        self.sampling = sampling_of(spec)
        self.sampler = Sampler(
            model.source,
            precision=spec.online.sampler_precision or spec.dtypes.compute,
            device=self.mesh.device,
            lora=policy.lora,
            routing=spec.routing.replay == "recorded",
            project=project,
            tied=model.tied,
            seed=model.seed,
        )
        self.sync = WeightSync(spec, policy, self.sampler)
        self.synced: tuple[dict[str, float], dict[str, object]] = ({}, {})
        self.reader = TaskReader(self.task, spec, policy.vocabulary_size, self.sampler.positions)
        self.reference = None
        if needs_reference(spec.loss):
            self.reference = build_policy(spec, self.mesh, project, temperature=spec.online.temperature)

    def steps(self, first: int = 0) -> Iterator[StepData]:
        """Yield the data of each optimizer step from step ``first``; sampled after the step before has finished.

        Collective. ``first`` is a multiple of ``updates``.
        """
        updates, per_step = self.spec.online.updates, self.spec.data.documents_per_step
        for number in itertools.count(first // updates):
            batch, numbers = self.sample(number)
            numbers, sync = numbers | self.synced[0], self.synced[1]
            for update, documents in enumerate(itertools.islice(in_order(batch, per_step), updates)):
                if update:
                    self.sync.note(number * updates + update)
                yield StepData(documents, batch, numbers, fresh=update == 0, sync=sync if update == 0 else {})
                numbers = {name: value for name, value in numbers.items() if not name.startswith("time/")}

    def sample(self, number: int) -> tuple[RolloutBatch, dict[str, float]]:
        """Sample from the current policy; return the batch, with every field that the loss needs, and its statistics.

        Collective. The batch is the same on every rank.

        Raises:
            SpecError: invalid prompts or an invalid reward.
        """
        start, online = time.perf_counter(), self.spec.online
        self.sync.note(self.sync.schedule.trained(number))
        moved = self.sync.deliver(self.sync.schedule.begin(number, 0))
        prompts = self.reader.prompts(number)
        encoded = [self.reader.encoded(prompt) for prompt in prompts]
        self.reader.check_equal(encoded, self.mesh)
        own = self._sample_own(number, prompts, encoded)
        self.synced = self.sync.report()
        completions, rewards_N = gather_completions(own, online, self.sampler.routers, self.mesh)
        if not all(math.isfinite(logprob) for completion in completions for logprob in completion.logprobs):
            raise SpecError(
                f"sampling {number}, from the policy after {number * online.updates} steps",
                found="log-probabilities that are not finite",
                rule="log-probabilities of sampled tokens are finite",
                fix="lower optimizer.learning_rate, or set optimizer.max_grad_norm; gradient/norm/global "
                "in metrics.jsonl shows since when, and the newest checkpoint is from before",
            )
        sampled = time.perf_counter()
        batch = self._batch(encoded, completions, rewards_N)
        numbers = describe(batch, self.task.right_reward, online.answers)
        if moved is not None:
            numbers[SAMPLER_MOVED] = moved
        if self.spec.sync.asynchronous:
            batch, ages = self._with_versions(number, batch)
            numbers |= ages
        batch = self._scored(batch)
        return batch, numbers | {
            "time/sample_ms": 1e3 * (sampled - start),
            "time/score_ms": 1e3 * (time.perf_counter() - sampled),
        }

    # ---- sampling completions ------------------------------------------------------------------------

    def _sample_own(
        self, number: int, prompts: Sequence[str], encoded: Sequence[Sequence[int]]
    ) -> dict[int, tuple[Completion, float]]:
        """Completions and rewards of this rank's share, by document."""
        online, results = self.spec.online, {}
        rank = self.mesh["dp_cp"].rank * self.mesh["tp"].size + self.mesh["tp"].rank
        every, at_once = range(len(prompts)), online.prompts_at_once
        shares = list(enumerate(every[begin : begin + at_once] for begin in every[::at_once]))
        # Every rank samples, cp and tp ranks too, so that none is idle (DECISIONS.md, row 102).
        for index, share in shares[rank :: self.mesh.world_size]:
            self.sync.deliver(self.sync.schedule.begin(number, index))
            uniforms_NM = torch.cat([self._uniforms(number, at) for at in share])
            completions = self.sampler.answers(
                [encoded[at] for at in share for _ in range(online.answers)],
                by_uniforms(uniforms_NM.to(self.mesh.device)),
                temperature=online.temperature,
                max_new_tokens=online.max_new_tokens,
                end_ids=self.task.end_ids,
                sampling=self.sampling,
                update=self.sync.in_flight(number, index),
            )
            documents = [at * online.answers + i for at in share for i in range(online.answers)]
            for document, completion in zip(documents, completions, strict=True):
                results[document] = (
                    completion,
                    self.reader.reward(prompts[document // online.answers], completion.tokens),
                )
        return results

    def _uniforms(self, number: int, prompt: int) -> Tensor:
        """[G, M] random numbers of a prompt's completions."""
        # A seed per prompt: samples depend on neither the batch nor a state to save (DECISIONS.md, row 101).
        generator = torch.Generator().manual_seed(seed_of(self.spec.seed, number, prompt))
        return torch.rand(
            self.spec.online.answers, self.spec.online.max_new_tokens, generator=generator, dtype=torch.float64
        )

    # ---- building a batch ----------------------------------------------------------------------------

    def _batch(
        self, encoded: Sequence[Sequence[int]], sampled: Sequence[Completion], rewards_N: Tensor
    ) -> RolloutBatch:
        """Prompts and completions as documents. Old log-probabilities are the sampler's, advantages 0, for now."""
        online, documents = self.spec.online, []
        for number, completion in enumerate(sampled):
            prompt = list(encoded[number // online.answers])
            zeros = [0.0] * len(prompt)
            logprobs = torch.tensor(zeros + completion.logprobs, dtype=torch.float64)
            documents.append(
                {
                    "tokens": prompt + completion.tokens,
                    "advantages": 0.0,
                    "old_logprobs": logprobs,
                    "loss_mask": [0] * len(prompt) + [1] * len(completion.tokens),
                    "sampler_logprobs": logprobs,
                    "reward": rewards_N[number],
                    "group_id": number // online.answers,
                }
            )
        cut_off_N = torch.tensor([float(c.tokens[-1] not in self.task.end_ids) for c in sampled])
        batch = RolloutBatch.from_documents(documents, temperature=online.temperature)
        batch = replace(batch, sampling=self.sampling)
        if self.sampling.truncates:
            batch = with_completion_supports(batch, sampled)
        truncated = Extension(cut_off_N[batch.document_ids_T], "token", "1", "whether the sampler cut the answer off")
        batch = replace(batch, extensions={**batch.extensions, "truncated": truncated})
        return batch if self.sampler.routers is None else with_routes(batch, completion_routes(sampled))

    def _with_versions(self, number: int, batch: RolloutBatch) -> tuple[RolloutBatch, dict[str, float]]:
        """Return the batch with the version of each token, without what is too old, and statistics of ages."""
        online, schedule, versions = self.spec.online, self.sync.schedule, list[int]()
        trained_N = torch.zeros(batch.num_documents).index_add_(0, batch.document_ids_T, batch.loss_mask_T.float())
        for document, (length, trained) in enumerate(zip(batch.lengths_N.tolist(), trained_N.tolist(), strict=True)):
            share, prompt = document // online.answers // online.prompts_at_once, length - int(trained)
            versions += [schedule.version(number, share, max(0, at - prompt)) for at in range(length)]
        batch = with_versions(batch, torch.tensor(versions), schedule.trained(number))
        ages_S = batch.extensions[STALENESS].values[batch.loss_mask_T]
        numbers = {"staleness/token/mean": float(ages_S.double().mean()), "staleness/token/max": float(ages_S.max())}
        if self.spec.sync.max_staleness is not None:
            batch = without_stale(batch, self.spec.sync.max_staleness)
            left = len(batch.document_ids_T[batch.loss_mask_T].unique())
            numbers["staleness/left_out/fraction"] = 1 - left / batch.num_documents
        return batch, numbers

    def _old(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the batch with old log-probabilities of the source that the settings name."""
        source = self.spec.online.old_logprobs
        if source == "sampler":  # as what this run compares with its own
            converted = for_policy(batch, self.spec.policy.support).sampler_logprobs_T
            assert converted is not None, "sampled completions have log-probabilities"
            return replace(batch, old_logprobs_T=converted)
        if source == "behaviour":
            version_S, old_S = batch.extensions[VERSION].values, torch.zeros_like(batch.old_logprobs_T)
            for version in version_S[batch.loss_mask_T].unique().tolist():
                with self.sync.policy_at(version):
                    of_version_S = document_logprobs(self.policy, batch, self.spec, self.mesh, project=self.project)
                old_S = torch.where(version_S == version, of_version_S.to(old_S.dtype), old_S)
            return replace(batch, old_logprobs_T=old_S)
        logprobs_S, routes_SLk = old_pass(self.policy, batch, self.spec, self.mesh, project=self.project)
        batch = replace(batch, old_logprobs_T=logprobs_S)
        return batch if routes_SLk is None else with_routes(batch, routes_SLk)

    def _logprobs(self, policy: Policy, batch: RolloutBatch) -> Tensor:
        """Those of another policy than the trained one, by the choice of its own routers."""
        spec = self.spec.model_copy(update={"routing": RoutingSpec()})
        return document_logprobs(policy, batch, spec, self.mesh, project=self.project)

    def _scored(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the batch with the trainer's log-probabilities, if requested, and advantages."""
        if self.spec.loss.needs_pairs:
            batch = without_ties(batch)
        batch = self._old(batch)
        if self.reference is not None:
            batch = replace(batch, ref_logprobs_T=self._logprobs(self.reference, batch))
        # Once, of all that was sampled: baselines must not see a mini-batch (DECISIONS.md, row 103).
        return flow.compute_advantages(batch, self.spec)


def sampling_of(spec: RunSpec) -> Sampling:
    """Return the truncation of an online run's sampler, and what its log-probabilities are of."""
    online = spec.online
    return Sampling(
        online.top_k,
        online.top_p,
        online.min_p,
        online.sampler_logprobs or ("truncated" if online.truncates else "scaled"),
        "truncated" if spec.policy.support == "recorded" else "scaled",
        online.truncation_order,
    )


def needs_reference(loss: LossSpec) -> bool:
    """True if a loss uses the frozen reference policy, which is the policy at the start of the run."""
    return bool(loss.kl.coefficient and loss.kl.against == "ref") or loss.surrogate.kind in ("dpo", "ref_kl")


def without_ties(batch: RolloutBatch) -> RolloutBatch:
    """Mask pairs of completions with equal rewards, of which neither is preferred."""
    assert batch.rewards_N is not None, "sampled documents have rewards"
    rewards_P2 = batch.rewards_N.view(-1, 2)
    differ_N = (rewards_P2[:, 0] != rewards_P2[:, 1]).repeat_interleave(2)
    return replace(batch, loss_mask_T=batch.loss_mask_T & differ_N[batch.document_ids_T])


def describe(batch: RolloutBatch, right_reward: float, answers: int) -> dict[str, float]:
    """Return statistics of sampled rewards and lengths for a step record.

    The documents are grouped by prompt; ``answers`` is G.

    Units: rewards in their own; lengths in tokens of the completion; fractions of documents, or of prompts.
    """
    assert batch.rewards_N is not None, "sampled documents have rewards"
    rewards_N = batch.rewards_N.double()
    lengths_N = torch.zeros(batch.num_documents, dtype=torch.float64)
    lengths_N.index_add_(0, batch.document_ids_T, batch.loss_mask_T.double())
    cut_off_N = batch.extensions["truncated"].values[batch.positions_T == 0]
    grouped_PG = rewards_N.view(-1, answers)
    mixed_P = grouped_PG.amax(1) > grouped_PG.amin(1)
    return {
        "reward/all/mean": float(rewards_N.mean()),
        "reward/all/std": float(rewards_N.std(correction=0)),
        "reward/right/fraction": float((rewards_N == right_reward).double().mean()),
        MIXED_PROMPTS: float(mixed_P.double().mean()),
        "length/answer/mean": float(lengths_N.mean()),
        "length/answer/max": float(lengths_N.max()),
        "length/truncated/fraction": float(cut_off_N.double().mean()),
    }
