"""Workloads of the head benchmark: hidden states, an output head and rollouts that resemble a language model's.

Logits of random weights would be flat, so every row plants its target: sampled tokens have probabilities between
about 0.05 and 0.95 and the other tokens share a long tail. Documents have 1 024 tokens and an advantage each; the old
policy is the current one with a little noise, so that some ratios are clipped.

Letters: T packed tokens | V vocabulary | D model dimension | C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.losses.build import build_loss
from workbench.losses.terms import LossInputs
from workbench.policy.logprobs import TokenLogprobs
from workbench.specs.losses import LossSpec

DOCUMENT = 1024
"""Tokens of a document, and of a sequence for contenders that take rectangles."""


@dataclass(frozen=True)
class Size:
    """Size of a workload."""

    name: str
    tokens: int
    dimension: int
    vocabulary: int

    def __str__(self) -> str:
        return f"{self.name}: {self.tokens} tokens, hidden {self.dimension}, vocabulary {self.vocabulary}"

    @property
    def gemm_flops(self) -> float:
        """Floating-point operations of one GEMM."""
        return 2.0 * self.tokens * self.dimension * self.vocabulary


SIZES = (
    Size("A", 8192, 4096, 151936),
    Size("B", 32768, 2048, 151936),
    Size("C", 16384, 4096, 128256),
    Size("D", 65536, 1024, 151936),
)
"""Qwen3-8B, -1.7B, Llama-3-8B and Qwen3-0.6B heads, with the tokens of one micro-batch of a rank."""

SIZES_WITHOUT_GPU = (Size("tiny", 2048, 64, 1000),)


@dataclass
class Workload:
    """Tensors of one workload, in the precision of the operands.

    Attributes:
        size: of the workload.
        hidden_TD: hidden states; a leaf with gradient.
        weight_VD: the output head; a leaf with gradient.
        targets_T: sampled tokens.
        old_logprobs_T: of the old policy, float32.
        advantages_T: one number per document, float32.
    """

    size: Size
    hidden_TD: Tensor
    weight_VD: Tensor
    targets_T: Tensor
    old_logprobs_T: Tensor
    advantages_T: Tensor

    @classmethod
    def make(cls, size: Size, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Workload:
        """Draw a workload."""
        draw = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, generator=draw)

        weight_VD = (normal(size.vocabulary, size.dimension) * (1.28 / size.dimension**0.5)).to(dtype)
        targets_T = torch.randint(size.vocabulary, (size.tokens,), device=device, generator=draw)
        planted_T = 6 + 3.5 * torch.rand(size.tokens, device=device, generator=draw)
        hidden_TD = normal(size.tokens, size.dimension).addcmul_(planted_T[:, None], weight_VD[targets_T].float())
        hidden_TD = hidden_TD.to(dtype)
        exact_T = exact_logprobs(hidden_TD, weight_VD, targets_T, torch.float32)
        advantages_T = normal(-(-size.tokens // DOCUMENT)).repeat_interleave(DOCUMENT)[: size.tokens]
        return cls(
            size,
            hidden_TD.requires_grad_(),
            weight_VD.requires_grad_(),
            targets_T,
            exact_T + 0.04 * normal(size.tokens),
            advantages_T,
        )

    def documents(self, length: int) -> Tensor:
        """[T] long: documents of a length, one after another."""
        return torch.arange(self.size.tokens, device=self.targets_T.device) // length

    def loss_of(self, spec: LossSpec, documents_T: Tensor | None = None) -> Part:
        """Build the loss as a callback: the share of some rows in the mean over all tokens.

        ``documents_T`` are needed by losses of sequences alone.
        """
        return Part(self, spec, documents_T)


class Part:
    """Share of some rows in a loss: the callback of `fused_loss`, and the loss of peers' log-probabilities."""

    def __init__(self, work: Workload, spec: LossSpec, documents_T: Tensor | None) -> None:
        self.work, self.loss, self.documents_T = work, build_loss(spec), documents_T

    def __call__(self, output: TokenLogprobs, index_C: Tensor) -> Tensor:
        """Sum of the rows' values over all tokens of the workload."""
        return self.of(
            output.logprobs_T,
            self.work.old_logprobs_T[index_C],
            self.work.advantages_T[index_C],
            None if self.documents_T is None else self.documents_T[index_C],
        )

    def whole(self, logprobs_T: Tensor) -> Tensor:
        """The loss of all rows, from their log-probabilities."""
        return self.of(logprobs_T, self.work.old_logprobs_T, self.work.advantages_T, self.documents_T)

    def of(self, logprobs_C: Tensor, old_C: Tensor, advantages_C: Tensor, documents_C: Tensor | None) -> Tensor:
        """Sum of the rows' values over all tokens of the workload, from tensors of the rows."""
        inputs = LossInputs(
            logprobs_C,
            old_C.to(logprobs_C.dtype),
            advantages_C.to(logprobs_C.dtype),
            document_ids_T=None if documents_C is None else documents_C - documents_C[0],
        )
        return self.loss(inputs)["policy"].values_T.sum() / self.work.size.tokens


@dataclass(frozen=True)
class Truth:
    """The fp64 ground truth, from the operands in their own precision.

    Attributes:
        logprobs_T: log-probabilities.
        hidden_TD: gradient of the hidden states.
        weight_VD: gradient of the head.
    """

    logprobs_T: Tensor
    hidden_TD: Tensor
    weight_VD: Tensor

    @classmethod
    def of(cls, work: Workload, part: Part, rows: int = 512) -> Truth:
        """Log-probabilities and both gradients in float64, some rows at a time."""
        hidden_TD, weight_VD = work.hidden_TD.detach(), work.weight_VD.detach().double()
        logprobs_T = exact_logprobs(hidden_TD, weight_VD, work.targets_T, torch.float64)
        leaf_T = logprobs_T.clone().requires_grad_()
        (coefficients_T,) = torch.autograd.grad(part.whole(leaf_T), leaf_T)
        gradient_TD = torch.empty_like(hidden_TD, dtype=torch.float64)
        gradient_VD = torch.zeros_like(weight_VD)
        for start in range(0, len(hidden_TD), rows):
            at = slice(start, start + rows)
            logits_CV = hidden_TD[at].double() @ weight_VD.T
            d_logits_CV = torch.softmax(logits_CV, -1).mul_(-coefficients_T[at, None])
            d_logits_CV.scatter_add_(1, work.targets_T[at, None], coefficients_T[at, None])
            gradient_VD.addmm_(d_logits_CV.T, hidden_TD[at].double())
            gradient_TD[at] = d_logits_CV @ weight_VD
        return cls(logprobs_T, gradient_TD, gradient_VD)


def exact_logprobs(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, dtype: torch.dtype, rows: int = 512
) -> Tensor:
    """[T] log-probabilities from GEMMs in a wider precision, some rows at a time."""
    wide_VD = weight_VD.detach().to(dtype)
    chunks = []
    for start in range(0, len(hidden_TD), rows):
        logits_CV = hidden_TD.detach()[start : start + rows].to(dtype) @ wide_VD.T
        chosen_C = logits_CV.gather(1, targets_T[start : start + rows, None]).squeeze(1)
        chunks.append(chosen_C - torch.logsumexp(logits_CV, 1))
    return torch.cat(chunks)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """L2 norm of the difference over that of the expected value."""
    return float((actual.to(expected.dtype) - expected).norm() / expected.norm())
