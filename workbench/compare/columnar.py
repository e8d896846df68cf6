"""The long tables of a comparison as columns: a parquet file for each, next to the JSON that names them.

A table is a list of records for each configuration. A column has one type: integers, numbers, truth values, text, lists
of numbers, or mappings of names to numbers; one of any other kind, or of several, is text in JSON. What is read back
equals what was written in every bit, in type and in the order of keys; a key that a record lacks stays absent.

The name of a file has the beginning of its SHA-256. The JSON is written last, so that a reader sees the old comparison
whole or the new one, and a file that was changed, cut or exchanged is refused.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.atomic import from_json, to_json, write_whole

if TYPE_CHECKING:
    import pyarrow

Record = dict[str, Any]

_DIGITS = 12  # of the SHA-256 in a file's name
_AS_JSON = {b"workbench": b"json"}  # metadata of a column


def write_table(json_path: Path, name: str, table: Sequence[Sequence[Mapping[str, Any]]]) -> Record:
    """Write a table next to a JSON file, and return what that has to say of it, for `read_table`.

    Args:
        json_path: of the JSON.
        name: of the table.
        table: the records of each configuration. A column ``configuration`` has the place of theirs, from 0.
    """
    import pyarrow
    from pyarrow import parquet

    records = [record for group in table for record in group]
    keys = list(dict.fromkeys(tuple(record) for record in records))
    numbers = {each: number for number, each in enumerate(keys)}
    runs = [[number, len(list(same))] for number, same in itertools.groupby(numbers[tuple(r)] for r in records)]
    places = [place for place, group in enumerate(table) for _ in group]
    # by number: a record may have a key of this name, and two columns may not
    columns, fields = [pyarrow.array(places, pyarrow.int64())], [pyarrow.field("configuration", pyarrow.int64())]
    for key in dict.fromkeys(itertools.chain.from_iterable(keys)):
        field, column = _column(_column_name(key), [record.get(key) for record in records])
        fields.append(field)
        columns.append(column)
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns, schema=pyarrow.schema(fields)), sink, compression="zstd")
    content = sink.getvalue().to_pybytes()
    digest = hashlib.sha256(content).hexdigest()
    file = f"{json_path.stem}.{name}.{digest[:_DIGITS]}.parquet"
    write_whole(json_path.with_name(file), content)
    return {"file": file, "sha256": digest, "rows": [len(group) for group in table], "keys": keys, "runs": runs}


def read_table(json_path: Path, entry: Mapping[str, Any]) -> list[list[Record]]:
    """Read a table, from the entry that `write_table` returned.

    Raises:
        OSError, ValueError, TypeError, KeyError: no such file, another content, or not what the JSON says of it.
    """
    import pyarrow
    from pyarrow import parquet

    file = str(entry["file"])
    if Path(file).name != file:
        raise ValueError(f"{file!r} is not the name of a file next to {json_path.name}")
    with json_path.with_name(file).open("rb") as opened:
        if (found := hashlib.file_digest(opened, "sha256").hexdigest()) != entry["sha256"]:
            raise ValueError(f"{file} has SHA-256 {found}, not {entry['sha256']}: it was changed, cut or exchanged")
        try:
            read = parquet.read_table(opened)
        except pyarrow.ArrowException as error:
            raise ValueError(f"{file}: {error}") from None
    if sum(entry["rows"]) != read.num_rows or sum(count for _, count in entry["runs"]) != read.num_rows:
        raise ValueError(f"{file} has {read.num_rows} rows, the JSON says {sum(entry['rows'])}")
    columns = {field.name: _values(field, read.column(field.name)) for field in read.schema}
    records = _records(columns, entry["keys"], entry["runs"])
    return [list(itertools.islice(records, count)) for count in entry["rows"]]


def forget_tables(json_path: Path, kept: Sequence[str]) -> None:
    """Remove the files of earlier tables of a JSON file, all but the named ones."""
    own = re.compile(rf"{re.escape(json_path.stem)}\.\w+\.[0-9a-f]{{{_DIGITS}}}\.parquet")
    for path in json_path.parent.glob("*.parquet"):
        if own.fullmatch(path.name) and path.name not in kept:
            path.unlink()


def _column_name(key: str) -> str:
    """Name of the column of a key; text that no file can hold, and the name that is taken, are written in JSON."""
    return (
        key if _is_text(key) and key != "configuration" and not key.startswith('"') else to_json(key).decode().strip()
    )


def _column(name: str, values: Sequence[Any]) -> tuple[pyarrow.Field, pyarrow.Array]:
    import pyarrow

    kind = _type(values)
    if kind is not None:
        return pyarrow.field(name, kind), pyarrow.array(
            [list(value.items()) if isinstance(value, dict) else value for value in values], kind
        )
    texts = [None if value is None else to_json(value, indent=None).decode().strip() for value in values]
    return pyarrow.field(name, pyarrow.string(), metadata=_AS_JSON), pyarrow.array(texts, pyarrow.string())


def _type(values: Sequence[Any]) -> pyarrow.DataType | None:
    """The type that all values have; None if they have several, or one that is none of a column's."""
    import pyarrow

    present = [value for value in values if value is not None]
    kinds = {type(value) for value in present}
    if kinds == {float}:
        return pyarrow.float64()
    if kinds == {bool}:
        return pyarrow.bool_()
    if kinds == {int} and all(-(2**63) <= value < 2**63 for value in present):
        return pyarrow.int64()
    if kinds == {str} and all(map(_is_text, present)):
        return pyarrow.string()
    if kinds == {list} and {type(item) for value in present for item in value} == {float}:
        return pyarrow.list_(pyarrow.float64())
    if kinds == {dict} and {type(item) for value in present for item in value.values()} == {float}:
        names = set().union(*present)
        return pyarrow.map_(pyarrow.string(), pyarrow.float64()) if all(map(_is_text, names)) else None
    return None


def _is_text(value: Any) -> bool:
    """True for text that UTF-8 can hold: no half surrogate."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _values(field: pyarrow.Field, column: pyarrow.ChunkedArray) -> list[Any]:
    import pyarrow

    values = column.to_pylist()
    if field.metadata and field.metadata.get(b"workbench") == b"json":
        return [None if value is None else from_json(value) for value in values]
    if pyarrow.types.is_map(field.type):
        return [None if value is None else dict(value) for value in values]
    return values


def _records(columns: Mapping[str, list[Any]], keys: Sequence[Sequence[str]], runs: Any) -> Iterator[Record]:
    row = 0
    for number, count in runs:
        present = [(key, columns[_column_name(key)]) for key in keys[number]]
        for _ in range(count):
            yield {key: values[row] for key, values in present}
            row += 1
