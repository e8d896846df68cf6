"""Unpacked rows under torch's own context parallelism: sharded, shifted and trained with a correct loss.

    with align.torch_context_parallel(tokens=ids, mask=mask, old_logprobs=old, advantages=advantages) as rows:
        logits = model(**rows.model_inputs).logits
        rows.policy_loss("grpo", logits=logits).backward()       # inside: outside, attention is no longer a ring

All inputs hold the value of token t at t. Values are shifted to the position that predicts the token before rows are
sharded, because a shard does not hold the next token.

Letters: B rows | T tokens of a row | t tokens of this rank | V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.errors import ShapeError, ShardingError
from workbench.parallel_loss.policy_loss import StepCounts, uses_input
from workbench.policy.logprobs.from_logits import token_logprobs_from_logits
from workbench.sharding.torch_context_parallel import TorchRing, torch_context_parallel
from workbench.specs.losses import LossSpec

if TYPE_CHECKING:
    from workbench.parallel_loss.align import Alignment


@dataclass
class ContextParallelRows:
    """This rank's shard of some rows, inside the context manager that sharded them.

    Attributes:
        align: computes the loss.
        tensors: by name, [B, t]: ``tokens``, ``positions``, ``targets``, ``mask`` (the target counts) and the given
            values of targets: ``old_logprobs``, ``advantages``, ...
        is_open: True until the context manager is left.
    """

    align: Alignment
    tensors: dict[str, Tensor]
    is_open: bool = field(default=True)

    @property
    def model_inputs(self) -> dict[str, Any]:
        """Inputs of a `transformers` decoder: tokens and their positions in the row, no mask, no cache."""
        return {"input_ids": self.tensors["tokens"], "position_ids": self.tensors["positions"], "use_cache": False}

    def logprobs(self, logits: Tensor, *, temperature: float = 1.0) -> Tensor:
        """Log-probability of each target, in nats; 0 where nothing counts.

        Shapes: [B, t, V] -> [B, t].
        """
        targets = torch.where(self.tensors["mask"], self.tensors["targets"], -1)
        output = token_logprobs_from_logits(
            logits.flatten(0, 1), targets.flatten(), temperature=temperature, outputs=()
        )
        return output.logprobs_T.view(targets.shape)

    def policy_loss(
        self,
        loss: LossSpec | str = "grpo",
        *,
        logits: Tensor | None = None,
        logprobs: Tensor | None = None,
        temperature: float = 1.0,
        counts: StepCounts | None = None,
    ) -> Tensor:
        """Compute a policy loss over the tokens of all ranks, each row a document.

        ``counts`` are those of the whole step, from `Alignment.row_counts`, if this is one of several micro-batches.

        Shapes:   logits [B, t, V], or logprobs [B, t] of the targets -> scalar, the same on every rank.
        Backward: as the engine needs it (`Alignment.policy_loss`); inside the context manager only.
        Raises:   ShapeError: neither logits nor log-probabilities.
        """
        if (logits is None) == (logprobs is None):
            raise ShapeError(
                "a policy loss",
                found="both or neither of logits and logprobs",
                rule="one of them",
                fix="pass the model's logits, or the log-probability of each target",
            )
        given: dict[str, Any] = {
            name: self.tensors.get(name) for name in ("old_logprobs", "advantages", "ref_logprobs", "sampler_logprobs")
        }
        if given["old_logprobs"] is None or given["advantages"] is None:
            raise ShapeError(
                "a policy loss",
                found="rows without old_logprobs or advantages",
                rule="it uses both",
                fix="pass them to the context manager",
            )
        spec = LossSpec(name=loss) if isinstance(loss, str) else loss
        for name in ("ref_logprobs", "sampler_logprobs"):  # rows are split once; a loss may use fewer inputs
            given[name] = given[name] if uses_input(spec, name) else None
        if logprobs is None:
            assert logits is not None, "one of the two, as checked above"
            logprobs = self.logprobs(logits, temperature=temperature)
        given |= {"policy_logprobs": logprobs, "mask": self.tensors["mask"]}
        whole = self.align.policy_loss(loss, counts=counts, **given)
        if whole.requires_grad and self.align.cp.size > 1:
            whole.register_hook(self._refuse_outside)
        return whole

    def _refuse_outside(self, gradient: Tensor) -> Tensor:
        if not self.is_open:
            raise ShardingError(
                "backward of a loss of rows under torch's context parallelism",
                found="the context manager was already left",
                rule="the backward of attention uses torch's ring, which is active inside only",
                fix="call loss.backward() inside the with block; optimizer.step() may be outside",
            )
        return gradient


@contextmanager
def context_parallel_rows(
    align: Alignment,
    *,
    tokens: Tensor,
    mask: Tensor,
    positions: Tensor | None = None,
    attention_mask: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    advantages: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
    ring: TorchRing | None = None,
) -> Iterator[ContextParallelRows]:
    """Shard rows over the cp ranks of an alignment, with attention over whole rows, on GPUs.

    Every cp rank passes the same whole rows, each one document, padded at its end if at all. ``mask`` has the tokens
    that count; the first of a row is not predicted, and never counts. Positions in the row (None: 0, 1, 2, ...) and
    the attention mask, 0 on padding, are only checked. ``ring`` is as in `workbench.sharding.torch_context_parallel`.

    Shapes: [B, T] each; advantages also [B], one for all tokens of a row.
    Units:  log-probabilities in nats.

    Raises:
        ShardingError: packed rows, left-padded rows, and errors of `torch_context_parallel`.
        ShapeError: tensors of other shapes.
    """
    _refuse_packed(tokens, positions, attention_mask)
    if advantages is not None and advantages.dim() == 1 and len(advantages) == len(tokens):
        advantages = advantages[:, None].expand_as(tokens)
    whole = shifted(
        tokens,
        mask,
        advantages=advantages,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        sampler_logprobs=sampler_logprobs,
    )
    with torch_context_parallel(align.cp, whole, ring=ring) as shards:
        rows = ContextParallelRows(align, shards)
        try:
            yield rows
        finally:
            rows.is_open = False


def shifted(tokens: Tensor, mask: Tensor, **of_tokens: Tensor | None) -> dict[str, Tensor]:
    """Shift values to the position that predicts them, on whole rows; the last position of a row predicts nothing.

    Floating-point values are zeroed where the target does not count, so that they cannot reach a gradient.

    Shapes: [B, T] each -> [B, T] each.
    Raises: ShapeError: tensors of another shape, a mask that is not bool.
    """
    if mask.dtype is not torch.bool or tokens.dim() != 2:
        raise ShapeError(
            "rows",
            found=f"tokens of shape {tuple(tokens.shape)}, mask of {mask.dtype}",
            rule="tokens [B, T], and a bool mask",
            fix="unsqueeze a single row; compare the mask with 0",
        )
    if wrong := [
        f"{name} {tuple(value.shape)}"
        for name, value in ({"mask": mask} | of_tokens).items()
        if value is not None and value.shape != tokens.shape
    ]:
        raise ShapeError(
            "rows",
            found=f"{', '.join(wrong)} next to tokens {tuple(tokens.shape)}",
            rule="a value for each token, at the token",
            fix="align values with tokens: pad tensors of T - 1 values by one at the start",
        )
    counts = mask.roll(-1, dims=1)
    counts[:, -1] = False
    whole = {
        "tokens": tokens,
        "positions": torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens),
        "targets": torch.where(counts, tokens.roll(-1, dims=1), 0),
        "mask": counts,
    }
    return whole | {
        name: torch.where(counts, value.roll(-1, dims=1), value.new_zeros(()))
        for name, value in of_tokens.items()
        if value is not None
    }


def _refuse_packed(tokens: Tensor, positions: Tensor | None, attention_mask: Tensor | None) -> None:
    where = "rows under torch's context parallelism"
    if positions is not None and not bool((positions == torch.arange(tokens.shape[-1], device=tokens.device)).all()):
        raise ShardingError(
            where,
            found="positions that are not 0, 1, 2, ... in every row: packed documents, or left-padded rows",
            rule="a row is one document, padded at its end if at all: torch's ring knows no document boundaries",
            fix="put each document in its own row; for packed rows use the workbench's attention "
            "(layout.cp with layout.attention)",
        )
    if attention_mask is not None and bool((attention_mask[:, 1:] > attention_mask[:, :-1]).any()):
        raise ShardingError(
            where,
            found="an attention_mask with padding before tokens",
            rule="padding is at the end of a row, where no causal query sees it",
            fix="pad rows on the right",
        )
