"""The process that writes for a tracker: a request on standard input, a line per run into the given file."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from workbench.atomic import from_json, to_json
from workbench.report.exporters import TRACKERS
from workbench.report.exporters.tracked import from_plain


def main(outcomes: Path) -> None:
    """Write every run that is not there yet, and record its outcome as soon as it is known."""
    request = from_json(sys.stdin.buffer.read())
    module, _, name = TRACKERS[request["tracker"]].writer.partition(":")
    writer = getattr(importlib.import_module(module), name)(Path(request["folder"]), request["project"])
    with outcomes.open("ab") as file:
        try:
            for run in map(from_plain, request["runs"]):
                there = writer.has(run)
                notes = [] if there else [*run.notes, *writer.write(run)]
                outcome = {
                    "outcome": "there already" if there else "exported",
                    "notes": notes,
                    "steps": 0 if there else len(run.steps),
                }
                file.write(to_json(outcome, indent=None))
                file.flush()
        finally:
            writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
