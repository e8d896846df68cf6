"""The sampler: a stock decoder that writes answers, token by token with cached keys and values, as engines do.

It is another program than the trainer on purpose: other kernels, padded rows instead of packed ones, perhaps another
precision. What it says of its own tokens is kept, and differs from what the trainer says of them.

Letters: N answers | V vocabulary | M most tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.policy.model import DTYPES, load_decoder
from workbench.policy.precision import cast, lift_to_float64

Choose = Callable[[Tensor, int], Tensor]
"""[N, V] log-probabilities and the place in the answer, from 0 -> [N] the token that each answer goes on with."""


@dataclass(frozen=True)
class Answer:
    """One sampled completion.

    Attributes:
        tokens: vocabulary ids, the end symbol included if it came.
        logprobs: nats of each of them, as the sampler computed them.
    """

    tokens: list[int]
    logprobs: list[float]


class Sampler:
    """A decoder as `transformers` has it, with the weights that it was given last.

    Args:
        source: see `workbench.policy.model.load_decoder`.
        precision: of its weights and activations; float64 lifts norms and rotary embeddings too.
        device: where it samples.
        source_settings: further settings of `load_decoder`.

    Example:
        >>> sampler = Sampler("tiny-qwen3")
        >>> [answer] = sampler.answers([[3, 12, 4]], by_uniforms(torch.full((1, 2), 0.5)), temperature=1.0,
        ...                            max_new_tokens=2, end_ids=[])
        >>> len(answer.tokens), len(answer.logprobs)
        (2, 2)
    """

    def __init__(
        self, source: str, *, precision: str = "float32", device: torch.device | str = "cpu", **source_settings: Any
    ) -> None:
        model = load_decoder(source, **source_settings).eval()
        model = lift_to_float64(model) if precision == "float64" else cast(model, DTYPES[precision])
        self.model = model.to(device).requires_grad_(False)

    @property
    def positions(self) -> int | None:
        """How many tokens prompt and answer may have together, as the configuration says; None if it does not."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @torch.no_grad()
    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Take the weights of a policy, by the names of its parameters, rounded to the sampler's own precision.

        Raises:
            SpecError: the two do not have the same parameters.
        """
        mine = dict(self.model.named_parameters())
        if unlike := sorted(mine.keys() ^ weights.keys()):
            raise SpecError(
                "weights for the sampler",
                found=f"only one of the two has {', '.join(unlike[:4])}",
                rule="sampler and policy are the same model",
                fix="make both from the same source",
            )
        for name, weight in weights.items():
            mine[name].copy_(weight)

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        choose: Choose,
        *,
        temperature: float,
        max_new_tokens: int,
        end_ids: Sequence[int],
    ) -> list[Answer]:
        """One answer for each prompt; see `generate`."""
        return generate(
            self.model,
            prompts,
            choose,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            end_ids=end_ids,
            logits_to_keep=1,
        )


@torch.no_grad()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    choose: Choose,
    *,
    temperature: float,
    max_new_tokens: int,
    end_ids: Sequence[int],
    **forward: Any,
) -> list[Answer]:
    """One answer for each prompt, all of them together; shorter prompts are padded on the left, and masked.

    Args:
        model: a `transformers` decoder.
        prompts: vocabulary ids, at least one each.
        choose: draws the next tokens.
        temperature: divides logits.
        max_new_tokens: M; an answer that reaches so many ends there, without its end symbol.
        end_ids: any of them ends an answer.
        forward: further arguments of the model, such as logits_to_keep=1, which spares the logits of the prompts.

    Units: nats, under the distribution that was drawn from: after the temperature, and in float32 at least.
    """
    longest = max(map(len, prompts))
    short = [longest - len(prompt) for prompt in prompts]
    inputs = torch.tensor(
        [[0] * gap + [*prompt] for gap, prompt in zip(short, prompts, strict=True)], device=model.device
    )
    where: dict[str, Tensor] = {}
    if any(short):
        mask = torch.tensor([[0] * gap + [1] * (longest - gap) for gap in short], device=model.device)
        where = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    ends = torch.tensor(list(end_ids), dtype=torch.int64, device=model.device)
    cache, ended = None, torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
    chosen: list[Tensor] = []
    logprobs: list[Tensor] = []
    while len(chosen) < max_new_tokens and not ended.all():
        output = model(input_ids=inputs, past_key_values=cache, use_cache=True, **where, **forward)
        cache, logits_NV = output.past_key_values, output.logits[:, -1]
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        logprobs_NV = torch.log_softmax(logits_NV / temperature, dim=-1)
        token_N = choose(logprobs_NV, len(chosen))
        inputs = token_N[:, None]
        chosen.append(token_N)
        logprobs.append(logprobs_NV.gather(1, inputs)[:, 0])
        ended |= torch.isin(token_N, ends)
        if where:
            mask = torch.cat([where["attention_mask"], torch.ones_like(inputs)], dim=1)
            where = {"attention_mask": mask, "position_ids": where["position_ids"][:, -1:] + 1}
    return [
        _up_to_end(tokens, said, end_ids)
        for tokens, said in zip(torch.stack(chosen, 1).tolist(), torch.stack(logprobs, 1).tolist(), strict=True)
    ]


def by_uniforms(uniforms_NM: Tensor) -> Choose:
    """Draw by numbers that are there before: what one answer draws does not depend on which others it is drawn with.

    Formula: the first token up to which the probabilities add up to more than u, in the order of the vocabulary.
    Shapes:  uniforms_NM [N, M], evenly spread over [0, 1); the sums are taken in float64.
    """

    def choose(logprobs_NV: Tensor, place: int) -> Tensor:
        sums_NV = logprobs_NV.double().exp().cumsum(dim=1)
        wanted_N = uniforms_NM[:, place].to(sums_NV) * sums_NV[:, -1]
        found_N1 = torch.searchsorted(sums_NV, wanted_N[:, None], right=True)
        return found_N1[:, 0].clamp_max(sums_NV.shape[1] - 1)

    return choose


def _up_to_end(tokens: Sequence[int], logprobs: Sequence[float], end_ids: Sequence[int]) -> Answer:
    first = next((place for place, token in enumerate(tokens) if token in end_ids), len(tokens) - 1)
    return Answer(list(tokens[: first + 1]), list(logprobs[: first + 1]))
