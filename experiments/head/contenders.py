"""Contenders: log-probabilities and their gradients from hidden states, by this package and by installed libraries.

A contender is a function of a workload that runs one forward and backward pass and leaves gradients in `.grad`. All
policy-gradient contenders use the same loss, written once; those with a loss of their own get the same numbers. A
contender that is not installed, or cannot run a size, is left out with the reason.

Letters: T packed tokens | V vocabulary | D model dimension.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from experiments.head.workloads import DOCUMENT, Part, Workload
from workbench.policy.logprobs import token_logprobs
from workbench.policy.logprobs.fused_loss import fused_loss
from workbench.specs.losses import LossSpec

Kind = Literal["floor", "ours", "peer", "cross entropy"]
Pass = Callable[[], Tensor | None]
"""One pass; returns log-probabilities [T] if it computes them."""

LONG = 8192
"""Tokens of a document that is longer than a chunk."""

TOKEN = LossSpec(name="grpo")
GSPO = LossSpec(name="gspo", surrogate={"clip_low": 0.02, "clip_high": 0.02}, denominator="token")


@dataclass(frozen=True)
class Contender:
    """One implementation.

    Attributes:
        name: in the table.
        kind: of implementation.
        make: from a workload to a pass, once before timing.
        what: description.
        memory: the quantity that its memory grows with.
        loss: that it trains: "token", "gspo" or "gspo long"; None: no comparable gradient.
        package: its distribution; None: this one or torch.
        only: the only workloads on which it is measured; () for all.
    """

    name: str
    kind: Kind
    make: Callable[[Workload], Pass]
    what: str
    memory: Literal["chunk", "all tokens"]
    loss: str | None = "token"
    package: str | None = None
    only: tuple[str, ...] = ()

    @property
    def version(self) -> str | None:
        """Of its package; None if that is not installed."""
        if self.package is None:
            return torch.__version__
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None


def part_of(work: Workload, loss: str) -> Part:
    """Build a named loss on a workload."""
    if loss == "token":
        return work.loss_of(TOKEN)
    return work.loss_of(GSPO, work.documents(LONG if loss == "gspo long" else DOCUMENT))


# -- the floor -------------------------------------------------------------------------------------------------


def three_gemms(work: Workload) -> Pass:
    """Logits, gradient of the hidden states, gradient of the head: three cuBLAS GEMMs and nothing else."""
    hidden_TD, weight_VD = work.hidden_TD.detach(), work.weight_VD.detach()
    logits_TV = hidden_TD @ weight_VD.T
    out_TD, out_VD = torch.empty_like(hidden_TD), torch.empty_like(weight_VD)

    def run() -> None:
        torch.mm(hidden_TD, weight_VD.T, out=logits_TV)
        torch.mm(logits_TV, weight_VD, out=out_TD)
        torch.mm(logits_TV.T, hidden_TD, out=out_VD)

    return run


def one_gemm(work: Workload) -> Pass:
    """Logits alone."""
    hidden_TD, weight_VD = work.hidden_TD.detach(), work.weight_VD.detach()
    logits_TV = hidden_TD @ weight_VD.T

    def run() -> None:
        torch.mm(hidden_TD, weight_VD.T, out=logits_TV)

    return run


# -- ours ------------------------------------------------------------------------------------------------------


def ours_fused(
    loss: str, accumulate: str = "weight", implementation: str = "auto", *, counted: bool = False
) -> Callable[[Workload], Pass]:
    """`fused_loss`: the gradient in the forward pass; ``counted``: the host waits for a copy of the targets first."""

    def make(work: Workload) -> Pass:
        part, rows = part_of(work, loss), None if counted else work.size.tokens

        def run() -> Tensor:
            result = fused_loss(
                work.hidden_TD,
                work.weight_VD,
                work.targets_T,
                part,
                document_ids_T=part.documents_T,
                expected_rows=rows,
                accumulate=accumulate,
                implementation=implementation,
            )
            result.loss.backward()
            return result.head_output.logprobs_T

        return run

    return make


def ours_logprobs(kept_bytes: int, implementation: str = "auto") -> Callable[[Workload], Pass]:
    """`token_logprobs`, the loss outside."""

    def make(work: Workload) -> Pass:
        part = part_of(work, "token")

        def run() -> Tensor:
            head_output = token_logprobs(
                work.hidden_TD,
                work.weight_VD,
                work.targets_T,
                outputs=(),
                expected_rows=work.size.tokens,
                keep_bytes=kept_bytes,
                implementation=implementation,
            )
            part.whole(head_output.logprobs_T).backward()
            return head_output.logprobs_T

        return run

    return make


def ours_forward(*outputs: str, counted: bool = False) -> Callable[[Workload], Pass]:
    """`token_logprobs` without a gradient; ``counted``: see `ours_fused`."""

    def make(work: Workload) -> Pass:
        rows = None if counted else work.size.tokens

        def run() -> Tensor:
            with torch.no_grad():
                return token_logprobs(
                    work.hidden_TD, work.weight_VD, work.targets_T, outputs=outputs, expected_rows=rows
                ).logprobs_T

        return run

    return make


# -- torch -----------------------------------------------------------------------------------------------------


def _plain_logprobs(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    return torch.log_softmax((hidden_TD @ weight_VD.T).float(), -1).gather(1, targets_T[:, None]).squeeze(1)


def plain_torch(work: Workload) -> Pass:
    """All logits, float32 log-softmax."""
    return _logprobs_then_loss(work, lambda: _plain_logprobs(work.hidden_TD, work.weight_VD, work.targets_T))


def compiled_torch(work: Workload) -> Pass:
    """The same, compiled."""
    compiled = torch.compile(_plain_logprobs)
    return _logprobs_then_loss(work, lambda: compiled(work.hidden_TD, work.weight_VD, work.targets_T))


# -- peers -----------------------------------------------------------------------------------------------------


def liger_full_logits(work: Workload) -> Pass:
    """Liger `triton_grpo_loss` on all logits; a sequence's rows are one longer than its tokens."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    sequences, dimension = work.size.tokens // DOCUMENT, work.size.dimension
    old, ids = (t.view(sequences, DOCUMENT) for t in (work.old_logprobs_T, work.targets_T))
    advantages = work.advantages_T.view(sequences, DOCUMENT)[:, 0].contiguous()

    def run() -> None:
        hidden = torch.nn.functional.pad(work.hidden_TD.view(sequences, DOCUMENT, dimension), (0, 0, 0, 1))
        loss, _ = triton_grpo_loss(
            hidden @ work.weight_VD.T,
            old,
            None,
            ids,
            advantages,
            temperature=1.0,
            beta=0.0,
            eps_low=0.2,
            eps_high=0.2,
            loss_type="bnpo",
            reduce=True,
        )
        loss.backward()

    return run


