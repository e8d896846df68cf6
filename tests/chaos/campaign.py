"""A campaign of chaos: for some minutes kill, stop, starve and feed everything, and append what was tried to a record.

    python -m tests.chaos.campaign --seed 7 --minutes 30

Every trial is drawn from the seed and its number, so a failure is told again by --only KIND with the same seed. The
record, `experiments/chaos/record.json`, gets one entry a campaign; `totals` adds all of them up.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from tests.chaos import file_operations, filesystems, hostile, launchers, signals
from tests.chaos.harness import VICTIMS, Story
from workbench.atomic import from_json, locked, to_json, write_whole
from workbench.records.provenance import project_root, provenance, without_machine_paths

RECORD = project_root() / "experiments" / "chaos" / "record.json"

AT_ONCE = {"specs": 250, "rollouts": 125, "records": 25}
"""Cases of one turn, by kind: a turn takes some ten seconds."""

_LONGEST = 20_000
"""Characters of a failure in the record: five processes that hang, with sixty lines of stacks each, and the story."""


@dataclass
class Campaign:
    """What was tried so far.

    Args:
        seed: of everything random.
        folder: for files; emptied in between.
    """

    seed: int
    folder: Path
    cases: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    turns: Counter[str] = field(default_factory=Counter)

    def turn(self, kind: str) -> None:
        """Do some cases of a kind; a failure is noted, and the campaign goes on."""
        number = self.turns[kind]
        self.turns[kind] += 1
        place = self.folder / f"{kind}-{number}".replace(" ", "-")
        place.mkdir(parents=True)
        try:
            TURNS[kind](self, place, random.Random(f"{self.seed} {kind} {number}"))
        except Exception as error:
            notes = "\n".join(getattr(error, "__notes__", ()))
            text = without_machine_paths("".join(traceback.format_exception(error, limit=-4)) + f"\n{notes}")
            self.failures.append({"kind": kind, "turn": number, "error": text[-_LONGEST:]})
            sys.stdout.write(f"FAILED {kind}, turn {number}: {type(error).__name__}: {str(error)[:300]}\n")
        finally:
            shutil.rmtree(place, ignore_errors=True)
        sys.stdout.write(f"{kind}, turn {number}: {self.cases.total()} cases, {len(self.failures)} failures\n")
        sys.stdout.flush()

    def entry(self, minutes: float, kinds: list[str]) -> dict[str, Any]:
        """The campaign's entry in the record."""
        about = provenance(project_root(), seed=self.seed)
        return {
            "seed": self.seed,
            "minutes": round(minutes, 1),
            "kinds": kinds,
            "written": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
            **{key: about[key] for key in ("git", "versions", "cpu", "cpu_count", "system")},
            "cases": dict(sorted(self.cases.items())),
            "outcomes": dict(sorted(self.outcomes.items())),
            "failures": self.failures,
        }


# ---- turns -----------------------------------------------------------------------------------------------


def _kills(campaign: Campaign, folder: Path, draw: random.Random) -> None:
    """A story with one kill of each kind of process, at random moments."""
    where = draw.choice(sorted(VICTIMS))
    story = Story(folder, where, draw.randrange(2**32))
    try:
        story.tell(kills=len(VICTIMS[where]))
    finally:
        story.end()
        for victim in story.killing[: story.kills]:
            campaign.cases[f"SIGKILL of a {victim} ({where})"] += 1


def _operations(campaign: Campaign, folder: Path, draw: random.Random) -> None:
    """A kill at every file operation of a run, and a failure of every one."""
    seed = draw.randrange(2**32)
    count = file_operations.operations_of_a_run(folder / "run", seed)
    for at in draw.sample(range(1, count + 1), min(count, 60)):
        file_operations.kill_at(folder / "run", seed, at)
        campaign.cases["SIGKILL at a file operation"] += 1
    for at in draw.sample(range(1, count + 1), min(count, 20)):
        failure = draw.choice(file_operations.FAILURES)
        file_operations.fail_at(folder / "run", seed, at, failure)
        campaign.cases[f"{failure} at a file operation"] += 1
    for kind, (_, (least, most)) in file_operations.LIMITS.items():
        for _ in range(3):
            file_operations.limited(folder / "run", seed, kind, draw.randint(least, most))
            campaign.cases[f"limit on {kind}"] += 1


def _filesystems(campaign: Campaign, folder: Path, draw: random.Random) -> None:
    """A run on file systems that are really full, out of inodes or read-only; noted as skipped without the right."""
    for kind in filesystems.KINDS:
        for trial in range(10):
            try:
                outcome = filesystems.tell(folder / f"{kind} {trial}".replace(" ", "-"), kind, draw)
            except filesystems.Unavailable as error:
                campaign.outcomes[f"file systems skipped: {error}"] += 1
                return
            campaign.cases[f"file system {kind}"] += 1
            campaign.outcomes[f"file system {kind}: {outcome}"] += 1


