"""Atomic files, and JSON lines with checksums.

A file is written under a temporary name, flushed and renamed. A line of JSON is appended with a checksum, so that a
line torn by a crash is detected and left out. JSON is standard JSON, also for NaN. Nothing is ever unpickled.

This module imports no torch until a tensor is read or written, and otherwise only the standard library and safetensors.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from workbench.errors import RecordError
from workbench.untrusted import parse_json

if TYPE_CHECKING:
    from torch import Tensor

_NOT_FINITE = [{"float": name} for name in ("nan", "inf", "-inf")]
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # as Rust's std::io::Error prints a number of the operating system
_CHECK = re.compile(r'\{"crc32": "([0-9a-f]{8})", ')


def to_json(value: Any, *, indent: int | None = 1, sort_keys: bool = False) -> bytes:
    """Encode as standard JSON with a final newline; `from_json` decodes it.

    JSON cannot represent NaN and the infinities: they are written as ``{"float": "nan"}``, "inf" and "-inf".

    Raises:
        RecordError: a value that is not JSON data.
    """
    try:
        return (json.dumps(standard(value), indent=indent, sort_keys=sort_keys, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise RecordError(
            "write a record as JSON",
            found=str(error),
            rule="text, numbers, booleans, None, lists and mappings of them",
            fix="turn tensors into numbers with .item() or float()",
        ) from None


def from_json(content: bytes | str) -> Any:
    """Decode the output of `to_json`; a ValueError if it is not JSON."""
    return parse_json(content, convert=lambda read: float(read["float"]) if read in _NOT_FINITE else read)


def standard(value: Any) -> Any:
    """Replace NaN and the infinities in JSON data by the form that `to_json` writes."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(float(value))}
    if isinstance(value, Mapping):
        return {key: standard(item) for key, item in value.items()}
    return [standard(item) for item in value] if isinstance(value, list | tuple) else value


