"""The folder of a training run's record, ours or another trainer's.

    <folder>/
      record.json                             {"record": 1, "context": {...}}: settings that the run reports
      steps.jsonl                             one line an optimizer step, each with its own checksum
      tensors/step0000.gradients.safetensors  whole gradients, by parameter
      tensors/step0000.tokens.safetensors     per-token values, [S] each, by name

A line has ``step`` and, as far as they are known, ``loss``, ``metrics``, ``gradient_norms`` (L2, by parameter),
``no_gradient`` (trained parameters that had none: their norms are 0), ``counts`` (of the whole step) and
``partial_metrics`` (names of metrics that are of parts of it). Their names
are defined by their reader, `workbench.diagnose.record`. Any part may be missing. Files are written atomically, and
the line of a step is written last.

Letters: S tokens of the step, in source order.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from workbench import atomic
from workbench.atomic import append_line, drop_torn_tail, read_json, read_lines, to_json, write_whole
from workbench.errors import RecordError

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1

TOKENS = {
    "policy_logprobs": "of the policy being trained, nats",
    "old_logprobs": "of the policy at the start of the update",
    "ref_logprobs": "of the frozen reference",
    "sampler_logprobs": "as the sampler saw them",
    "entropy_nats": "of the policy's distribution from which the token was drawn",
    "trained": "bool: the token counts in the loss",
    "documents": "number of the token's document in the step; -1: padding",
    "rows": "micro-batch in which the token lies, over all ranks; added where it is not given",
    "shards": "context-parallel rank of the token",
    "places": "of the token in its row",
    "positions": "of the token in its document",
    "losses": "value of the token in the loss, before weights and denominators",
    "advantages": "of the token",
    "rewards": "of the token's document",
    "ratios": "importance ratio of the token",
    "clipped": "bool: the clip removed the token's gradient",
    "targets": "vocabulary id of the token",
    "source": "place of the token in the step, the same in every layout; -1: padding",
}
"""Per-token values that a record may have, and what they mean; each lies where its token does."""

Kind = Literal["gradients", "tokens"]

_FIX = "record the run again"


def is_record(folder: Path) -> bool:
    """True if this folder has a record."""
    return (folder / "record.json").is_file()


def write_record(folder: Path, context: Mapping[str, Any]) -> None:
    """Create a record without steps.

    Raises:
        RecordError: there is a record already, or the context is no JSON data.
    """
    if is_record(folder):
        raise RecordError(
            f"begin a record in {folder}",
            found="a record",
            rule="records are never replaced",
            fix="choose another folder, or delete that one",
        )
    content = to_json({"record": VERSION, "context": dict(context)})
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "record.json", content)


def append_step(folder: Path, step: Mapping[str, Any]) -> None:
    """Append one optimizer step; a torn last line of an interrupted writer is removed first.

    Raises:
        RecordError: there is no record, or the step is no JSON data.
    """
    if not is_record(folder):
        raise _no_record(folder)
    drop_torn_tail(folder / "steps.jsonl")
    append_line(folder / "steps.jsonl", step)


def write_tensors(folder: Path, number: int, kind: Kind, tensors: Mapping[str, Tensor]) -> None:
    """Write the gradients or per-token values of a step, before its line."""
    atomic.write_tensors(_tensor_path(folder, number, kind), tensors)


def read_context(folder: Path) -> dict[str, Any]:
    """Return the settings that the run reports.

    Raises:
        RecordError: missing, damaged, or of another version.
    """
    requested = f"read {folder.name}/record.json"
    try:
        read = read_json(folder / "record.json", requested=requested, fix=_FIX)
    except FileNotFoundError:
        raise _no_record(folder) from None
    if not isinstance(read, dict) or read.get("record") != VERSION or not isinstance(read.get("context"), dict):
        raise RecordError(
            requested,
            found=str(read)[:80],
            rule=f'{{"record": {VERSION}, "context": {{...}}}}',
            fix=_FIX,
        )
    return read["context"]


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """The lines of all steps; a torn last one is left out.

    Raises:
        RecordError: a line before the last is damaged.
    """
    return read_lines(folder / "steps.jsonl", fix=_FIX)


def read_tensors(folder: Path, number: int, kind: Kind) -> dict[str, Tensor] | None:
    """The gradients or per-token values of a step; None if they were not recorded.

    Raises:
        RecordError: damaged.
    """
    path = _tensor_path(folder, number, kind)
    if not path.exists():
        return None
    return atomic.read_tensors(path, requested=f"read {folder.name}/tensors/{path.name}", fix=_FIX)


def _tensor_path(folder: Path, number: int, kind: Kind) -> Path:
    return folder / "tensors" / f"step{number:04d}.{kind}.safetensors"


def _no_record(folder: Path) -> RecordError:
    return RecordError(
        f"a record in {folder}",
        found="no record.json",
        rule="a folder that a recorder wrote, or began to write",
        fix="check the path",
    )
