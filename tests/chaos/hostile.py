"""Specs, rollouts and records that nobody should write: strategies that shrink, and what may come of each.

Whatever a file has, the answer is data or an error of the workbench; never another exception, never a raw control
character on a terminal, and never a number from a file that no longer holds it.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from hypothesis import strategies as st

from tests.helpers.hand_made import make_project, make_run
from workbench.cli import main as command
from workbench.errors import WorkbenchError
from workbench.launch.ablation import load_ablation
from workbench.records.directory import RunDirectory
from workbench.rollouts import files
from workbench.rollouts.importers import load_rollouts

SPEC = {
    "question": "?",
    "base": {
        "steps": 4,
        "seed": 1,
        "device": "cpu",
        "optimizer": {"name": "adamw", "learning_rate": 1e-4},
        "loss": {"name": "grpo", "surrogate": {"clip_low": 0.2}, "kl": {"coefficient": 0.05}, "denominator": "token"},
        "record": {"certificate": True},
        "data": {"micro_batches": 2},
    },
    "axes": {"precision": {"float64": {}, "float32": {"frozen_clip": "a-float64"}}},
    "reference": "a",
    "truth": "a-float64",
    "configurations": {"a": {}, "b": {"layout": {"cp": 2, "order": "zigzag"}}},
    "extra": {"c": {"precision": "float64", "faults": ["local_denominator"]}},
}

ROLLOUT = {
    "prompt_ids": [5, 6],
    "completion_ids": [7, 2],
    "old_logprobs": [-1.0, -2.0],
    "advantages": 0.5,
    "rewards": 1.0,
    "group_ids": 0,
}

_TEXT = st.text(max_size=30) | st.sampled_from(
    [
        "",
        "a" * 300,
        "../../x",
        "\x1b[31mred\x1b[0m",
        "\ud800",
        "größer",
        "nan",
        "1e400",
        "0x10",
        "~",
        "1_000",
        "-",
        "a\nb",
    ]
)
_NUMBERS = st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, 10**400, -(10**30)]) | st.integers()
SCALARS = st.none() | st.booleans() | _NUMBERS | st.floats() | _TEXT
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4), max_leaves=8
)

_ODD_YAML = st.sampled_from(
    [
        "2020-13-45",
        "!!int abc",
        "9" * 5000,
        "? [a, b] : c",
        "[" * 200 + "]" * 200,
        "&a [*a, *a]",
        "{a: &x [1, 1], b: [*x, *x, *x]}",
        "!!python/object/apply:os.system [true]",
        "<<: 3",
        ".inf",
        "\x00",
        "'",
        "--- a\n--- b",
        "%TAG ! x",
    ]
)


def _paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, inner in items for path in _paths(inner, (*at, key)))]


def _with(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return value


@st.composite
def changed(draw: st.DrawFn, valid: Any) -> Any:
    """Valid data in which one to three places hold something else, or have another name."""
    value = valid
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(_paths(value)))
        if path and isinstance(path[-1], str) and draw(st.booleans()):
            holder = value
            for key in path[:-1]:
                holder = holder[key]
            value = _with(value, path[:-1], {(draw(_TEXT) if k == path[-1] else k): v for k, v in holder.items()})
        else:
            value = _with(value, path, draw(VALUES))
    return value


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content of a file after one to three damages: cut, changed, repeated, replaced."""
    for _ in range(draw(st.integers(1, 3))):
        size = len(content)
        at = draw(st.integers(0, size))
        until = draw(st.integers(at, min(size, at + 64)))
        match draw(st.sampled_from(["cut", "other", "drop", "twice", "nothing", "long"])):
            case "cut":
                content = content[:at]
            case "other":
                content = content[:at] + draw(st.binary(min_size=1, max_size=16)) + content[until:]
            case "drop":
                content = content[:at] + content[until:]
            case "twice":
                content = content[:until] + content[at:until] + content[until:]
            case "nothing":
                content = b""
            case "long":
                content = content[:at] + b"[" * draw(st.integers(0, 5000)) + content[at:]
    return content


