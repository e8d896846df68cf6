"""Steps of what a user would run instead: a model of Hugging Face with fast kernels, in a plain loop.

The same weights, packed rows, precision and optimizer as `experiments.step.measure`, with the cheapest loss that such
a model has: Liger's fused linear cross-entropy of the same trained tokens. It has no ratio, no clipping, no weights of
the step, no metrics and no norms by parameter, so that a peer does less than a step of ours.

Attention is called as `transformers` calls its FlashAttention integrations (documents by cumulative lengths, native
grouped heads), through its public `AttentionInterface`.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from workbench.metrics.step import StepClock
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.targets import shift_targets
from workbench.specs.run import RunSpec
from workbench.train import step as flow

PEERS: dict[str, dict[str, Any]] = {
    "transformers, liger, fa4": {"attention": "fa4", "liger": True},
    "transformers, compiled layers, fa4": {"attention": "fa4", "compiled": True},
    "transformers, liger, flash": {"attention": "flash", "liger": True},
    "transformers, compiled layers, flash": {"attention": "flash", "compiled": True},
}
"""Name -> attention kernel; Liger's kernels of norms, rotary embeddings and MLPs, or each layer under torch.compile."""


class Documents:
    """Attention over the documents of the row that is computed now."""

    def __init__(self, kernel: str) -> None:
        self.kernel, self.starts, self.longest = kernel, torch.zeros(0, dtype=torch.int32), 0

    def of(self, document_ids_T: Tensor) -> None:
        """Choose a row."""
        lengths = torch.unique_consecutive(document_ids_T, return_counts=True)[1]
        self.starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        self.longest = int(lengths.max())

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Shapes: query [1, H, T, d], key and value [1, h, T, d] -> [1, T, H, d]."""
        heads = [each[0].transpose(0, 1) for each in (query, key, value)]
        if self.kernel == "fa4":
            attend = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
            out = attend(
                *heads,
                cu_seqlens_q=self.starts,
                cu_seqlens_k=self.starts,
                max_seqlen_q=self.longest,
                max_seqlen_k=self.longest,
                softmax_scale=scaling,
                causal=True,
            )
            out = out[0] if isinstance(out, tuple) else out
        else:  # the kernels of FlashAttention-2, which torch has
            limits = self.starts, self.starts, self.longest, self.longest
            out = torch.ops.aten._flash_attention_forward(*heads, *limits, 0.0, True, False, scale=scaling)[0]
        return out[None], None


class Peer:
    """A model of `transformers`, its kernels, and its steps."""

    def __init__(self, spec: RunSpec, batch: RolloutBatch, peer: dict[str, Any], device: torch.device) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        self.device, self.documents = device, Documents(peer["attention"])
        AttentionInterface.register("peer", self.documents)  # type: ignore[no-untyped-call]
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            spec.model.source, dtype=torch.bfloat16, attn_implementation="peer"
        ).to(device)
        self.model.train()
        liger = importlib.import_module("liger_kernel.transformers")
        if peer.get("liger"):
            liger.apply_liger_kernel_to_qwen3(
                rope=True, rms_norm=True, swiglu=True, fused_linear_cross_entropy=False, model=self.model
            )
        if peer.get("compiled"):
            for layer in self.model.model.layers:
                layer.compile()
        self.loss = liger.LigerFusedLinearCrossEntropyLoss(reduction="sum")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
        self.rows = [shift_targets(row).to(device, torch.float32) for row in flow.pack_step(batch, spec)]
        self.trained = sum(int(row.loss_mask_T.sum()) for row in self.rows)

    def step(self) -> float:
        """Milliseconds of a step: every row forward and backward, the norm of the gradient, the optimizer."""
        with StepClock(self.device) as clock:
            for row in self.rows:
                self.documents.of(row.document_ids_T)
                hidden = self.model.model(
                    input_ids=row.tokens_T[None], position_ids=row.positions_T[None], use_cache=False
                ).last_hidden_state[0]
                targets_T = torch.where(row.loss_mask_T, row.targets_T, -100)
                (self.loss(self.model.lm_head.weight, hidden, targets_T) / self.trained).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e9)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return clock.step_ms