def read_json(path: Path, *, requested: str, fix: str) -> Any:
    """Read a file of JSON.

    Raises:
        RecordError: damaged, with this request and fix.
        FileNotFoundError: missing.
    """
    try:
        return from_json(path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise RecordError(
            requested, found=f"{type(error).__name__}: {error}", rule="a whole JSON file", fix=fix
        ) from None


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file atomically; it is on disk when this returns, and the old content stays until then."""
    return _replace(path, lambda temporary: temporary.write_bytes(content))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Write a safetensors file atomically. Tensors that share memory are written separately.

    Raises:
        OSError: the operating system refuses, such as on a full disk. The library raises errors of its own for it.
    """
    from safetensors.torch import save_file

    plain: dict[str, Tensor] = {}
    storages: set[int] = set()
    for key, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        storage = value.untyped_storage().data_ptr()
        plain[key] = value.clone() if storage in storages else value
        storages.add(storage)
    with system_errors(path):
        return _replace(path, lambda temporary: save_file(plain, temporary))


@contextlib.contextmanager
def system_errors(path: Path) -> Iterator[None]:
    """Raise errors of the operating system that the tensor library found on a file as what they are, OSError."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        if (number := _OS_ERROR.search(str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None


def read_tensors(path: Path, *, requested: str, fix: str) -> dict[str, Tensor]:
    """Read a safetensors file.

    Raises:
        RecordError: missing or damaged, with this request and fix.
    """
    from safetensors.torch import load_file

    with _damaged_tensors(requested, fix):
        return load_file(path)


class StoredTensors(Mapping[str, "Tensor"]):
    """The tensors of a safetensors file, each read when it is asked for, and forgotten.

    Args:
        path: of the file.
        requested: what is read, for errors.
        fix: what a user can do, for errors.
        order: names in the order in which they are given; () for that of the file.

    Raises:
        RecordError: missing or damaged, with this request and fix; also when a tensor is read.
    """

    def __init__(self, path: Path, *, requested: str, fix: str, order: Iterable[str] = ()) -> None:
        self._path, self._requested, self._fix = path, requested, fix
        names = dict.fromkeys(tensor_names(path, requested=requested, fix=fix))
        self._names = {name: None for name in order if name in names} | names

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import safe_open

        if name not in self._names:
            raise KeyError(name)
        # opened for each: a file that stays open keeps the pages of all tensors that were read
        with _damaged_tensors(self._requested, self._fix), safe_open(self._path, framework="pt") as file:
            return cast("Tensor", file.get_tensor(name)).clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def tensor_names(path: Path, *, requested: str, fix: str) -> list[str]:
    """Read the names in a safetensors file from its header alone; safetensors checks the file's length against it.

    Raises:
        RecordError: missing, cut or damaged, with this request and fix.
    """
    from safetensors import safe_open

    with _damaged_tensors(requested, fix), safe_open(path, framework="np") as file:
        return list(file.keys())


@contextlib.contextmanager
def _damaged_tensors(requested: str, fix: str) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RecordError(
            requested, found=f"{type(error).__name__}: {error}", rule="a safetensors file written by this run", fix=fix
        ) from None


def _replace(path: Path, write: Callable[[Path], object]) -> Path:
    """Write under a temporary name, flush and rename."""
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # without it the rename itself may be lost in a crash
    finally:
        os.close(folder)
    return path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file lock, one process and thread at a time; it is released when its process ends."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---- lines -----------------------------------------------------------------------------------------------


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record as one line with its checksum, on disk when this returns. Requires a single writer.

    Raises:
        RecordError: the record is empty, names a key ``crc32``, or does not fit in JSON.
    """
    _refuse_reserved(path, record)
    with path.open("ab") as file:
        file.write(line_of(record))
        file.flush()
        os.fsync(file.fileno())


def line_of(record: Mapping[str, Any]) -> bytes:
    """Encode a record as one line with its checksum."""
    body = to_json(dict(record), indent=None).rstrip(b"\n")
    return b'{"crc32": "%08x", ' % zlib.crc32(body) + body[1:] + b"\n"


def _refuse_reserved(path: Path, record: Mapping[str, Any]) -> None:
    if not record or "crc32" in record:
        raise RecordError(
            f"append to {path.name} of {path.parent.name}",
            found=f"keys {sorted(record)}",
            rule="at least one key, and none named crc32",
            fix="rename the key",
        )


def read_lines(path: Path, *, fix: str) -> list[dict[str, Any]]:
    """Read all appended records, [] if there is no file; a torn last line is left out.

    Raises:
        RecordError: a line before the last is damaged.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(path, error, fix=fix) from None
    if not lines[-1]:
        lines.pop()
    records = [checked_line(line) for line in lines]
    if None in records[:-1]:
        raise damaged(path, f"line {records.index(None) + 1} of {len(lines)}", fix=fix)
    return [record for record in records if record is not None]


def checked_line(line: bytes) -> dict[str, Any] | None:
    """Parse a line, or return None if its checksum does not match."""
    text = line.decode("utf8", errors="replace")
    match = _CHECK.match(text)
    if match is None:
        return None
    body = "{" + text[match.end() :]
    return from_json(body) if f"{zlib.crc32(body.encode()):08x}" == match[1] else None


def unreadable(path: Path, error: OSError, *, fix: str) -> RecordError:
    """Build the error for a file of lines that the operating system does not read."""
    return RecordError(
        f"read {path.parent.name}/{path.name}",
        found=f"{type(error).__name__}: {error.strerror}",
        rule="a file of lines that can be read",
        fix=fix,
    )


def damaged(path: Path, which: str, *, fix: str) -> RecordError:
    """Build the error for a file of lines with a damaged line."""
    return RecordError(
        f"read {path.parent.name}/{path.name}",
        found=f"{which} is damaged",
        rule="every line except a torn last one has the right checksum",
        fix=fix,
    )


def drop_torn_tail(path: Path) -> None:
    """Truncate a torn last line of an interrupted writer, so that the next record starts on a new line."""
    content = path.read_bytes() if path.exists() else b""
    start = content.rstrip(b"\n").rfind(b"\n") + 1
    last = content[start:]
    if last and (not last.endswith(b"\n") or checked_line(last.rstrip(b"\n")) is None):
        with path.open("rb+") as file:
            file.truncate(start)
            os.fsync(file.fileno())