# ---- specs -----------------------------------------------------------------------------------------------


def _yaml(value: Any) -> bytes:
    with contextlib.suppress(yaml.YAMLError, ValueError):
        return yaml.safe_dump(value, allow_unicode=True).encode("utf8", errors="surrogatepass")
    return json.dumps(value).encode()


SPECS: st.SearchStrategy[bytes] = st.one_of(
    changed(SPEC).map(_yaml),
    changed(SPEC).map(lambda value: json.dumps(value).encode()),
    damaged(_yaml(SPEC)),
    st.builds(
        lambda path, odd: _yaml(_with(SPEC, path, "PLACE")).replace(b"PLACE", odd.encode()),
        st.sampled_from(_paths(SPEC)[1:]),
        _ODD_YAML,
    ),
    st.binary(max_size=200),
    st.text(max_size=200).map(lambda text: text.encode("utf8", errors="surrogatepass")),
)
"""Files of ablations."""


def check_spec(folder: Path, content: bytes) -> str:
    """Read an ablation and expand it; what came of it."""
    path = folder / "ablation.yaml"
    path.write_bytes(content)
    return _result(lambda: load_ablation(path).expand())


# ---- rollouts --------------------------------------------------------------------------------------------


def _jsonl(records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def _npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


_PADDED = {
    "prompt_ids": [[0, 5], [3, 4]],
    "prompt_mask": [[0, 1], [1, 1]],
    "completion_ids": [[7, 2], [9, 0]],
    "completion_mask": [[1, 1], [1, 0]],
    "old_logprobs": [[-1.0, -2.0], [-0.5, 0.0]],
    "advantages": [0.5, -0.5],
}


@st.composite
def _odd_npz(draw: st.DrawFn) -> bytes:
    arrays: dict[str, Any] = {}
    chosen = draw(changed(_PADDED))
    for name, value in chosen.items() if isinstance(chosen, dict) else _PADDED.items():
        with contextlib.suppress(ValueError, TypeError, OverflowError, UnicodeError):
            array = np.asarray(value, dtype=draw(st.sampled_from([None, "f4", "i8", "f8", "U3", "?"])))
            if array.dtype != object:
                arrays[str(name).encode("ascii", "replace").decode() or "x"] = array
    return _npz(**arrays)


def datasets(folder: Path) -> dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], str]]]:
    """Strategies of rollout datasets and of files to import, each with its check."""
    valid = folder / "valid"
    load_rollouts([ROLLOUT, ROLLOUT | {"completion_ids": [9], "old_logprobs": [-1.0]}]).save(valid)
    names = sorted(path.name for path in valid.iterdir())
    contents = {name: (valid / name).read_bytes() for name in names}
    manifest = json.loads(contents["manifest.json"])

    def damaged_dataset(case: tuple[str, bytes]) -> str:
        name, content = case
        broken = folder / "broken"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(valid, broken)
        (broken / name).write_bytes(content)
        read = _result(lambda: files.load(broken))
        if name != "manifest.json" and content != contents[name]:
            assert read == "refused", "changed tensors were read"
        return read

    def imported(suffix: str) -> Callable[[bytes], str]:
        def check(content: bytes) -> str:
            path = folder / f"import{suffix}"
            path.write_bytes(content)
            return _result(lambda: load_rollouts(path))

        return check

    tensors = st.sampled_from(names).flatmap(lambda name: st.tuples(st.just(name), damaged(contents[name])))
    manifests = changed(manifest).map(lambda value: ("manifest.json", json.dumps(value).encode()))
    records = st.lists(changed(ROLLOUT), min_size=1, max_size=3)
    return {
        "dataset": (tensors | manifests, damaged_dataset),
        "jsonl": (records.map(_jsonl) | damaged(_jsonl([ROLLOUT, ROLLOUT])), imported(".jsonl")),
        "npz": (_odd_npz() | damaged(_npz(**_PADDED)), imported(".npz")),
        "records": (records, lambda value: _result(lambda: load_rollouts(value))),
        "padded": (changed(_PADDED), lambda value: _result(lambda: load_rollouts(value))),
    }


