"""The process that follows runs for a tracker: a request on standard input, whose end says that the launcher ended."""

from __future__ import annotations

import importlib
import select
import sys
import time
from pathlib import Path
from typing import Any

from workbench.atomic import from_json
from workbench.errors import RecordError
from workbench.records.directory import RunDirectory
from workbench.records.states import ENDED
from workbench.report.exporters import TRACKERS
from workbench.report.exporters.tracked import Writer, tracked

POLL_S = 0.5
SHARE = 20
"""A poll reads whole records, so the next one waits so many times as long as that: long runs cost at most a twentieth
of a core."""


class Followed:
    """One run: what the tracker has of it.

    Attributes:
        reading_s: what the last poll took to read the record; the start of a tracker comes once.
    """

    def __init__(self, path: Path, writer: Writer) -> None:
        self.run, self.writer = RunDirectory.open(path), writer
        self.session: Any = None
        self.sent, self.done, self.reading_s, self._said = 0, False, 0.0, ""

    def poll(self) -> None:
        """Send the steps that are new, and the end."""
        status = self.run.status
        if status == "pending":
            return
        began = time.monotonic()
        try:
            now = tracked(self.run)
        except RecordError as error:  # said once; a later poll may find the file whole
            if self._said != str(error):
                self._said = str(error)
                sys.stdout.write(f"{error}\n")
            self.done = status in ENDED
            return
        finally:
            self.reading_s = time.monotonic() - began
        if self.session is None:
            self.session = self.writer.live(now)
        for step in now.steps[self.sent :]:
            self.session.log_step(step)
        self.sent = max(self.sent, len(now.steps))
        if now.state in ENDED:
            self.session.end(now)
            self.done = True


def main() -> None:
    """Follow the runs of the request until all have ended, or the launcher has."""
    request = from_json(sys.stdin.buffer.readline())
    module, _, name = TRACKERS[request["tracker"]].writer.partition(":")
    writer: Writer = getattr(importlib.import_module(module), name)(Path(request["folder"]), request["project"])
    followed = [Followed(Path(path), writer) for path in request["runs"]]
    alone = False
    try:
        while True:
            going_on = [each for each in followed if not each.done]
            for each in going_on:
                each.poll()
            if alone or all(each.done for each in followed):
                break
            pause = max(POLL_S, SHARE * sum(each.reading_s for each in going_on))
            alone = bool(select.select([sys.stdin.buffer], [], [], pause)[0])  # readable: its end
    finally:
        writer.close()


if __name__ == "__main__":
    main()
