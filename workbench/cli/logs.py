"""`workbench logs`: print the logs of a run's ranks, also while it runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from workbench.cli.terminal import answered, print_lines, safe
from workbench.errors import RecordError
from workbench.records.directory import RunDirectory
from workbench.records.lookup import look_up, shell_name
from workbench.records.states import ENDED

_BLOCK = 64 * 1024  # bytes read at a time, so that a long log is never in memory as a whole
_POLL_S = 0.2  # chosen: at once for a reader, and five looks a second at each file


def tail_lines(run: RunDirectory, *, ranks: Sequence[int] | None = None, lines: int = -1) -> list[tuple[int, str]]:
    """Return (rank, line) of what ranks have printed so far, rank after rank.

    Args:
        run: the run.
        ranks: ranks to read; None for all that have a log.
        lines: number of last lines of each rank; -1 for all of them.

    Raises:
        RecordError: a rank that has no log, though the run has ended.
    """
    logs = _Logs(run, ranks)
    logs.open_new(lines)
    logs.refuse_missing()
    return [*logs.read(), *logs.rest()]


def follow_lines(
    run: RunDirectory, *, ranks: Sequence[int] | None = None, lines: int = -1
) -> Iterator[tuple[int, str]]:
    """Yield (rank, line) as ranks print, until the run has ended; arguments and first lines as in `tail_lines`."""
    logs = _Logs(run, ranks)
    logs.open_new(lines)
    while True:
        ended = run.status in ENDED  # read first, so that nothing printed before the end is missed
        yield from logs.read()
        if ended:
            yield from logs.rest()
            logs.refuse_missing()
            return
        time.sleep(_POLL_S)
        logs.open_new(-1)


class _Logs:
    """The logs of some ranks, each read from where the last read stopped."""

    def __init__(self, run: RunDirectory, ranks: Sequence[int] | None) -> None:
        self.run, self.ranks = run, ranks
        self.offset: dict[int, int] = {}
        self.unfinished: dict[int, bytearray] = {}  # appending copies nothing: a progress bar is one long line

    def open_new(self, lines: int) -> None:
        """Open logs that are new, so many lines from their ends."""
        for rank in self.ranks if self.ranks is not None else _ranks_with_logs(self.run):
            path = self.run.log_path(rank)
            if rank not in self.offset and path.is_file():
                self.offset[rank], self.unfinished[rank] = _start_offset(path, lines), bytearray()

    def read(self) -> Iterator[tuple[int, str]]:
        """Yield new whole lines."""
        for rank in sorted(self.offset):
            path = self.run.log_path(rank)
            if not path.is_file():
                continue
            if path.stat().st_size < self.offset[rank]:  # the log was started again
                self.offset[rank], self.unfinished[rank] = 0, bytearray()
            with path.open("rb") as file:
                file.seek(self.offset[rank])
                while block := file.read(_BLOCK):
                    self.offset[rank] += len(block)
                    self.unfinished[rank] += block
                    if b"\n" in block:
                        *whole, self.unfinished[rank] = self.unfinished[rank].split(b"\n")
                        yield from ((rank, _text(line)) for line in whole)

    def rest(self) -> Iterator[tuple[int, str]]:
        """Yield last lines without a line break."""
        for rank, line in sorted(self.unfinished.items()):
            if line:
                yield rank, _text(line)
        self.unfinished = {rank: bytearray() for rank in self.unfinished}

    def refuse_missing(self) -> None:
        """Raise an error for requested ranks that have no log."""
        missing = [rank for rank in self.ranks or () if rank not in self.offset]
        if missing:
            there = ", ".join(map(str, _ranks_with_logs(self.run))) or "none"
            raise RecordError(
                f"read the log of rank {missing[0]} of {self.run.path.name}",
                found=f"ranks with a log: {there}; the run is {self.run.status}",
                rule="a rank has a log once it has started",
                fix=f"`workbench status {shell_name(self.run.path)}` shows the state of each rank",
            )


def _ranks_with_logs(run: RunDirectory) -> list[int]:
    names = (path.stem.removeprefix("rank") for path in (run.path / "ranks").glob("rank*.log"))
    return sorted(int(name) for name in names if name.isdecimal())


def _start_offset(path: Path, lines: int) -> int:
    """Return the offset of the last so many lines of a file."""
    if lines < 0:
        return 0
    end = place = path.stat().st_size
    remaining = lines
    with path.open("rb") as file:
        if end:
            file.seek(end - 1)
            remaining += file.read(1) == b"\n"  # the break that ends the last line begins no other
        while place:
            size = min(_BLOCK, place)
            file.seek(place - size)
            block = file.read(size)
            newline = size
            while (newline := block.rfind(b"\n", 0, newline)) >= 0 and remaining > 0:
                remaining -= 1
                if not remaining:
                    return place - size + newline + 1
            place -= size
    return 0 if lines else end


def _text(line: bytes | bytearray) -> str:
    return line.decode("utf8", errors="backslashreplace")


def _shown(rank: int, line: str, *, prefix: bool, escape: bool) -> str:
    shown = safe(line.removesuffix("\r")) if escape else line
    return f"[rank {rank}] {shown}" if prefix else shown


def logs(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    *,
    follow: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(aliases=["-f"])] = False,
    rank: str = "all",
    lines: int = 50,
) -> int:
    """Print the logs of a run's ranks.

    On a terminal control characters are escaped, because a terminal would obey them; elsewhere lines are printed as
    they are.

    Args:
        run: Its folder, or the beginning of its name.
        follow: Follow until the run has ended. Ctrl-C detaches, and the run continues.
        rank: The number of a rank, or all.
        lines: Number of last lines of each rank to start with; -1 for all.
    """
    if rank != "all" and not rank.isdecimal():
        raise RecordError(
            f"read the log of rank {rank!r}", found=rank, rule="the number of a rank, or all", fix="use --rank 0"
        )
    target = look_up(run)
    if len(target.runs) > 1:
        names = ", ".join(entry.name for entry in target.runs if entry.name.isprintable())
        raise RecordError(
            f"read the logs of {safe(run)}",
            found="an experiment of several runs",
            rule="logs are those of one run",
            fix=f"name one of its runs: {names}",
        )
    [directory] = target.opened()
    ranks = None if rank == "all" else [int(rank)]
    world_size = int(directory.state.get("world_size", directory.spec.layout.world_size))
    prefix, escape = ranks is None and world_size > 1, sys.stdout.isatty()
    if not follow:
        printed = tail_lines(directory, ranks=ranks, lines=lines)
        answered(lambda: [{"rank": number, "line": line} for number, line in printed])
        print_lines((_shown(number, line, prefix=prefix, escape=escape) for number, line in printed), raw=not escape)
        if not printed and not _ranks_with_logs(directory):
            print(f"no rank of {directory.path.name} has started; it is {directory.status}", file=sys.stderr)
        return 0
    followed = []
    try:
        for number, line in follow_lines(directory, ranks=ranks, lines=lines):
            followed.append({"rank": number, "line": line})
            print_lines([_shown(number, line, prefix=prefix, escape=escape)], raw=not escape)
            sys.stdout.flush()
    except KeyboardInterrupt:
        stop = f"workbench cancel {safe(shell_name(directory.path))}"
        print(f"\ndetached; the run continues; `{stop}` stops it", file=sys.stderr)
        return 130
    answered(lambda: followed)
    print(f"{directory.path.name} has ended: {directory.status}", file=sys.stderr)
    return 0
