"""torch's own context parallelism behind input checks, with attention restored on exit.

`torch.distributed.tensor.experimental.context_parallel` replaces ``torch.nn.functional.scaled_dot_product_attention``
by ring attention and shards buffers in place; each rank holds a chunk from the first half of the row and one from the
second. Several of its limitations change numbers silently, or fail in an assertion far from the cause. Here they are
checked or handled:

    backward must run inside                             outside, attention is no longer a ring
    an attention mask, dropout, non-causal attention     torch's ring supports causal attention over whole rows only
    the math kernel                                      would treat the permuted row as the row itself; disabled
    fewer key/value heads, outside half precision        repeated first: the other kernels need equal heads
    T % (2 cp) != 0                                      2.11 asserts; 2.13 silently drops the balance, and the order
    t % 64 != 0, outside half precision                  the memory-efficient kernel pads its log-sum-exps to 32, halved

Up to 2.11 an exception inside leaves the function replaced. The caller's tensors are copied, not sharded in place.

Letters: T tokens of a row | t tokens of this rank.
Source:  torch 2.11.0 and 2.13.0, torch/distributed/tensor/experimental/_context_parallel/_attention.py; names are
         detected at run time, never by version.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from workbench.errors import ShardingError
from workbench.sharding.mesh import Axis, device_mesh_of

PLACES = ("torch.distributed.tensor.experimental", "torch.distributed.tensor.experimental._attention")
"""Modules that have had `context_parallel`, the public one first."""

HALF = (torch.float16, torch.bfloat16)
KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
"""The kernels that torch's ring supports, without cuDNN's."""

WIDEST_FLASH_HEAD = 256
"""FlashAttention takes head dimensions up to 256; wider heads use the memory-efficient kernel."""
EFFICIENT_MULTIPLE = 64
"""A rank's tokens, outside half precision: twice the 32 rows to which the memory-efficient kernel pads log-sum-exps."""


@dataclass(frozen=True)
class TorchRing:
    """torch's context manager, the module that defines it, and the device types that it can train on."""

    enter: Callable[..., AbstractContextManager[None]]
    place: str
    devices: tuple[str, ...] = ("cuda",)


@functools.cache
def torch_ring() -> TorchRing:
    """Find torch's context manager, once per process.

    Raises:
        ShardingError: this torch has none.
    """
    for place in PLACES:
        try:
            module = importlib.import_module(place)
        except ImportError:
            continue
        if hasattr(module, "context_parallel"):
            return TorchRing(module.context_parallel, place)
    raise ShardingError(
        "torch's context parallelism",
        found=f"torch {torch.__version__} without context_parallel",
        rule=f"it is in {' or '.join(PLACES)} (torch 2.11 to 2.13)",
        fix="use another torch, or the workbench's own attention",
    )


