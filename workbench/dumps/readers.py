"""Parts that readers of systems' dumps share: groups as numbers, rectangles, packed documents, JSON lines, text.

Letters: B rows | C padded length | N documents | n tokens of one document.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.dumps.step import ID_FIELDS, StepDump, as_value
from workbench.errors import RecordError
from workbench.untrusted import parse_json


def numbered(labels: Sequence[Any]) -> Tensor:
    """Return [N] numbers of labels, in the order of their first appearance."""
    known: dict[Any, int] = {}
    texts = [label if isinstance(label, int | str) else json.dumps(label, default=str) for label in labels]
    return torch.tensor([known.setdefault(text, len(known)) for text in texts], dtype=torch.int64)


def rectangle(tokens: Mapping[str, Tensor], documents: Mapping[str, Tensor], **more: Any) -> StepDump:
    """Return a step of values [B, C] of any dtype; what is not finite where nothing trains becomes 0."""
    values = {name: as_value(name, value) for name, value in tokens.items()}
    of_documents = {name: as_value(name, value) for name, value in documents.items()}
    return StepDump.from_rectangle(values, of_documents, **more)


def packed(path: Path, rows: Sequence[Mapping[str, Tensor]], documents: Mapping[str, Tensor], **more: Any) -> StepDump:
    """Return a step of documents of unequal length, from the values [n] of each; all have the same names.

    Names of `ID_FIELDS` are ids of the document, of any number.

    Raises:
        RecordError: no document, other names in one, or values of one document that differ in length.
    """
    if not rows:
        raise refuse_names(path, "no document", "at least one")
    for number, row in enumerate(rows):
        if other := set(row) ^ set(rows[0]):
            found = f"{', '.join(sorted(other))} in document 0 or document {number}, but not in both"
            raise refuse_names(path, found, "every document has the same values")
        if len({len(value) for name, value in row.items() if name not in ID_FIELDS}) > 1:
            found = ", ".join(f"{len(value)} {name}" for name, value in row.items())
            raise refuse_names(path, f"document {number} with {found}", "one value of each a token")
    lengths_N = torch.tensor([len(row["loss_mask"]) for row in rows])
    ids_T = torch.repeat_interleave(torch.arange(len(rows)), lengths_N)
    of_tokens = [name for name in rows[0] if name not in ID_FIELDS]
    tokens = {name: as_value(name, torch.cat([row[name] for row in rows])) for name in of_tokens}
    ids = {name: [row[name] for row in rows] for name in rows[0] if name in ID_FIELDS}
    of_documents = {name: as_value(name, value) for name, value in documents.items()}
    return StepDump(ids_T, tokens, of_documents, ids, origin=str(path), **more)


def numbers_of(path: Path, where: str, record: Mapping[str, Any], name: str, *, dim: int = 1) -> Tensor:
    """Return a tensor or list of numbers of a record as a tensor; None in it is NaN.

    Raises:
        RecordError: no such value, or one that is not numbers in ``dim`` dimensions.
    """
    value, rule = record.get(name), f"{name}: numbers in {dim} dimension{'s' * (dim > 1)}"
    if value is None:
        raise refuse_names(path, f"{where} with {', '.join(map(str, record)) or 'nothing'}", rule)
    try:
        tensor = value if isinstance(value, Tensor) else torch.tensor(_without_none(value))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise refuse_names(path, f"{where}: {name} that is not numbers", rule) from None
    if tensor.dim() != dim:
        raise refuse_names(path, f"{where}: {name} of shape {list(tensor.shape)}", rule)
    return tensor.detach().cpu()


def _without_none(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return math.nan if value is None else value


def completion(path: Path, where: str, row: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the values of a sequence from its first token with a loss on, which ends its prompt, with a token_mask.

    A sequence without such a token is kept whole.

    Raises:
        RecordError: values that differ in length.
    """
    if len({len(value) for value in row.values()}) > 1:
        found = ", ".join(f"{len(value)} {name}" for name, value in row.items())
        raise refuse_names(path, f"{where} with {found}", "one value of each a token")
    trained = torch.nonzero(row["loss_mask"]).squeeze(1)
    start = int(trained[0]) if len(trained) else 0
    own = {name: value[start:] for name, value in row.items()}
    return {**own, "token_mask": torch.ones_like(own["loss_mask"], dtype=torch.bool)}


def count_of(flags: Tensor) -> float:
    """Return the number of flags that are on."""
    return float(torch.count_nonzero(flags))


def sums_of_rows(value_BC: Tensor, mask_BC: Tensor) -> Tensor:
    """Return [B] sums of values over the tokens of a mask, in float64."""
    return torch.where(mask_BC, value_BC.double(), 0.0).sum(1)


def groups_of_prompts(prompts: Sequence[Tensor]) -> Tensor:
    """Return [N] numbers of the prompts: documents of the same prompt tokens are one group."""
    return numbered([json.dumps(prompt.tolist()) for prompt in prompts])


