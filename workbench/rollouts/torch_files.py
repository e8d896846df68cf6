"""Tensors and arrays of `.pt` files and pickles, read without executing anything; see `workbench.rollouts.pickles`.

Read are the zip archives and the older streams of `torch.save`, and plain pickles, all of tensors, numpy arrays and
plain containers. Classes of other packages are refused by name, unless the caller has a constructor for them.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from workbench.errors import RecordError, check_kind
from workbench.rollouts.pickles import Global, Known, damaged, read_pickle

_ZIP = b"PK\x03\x04"
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class _Storage(NamedTuple):
    dtype: torch.dtype
    content: bytes


def read_restricted(source: Path | str | bytes, *, known: Known | None = None, what: str = "") -> Any:
    """Read a `.pt` file or a pickle as plain data: containers, numbers, text, tensors and numpy arrays.

    Args:
        source: the file, or its content.
        known: constructors of further classes, by their names.
        what: name in errors; by default the path.

    Returns:
        Tensors on the CPU; an `OrderedDict` is a dict, numpy scalars are Python numbers.

    Raises:
        SpecError: no path and no bytes.
        RecordError: no such file; a class or function that is not known, by its name; a damaged file.
    """
    check_kind("read a .pt file or a pickle", source, (str, Path, bytes), "pass its path")
    what = what or ("a pickle" if isinstance(source, bytes) else str(source))
    try:
        content = source if isinstance(source, bytes) else Path(source).read_bytes()
    except OSError as error:
        raise damaged(what, f"{type(error).__name__}: {error.strerror}") from None
    table = KNOWN if known is None else KNOWN | known
    if content.startswith(_ZIP):
        return _read_zip(content, table, what)
    stream = BytesIO(content)
    first = read_pickle(stream, table, what=what)
    return _read_legacy(stream, table, what) if first == _LEGACY_MAGIC and first is not True else first


def _read_zip(content: bytes, known: Known, what: str) -> Any:
    try:
        with zipfile.ZipFile(BytesIO(content)) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError, RuntimeError) as error:
        raise damaged(what, f"{type(error).__name__}: {error}") from None
    programs = [name for name in entries if name.endswith("/data.pkl")]
    if len(programs) != 1:
        raise damaged(what, f"{len(programs)} data.pkl in the archive")
    folder = programs[0].removesuffix("data.pkl")
    if (order := entries.get(f"{folder}byteorder", b"little")) != b"little":
        raise RecordError(f"read {what}", found=f"byte order {order!r}", rule="little-endian", fix="save it again")

    def storage(name: Any) -> _Storage:
        _, kind, key, _, _ = name
        return _Storage(_dtype_of(kind), entries[f"{folder}data/{key}"])

    return read_pickle(entries[programs[0]], known, what=what, persistent=storage)


def _read_legacy(stream: BytesIO, known: Known, what: str) -> Any:
    """Read the older format behind its first pickle: two more, the object, the keys of its storages, and their bytes.

    The storages come last: the object is read twice, first for the types of its storages.
    """
    for _ in range(2):
        read_pickle(stream, known, what=what)
    start, blank = stream.tell(), dict[str, _Storage]()

    def first(name: Any) -> _Storage:
        kind = _dtype_of(name[1])
        size = int(name[4]) * kind.itemsize
        if not 0 <= size <= len(stream.getbuffer()):
            raise ValueError(f"a storage of {size} bytes in a file of {len(stream.getbuffer())}")
        return blank.setdefault(name[2], _Storage(kind, bytes(size)))

    read_pickle(stream, known, what=what, persistent=first)
    keys = read_pickle(stream, known, what=what)
    if not isinstance(keys, list) or {*map(str, keys)} != {*map(str, blank)}:
        raise damaged(what, "the object names other storages than the list of them")
    filled = {}
    for key in keys:
        kind, size = blank[key].dtype, len(blank[key].content)
        stored = int.from_bytes(stream.read(8), "little") * kind.itemsize
        content = stream.read(size)
        if stored != size or len(content) != size:
            raise damaged(what, f"{len(content)} bytes of a storage that has {stored}, of {size} in the object")
        filled[key] = _Storage(kind, content)
    stream.seek(start)
    return read_pickle(stream, known, what=what, persistent=lambda name: filled[name[2]])


def _dtype_of(kind: Any) -> torch.dtype:
    name = kind.name.rpartition(".")[2] if isinstance(kind, Global) else "?"
    return torch.uint8 if name == "UntypedStorage" else _STORAGES[name]


def _rebuild_tensor(storage: _Storage, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
    return _strided(storage, storage.dtype, offset, size, stride)


def _rebuild_tensor_v3(
    storage: _Storage, offset: int, size: Any, stride: Any, gradient: bool, hooks: Any, dtype: torch.dtype, *_: Any
) -> Tensor:
    return _strided(storage, dtype, offset, size, stride)


def _strided(storage: _Storage, dtype: torch.dtype, offset: int, size: Any, stride: Any) -> Tensor:
    """View of a storage; one that would leave it is torch's RuntimeError, which the reader reports as damage."""
    flat = torch.empty(0, dtype=dtype)
    if storage.content:
        flat = torch.frombuffer(bytearray(storage.content), dtype=dtype)
    return flat.as_strided(tuple(size), tuple(stride), offset)


