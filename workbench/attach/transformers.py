"""A recorder as a callback of transformers' Trainer, and of TRL's, which are made of it.

    trainer = Trainer(...)                                       # or TRL's SFTTrainer, DPOTrainer, GRPOTrainer
    trainer.add_callback(RecorderCallback("records/mine", trainer))
    trainer.train()

Source: transformers 5.23, TRL 1.16: `CallbackHandler.on_train_begin` has model and optimizer;
        `GRPOTrainer._compute_loss` and `_get_per_token_logps_and_entropies`, which are private and may change: without
        them no values of tokens are noted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from workbench.records.recorder import Recorder

SETTINGS = (
    *("lr_scheduler_type", "warmup_steps", "label_smoothing_factor", "average_tokens_across_devices"),
    *("temperature", "beta", "epsilon", "epsilon_high", "delta", "loss_type", "scale_rewards", "num_iterations"),
    *("num_generations", "importance_sampling_level", "mask_truncated_completions", "top_entropy_quantile"),
    *("completion_only_loss", "assistant_only_loss", "packing", "padding_free", "reference_free", "label_smoothing"),
)
"""Arguments of a trainer that decide what it computes, beside those that the recorder sees."""
_LOSS, _LOGPROBS = "_compute_loss", "_get_per_token_logps_and_entropies"


class RecorderCallback(TrainerCallback):
    """Callback that records the training of a trainer.

    Args:
        folder: of the record; it must not have one yet.
        trainer: to which the callback is added; with it, values of tokens are noted where it is TRL's GRPO trainer.
        options: of `wb.Recorder`, such as ``gradients="full"``.
    """

    def __init__(self, folder: Path | str, trainer: Any = None, **options: Any) -> None:
        self.folder = Path(folder)
        self.recorder: Recorder | None = None
        self._trainer, self._options = trainer, options
        self._documents = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin the record, of the model and the optimizer that train."""
        scaler = getattr(getattr(self._trainer, "accelerator", None), "scaler", None)
        options: dict[str, Any] = {"scaler": scaler} | self._options
        options["context"] = _settings(args) | (options.get("context") or {})
        self.recorder = Recorder(self.folder, given["model"], given["optimizer"], **options)
        if all(hasattr(self._trainer, name) for name in (_LOSS, _LOGPROBS)):
            self._wrap(_LOGPROBS, self._with_logprobs)
            self._wrap(_LOSS, self._with_loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Number the documents of a step from 0."""
        self._documents = 0

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close the record, and leave the trainer as it was."""
        if self.recorder is not None:
            self.recorder.close()
        for name in (_LOSS, _LOGPROBS):
            if self._trainer is not None:
                vars(self._trainer).pop(name, None)

    # ---- values of tokens of TRL's GRPO ------------------------------------------------------------------

    def _wrap(self, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(self._trainer, name)
        setattr(self._trainer, name, lambda *given, **named: wrapper(original, *given, **named))

    def _with_logprobs(self, original: Any, *given: Any, **named: Any) -> Any:
        result = original(*given, **named)
        if torch.is_grad_enabled():
            self._logprobs, self._entropies = result[0], result[1]
        return result

    def _with_loss(self, original: Any, model: Any, inputs: Any) -> Any:
        result = original(model, inputs)
        if torch.is_grad_enabled() and self.recorder is not None:
            tokens = self._tokens(inputs)
            counts = {
                "documents": float(tokens["trained"].any(1).sum()),
                "trained_tokens": float(tokens["trained"].sum()),
            }
            self.recorder.note(counts=counts, tokens=tokens)
        return result

    def _tokens(self, inputs: Any) -> dict[str, Tensor]:
        """Values of completions, [B, T], by the names of a recorder; places are those of unpadded completions."""
        policy, mask = self._logprobs.detach(), inputs["completion_mask"].bool()
        rows, length = policy.shape
        world, most = self._trainer.accelerator.num_processes, self._trainer.max_completion_length or length
        numbers = (self._documents + torch.arange(rows)) * world + self._trainer.accelerator.process_index
        self._documents += rows
        documents = numbers.to(policy.device)[:, None].expand(rows, length)
        places = torch.arange(length, device=policy.device)
        advantages = inputs["advantages"]
        old = inputs.get("old_per_token_logps")
        values = {
            "policy_logprobs": policy,
            "old_logprobs": policy if old is None else old,
            "advantages": (advantages[:, None] if advantages.dim() == 1 else advantages).expand(rows, length),
            "trained": mask & inputs["tool_mask"].bool() if "tool_mask" in inputs else mask,
            "documents": documents,
            "targets": inputs["completion_ids"],
            "positions": (inputs["prompt_mask"].sum(1, keepdim=True) + places).expand(rows, length),
            "source": torch.where(mask, documents * max(most, length) + places, -1),
        }
        optional = {
            "entropy_nats": self._entropies,
            "ref_logprobs": inputs.get("ref_per_token_logps"),
            "sampler_logprobs": inputs.get("sampling_per_token_logps"),
        }
        return values | {name: value for name, value in optional.items() if value is not None}


def _settings(args: Any) -> dict[str, Any]:
    """Context of a record, from the arguments of a trainer."""
    known = {name: getattr(args, name) for name in SETTINGS if hasattr(args, name)}
    plain = {
        name: value if isinstance(value, bool | int | float | None) else str(value) for name, value in known.items()
    }
    sizes = {
        "dp": args.world_size,
        "micro_batches": args.gradient_accumulation_steps,
        "max_grad_norm": args.max_grad_norm,
    }
    return sizes | {name: value for name, value in plain.items() if value is not None}