def padded_ids(path: Path, name: str, ids_BC: Tensor, mask_BC: Tensor) -> list[Tensor]:
    """Return the token ids [n] of each row of a rectangle, without padding on any side.

    Raises:
        RecordError: ids that are no whole numbers, or a mask of another shape.
    """
    if ids_BC.is_floating_point() or ids_BC.dim() != 2 or ids_BC.shape != mask_BC.shape:
        found = f"{name} of {ids_BC.dtype} {list(ids_BC.shape)}, a mask of {list(mask_BC.shape)}"
        raise refuse_names(path, found, "[B, C] of whole numbers, and a mask of that shape")
    return [row[keep] for row, keep in zip(ids_BC.long().cpu(), mask_BC.bool().cpu(), strict=True)]


def gradients_of(path: Path, content: Any) -> dict[str, Tensor]:
    """Return gradients by the name of the parameter, that a hook added; none if there are none.

    Raises:
        RecordError: no dict of tensors.
    """
    if content is None:
        return {}
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise refuse_names(path, f"gradients: a {type(content).__name__}", "a dict of tensors, by parameter")
    return {str(name): value.detach().cpu() for name, value in content.items()}


def text_only(
    rewards: Sequence[float], group_ids: Tensor, *, advantages: Sequence[float] | None = None, **more: Any
) -> StepDump:
    """Return a step of documents whose tokens are not known: each is one token that trains."""
    number = len(rewards)
    documents = {"rewards": torch.tensor(rewards, dtype=torch.float64), "group_ids": group_ids}
    if advantages is not None:
        documents["advantages"] = torch.tensor(advantages, dtype=torch.float64)
    note = "the file has text and no tokens: only advantages can be checked, with every document as one token"
    mask_T = torch.ones(number, dtype=torch.bool)
    return StepDump(torch.arange(number), {"loss_mask": mask_T}, documents, notes=(note,), **more)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines.

    Raises:
        RecordError: no such file, no text, or a line that is no object, by its number.
    """
    try:
        lines = path.read_text(encoding="utf8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise refuse_names(path, f"{type(error).__name__}: {reason}", "a text file of JSON lines") from None
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except (ValueError, RecursionError) as error:
            raise refuse_names(path, f"line {number}: {error}", "one JSON object a line") from None
        if not isinstance(record, dict):
            raise refuse_names(path, f"line {number}: a {type(record).__name__}", "one JSON object a line")
        records.append(record)
    if not records:
        raise refuse_names(path, "no record", "one JSON object a line")
    return records


def read_table(path: Path) -> dict[str, list[Any]]:
    """Return the columns of a parquet table, by name.

    Raises:
        RecordError: no such file, no parquet table, or one without rows.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        with path.open("rb") as file:
            table = parquet.read_table(file)
    except (OSError, pyarrow.ArrowException) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        raise refuse_names(path, f"{type(error).__name__}: {reason}", "a parquet table") from None
    if not table.num_rows:
        raise refuse_names(path, "no row", "a row a document")
    return {name: table.column(name).to_pylist() for name in table.column_names}


def total_of(columns: Sequence[Sequence[Any]]) -> list[float]:
    """Return the sum of several rewards of each document; one that was not scored (None, NaN) adds nothing."""
    scored = [[0.0 if value is None or value != value else float(value) for value in column] for column in columns]
    return [sum(values) for values in zip(*scored, strict=True)]


MICRO_BATCH = re.compile(r"rank_(?P<rank>\d+)_micro_(?P<micro>\d+)\.pt")


def micro_batch_files(path: Path) -> dict[tuple[int, int], Path]:
    """Return (rank, micro-batch) -> file, in this order, of a folder of `rank_R_micro_M.pt`; a file is one alone.

    Raises:
        RecordError: no such file in the folder, two of one micro-batch, or a rank or a micro-batch that is missing.
    """
    rule = "rank_R_micro_M.pt, one for each rank and micro-batch of an optimizer step"
    if not path.is_dir():
        return {(0, 0): path}
    named = [(match, file) for file in path.iterdir() if (match := MICRO_BATCH.fullmatch(file.name))]
    files = {(int(match["rank"]), int(match["micro"])): file for match, file in named}
    if not files or len(files) < len(named):
        raise refuse_names(path, "two files of one micro-batch" if files else "no such file", rule)
    ranks, micro = (1 + max(place[axis] for place in files) for axis in (0, 1))
    for place in ((rank, number) for rank in range(ranks) for number in range(micro)):
        if place not in files:
            raise refuse_names(path, f"no micro-batch {place[1]} of rank {place[0]}", rule)
    return dict(sorted(files.items()))


def refuse_names(path: Path, found: str, rule: str) -> RecordError:
    """The error about a file that is no dump of the system."""
    return RecordError(
        f"read the dump {path}", found=found, rule=rule, fix="check the path, and the writer of the file"
    )