def _array(_: tuple[Any, ...], state: Any) -> np.ndarray:
    """Numpy array from its state: version, shape, dtype, column order, and its bytes or its list of objects."""
    _, shape, dtype, fortran, content = state
    return _array_of(content, dtype, shape, "F" if fortran else "C")


def _array_of(content: Any, dtype: np.dtype, shape: Any, order: str = "C") -> np.ndarray:
    if not isinstance(content, list if dtype.kind == "O" else bytes | bytearray):
        raise ValueError(f"an array of {dtype} from a {type(content).__name__}")
    if dtype.kind == "O":
        array = np.empty(len(content), dtype=object)
        array[:] = content
    else:
        array = np.frombuffer(bytes(content), dtype=dtype).copy()
    return array.reshape(tuple(shape), order="F" if order == "F" else "C")


def _dtype(arguments: tuple[Any, ...], state: Any) -> np.dtype:
    """Plain numpy type; of its state only the byte order is read."""
    name = str(arguments[0])
    if not isinstance(state, tuple) or any(part is not None for part in state[2:5]) or name[:1] not in "biufcOSU":
        raise RecordError(
            f"read numpy type {name!r}", rule="numbers, text or objects, without fields", fix="convert it"
        )
    dtype = np.dtype(name)
    return dtype.newbyteorder(state[1]) if state[1] in ("<", ">") else dtype


def _encoded(text: str, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"encoding {encoding!r}")
    return text.encode("latin1")


def _scalar(dtype: np.dtype, content: Any) -> Any:
    return content if dtype.kind == "O" else _array_of(content, dtype, (1,))[0].item()


def _first(value: Any, *_: Any) -> Any:
    return value


def _named(path: str) -> Mapping[str, Global]:
    return {path: Global(path)}


_CONTAINERS: dict[str, Callable[..., Any]] = {
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.list": list,
    "builtins.dict": dict,
    "builtins.bytes": lambda: b"",
    "builtins.bytearray": lambda value=b"", *_: bytearray(
        _encoded(value) if isinstance(value, str) else b"".join([value])
    ),
    "collections.OrderedDict": dict,
    "collections.defaultdict": lambda *_: {},
}

KNOWN = Known(
    constants={
        **{f"torch.{name}": _ for name, _ in vars(torch).items() if isinstance(_, torch.dtype)},
        **{path: Global(path) for path in (f"torch.{name}" for name in _STORAGES)},
        **_named("torch.storage.UntypedStorage"),
        **_named("numpy.ndarray"),
    },
    calls={
        **_CONTAINERS,
        "_codecs.encode": _encoded,
        "numpy._core.multiarray.scalar": _scalar,
        "numpy._core.numeric._frombuffer": _array_of,
        "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
        "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
        "torch._utils._rebuild_parameter": _first,
        "torch.storage._load_from_bytes": lambda content: read_restricted(content, what="a tensor in a pickle"),
        "torch.Size": lambda sizes=(): tuple(sizes),
        "torch.device": lambda kind, *_: str(kind),
    },
    states={"numpy._core.multiarray._reconstruct": _array, "numpy.dtype": _dtype},
)
"""Tensors, numpy arrays and plain containers."""
