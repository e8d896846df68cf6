"""The gap between trainer and sampler: its causes, each measured by switching it alone, and the floor that is safe.

The modules, in the order in which an attribution is built:

    settings.py        what each side states
    documents.py       the record
    quantities.py      raw, scaled and processed log-probabilities
    adapters.py        LoRA in peft's files
    gemms.py, routing.py, prefixes.py, tokenisation.py    values of single factors
    configuration.py   one way to compute the record
    computing.py       columns of log-probabilities under any configuration
    factors.py         the table of factors: read first, to add one
    search.py          the configuration under which a recorded column comes out
    sampled.py         the search on some documents of a large model
    rounding.py        stochastic arithmetic
    floor.py, alarm.py the noise of rounding, and thresholds from it
    likelihood.py      what the drawn tokens say of the distribution they were drawn from
    parts.py           parts, interactions, rest
    verdict.py         the result
"""

from __future__ import annotations

from typing import Any

from workbench.mismatch.parts import attribute_gap
from workbench.mismatch.settings import sides
from workbench.mismatch.verdict import Attribution as Attribution
from workbench.mismatch.verdict import Part as Part


def attribute(trainer: Any, sampler: Any = None, *, draws: int = 8, device: str = "cpu") -> Attribution:
    """Split the per-token gap, trainer's minus recorded sampler's log-probability, into its causes.

    The record is computed again from the trainer's checkpoint, with one factor switched after the other: stale
    weights, temperature, truncation, log-probability mode, head precision, trunk precision, attention kernel, FP8,
    routes, LoRA merge, tokenisation, offset by one, wrong prefix. A factor is a cause if the recorded values come out
    under it, token by token. The floor is drawn by rounding each operation at random.

    Args:
        trainer: the keys of `workbench.mismatch.settings.Trainer`, or a checkpoint alone (a folder, a tiny model's
            name, a model of transformers); or, without ``sampler``, the folder of a case with `attribute.yaml`.
        sampler: the keys of `workbench.mismatch.settings.Sampler`, or rollouts alone. What it leaves out is as the
            trainer's.
        draws: of the floor, on each side; 0: no floor and no alarm.
        device: where it is computed.

    Raises:
        SpecError: an unknown setting, ids beyond the vocabulary.
        RecordError: a file that is missing or damaged, or breaks the format.

    Example:
        >>> import torch
        >>> from workbench.policy.sampling import Sampler, by_uniforms
        >>> draw = by_uniforms(torch.rand(8, 12, generator=torch.Generator().manual_seed(0)))
        >>> prompts = [[number + 1, 4, 7] for number in range(8)]
        >>> completions = Sampler("tiny-qwen3").answers(prompts, draw, temperature=0.7, max_new_tokens=12, end_ids=[])
        >>> records = [{"prompt_ids": prompt, "completion_ids": one.tokens, "sampler_logprobs": one.logprobs}
        ...            for prompt, one in zip(prompts, completions)]
        >>> [part.description for part in attribute("tiny-qwen3", records).causes]
        ['temperature 0.7']
    """
    return attribute_gap(*sides(trainer, sampler), draws=draws, device=device)
