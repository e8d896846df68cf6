"""Reader of what ROLL writes of a step: a pickled `DataProto`, and generations (`rollout_dump_dir`, .jsonl).

`RolloutMockMixin._dump_batch` (`rollout_mock`, mode dump) pickles the batch of a rollout, before advantages; the same
pickle of a batch after `compute_advantage` has them. Two names are not ROLL's own, and may be added by a hook in the
actor: `log_probs`, of the policy that the loss is of, and `grad_log_probs`, the derivative by them of the loss that
reaches the optimizer. Values [B, C - 1] stand at the position that predicts a token. Read from alibaba/ROLL 8eb27cc2.

Letters: B rows | C their padded length.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.dumps.readers import completion, numbered, packed, read_json_lines, refuse_names, text_only
from workbench.dumps.step import StepDump
from workbench.dumps.tensordicts import KNOWN as TENSORDICTS
from workbench.dumps.tensordicts import DataProto
from workbench.rollouts.pickles import Known
from workbench.rollouts.torch_files import read_restricted

NAMES = {
    "log_probs": "policy_logprobs",
    "old_log_probs": "old_logprobs",
    "infer_logprobs": "sampler_logprobs",
    "ref_log_probs": "ref_logprobs",
    "entropy": "entropies",
    "values": "values",
    "advantages": "advantages",
    "grad_log_probs": "coefficients",
}
"""ROLL's name of a tensor [B, C - 1] -> that of `StepDump`."""
LOSSES = {"actor/weighted_pg_loss": "policy", "actor/total_loss": "total", "actor/kl_loss": "kl_without_coefficient"}
"""Name in ROLL's logs, without its reducer -> that of `StepDump`."""
METRICS = ("actor/ratio_mean", "actor/approxkl", "actor/policykl")
WITHOUT_LIVE = "a DataProto has no log-probabilities of the live policy; a hook can add them as log_probs"
WITHOUT_ADVANTAGES = "the batch of a rollout has no advantages: pickle it after compute_advantage"


def _data_proto(_: tuple[Any, ...], state: Any) -> DataProto:
    """`DataProto.__getstate__`: a buffer of torch.save, numpy arrays, a remote batch, other data."""
    buffer, non_tensors, remote, meta = state
    if remote is not None:
        raise ValueError("a batch that is in Ray's store; materialize it before saving")
    batch = read_restricted(buffer, known=TENSORDICTS, what="the batch of a DataProto")
    return DataProto(dict(batch or {}), dict(non_tensors or {}), dict(meta or {}))


KNOWN = TENSORDICTS | Known(
    states={
        "roll.distributed.scheduler.protocol.DataProto": _data_proto,
        "_io.BytesIO": lambda _, state: bytes(state[0]),
    }
)
"""`DataProto` of ROLL, whose tensors are in a `BytesIO`."""


def read_dump(path: Path) -> StepDump:
    """Read a `DataProto` (any suffix), or generations (.jsonl).

    Raises:
        RecordError: no such file, a damaged one, one with unknown classes, or a batch without response_mask.
    """
    if path.suffix == ".jsonl":
        return _generations(path)
    content = read_restricted(path, known=KNOWN)
    if not isinstance(content, DataProto):
        raise refuse_names(path, f"a {type(content).__name__}", "a DataProto of ROLL")
    batch = {name: value for name, value in content.batch.items() if isinstance(value, Tensor)}
    if missing := [name for name in ("input_ids", "response_mask") if name not in batch]:
        raise refuse_names(path, f"no {', '.join(missing)} in {', '.join(batch) or 'it'}", "the batch of a rollout")
    rows = _rows(path, batch)
    losses, metrics = _of_loss(content.meta.get("metrics"))
    documents = {}
    groups = batch.get("prompt_id", content.non_tensors.get("prompt_id"))
    if groups is not None:
        labels = groups.tolist()
        if len(labels) != len(rows):
            raise refuse_names(path, f"{len(labels)} prompt_id of {len(rows)} rows", "one a row")
        documents["group_ids"] = numbered(labels)
    notes = [] if "log_probs" in batch else [WITHOUT_LIVE]
    notes += [] if "advantages" in batch else [WITHOUT_ADVANTAGES]
    return packed(path, rows, documents, system="roll", losses=losses, metrics=metrics, notes=tuple(notes))


def _rows(path: Path, batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Values of each row's completion, from the first token that trains to the end of the row."""
    mask, ids = batch["response_mask"], batch["input_ids"]
    if mask.dim() != 2 or mask.shape != ids.shape or mask.shape[1] < 2:
        found = f"response_mask {list(mask.shape)}, input_ids {list(ids.shape)}"
        raise refuse_names(path, found, "both of the same two dimensions")
    trained = batch.get("final_response_mask", mask[:, 1:])
    values = {"loss_mask": trained, "token_ids": ids[:, 1:]}
    values |= {ours: batch[name] for name, ours in NAMES.items() if name in batch and batch[name].numel()}
    needed = [len(mask), mask.shape[1] - 1]
    if wrong := {name: list(value.shape) for name, value in values.items() if list(value.shape) != needed}:
        found = ", ".join(f"{name} {shape}" for name, shape in wrong.items())
        raise refuse_names(path, found, f"{needed}: a value a predicted token of response_mask {list(mask.shape)}")
    real = batch.get("attention_mask", torch.ones_like(mask))
    if real.shape != mask.shape:
        raise refuse_names(path, f"attention_mask {list(real.shape)}", f"{list(mask.shape)}, as response_mask")
    rows = []
    for number, own_C in enumerate(real[:, 1:].bool()):
        row = {name: value[number][own_C] for name, value in values.items()}
        rows.append(completion(path, f"row {number}", row))
    return rows


def _of_loss(metrics: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Losses and means that `loss_func` returned, each a sum over micro-batches and ranks (@sum)."""
    given = metrics if isinstance(metrics, Mapping) else {}
    numbers = {
        str(name).partition("@")[0]: float(value) for name, value in given.items() if isinstance(value, int | float)
    }
    losses = {ours: numbers[name] for name, ours in LOSSES.items() if name in numbers}
    return losses, {name: numbers[name] for name in METRICS if name in numbers}


def _generations(path: Path) -> StepDump:
    """Read `write_to_json_process`: one line with columns, text and scores."""
    scores, prompts = list[float](), list[Any]()
    for number, record in enumerate(read_json_lines(path)):
        columns = {name: record.get(name) for name in ("scores", "prompt")}
        if not all(isinstance(column, list) for column in columns.values()):
            found = f"line {number + 1} with {', '.join(record)}"
            raise refuse_names(path, found, "columns scores and prompt, as rollout_dump_dir has them")
        lengths = {name: len(column or ()) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise refuse_names(path, f"line {number + 1}: {lengths}", "columns of one length")
        scores += [float(score) for score in columns["scores"] or ()]
        prompts += columns["prompt"] or ()
    return text_only(scores, numbered(prompts), system="roll", origin=str(path))