def _result(read: Callable[[], Any]) -> str:
    message = "accepted"
    try:
        read()
    except WorkbenchError as error:
        message = str(error)
    assert message.strip(), "an error without a message"
    return "accepted" if message == "accepted" else "refused"


# ---- records ---------------------------------------------------------------------------------------------


class Records:
    """Two runs of an experiment, one file of which is damaged, and every verb that reads them.

    Args:
        project: an empty folder; the verbs run in it.
    """

    VERBS = (("status", "cp2"), ("status", "parity"), ("ls",), ("logs", "cp2"), ("compare", "cp2", "one_rank"))

    def __init__(self, project: Path) -> None:
        make_project(project)
        self.experiment = project / "experiments" / "parity"
        make_run(self.experiment, "one_rank")
        run = make_run(
            self.experiment,
            "cp2",
            state="failed",
            layout={"cp": 2},
            error=ValueError("\x1b[31mred"),
            rank=1,
            logs={0: "out\x1b[2J\n", 1: "more\n"},
        )
        for each in RunDirectory.find(self.experiment / "runs", "one_rank"):
            each.write_tensors("gradients.step0", {"model.norm.weight": torch.ones(3)})
        run.write_json("ranks/waiting.json", {"looked_ns": 1, "waiting": [], "was": []})
        self.whole = {path: path.read_bytes() for path in sorted(self.experiment.rglob("*")) if path.is_file()}
        self.files = [path for path in self.whole if self.whole[path]]

    @property
    def strategy(self) -> st.SearchStrategy[tuple[Path, bytes]]:
        """A file, and its damaged content."""

        def of(path: Path) -> st.SearchStrategy[tuple[Path, bytes]]:
            content = self.whole[path]
            strategies = [damaged(content)]
            with contextlib.suppress(ValueError):
                strategies.append(changed(json.loads(content)).map(lambda value: json.dumps(value).encode()))
            if path.name == "metrics.jsonl":  # lines with a right checksum and another content
                lines = [json.loads(line) for line in content.splitlines()]
                bodies = changed([{k: v for k, v in line.items() if k != "crc32"} for line in lines])
                strategies.append(bodies.map(_lines))
            return st.tuples(st.just(path), st.one_of(strategies))

        return st.sampled_from(self.files).flatmap(of)

    def check(self, case: tuple[Path, bytes]) -> str:
        """Damage the file, run the verbs, and write it back."""
        path, content = case
        path.write_bytes(content)
        codes = []
        try:
            for verb in self.VERBS:
                out, err = _Terminal(), _Terminal()
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                    try:
                        codes.append(command(verb))
                    except SystemExit as end:
                        codes.append(end.code if isinstance(end.code, int) else 2)
                text = out.getvalue() + err.getvalue()
                assert "Traceback (most recent call last)" not in err.getvalue(), f"{verb}: {err.getvalue()[-1500:]}"
                assert "\x1b" not in text, f"{verb} prints a control character"
                assert codes[-1] in (0, 1, 2), f"{verb} ends with {codes[-1]}"
        finally:
            path.write_bytes(self.whole[path])
        return "accepted" if 2 not in codes else "refused"


class _Terminal(io.StringIO):
    """Output that a terminal would obey."""

    def isatty(self) -> bool:
        return True


def _lines(bodies: Any) -> bytes:
    lines = []
    for body in bodies if isinstance(bodies, list) else [bodies]:
        text = json.dumps(body).encode()
        check = b'{"crc32": "%08x", ' % zlib.crc32(text)
        lines.append(check + text[1:] + b"\n" if text.startswith(b"{") else text + b"\n")
    return b"".join(lines)
