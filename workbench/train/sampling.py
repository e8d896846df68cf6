"""Generate a rollout dataset: warm up a tiny policy, sample from it, store everything that an RL loss needs.

The policy is a stock transformers model on unpacked documents: the dataset depends on neither packing nor
sharding, which it is used to test.

Letters: T tokens of one document | G completions of a prompt | V vocabulary.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import SpecError
from workbench.policy.decoder import tiny_qwen3
from workbench.policy.precision import lift_to_float64
from workbench.policy.sampling import Completion, generate, with_completion_supports
from workbench.rollouts import files
from workbench.rollouts.advantages.groups import group_advantages
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.sampling import Sampling
from workbench.rollouts.task import ArithmeticTask, Problem

EVALUATION_SEED, PROMPT_SEED = 1, 2
"""Offsets to the seed: problems of the warm-up's evaluations, and of the rollout dataset."""


@dataclass(frozen=True)
class RolloutSettings:
    """Settings of a rollout dataset.

    Attributes:
        prompts: number of problems.
        answers: G, completions sampled for each.
        temperature: divides logits when sampling and when old and reference log-probabilities are computed.
        top_k, top_p, min_p: truncation of the sampler. Log-probabilities, of all policies, are then those within the
            truncated support, which is recorded with each token.
        seed: of the weights, the problems and the sampling.
        max_new_tokens: length limit of a completion, which may then lack its end symbol.
        success_low: the learning rate begins to fall at the first evaluation in which this share of completions
            is right...
        success_high: ...and the warm-up fails if more than this share is right at its end.
        max_warm_up_steps: the warm-up fails if the learning rate has not begun to fall by then.
        cool_down_steps: steps in which the learning rate falls to 0. The reference policy is the one half-way.
        evaluate_every: optimizer steps between evaluations.
        evaluation_problems: problems of an evaluation, with one completion each.
        documents_per_step: worked-out problems in a warm-up step.
        learning_rate: of AdamW in the warm-up.
        weight_decay: of AdamW in the warm-up.
    """

    prompts: int = 12
    answers: int = 6
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_new_tokens: int = 64
    success_low: float = 0.25
    success_high: float = 0.6
    max_warm_up_steps: int = 6000
    cool_down_steps: int = 100
    evaluate_every: int = 100
    evaluation_problems: int = 128
    documents_per_step: int = 64
    learning_rate: float = 3e-3
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        free = ("seed", "success_low", "success_high", "max_warm_up_steps", "weight_decay", "top_k", "top_p", "min_p")
        _ = self.sampling  # raises
        wrong = [f"{name}={value}" for name, value in vars(self).items() if name not in free and value <= 0]
        if not 0 <= self.success_low <= self.success_high <= 1:
            wrong.append(f"success from {self.success_low} to {self.success_high}")
        if wrong:
            raise SpecError(
                "RolloutSettings",
                found=", ".join(wrong),
                rule="counts and rates are positive, and 0 <= success_low <= success_high <= 1",
                fix="see the attributes of RolloutSettings",
            )

    @property
    def sampling(self) -> Sampling:
        """Truncation of the sampler, and what log-probabilities are of."""
        sampling = Sampling(self.top_k, self.top_p, self.min_p)
        if not sampling.truncates:
            return sampling
        return replace(sampling, sampler_logprobs="truncated", trainer_logprobs="truncated")


@dataclass(frozen=True)
class WarmUp:
    """The result of the warm-up.

    Attributes:
        reference: the policy some steps earlier.
        steps: optimizer steps taken.
        success_rate: share of right completions at the end.
        seconds: wall-clock time.
    """

    policy: Any
    reference: Any
    steps: int
    success_rate: float
    seconds: float


def warm_up(
    task: ArithmeticTask,
    settings: RolloutSettings,
    on_event: Callable[[str], None] = lambda line: None,
    *,
    policy: Any = None,
) -> WarmUp:
    """Train a policy on worked-out problems until some of its completions are right and some wrong.

    ``on_event`` is called with a line at every evaluation. ``policy`` is a `transformers` decoder in float32, trained
    in place on its device, whose evaluations batch prompts of all lengths; None: a tiny one, from the settings' seed.

    Raises:
        SpecError: the success rate overshot the window, or never reached it.
    """
    start, padded = time.perf_counter(), policy is not None
    policy = tiny_qwen3(task.vocab_size, seed=settings.seed) if policy is None else policy
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.98), weight_decay=settings.weight_decay)
    # Seeds of these problems are far from those of evaluations and of the dataset.
    problems = (p for at in itertools.count(1_000_003 * (settings.seed + 1)) for p in task.problems(at, 4096))
    generator = torch.Generator(policy.device).manual_seed(settings.seed)

    def train(step: int, learning_rate: float) -> float:
        documents = [next(problems) for _ in range(settings.documents_per_step)]
        return _supervised_step(policy, optimizer, task, documents, learning_rate * min(1.0, step / 100))

    def evaluate(step: int, loss: float) -> float:
        rate = _success_rate(policy, task, settings, generator, padded)
        on_event(f"warm-up step {step}: loss {loss:.3f} nats, {rate:.0%} right, {time.perf_counter() - start:.0f} s")
        return rate

    for step in range(1, settings.max_warm_up_steps + 1):
        loss = train(step, settings.learning_rate)
        if step % settings.evaluate_every == 0 and evaluate(step, loss) >= settings.success_low:
            break
    else:
        raise SpecError(
            f"warm up to a success rate of {settings.success_low}",
            found=f"less after {settings.max_warm_up_steps} steps",
            rule="some completions are right and some wrong",
            fix="allow more warm-up steps",
        )
    reference = policy
    for cool in range(1, settings.cool_down_steps + 1):
        if cool == settings.cool_down_steps // 2:
            reference = copy.deepcopy(policy)
        loss = train(step + cool, settings.learning_rate * (1 - cool / settings.cool_down_steps))
    rate = evaluate(step + settings.cool_down_steps, loss)
    if rate > settings.success_high:
        raise SpecError(
            f"warm up to a success rate of at most {settings.success_high}",
            found=f"{rate}",
            rule="some completions are right and some wrong, so that groups have advantages",
            fix="evaluate more often, cool down in fewer steps, or take a smaller success_low",
        )
    return WarmUp(policy, reference, step + settings.cool_down_steps, rate, time.perf_counter() - start)


