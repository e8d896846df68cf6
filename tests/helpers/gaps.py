"""A tiny trainer and the completions of a sampler, for attributions of a second or two."""

import functools

import torch

from workbench.mismatch.computing import Computation
from workbench.mismatch.documents import read_documents
from workbench.mismatch.settings import sides
from workbench.policy.sampling import Sampler, by_uniforms

PROMPTS = [[number % 19, 4, 7, (3 * number + 1) % 19][: 4 - number % 2] for number in range(8)]
TOKENS = 12


@functools.cache
def _completions(precision, temperature, source):
    draw = by_uniforms(torch.rand(len(PROMPTS), TOKENS, generator=torch.Generator().manual_seed(0)))
    sampler = Sampler(source, precision=precision)
    return sampler.answers(PROMPTS, draw, temperature=temperature, max_new_tokens=TOKENS, end_ids=[])


def records(precision="float32", temperature=1.0, source="tiny-qwen3"):
    """Records of the stock sampler, which has padded rows and a cache."""
    return [
        {"prompt_ids": list(prompt), "completion_ids": list(one.tokens), "sampler_logprobs": list(one.logprobs)}
        for prompt, one in zip(PROMPTS, _completions(precision, temperature, source), strict=True)
    ]


def computation(given=None, vocabulary=None, **trainer):
    """A computation of records by the tiny model."""
    own, other = sides({"model": "tiny-qwen3", **trainer}, given or records())
    return Computation(own, read_documents(other.rollouts), vocabulary=vocabulary)


def recorded(computation):
    """The sampler's column. Shape: [T]."""
    return torch.cat([document.sampler_C for document in computation.documents])
