"""The sampler: a stock decoder that generates completions token by token with a KV cache, as inference engines do.

It deliberately shares no code path with the trainer: other kernels, padded rows instead of packed ones, possibly
another precision. The log-probabilities of its own tokens are recorded, and differ from the trainer's.

Letters: N completions | V vocabulary | M maximum tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.policy.decoder import load_decoder
from workbench.policy.lora import Lora, prepare_sampler, sampled_names
from workbench.policy.model import DTYPES
from workbench.policy.precision import cast, lift_to_float64
from workbench.policy.routers import NO_ROUTE, Routers, Routes, install_routers
from workbench.policy.truncation import reported, truncate
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.sampling import Sampling
from workbench.rollouts.support import with_support

Update = Callable[[int], bool]
"""Position in the completion, from 0, before its token is computed -> keys and values of earlier tokens are stale and
computed again. It may load other weights into the model."""

Choose = Callable[[Tensor, int], Tensor]
"""[N, V] log-probabilities and the position in the completion, from 0 -> [N] next token of each completion."""


@dataclass(frozen=True)
class Completion:
    """A sampled completion.

    Attributes:
        tokens: vocabulary ids, including the end symbol if it was sampled.
        logprobs: nats of each, of the quantity that the sampler reports.
        supports: of each, the ids from which it was drawn; empty if the sampler does not truncate.
        masses: of each, the probability of its support after the temperature; empty likewise.
        routes_tLk: experts that each token of prompt and completion took, but for the last, which was not fed back;
            None if they are not noted.
    """

    tokens: list[int]
    logprobs: list[float]
    supports: list[list[int]] = field(default_factory=list)
    masses: list[float] = field(default_factory=list)
    routes_tLk: Tensor | None = None


class Sampler:
    """A stock `transformers` decoder with the most recently loaded weights.

    Args:
        source: see `workbench.policy.decoder.load_decoder`.
        precision: of its weights and activations; float64 includes norms and rotary embeddings.
        device: where it samples.
        lora: the adapters of the policy, merged or not, as `LoraSpec.sampler` says; None: it has none.
        routing: note the routes of a mixture of experts.
        source_settings: further settings of `load_decoder`.

    Example:
        >>> sampler = Sampler("tiny-qwen3")
        >>> [answer] = sampler.answers([[3, 12, 4]], by_uniforms(torch.full((1, 2), 0.5)), temperature=1.0,
        ...                            max_new_tokens=2, end_ids=[])
        >>> len(answer.tokens), len(answer.logprobs)
        (2, 2)
    """

    def __init__(
        self,
        source: str,
        *,
        precision: str = "float32",
        device: torch.device | str = "cpu",
        lora: Lora | None = None,
        routing: bool = False,
        **source_settings: Any,
    ) -> None:
        model = load_decoder(source, **source_settings).eval()
        if lora is not None:
            prepare_sampler(model, lora)
        half = DTYPES[precision].itemsize == 2
        changing = {name for name, _ in model.named_parameters()} if lora is None else sampled_names(lora)
        self._source = {n: p.detach().clone() for n, p in model.named_parameters() if half and n in changing}
        model = lift_to_float64(model) if precision == "float64" else cast(model, DTYPES[precision])
        self.model = model.to(device).requires_grad_(False)
        self.routers = install_routers(self.model) if routing else None

    @property
    def positions(self) -> int | None:
        """Maximum length of prompt plus completion according to the configuration; None if unspecified."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> float | None:
        """Load the weights of a policy by parameter name, rounded to the sampler's own precision.

        Buffers that training moves, such as the biases of routers, come with them, by their names.

        Returns the share of the trained weights that are no longer those of the source: a change below half a unit in
        the last place does not reach a sampler in bfloat16 or float16. None for other dtypes, and until the policy
        moves.

        Raises:
            SpecError: the two do not have the same parameters.
        """
        parameters, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        if unmatched := sorted(parameters.keys() ^ (weights.keys() - buffers.keys())):
            raise SpecError(
                "weights for the sampler",
                found=f"only one of the two has {', '.join(unmatched[:4])}",
                rule="sampler and policy are the same model",
                fix="load both from the same source",
            )
        for name, weight in weights.items():
            (parameters if name in parameters else buffers)[name].copy_(weight)
        source = {name: (value, weights[name].cpu()) for name, value in self._source.items()}
        if all(torch.equal(value.to(weight.dtype), weight) for value, weight in source.values()):
            return None
        changed = sum(
            int((parameters[name].cpu() != value.to(parameters[name].dtype)).sum())
            for name, (value, _) in source.items()
        )
        return changed / sum(value.numel() for value, _ in source.values())

    def answers(self, prompts: Sequence[Sequence[int]], choose: Choose, **settings: Any) -> list[Completion]:
        """Sample one completion per prompt, with the settings of `generate`."""
        return generate(self.model, prompts, choose, logits_to_keep=1, routers=self.routers, **settings)


