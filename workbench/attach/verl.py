"""A recorder of verl's engine worker, which updates the actor.

    class Recorded(ActorRolloutRefWorker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def init_model(self):
            super().init_model()
            record("records/mine", self.actor)

Source: verl 0.9.1: `TrainingWorker.train_mini_batch` steps once for each mini-batch; `BaseEngine.train_batch`
        back-propagates the loss of each micro-batch, which is divided by counts of the whole mini-batch and multiplied
        by the ranks, and FSDP takes the mean over the ranks; `ppo_loss` and `no_padding_2_padding` say which token a
        value belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from verl.workers.utils.padding import no_padding_2_padding

from workbench.records.recorder import Recorder
from workbench.sharding.collectives import all_gather
from workbench.sharding.mesh import Axis, axis_of

SETTINGS = (
    *("loss_agg_mode", "loss_scale_factor", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
    *("entropy_coeff", "use_kl_loss", "kl_loss_coef", "kl_loss_type", "ppo_epochs", "shuffle"),
)
"""Settings of an actor that decide what it computes, beside those that the recorder sees."""
NOTED = {
    "old_log_probs": "old_logprobs",
    "ref_log_prob": "ref_logprobs",
    "rollout_log_probs": "sampler_logprobs",
    "advantages": "advantages",
    "responses": "targets",
}
"""Fields of verl's batch, [B, T] or nested -> values of tokens of a record."""
ROW = "workbench_row"
"""Field that a batch is given while it trains: the number of each document on its rank, which micro-batches keep."""


def record(folder: Path | str, worker: Any, **options: Any) -> Recorder:
    """Record every update that a worker makes until the recorder is closed, with the values of tokens.

    Call it on every rank, after the worker has its model and its loss: ``reset()`` and ``set_loss_fn``. The loss is
    called as before; its inputs are read.

    Args:
        folder: of the record; it must not have one yet.
        worker: verl's `TrainingWorker`, as ``self.actor`` of `ActorRolloutRefWorker`, with FSDP2 (``strategy: fsdp2``).
        options: of `wb.Recorder`, such as ``gradients="full"``.

    Raises:
        RecordError: the folder has a record already.
        SpecError: the model is under FSDP1, verl's default.
    """
    engine = worker.engine
    ranks = axis_of(engine.get_data_parallel_group(), "ranks")
    given: dict[str, Any] = {"ranks": ranks, "scaler": getattr(engine, "scaler", None)} | options
    given["context"] = _settings(worker) | (options.get("context") or {})
    recorder = Recorder(folder, engine.module, engine.optimizer, **given)
    original = engine.train_batch

    def train_batch(data: Any, loss_function: Callable[..., Any]) -> Any:
        rows = len(data)
        data[ROW] = ranks.rank * rows + torch.arange(rows)
        width = _most(data["responses"], ranks, next(engine.module.parameters()).device)

        def noting(**inputs: Any) -> Any:
            result = loss_function(**inputs)
            tokens = _tokens(inputs["model_output"], inputs["data"], width)
            recorder.note(counts=_counts(tokens["trained"]), tokens=tokens)
            return result

        return original(data, loss_function=noting)

    engine.train_batch = train_batch
    recorder.at_close(lambda: vars(engine).pop("train_batch", None))
    return recorder


def _most(responses: Any, ranks: Axis, device: torch.device) -> int:
    """Tokens of the longest response on all ranks, with its padding where responses are padded. Collective."""
    here = int(responses.offsets().diff().max()) if responses.is_nested else responses.shape[1]
    return max(int(piece) for piece in all_gather(torch.tensor([here], device=device), ranks))


def _tokens(output: Mapping[str, Tensor], data: Any, width: int) -> dict[str, Tensor]:
    """Values of the responses of a micro-batch, [B, T], by the names of a recorder."""
    policy = no_padding_2_padding(output["log_probs"], data).detach()
    lengths, prompts = _lengths(data)
    places = torch.arange(policy.shape[1], device=policy.device)
    documents = data[ROW].to(policy.device)[:, None].expand_as(policy)
    here = places < lengths[:, None]
    values = {
        "policy_logprobs": policy,
        "trained": _padded(data["response_mask"], policy).bool(),
        "documents": torch.where(here, documents, -1),
        "positions": prompts[:, None] + places,
        "source": torch.where(here, documents * width + places, -1),
    }
    values |= {name: _padded(data[field], policy) for field, name in NOTED.items() if field in data}
    if output.get("entropy") is not None:
        values["entropy_nats"] = no_padding_2_padding(output["entropy"], data).detach()
    return values


def _lengths(data: Any) -> tuple[Tensor, Tensor]:
    """Tokens of each response and of each prompt, [B]."""
    prompts, responses = data["prompts"], data["responses"]
    if prompts.is_nested:
        return responses.offsets().diff(), prompts.offsets().diff()
    mask, end = data["attention_mask"], prompts.shape[1]
    return mask[:, end:].sum(1), mask[:, :end].sum(1)


def _padded(values: Tensor, like: Tensor) -> Tensor:
    """Values of tokens as [B, T] of another tensor."""
    return torch.nested.to_padded_tensor(values, 0, output_size=like.shape) if values.is_nested else values


def _counts(trained: Tensor) -> dict[str, float]:
    documents = float(trained.any(1).sum())
    return {
        "documents": documents,
        "masked_documents": len(trained) - documents,
        "trained_tokens": float(trained.sum()),
    }


def _settings(worker: Any) -> dict[str, Any]:
    """Context of a record, from the worker and from the actor's settings that its loss was given."""
    engine = worker.engine
    actor = getattr(worker.loss_fn, "keywords", {}).get("config")
    sizes = {
        "dp": engine.get_data_parallel_size(),
        "micro_batch_size": None
        if engine.engine_config.use_dynamic_bsz
        else engine.engine_config.micro_batch_size_per_gpu,
        "max_grad_norm": engine.optimizer_config.clip_grad,
        "loss_mode": getattr(getattr(actor, "policy_loss", None), "loss_mode", None),
    }
    known = sizes | {name: getattr(actor, name, None) for name in SETTINGS}
    return {name: value for name, value in known.items() if value is not None}