@contextmanager
def torch_context_parallel(
    axis: Axis, tensors: Mapping[str, Tensor], *, ring: TorchRing | None = None
) -> Iterator[dict[str, Tensor]]:
    """Shard rows over an axis, with attention over the tokens of all its ranks.

    Forward and backward of every model that calls ``torch.nn.functional.scaled_dot_product_attention`` belong inside.
    Collectives: those of torch in each attention, the same on every rank. On an axis of one rank the tensors are
    returned whole and attention is unchanged. Tensors are all per-token values, by name, including positions and
    targets; ``ring`` replaces the context manager of this torch.

    Shapes: [B, T] or [B, T, ...] each -> [B, t] or [B, t, ...] copies, in the local order of this rank.

    Raises:
        ShardingError: a device on which torch's ring cannot train, lengths that do not divide, and attention features
            that the ring does not support.
    """
    lengths = {name: tensor.shape[1] for name, tensor in tensors.items()}
    length = next(iter(lengths.values()))
    if wrong := [f"{name} of {other}" for name, other in lengths.items() if other != length]:
        raise ShardingError(
            "rows under torch's context parallelism",
            found=f"{', '.join(wrong)} next to {length} tokens",
            rule="every tensor has a value for each token, in its second dimension",
            fix="expand values that a row shares",
        )
    if axis.group is None:
        yield dict(tensors)
        return
    implementation = ring or torch_ring()
    device = next(iter(tensors.values())).device
    check_rows(length, axis.size, device.type, implementation)
    shards = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    buffers = list(shards.values())
    manager = implementation.enter(
        device_mesh_of(axis, device.type),
        buffers=buffers,
        buffer_seq_dims=[1] * len(buffers),
        no_restore_buffers=set(buffers),
    )
    before = functional.scaled_dot_product_attention
    manager.__enter__()
    replaced = functional.scaled_dot_product_attention
    try:
        functional.scaled_dot_product_attention = guarded(replaced)
        with sdpa_kernel(list(KERNELS)):
            yield shards
    finally:
        # torch up to 2.11 does not clean up after an exception, so none is passed to it.
        functional.scaled_dot_product_attention = replaced
        try:
            manager.__exit__(None, None, None)
        finally:
            functional.scaled_dot_product_attention = before


def check_rows(length: int, ranks: int, device_type: str, ring: TorchRing) -> None:
    """Raise for rows, by their device or length, that torch would not shard, or would shard differently."""
    if device_type not in ring.devices:
        raise ShardingError(
            "torch's context parallelism",
            found=f"tensors on {device_type}",
            rule=f"it trains on {', '.join(ring.devices)} only; other devices have no kernel for its attention",
            fix="use the workbench's own attention (layout.cp with layout.attention), which runs on any device",
        )
    if length % (2 * ranks):
        raise ShardingError(
            f"rows of {length} tokens under torch's context parallelism over cp={ranks}",
            found=f"{length} is not a multiple of 2 * cp = {2 * ranks}",
            rule="a rank holds two chunks of equal length, one from each half of the row",
            fix=f"pad the rows at their end to {-(-length // (2 * ranks)) * 2 * ranks} tokens, and do "
            "not train on the padding",
        )


def guarded(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap torch's ring attention with the checks that it needs to be correct.

    Shapes:   query [B, Hq, t, d], key and value [B, Hk, t, d], Hk divides Hq -> [B, Hq, t, d].
    Backward: that of the ring; gradients of repeated key/value heads are summed.
    """

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        _refuse_unsupported(query, attn_mask, dropout_p, is_causal)
        groups = query.shape[1] // key.shape[1]
        grouped = groups > 1 and query.dtype in HALF and query.shape[-1] <= WIDEST_FLASH_HEAD
        if groups > 1 and not grouped:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        return attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)

    return scaled_dot_product_attention


def _refuse_unsupported(query: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool) -> None:
    where = "attention under torch's context parallelism"
    mask = attn_mask is not None and f"an attention mask of shape {tuple(attn_mask.shape)}"
    for found, fix in (
        (
            mask,
            "pass the model no mask. transformers builds one from positions, which it interprets as "
            "packed documents: workbench.with_torch_attention(model) prevents that",
        ),
        (
            dropout_p and f"dropout of {dropout_p}",
            "model.eval(), or attention_dropout=0; gradients are otherwise as in training",
        ),
        (not is_causal and "attention that is not causal", "pass is_causal=True, and run encoders outside"),
    ):
        if found:
            rule = "causal attention over a row that is one document"
            raise ShardingError(where, found=found, rule=rule, fix=fix)
    if query.dtype not in HALF and query.shape[2] % EFFICIENT_MULTIPLE:
        raise ShardingError(
            where,
            found=f"{query.shape[2]} tokens per rank in {query.dtype}",
            rule=f"outside half precision a multiple of {EFFICIENT_MULTIPLE}",
            fix=f"pad the rows at their end to a multiple of {EFFICIENT_MULTIPLE} * cp tokens, or compute in bfloat16",
        )
