"""The process that writes for a tracker: a request on standard input, a line per run into the given file."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

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
                outcome: dict[str, Any] = {"outcome": "there already", "notes": [], "steps": 0}
                if not writer.has(run):
                    notes = [*run.notes, *writer.write(run)]
                    outcome = {"outcome": "exported", "notes": notes, "steps": len(run.steps)}
                file.write(to_json(outcome, indent=None))
                file.flush()
        finally:
            writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