def liger_scaled(work: Workload) -> Pass:
    """Liger's scaled cross entropy in CuTe DSL: one log-probability per token, recomputed in backward."""
    from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import LigerFusedScaledCrossEntropySM90Function

    def logprobs() -> Tensor:
        out: Any = LigerFusedScaledCrossEntropySM90Function.apply(work.hidden_TD, work.weight_VD, work.targets_T)
        return -(out[0] if isinstance(out, tuple) else out)

    return _logprobs_then_loss(work, logprobs)


def liger_fused_grpo(work: Workload) -> Pass:
    """Liger `LigerFusedLinearGRPOLoss`: gradient in the forward pass, in float32 GEMMs."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    sequences = work.size.tokens // DOCUMENT
    loss_of = LigerFusedLinearGRPOLoss(
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.2,
        loss_type="bnpo",
        use_ref_model=False,
        compiled=False,
        temperature=1.0,
    )
    old, ids = (t.view(sequences, DOCUMENT) for t in (work.old_logprobs_T, work.targets_T))
    advantages = work.advantages_T.view(sequences, DOCUMENT)[:, 0].contiguous()
    mask = torch.ones_like(old)

    def run() -> None:
        hidden = work.hidden_TD.view(sequences, DOCUMENT, work.size.dimension)
        loss, _ = loss_of(hidden, work.weight_VD, ids, mask, advantages, old_per_token_logps=old)
        loss.backward()

    return run


def trl_full_logits(work: Workload) -> Pass:
    """TRL's fused log-softmax and entropy on all logits."""
    from trl.kernels import selective_log_softmax_and_entropy

    def logprobs() -> Tensor:
        logits_TV = work.hidden_TD @ work.weight_VD.T
        return selective_log_softmax_and_entropy(logits_TV[None], work.targets_T[None])[0][0]

    return _logprobs_then_loss(work, logprobs)


def trl_chunked(work: Workload) -> Pass:
    """TRL's chunked head: tiles of 4 096 tokens by 32 768 vocabulary entries, recomputed in backward."""
    from trl.kernels import ChunkedLogProbFunction

    def logprobs() -> Tensor:
        outputs: Any = ChunkedLogProbFunction.apply(
            work.hidden_TD, work.weight_VD, None, work.targets_T, 1.0, 32768, None, 1.0, ()
        )
        return outputs[0]

    return _logprobs_then_loss(work, logprobs)


def cut_cross_entropy(work: Workload) -> Pass:
    """Cut cross-entropy: one Triton kernel forward, one backward that recomputes and skips small probabilities."""
    from cut_cross_entropy import linear_cross_entropy

    return _logprobs_then_loss(
        work, lambda: -linear_cross_entropy(work.hidden_TD, work.weight_VD, work.targets_T, reduction="none")
    )