def _signals(campaign: Campaign, folder: Path, draw: random.Random) -> None:
    for kind in signals.KINDS:
        signals.tell(folder / kind.replace(" ", "-"), kind, draw)
        names = {"stopped": "SIGSTOP of a rank", "ended early": "early exit of a rank", "clock": "jump of the clock"}
        campaign.cases[names[kind]] += 1


def _launchers(campaign: Campaign, folder: Path, draw: random.Random) -> None:
    kind, where = draw.choice(launchers.KINDS), draw.choice(sorted(VICTIMS))
    launchers.tell(folder, where, draw.randrange(2**32), kind)
    campaign.cases[kind] += 1


def _specs(campaign: Campaign, folder: Path, draw: random.Random) -> None:
    _feed(campaign, "malformed spec", hostile.SPECS, lambda content: hostile.check_spec(folder, content), "specs", draw)


def _rollouts(campaign: Campaign, folder: Path, draw: random.Random) -> None:
    for name, (strategy, check) in hostile.datasets(folder).items():
        _feed(campaign, f"rollouts: {name}", strategy, check, "rollouts", draw)


def _records(campaign: Campaign, folder: Path, draw: random.Random) -> None:
    with contextlib.chdir(folder):
        records = hostile.Records(folder)
        _feed(campaign, "damaged record", records.strategy, records.check, "records", draw)


def _feed(
    campaign: Campaign,
    name: str,
    strategy: st.SearchStrategy[Any],
    check: Callable[[Any], str],
    kind: str,
    draw: random.Random,
) -> None:
    @seeded(draw.randrange(2**32))
    @settings(max_examples=AT_ONCE[kind], database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def feed(case: Any) -> None:
        outcome = check(case)
        campaign.cases[name] += 1
        campaign.outcomes[f"{name}: {outcome}"] += 1

    feed()


TURNS: dict[str, Callable[[Campaign, Path, random.Random], None]] = {
    "kills": _kills,
    "operations": _operations,
    "filesystems": _filesystems,
    "signals": _signals,
    "launchers": _launchers,
    "specs": _specs,
    "rollouts": _rollouts,
    "records": _records,
}


# ---- the record ------------------------------------------------------------------------------------------


def totals(record: list[dict[str, Any]]) -> dict[str, int]:
    """Cases of all campaigns by name, and of the kinds that belong together."""
    cases: Counter[str] = Counter()
    for entry in record:
        cases.update(entry["cases"])
    together = {
        "SIGKILL": sum(count for name, count in cases.items() if name.startswith("SIGKILL")),
        "SIGSTOP and early exit": cases["SIGSTOP of a rank"] + cases["early exit of a rank"],
        "rollouts": sum(count for name, count in cases.items() if name.startswith("rollouts")),
        "failures": sum(len(entry["failures"]) for entry in record),
    }
    return dict(sorted(cases.items())) | {f"all: {name}": count for name, count in together.items()}


def append(entry: dict[str, Any], path: Path = RECORD) -> list[dict[str, Any]]:
    """Append a campaign to the record, and return all of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(Path(tempfile.gettempdir()) / "workbench-chaos.lock"):
        record = from_json(path.read_bytes())["campaigns"] if path.exists() else []
        record.append(entry)
        write_whole(path, to_json({"campaigns": record, "totals": totals(record)}))
    return record


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A folder, and a folder of leases of its own: the campaign does not queue for the cores of other launchers."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        before = os.environ.get("XDG_RUNTIME_DIR")
        os.environ["XDG_RUNTIME_DIR"] = name
        try:
            yield Path(name)
        finally:
            os.environ.pop("XDG_RUNTIME_DIR")
            if before is not None:
                os.environ["XDG_RUNTIME_DIR"] = before


def main() -> int:
    """Run a campaign; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--only", nargs="+", choices=list(TURNS), default=list(TURNS))
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args()
    began = time.monotonic()
    with _scratch() as folder:
        campaign = Campaign(options.seed, folder)
        while time.monotonic() - began < 60 * options.minutes:
            for kind in options.only:
                campaign.turn(kind)
                if time.monotonic() - began >= 60 * options.minutes:
                    break
    record = append(campaign.entry((time.monotonic() - began) / 60, options.only), options.record)
    for name, count in totals(record).items():
        sys.stdout.write(f"{count:7d}  {name}\n")
    return bool(campaign.failures)


if __name__ == "__main__":
    sys.exit(main())
