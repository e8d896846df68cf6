"""Online rollouts: sample completions of a task's prompts from the policy, score them, and build the batch of a step.

README.md has the order. `workbench.train.step` trains on them as on a rollout dataset: any loss, head, layout,
precision and correction. Neither the layout nor an interruption changes the random numbers of a prompt; weights that
differ in their last bits can change completions.

Letters: P prompts | G completions of a prompt | N = P G documents | M length limit of a completion | S sampled tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
import reprlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.metrics.step import SAMPLER_MOVED
from workbench.policy.lora import sampler_weights
from workbench.policy.model import Policy
from workbench.policy.sampling import (
    Completion,
    Sampler,
    by_uniforms,
    completion_routes,
    with_completion_supports,
)
from workbench.policy.tensor_plan import of_prediction
from workbench.rollouts.batch import Extension, RolloutBatch
from workbench.rollouts.sampling import Sampling
from workbench.rollouts.support import for_policy
from workbench.rollouts.task import Task, named_task
from workbench.sharding.collectives import all_max, all_sum
from workbench.sharding.gradients import full_weights
from workbench.sharding.mesh import Axis, Mesh
from workbench.specs.groups import AdvantageSpec, RoutingSpec
from workbench.specs.losses import LossSpec
from workbench.specs.run import RunSpec
from workbench.train import step as flow
from workbench.train.checkpoint import build_policy
from workbench.train.routes import NOTED, StepRoutes, with_routes
from workbench.train.rows import StepData, in_order, multiples

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
            for update, documents in enumerate(itertools.islice(in_order(batch, per_step), updates)):
                yield StepData(documents, batch, numbers, fresh=update == 0)
                numbers = {name: value for name, value in numbers.items() if not name.startswith("time/")}

    def sample(self, number: int) -> tuple[RolloutBatch, dict[str, float]]:
        """Sample from the current policy; return the batch, with every field that the loss needs, and its statistics.

        Collective. The batch is the same on every rank.

        Raises:
            SpecError: invalid prompts or an invalid reward.
        """
        start, online = time.perf_counter(), self.spec.online
        moved = self.sampler.load_weights(self._weights())
        prompts = list(self.task.prompts(seed_of(self.spec.seed, number), online.prompts))
        if len(prompts) != online.prompts:
            raise SpecError(
                f"{online.prompts} prompts of {online.task}",
                found=f"{len(prompts)}",
                rule="a task returns the requested number of prompts",
                fix="correct its prompts()",
            )
        encoded = [self._encoded(prompt) for prompt in prompts]
        self._check_equal_prompts(encoded)
        completions, rewards_N = self._gather(self._sample_own(number, prompts, encoded))
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
        batch = self._scored(batch)
        return batch, numbers | {
            "time/sample_ms": 1e3 * (sampled - start),
            "time/score_ms": 1e3 * (time.perf_counter() - sampled),
        }

    def _weights(self) -> dict[str, Tensor]:
        """Weights of the sampler: those of the policy, with adapters merged or not.

        The sampler is a stock decoder, without the layers that predict further tokens.
        """
        weights = full_weights(self.policy.model, self.policy.shards, self.mesh)
        weights = {name: value for name, value in weights.items() if not of_prediction(name)}
        return weights if self.policy.lora is None else sampler_weights(self.policy.lora, weights)

    # ---- sampling completions ------------------------------------------------------------------------

    def _encoded(self, prompt: str) -> list[int]:
        encoded, size = self.task.encode(prompt), self.policy.vocabulary_size
        try:
            tokens = [operator.index(token) for token in encoded]
        except TypeError as error:
            raise SpecError(
                f"tokens of the prompt {prompt!r}",
                found=f"a {type(encoded).__name__}, {reprlib.repr(encoded)}",
                rule="encode() returns a flat sequence of integers: a list, or one row of a tensor",
                fix="return tokenizer(text).input_ids, not tokenizer(text) and not a list of such lists",
            ) from error
        if not tokens or not all(0 <= token < size for token in tokens):
            raise SpecError(
                f"tokens of the prompt {prompt!r}",
                found=f"{tokens}",
                rule=f"at least one, each from 0 to {size - 1}, of the policy's own vocabulary",
                fix="correct encode() of the task, or take the model of its tokenizer",
            )
        longest, positions = len(tokens) + self.spec.online.max_new_tokens, self.sampler.positions
        self._check_row_size(prompt, longest)
        if positions is not None and longest > positions:
            raise SpecError(
                f"a completion of {self.spec.online.max_new_tokens} tokens to {prompt!r}",
                found=f"{len(tokens)} tokens of the prompt, and a model of {positions} positions",
                rule="every token of prompt and completion has a position",
                fix="lower online.max_new_tokens, or take shorter prompts",
            )
        return tokens

    def _check_row_size(self, prompt: str, longest: int) -> None:
        """Raise an error if the longest completion fits no row: it could end the run hours later."""
        data, online = self.spec.data, self.spec.online
        together = online.answers if data.keep_groups or self.spec.loss.needs_pairs else 1
        needed = multiples(self.spec.layout, self.spec.reproducible)
        padded = -(-longest // needed.document) * needed.document
        row = data.multiple_of or needed.row
        if data.micro_batch_tokens is not None and together * padded > data.micro_batch_tokens // row * row:
            raise SpecError(
                f"data.micro_batch_tokens = {data.micro_batch_tokens} for completions of up to "
                f"{online.max_new_tokens} tokens to {prompt!r}",
                found=f"{together} document(s) of up to {padded} tokens in one row, and rows in multiples of {row}",
                rule="a row holds the longest completion with its prompt, and those that it is compared with",
                fix=f"take at least {-(-together * padded // row) * row}, or lower online.max_new_tokens",
            )

    def _check_equal_prompts(self, encoded: Sequence[Sequence[int]]) -> None:
        """Raise an error unless all ranks have the same prompts: completions would be joined to the wrong ones."""
        local = seed_of(*itertools.starmap(seed_of, encoded))
        both = torch.tensor([local, -local], device=self.mesh.device)
        most = all_max(all_max(both, self.mesh["tp"]), self.mesh["dp_cp"])  # the maximum, and minus the minimum
        if int(most[0]) != -int(most[1]):
            raise SpecError(
                f"prompts of {self.spec.online.task}",
                found="others on another rank",
                rule="prompts(seed, count) returns the same for the same seed, in every process",
                fix="draw them from random.Random(seed) alone: the order of a set, hash() of a text, the "
                "time or a pid differ between processes",
            )

    def _sample_own(
        self, number: int, prompts: Sequence[str], encoded: Sequence[Sequence[int]]
    ) -> dict[int, tuple[Completion, float]]:
        """Completions and rewards of this rank's share, by document."""
        online, results = self.spec.online, {}
        rank = self.mesh["dp_cp"].rank * self.mesh["tp"].size + self.mesh["tp"].rank
        every, at_once = range(len(prompts)), online.prompts_at_once
        shares = [every[begin : begin + at_once] for begin in every[::at_once]]
        # Every rank samples, cp and tp ranks too, so that none is idle (DECISIONS.md, row 102).
        for share in shares[rank :: self.mesh.world_size]:
            uniforms_NM = torch.cat([self._uniforms(number, at) for at in share])
            completions = self.sampler.answers(
                [encoded[at] for at in share for _ in range(online.answers)],
                by_uniforms(uniforms_NM.to(self.mesh.device)),
                temperature=online.temperature,
                max_new_tokens=online.max_new_tokens,
                end_ids=self.task.end_ids,
                sampling=self.sampling,
            )
            documents = [at * online.answers + i for at in share for i in range(online.answers)]
            for document, completion in zip(documents, completions, strict=True):
                results[document] = completion, self._reward(prompts[document // online.answers], completion)
        return results

    def _uniforms(self, number: int, prompt: int) -> Tensor:
        """[G, M] random numbers of a prompt's completions."""
        # A seed per prompt: samples depend on neither the batch nor a state to save (DECISIONS.md, row 101).
        generator = torch.Generator().manual_seed(seed_of(self.spec.seed, number, prompt))
        return torch.rand(
            self.spec.online.answers, self.spec.online.max_new_tokens, generator=generator, dtype=torch.float64
        )

    def _reward(self, prompt: str, completion: Completion) -> float:
        text = self._decoded(completion.tokens)
        value = self.task.reward(prompt, text)
        try:
            reward = float(value)
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several numbers
            reward = math.nan
        if not math.isfinite(reward):
            raise SpecError(
                f"reward of the completion {text!r} to {prompt!r}",
                found=reprlib.repr(value),
                rule="a reward is a finite number",
                fix="correct reward() of the task",
            )
        return reward

    def _decoded(self, tokens: Sequence[int]) -> str:
        """Decode a completion. The policy may sample any id of its vocabulary, including ids unknown to the task."""
        try:
            return self.task.decode(tokens)
        except (LookupError, ValueError) as error:
            known = getattr(self.task, "vocab_size", None)
            unknown = [token for token in tokens if known is None or token >= known]
            if not unknown:
                raise
            task_size = "" if known is None else f" and a task of {known}"
            raise SpecError(
                f"online.task = {self.spec.online.task!r} with model.source = {self.spec.model.source!r}",
                found=f"a completion with the ids {unknown}, which decode() does not accept "
                f"({type(error).__name__}), of a policy of {self.policy.vocabulary_size} ids{task_size}",
                rule="decode() accepts every id of the policy's vocabulary",
                fix="take a task with the tokenizer of this model, or decode other ids as padding",
            ) from error

    def _gather(self, own: Mapping[int, tuple[Completion, float]]) -> tuple[list[Completion], Tensor]:
        """Gather completions and rewards on every rank: an exact sum, as each is 0 on all ranks but one."""
        online = self.spec.online
        tokens_NM = torch.zeros(online.documents, online.max_new_tokens, dtype=torch.int64)
        numbers_NM = torch.zeros(online.documents, 2 * online.max_new_tokens + 2, dtype=torch.float64)
        longest = max((len(ids) for completion, _ in own.values() for ids in completion.supports), default=0)
        if online.truncates:
            longest = int(self._over_ranks(all_max, torch.tensor(longest)))
        # Ids plus 1, so that 0 is no id; as many as the largest support has.
        supports_NMK = torch.zeros(online.documents, online.max_new_tokens, longest, dtype=torch.int64)
        for document, (completion, reward) in own.items():
            count = len(completion.tokens)
            tokens_NM[document, :count] = torch.tensor(completion.tokens)
            numbers_NM[document, :count] = torch.tensor(completion.logprobs, dtype=torch.float64)
            numbers_NM[document, -2:] = torch.tensor([count, reward], dtype=torch.float64)
            if online.truncates:
                masses = slice(online.max_new_tokens, online.max_new_tokens + count)
                numbers_NM[document, masses] = torch.tensor(completion.masses, dtype=torch.float64)
            for place, ids in enumerate(completion.supports):
                supports_NMK[document, place, : len(ids)] = torch.tensor(ids) + 1
        gathered = (tokens_NM, numbers_NM, supports_NMK) if online.truncates else (tokens_NM, numbers_NM)
        tokens_NM, numbers_NM, *more = (self._over_ranks(all_sum, local_NM) for local_NM in gathered)
        routes = self._gather_routes({number: completion for number, (completion, _) in own.items()})
        completions = []
        for document, count in enumerate(numbers_NM[:, -2].long().tolist()):
            logprobs, masses = numbers_NM[document, : 2 * online.max_new_tokens].view(2, -1)[:, :count].tolist()
            kept = [(row[row > 0] - 1).tolist() for row in more[0][document, :count]] if more else []
            tokens = tokens_NM[document, :count].tolist()
            completions.append(Completion(tokens, logprobs, kept, masses if more else [], routes.get(document)))
        return completions, numbers_NM[:, -1]

    def _gather_routes(self, own: Mapping[int, Completion]) -> dict[int, Tensor]:
        """Gather the routes of the sampler's completions on every rank, by document; {} if it notes none."""
        routers = self.sampler.routers
        if routers is None:
            return {}
        routes = {n: completion.routes_tLk for n, completion in own.items() if completion.routes_tLk is not None}
        lengths_N = torch.zeros(self.spec.online.documents, dtype=torch.int64)
        for document, of_document_tLk in routes.items():
            lengths_N[document] = len(of_document_tLk)
        lengths_N = self._over_ranks(all_sum, lengths_N)
        shape = (len(lengths_N), int(lengths_N.max()), len(routers.names), routers.chosen)
        routes_NtLk = torch.zeros(shape, dtype=torch.int64)
        for document, of_document_tLk in routes.items():
            routes_NtLk[document, : len(of_document_tLk)] = of_document_tLk
        routes_NtLk = self._over_ranks(all_sum, routes_NtLk)
        return {document: routes_NtLk[document, :length] for document, length in enumerate(lengths_N.tolist())}

    def _over_ranks(self, reduce: Callable[[Tensor, Axis], Tensor], local: Tensor) -> Tensor:
        """Reduce a tensor over all ranks that sample; on the CPU."""
        return reduce(reduce(local.to(self.mesh.device), self.mesh["tp"]), self.mesh["dp_cp"]).cpu()

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

    def _logprobs(self, policy: Policy, batch: RolloutBatch) -> Tensor:
        """Those of another policy than the trained one, by the choice of its own routers."""
        spec = self.spec.model_copy(update={"routing": RoutingSpec()})
        return document_logprobs(policy, batch, spec, self.mesh, project=self.project)

    def _scored(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the batch with the trainer's log-probabilities, if requested, and advantages."""
        if self.spec.loss.needs_pairs:
            batch = without_ties(batch)
        if self.spec.online.old_logprobs == "trainer":
            logprobs_S, routes_SLk = old_pass(self.policy, batch, self.spec, self.mesh, project=self.project)
            batch = replace(batch, old_logprobs_T=logprobs_S)
            batch = batch if routes_SLk is None else with_routes(batch, routes_SLk)
        else:  # the sampler's, as what this run compares with its own
            converted = for_policy(batch, self.spec.policy.support).sampler_logprobs_T
            assert converted is not None, "sampled completions have log-probabilities"
            batch = replace(batch, old_logprobs_T=converted)
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


def with_advantages(spec: RunSpec) -> RunSpec:
    """Return the spec for steps on documents with advantages already computed, from all that was sampled with them."""
    return spec.model_copy(update={"data": spec.data.model_copy(update={"advantages": AdvantageSpec()})})


def document_logprobs(
    policy: Policy, batch: RolloutBatch, spec: RunSpec, mesh: Mesh, *, project: Path | None = None
) -> Tensor:
    """Log-probabilities of the trained tokens of documents, bitwise equal to those of a run's own steps; 0 elsewhere.

    Documents are selected, packed, split and sent through the head as in the optimizer steps that train on them, so a
    policy with the weights of this call starts each step at a ratio of exactly 1. A document that `in_order` selects
    again keeps its first values.

    Collective. The same on every rank.

    Shapes: [S], in the order of the batch. Units: nats, at the temperature of each token, or of the policy.
    """
    return old_pass(policy, batch, spec, mesh, project=project)[0]


def old_pass(
    policy: Policy, batch: RolloutBatch, spec: RunSpec, mesh: Mesh, *, project: Path | None = None
) -> tuple[Tensor, Tensor | None]:
    """`document_logprobs`, and the routes of the same pass if the run replays them (`routing.replay: old`).

    Shapes: [S] and [S, mixtures, experts of a token], in the order of the batch.
    """
    replayed = RoutingSpec(replay="recorded") if spec.routing.replay == "recorded" else RoutingSpec()
    spec = spec.model_copy(update={"routing": NOTED if spec.routing.replay == "old" else replayed})
    spec, loss, per_step = with_advantages(spec), flow.build_loss(spec.loss, project), spec.data.documents_per_step
    steps = 1 if per_step is None else -(-batch.num_documents // per_step)
    logprobs_S: Tensor | None = None
    routes_SLk: Tensor | None = None
    missing_S = batch.loss_mask_T.clone()
    for documents in itertools.islice(in_order(batch.as_source(), per_step), steps):
        rows, totals = flow.prepare_rows(documents, spec, mesh)
        noting = StepRoutes(policy, rows, spec.routing, totals) if spec.routing.on else None
        of_step_S = flow.row_logprobs(
            policy,
            loss,
            rows,
            totals,
            num_source=batch.num_tokens,
            loss_spec=spec.loss,
            fused=spec.policy.fused_loss,
            noting=noting,
        )
        if noting is not None:
            of_step_SLk = noting.in_source_order(batch.num_tokens)
            if of_step_SLk is not None:
                routes_SLk = of_step_SLk if routes_SLk is None else torch.where(routes_SLk < 0, of_step_SLk, routes_SLk)
        logprobs_S = torch.where(missing_S, of_step_S, 0.0 if logprobs_S is None else logprobs_S)
        missing_S[documents.source_T] = False
    assert logprobs_S is not None, "a batch has documents, so there is a step"
    return logprobs_S, routes_SLk


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


def seed_of(*parts: int) -> int:
    """Return a seed derived from integers by a hash, distinct for distinct ones.

    Example:
        >>> seed_of(0, 1) == seed_of(0, 1), seed_of(0, 1) == seed_of(1, 0)
        (True, False)
    """
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7])