@torch.no_grad()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    choose: Choose,
    *,
    temperature: float,
    max_new_tokens: int,
    end_ids: Sequence[int],
    sampling: Sampling | None = None,
    routers: Routers | None = None,
    update: Update | None = None,
    **forward: Any,
) -> list[Completion]:
    """Sample one completion per prompt, in one batch; shorter prompts are left-padded and masked.

    Args:
        model: a `transformers` decoder.
        prompts: vocabulary ids, at least one each.
        choose: draws the next tokens.
        temperature: divides logits.
        max_new_tokens: M; a completion that reaches it ends there, without an end symbol.
        end_ids: any of them ends a completion.
        sampling: truncation, and the quantity of the log-probabilities; None: none, and scaled ones.
        routers: of the model, whose routes are noted; None: they are not.
        update: called before each token; it may load newer weights, as engines do while requests run.
        forward: further arguments of the model, such as logits_to_keep=1, which skips the logits of the prompts.

    Units: nats, in float32 at least, of the quantity that ``sampling`` names.
    """
    sampling = sampling or Sampling()
    longest = max(map(len, prompts))
    gaps = [longest - len(prompt) for prompt in prompts]
    inputs = torch.tensor(
        [[0] * gap + [*prompt] for gap, prompt in zip(gaps, prompts, strict=True)], device=model.device
    )
    position_inputs: dict[str, Tensor] = {}
    if any(gaps):
        mask = torch.tensor([[0] * gap + [1] * (longest - gap) for gap in gaps], device=model.device)
        position_inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    ends = torch.tensor(list(end_ids), dtype=torch.int64, device=model.device)
    fed, cache, ended = inputs, None, torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
    chosen: list[Tensor] = []
    logprobs: list[Tensor] = []
    supports: list[Tensor] = []
    masses: list[Tensor] = []
    routes: list[Tensor] = []
    while len(chosen) < max_new_tokens and not ended.all():
        if update is not None and update(len(chosen)):
            inputs, cache = fed, None
            if position_inputs:
                mask = position_inputs["attention_mask"]
                position_inputs["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
        if routers is not None:
            forward["routes"] = noted = Routes(torch.ones(inputs.numel(), dtype=torch.bool, device=model.device))
        output = model(input_ids=inputs, past_key_values=cache, use_cache=True, **position_inputs, **forward)
        if routers is not None:
            taken_nLk = torch.stack([noted.noted[mixture].taken_tk for mixture in range(len(routers.names))], dim=1)
            routes.append(taken_nLk.unflatten(0, inputs.shape).cpu())
        cache, logits_NV = output.past_key_values, output.logits[:, -1]
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        logprobs_NV = torch.log_softmax(logits_NV / temperature, dim=-1)
        drawn_NV = logprobs_NV
        if sampling.truncates:
            kept_NV, mass_N, drawn_NV = truncate(logprobs_NV, sampling)
            supports.append(kept_NV.cpu())
            masses.append(mass_N)
        token_N = choose(drawn_NV, len(chosen))
        inputs = token_N[:, None]
        fed = torch.cat([fed, inputs], dim=1)
        chosen.append(token_N)
        reported_NV = reported(logits_NV, logprobs_NV, drawn_NV, sampling.sampler_logprobs)
        logprobs.append(reported_NV.gather(1, inputs)[:, 0])
        ended |= torch.isin(token_N, ends)
        if position_inputs:
            mask = torch.cat([position_inputs["attention_mask"], torch.ones_like(inputs)], dim=1)
            position_inputs = {"attention_mask": mask, "position_ids": position_inputs["position_ids"][:, -1:] + 1}
    completions, routes_NPLk = [], torch.cat(routes, dim=1) if routes else None
    mass_NM = torch.stack(masses, 1).tolist() if masses else [[]] * len(prompts)
    rows = zip(torch.stack(chosen, 1).tolist(), torch.stack(logprobs, 1).tolist(), mass_NM, strict=True)
    for number, (tokens, nats, mass) in enumerate(rows):
        length = next((place for place, token in enumerate(tokens, 1) if token in end_ids), len(tokens))
        kept = [torch.nonzero(kept_NV[number])[:, 0].tolist() for kept_NV in supports[:length]]
        places = slice(gaps[number], longest + length - 1)
        of_fed_tLk = None if routes_NPLk is None else routes_NPLk[number, places]
        completions.append(Completion(tokens[:length], nats[:length], kept, mass[:length], of_fed_tLk))
    return completions


def with_completion_supports(batch: RolloutBatch, completions: Sequence[Completion]) -> RolloutBatch:
    """Return a batch with the supports, and their masses, of the completions of its documents, in order."""
    supports: list[list[int]] = []
    masses: list[float] = []
    for completion, length in zip(completions, batch.lengths_N.tolist(), strict=True):
        prompt = length - len(completion.tokens)
        supports += [*([[]] * prompt), *completion.supports]
        masses += [*([1.0] * prompt), *completion.masses]
    return with_support(batch, supports, mass_T=torch.tensor(masses, dtype=torch.float64))


def completion_routes(completions: Sequence[Completion]) -> Tensor:
    """[S, L, k] routes of the documents of completions, in order; none of their last tokens."""
    rows = []
    for completion in completions:
        assert completion.routes_tLk is not None, "the sampler noted them"
        rows.append(torch.nn.functional.pad(completion.routes_tLk, (0, 0, 0, 0, 0, 1), value=NO_ROUTE))
    return torch.cat(rows)


def by_uniforms(uniforms_NM: Tensor) -> Choose:
    """Draw from given uniform numbers: a completion's draws do not depend on the other completions of its batch.

    Formula: the first token, in vocabulary order, at which the cumulative probability exceeds u; never one of
             probability 0.
    Shapes:  uniforms_NM [N, M], uniform on [0, 1); cumulative sums are in float64.
    """

    def choose(logprobs_NV: Tensor, place: int) -> Tensor:
        sums_NV = logprobs_NV.double().exp().cumsum(dim=1)
        threshold_N = uniforms_NM[:, place].to(sums_NV) * sums_NV[:, -1]
        # a product that rounds up to the total would choose the last id, which may be outside a truncated support
        threshold_N = torch.minimum(threshold_N, torch.nextafter(sums_NV[:, -1], torch.zeros_like(threshold_N)))
        token_N1 = torch.searchsorted(sums_NV, threshold_N[:, None], right=True)
        return token_N1[:, 0].clamp_max(sums_NV.shape[1] - 1)

    return choose