def quack_scaled_exp(work: Workload) -> Pass:
    """Chunked cross entropy of quack: gradient in the forward pass, for one scalar loss."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def run() -> None:
        # Its GEMMs cannot tell rows from columns if a chunk is as long as the model is wide.
        chunk = 8192 if work.size.dimension == 4096 else 4096
        chunked_linear_cross_entropy(work.hidden_TD, work.weight_VD, work.targets_T, chunk_size=chunk).backward()

    return run


def trl_forward(work: Workload) -> Pass:
    """TRL's chunked head, log-probability and entropy, no gradient."""
    from trl.kernels import ChunkedLogProbFunction

    def run() -> Tensor:
        with torch.no_grad():
            outputs: Any = ChunkedLogProbFunction.apply(
                work.hidden_TD, work.weight_VD, None, work.targets_T, 1.0, 32768, None, 1.0, ("entropy",)
            )
        return outputs[0]

    return run


def liger_forward(work: Workload) -> Pass:
    """Liger's scaled cross entropy, log-probability and entropy, no gradient."""
    from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import fused_scaled_cross_entropy_forward

    def run() -> Tensor:
        with torch.no_grad():
            return -fused_scaled_cross_entropy_forward(
                work.hidden_TD.detach(), work.weight_VD.detach(), work.targets_T, return_entropy=True
            )[0]

    return run


def _logprobs_then_loss(work: Workload, logprobs: Callable[[], Tensor]) -> Pass:
    part = part_of(work, "token")

    def run() -> Tensor:
        logprobs_T = logprobs()
        part.whole(logprobs_T).backward()
        return logprobs_T

    return run


ROOM = 1 << 60
"""Unlimited bytes that may be kept for backward."""

BOTH = (
    Contender("three products", "floor", three_gemms, "nothing but the GEMMs", "all tokens", loss=None),
    Contender("fused_loss", "ours", ours_fused("token"), "weight gradient in the weight's precision", "chunk"),
    Contender(
        "fused_loss, counted",
        "ours",
        ours_fused("token", counted=True),
        "the host counts the tokens first",
        "chunk",
    ),
    Contender("fused_loss float32", "ours", ours_fused("token", "float32"), "weight gradient in float32", "chunk"),
    Contender("fused_loss GSPO", "ours", ours_fused("gspo"), "documents of 1 024 tokens", "chunk", "gspo"),
    Contender(
        "fused_loss GSPO long", "ours", ours_fused("gspo long"), "documents of 8 192 tokens", "chunk", "gspo long"
    ),
    Contender("token_logprobs, room", "ours", ours_logprobs(ROOM), "everything kept for backward", "all tokens"),
    Contender("token_logprobs", "ours", ours_logprobs(0), "recomputed in backward", "chunk"),
    Contender("token_logprobs, torch", "ours", ours_logprobs(0, "chunked"), "no Triton", "chunk"),
    Contender("plain torch", "peer", plain_torch, "all logits in float32", "all tokens"),
    Contender("torch.compile", "peer", compiled_torch, "all logits, compiled", "all tokens"),
    Contender(
        "Liger triton_grpo_loss",
        "peer",
        liger_full_logits,
        "all logits, one kernel, in place",
        "all tokens",
        package="liger-kernel",
    ),
    Contender(
        "Liger scaled CE (CuTe)", "peer", liger_scaled, "recomputed in backward", "chunk", package="liger-kernel"
    ),
    Contender(
        "Liger fused GRPO",
        "peer",
        liger_fused_grpo,
        "gradient in the forward pass, float32 GEMMs",
        "chunk",
        package="liger-kernel",
        only=("A",),
    ),
    Contender("TRL fused log-softmax", "peer", trl_full_logits, "all logits, two kernels", "all tokens", package="trl"),
    Contender("TRL chunked head", "peer", trl_chunked, "recomputed in backward", "chunk", package="trl"),
    Contender(
        "cut-cross-entropy",
        "peer",
        cut_cross_entropy,
        "recomputed in backward, filtered",
        "chunk",
        package="cut-cross-entropy",
    ),
    Contender(
        "quack scaled exp",
        "cross entropy",
        quack_scaled_exp,
        "cross entropy only",
        "chunk",
        loss=None,
        package="quack-kernels",
    ),
)
"""Forward and backward."""

FORWARD = (
    Contender("one product", "floor", one_gemm, "nothing but the GEMM", "all tokens", loss=None),
    Contender("token_logprobs", "ours", ours_forward(), "log-probability", "chunk", loss=None),
    Contender(
        "token_logprobs, counted",
        "ours",
        ours_forward(counted=True),
        "the host counts the tokens first",
        "chunk",
        loss=None,
    ),
    Contender(
        "token_logprobs, entropy", "ours", ours_forward("entropy"), "log-probability and entropy", "chunk", loss=None
    ),
    Contender(
        "TRL chunked head", "peer", trl_forward, "log-probability and entropy", "chunk", loss=None, package="trl"
    ),
    Contender(
        "Liger scaled CE (CuTe)",
        "peer",
        liger_forward,
        "log-probability and entropy",
        "chunk",
        loss=None,
        package="liger-kernel",
    ),
)
"""Forward alone, as for the old and the reference policy."""