def _supervised_step(
    policy: Any,
    optimizer: torch.optim.Optimizer,
    task: ArithmeticTask,
    problems: Sequence[Problem],
    learning_rate: float,
) -> float:
    """One step on the mean negative log-probability, in nats, of the tokens of the solutions."""
    prompts = [task.encode(problem.prompt) for problem in problems]
    documents = [p + task.encode(problem.solution) for p, problem in zip(prompts, problems, strict=True)]
    longest = max(map(len, documents))
    tokens = torch.tensor([d + [task.pad_id] * (longest - len(d)) for d in documents], device=policy.device)
    targets = tokens[:, 1:].clone()
    for target, prompt, document in zip(targets, prompts, documents, strict=True):
        target[: len(prompt) - 1] = target[len(document) - 1 :] = -100
    # Padding is on the right, where causal attention hides it from every token.
    logits = policy(input_ids=tokens[:, :-1], use_cache=False).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def _success_rate(
    policy: nn.Module, task: ArithmeticTask, settings: RolloutSettings, generator: torch.Generator, padded: bool
) -> float:
    problems = task.problems(settings.seed + EVALUATION_SEED, settings.evaluation_problems)
    prompts = [problem.prompt for problem in problems]
    completions = sample(policy, task, prompts, settings, generator, padded=padded)
    rewards = [task.reward(p, task.decode(c.tokens)) for p, c in zip(prompts, completions, strict=True)]
    return sum(reward == 1.0 for reward in rewards) / len(rewards)


def sample(
    policy: nn.Module,
    task: ArithmeticTask,
    prompts: Sequence[str],
    settings: RolloutSettings,
    generator: torch.Generator,
    *,
    padded: bool = False,
) -> list[Completion]:
    """Sample one completion per prompt: in batches of equal prompt length, or with ``padded`` all at once."""

    def choose(logprobs_NV: Tensor, place: int) -> Tensor:
        return torch.multinomial(logprobs_NV.exp(), 1, generator=generator)[:, 0]

    completions: dict[int, Completion] = {}
    encoded = [task.encode(prompt) for prompt in prompts]
    for lengths in [set(map(len, encoded))] if padded else [{length} for length in sorted(set(map(len, encoded)))]:
        members = [index for index, tokens in enumerate(encoded) if len(tokens) in lengths]
        sampled = generate(
            policy,
            [encoded[index] for index in members],
            choose,
            temperature=settings.temperature,
            max_new_tokens=settings.max_new_tokens,
            end_ids=task.end_ids,
            sampling=settings.sampling,
        )
        completions |= dict(zip(members, sampled, strict=True))
    return [completions[index] for index in range(len(prompts))]


@torch.no_grad()
def document_logprobs(
    model: nn.Module,
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    temperature: float,
    supports: Sequence[Sequence[int]] = (),
) -> Tensor:
    """Log-probabilities of all completion tokens, from one forward pass over the whole document.

    ``supports`` are the tokens over which each is normalized; none: the vocabulary.

    Shapes: P prompt and C completion tokens -> [C], in the model's dtype.
    Units:  nats.
    """
    logits_TV = model(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False).logits[0]
    logits_CV = logits_TV[len(prompt) - 1 : -1] / temperature
    if supports:
        outside_CV = torch.ones_like(logits_CV, dtype=torch.bool)
        for outside_V, ids in zip(outside_CV, supports, strict=True):
            outside_V[list(ids)] = False
        logits_CV = logits_CV.masked_fill(outside_CV, -torch.inf)
    logprobs_TV = torch.log_softmax(logits_CV, dim=-1)
    return logprobs_TV.gather(1, torch.tensor(completion)[:, None])[:, 0]


