"""TensorBoard's event files: folder/<project>/<experiment>/<run>, one file a run.

Every reader of event files understands scalars, which have 32 bits: values are rounded to about seven digits.
"""

from __future__ import annotations

import math
import os
import struct
import tempfile
from pathlib import Path
from typing import BinaryIO

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from workbench.report.exporters.tracked import TrackedRun, TrackedStep, Writer, as_text


class TensorBoard(Writer):
    """Event files, written without a host name in them."""

    def has(self, run: TrackedRun) -> bool:
        """True if the run's folder exists; it gets its name when it is complete."""
        return self._place(run).exists()

    def write(self, run: TrackedRun) -> list[str]:
        """Write a run, and return what could not be stored as it is."""
        rounded, beyond = False, set()
        place = self._place(run)
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".unfinished-{os.getpid()}-", dir=place.parent) as scratch:
            whole = Path(scratch) / "run"
            whole.mkdir()
            with (whole / f"events.out.tfevents.{int(run.began_s)}.workbench").open("wb") as file:
                events = RecordWriter(file)
                for event in _head(run):
                    events.write(event.SerializeToString())
                for step in run.steps:
                    summary = Summary()
                    for key, value in step.values.items():
                        stored = _as_32_bits(value)
                        rounded |= stored != value and not math.isnan(value)
                        beyond |= {key} if math.isinf(stored) and math.isfinite(value) else set()
                        summary.value.add(tag=key, simple_value=stored)
                    events.write(Event(wall_time=step.time_s, step=step.number, summary=summary).SerializeToString())
                events.flush()
            whole.rename(place)
        notes = ["numbers are rounded to some seven digits: scalars have 32 bits there"] if rounded else []
        return notes + [f"metric {key} is beyond 32 bits: infinite there" for key in sorted(beyond)]

    def live(self, run: TrackedRun) -> _LiveEvents:
        """Begin an event file that grows."""
        place = self._place(run)
        place.mkdir(parents=True, exist_ok=True)
        return _LiveEvents((place / f"events.out.tfevents.{int(run.began_s)}.workbench").open("wb"), run)

    def _place(self, run: TrackedRun) -> Path:
        return self.folder / self.project / run.experiment / run.id


class _LiveEvents:
    """An event file, flushed after every step."""

    def __init__(self, file: BinaryIO, run: TrackedRun) -> None:
        self.file = file
        self.events = RecordWriter(file)
        for event in _head(run):
            self.events.write(event.SerializeToString())
        self.events.flush()

    def log_step(self, step: TrackedStep) -> None:
        """Write a step."""
        summary = Summary()
        for key, value in step.values.items():
            summary.value.add(tag=key, simple_value=_as_32_bits(value))
        self.events.write(Event(wall_time=step.time_s, step=step.number, summary=summary).SerializeToString())
        self.events.flush()

    def end(self, run: TrackedRun) -> None:
        """Close the file; it has no field for the end of a run."""
        self.file.close()


def _head(run: TrackedRun) -> list[Event]:
    """Return version, settings as hyperparameters, and all texts as a table."""
    known = {
        key: value if isinstance(value, bool | int | float | str) else as_text(value)
        for key, value in (run.config | run.facts).items()
    }
    rows = [f"| {_cell(key)} | {_cell(as_text(value))} |" for key, value in known.items()]
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    text = "\n".join(["| | |", "|---|---|", *rows]).encode()
    table = Summary.Value(
        tag="run/text_summary",
        metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
        tensor=TensorProto(dtype=DT_STRING, tensor_shape=shape, string_val=[text]),
    )
    return [
        Event(wall_time=run.began_s, file_version="brain.Event:2"),
        Event(wall_time=run.began_s, summary=hparams_pb(known, trial_id=run.id, start_time_secs=run.began_s)),
        Event(wall_time=run.began_s, summary=Summary(value=[table])),
    ]


def _cell(text: str) -> str:
    r"""Escape a text for a table in Markdown."""
    plain = " ".join(text.split())
    return "".join(f"\\{letter}" if letter in r"\`*_{}[]<>()#+-.!|~&" else letter for letter in plain)


def _as_32_bits(value: float) -> float:
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