def sample_batch(
    warmed: WarmUp, task: ArithmeticTask, settings: RolloutSettings
) -> tuple[RolloutBatch, dict[str, Any]]:
    """Sample completions, score them and build one batch; return it with its summary statistics."""
    problems = task.problems(settings.seed + PROMPT_SEED, settings.prompts)
    prompts = [problem.prompt for problem in problems for _ in range(settings.answers)]
    generator = torch.Generator().manual_seed(settings.seed + PROMPT_SEED)
    completions = sample(warmed.policy, task, prompts, settings, generator)
    rewards_N = torch.tensor(
        [task.reward(prompt, task.decode(c.tokens)) for prompt, c in zip(prompts, completions, strict=True)]
    )
    group_ids_N = torch.arange(settings.prompts).repeat_interleave(settings.answers)
    advantages_N = group_advantages(rewards_N, group_ids_N)

    # The dataset has the float64 values, rounded once; the error of float32 is measured and not stored.
    policy64, reference64 = (lift_to_float64(copy.deepcopy(m)) for m in (warmed.policy, warmed.reference))
    documents: list[dict[str, Any]] = []
    precision_error = sampler_error = 0.0
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        tokens = task.encode(prompt)

        def logprobs(model: nn.Module, tokens: list[int] = tokens, completion: Completion = completion) -> Tensor:
            supports = completion.supports
            return document_logprobs(
                model, tokens, completion.tokens, temperature=settings.temperature, supports=supports
            )

        old, ref = logprobs(policy64), logprobs(reference64)
        precision_error = max(precision_error, float((logprobs(warmed.policy) - old).abs().max()))
        sampler_error = max(sampler_error, float((torch.tensor(completion.logprobs) - old).abs().max()))
        zeros = [0.0] * len(tokens)
        documents.append(
            {
                "tokens": tokens + completion.tokens,
                "loss_mask": [False] * len(tokens) + [True] * len(completion.tokens),
                "advantages": zeros + [float(advantages_N[number])] * len(completion.tokens),
                "old_logprobs": zeros + old.tolist(),
                "sampler_logprobs": zeros + completion.logprobs,
                "ref_logprobs": zeros + ref.tolist(),
                "reward": float(rewards_N[number]),
                "group_id": int(group_ids_N[number]),
            }
        )
    batch = RolloutBatch.from_documents(documents, temperature=settings.temperature)
    batch = replace(batch, sampling=settings.sampling)
    if settings.sampling.truncates:
        batch = with_completion_supports(batch, completions)
    trained = batch.loss_mask_T
    assert batch.ref_logprobs_T is not None, "every document has them"
    difference = (batch.ref_logprobs_T - batch.old_logprobs_T)[trained].double()
    grouped = rewards_N.view(settings.prompts, settings.answers)
    return batch, {
        "answers_right": int((rewards_N == 1.0).sum()),
        "answers_wrong": int((rewards_N == 0.1).sum()),
        "answers_malformed": int((rewards_N == 0.0).sum()),
        "groups_mixed": int((grouped.amax(1) > grouped.amin(1)).sum()),
        "kl_k3_policy_reference_nats": float((difference.exp() - 1 - difference).mean()),
        "float32_minus_float64_max_nats": precision_error,
        "sampler_minus_old_max_nats": sampler_error,
    }


def record_rollouts(
    folder: Path,
    settings: RolloutSettings | None = None,
    *,
    overwrite: bool = False,
    on_event: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Write ``folder/rollouts`` (the rollout dataset) and ``folder/policy`` (the model that sampled it).

    ``on_event`` is called with lines of progress.

    Returns:
        The statistics of the dataset, which are also in its manifest under ``provenance``.

    Raises:
        SpecError: the warm-up did not reach a success rate in its window.
        RecordError: a dataset exists and ``overwrite`` is False.
    """
    settings = settings or RolloutSettings()
    if not overwrite:
        files.refuse_existing(folder / "rollouts")
    task = ArithmeticTask()
    threads = torch.get_num_threads()
    # One thread, so that sums, and with them the dataset, do not depend on the number of cores.
    torch.set_num_threads(1)
    try:
        warmed = warm_up(task, settings, on_event)
        batch, numbers = sample_batch(warmed, task, settings)
    finally:
        torch.set_num_threads(threads)
    numbers = {
        "warm_up_steps": warmed.steps,
        "warm_up_s": round(warmed.seconds, 1),
        "warm_up_success_rate": warmed.success_rate,
        **numbers,
    }

    # Remove the manifest first: the old dataset must become invalid before its policy is replaced.
    (folder / "rollouts" / files.MANIFEST).unlink(missing_ok=True)
    for config in (warmed.policy.config, warmed.policy.generation_config):
        config.bos_token_id, config.eos_token_id = task.start_id, task.end_id
    warmed.policy.save_pretrained(folder / "policy")
    weights = (folder / "policy" / "model.safetensors").read_bytes()
    files.save(
        batch,
        folder / "rollouts",
        provenance={
            "made_by": "workbench rollouts record",
            "task": "ArithmeticTask",
            "settings": asdict(settings),
            "numbers": numbers,
            "policy_sha256": hashlib.sha256(weights).hexdigest(),
            "versions": {"torch": torch.__version__, "transformers": warmed.policy.config.transformers_version},
        },
    )
    return numbers
