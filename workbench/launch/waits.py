"""Waits between ranks, from each rank's flight record of its collectives (`workbench.sharding.flight`).

In a correct program all ranks of a process group enter the same collectives in the same order, so entry #17 of a group
has one name, shape and dtype on all of them. From the ranks' files alone follows

certainly
    *skipped*    two ranks came to different collectives as #17. Nothing that happens later can correct that.
    *ended*      a rank is gone, and another one is in #17, which it never entered.
    *deadlock*   ranks are in collectives (entered, not left) and wait for each other in a ring.
and not certainly
    *behind*     a rank has not come to #17 yet, and waits for no rank itself. It may still load a model, compile a
                 kernel, write a checkpoint or run on a slower device; or it may hang outside of all collectives.
                 No clock can tell these apart, so it is named and left alone until the collective's own time-out.

Not detected: ranks that all hang outside of collectives (none waits), and two equal collectives that were paired
wrongly (same name, shape and dtype); the latter show at the first that differs, or at the end.

If two ranks disagree, the one that left its own habit is wrong, because training repeats itself. A habit is of calls,
since rows change their length from step to step; if all ranks kept to theirs, it is of shapes too. Attention exchanges
keys only in rows that need it: where that makes a step unlike all before, the habit is of the calls over one axis. If
that does not decide (a first step has no habit), the smaller party of three or more is wrong. If neither does, the
message says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from workbench.sharding.flight import CAPACITY, Entry, FlightView

_HABIT = 3  # collectives in a row that must have been seen before to predict the next
_SKIPS = 8  # a match later than this after a missing collective is a coincidence


@dataclass(frozen=True)
class Wait:
    """Ranks that wait for a rank.

    Attributes:
        rank: the rank that they wait for.
        entry: the collective that it has not entered, as recorded by the first rank that waits.
        waiting: the ranks that wait there, by number.
        kind: skipped, ended, deadlock or behind.
        why: what the rank did instead, a sentence without its full stop; "" if unknown.
    """

    rank: int
    entry: Entry
    waiting: tuple[int, ...]
    kind: str
    why: str = ""

    @property
    def certain(self) -> bool:
        """True if waiting longer cannot help."""
        return self.kind != "behind"

    @property
    def key(self) -> tuple[int, str, int, int]:
        """Identity of the wait, the same at any time."""
        return self.rank, self.kind, self.entry.group, self.entry.seq

    def message(self, now_ns: int) -> str:
        """The wait as a sentence, until a time."""
        seconds = max(0, now_ns - self.entry.entered_ns) / 1e9
        tail = f"; {self.why}" if self.why else ""
        return (
            f"rank {self.rank} has not come to {self.entry}, in which {format_ranks(self.waiting)} "
            f"{'has' if len(self.waiting) == 1 else 'have'} waited for {seconds:.0f} s{tail}"
        )


def format_ranks(ranks: Sequence[int]) -> str:
    """Format a list of ranks.

    Example:
        >>> format_ranks([0]), format_ranks([0, 2, 3]), format_ranks(range(64))
        ('rank 0', 'ranks 0, 2 and 3', 'ranks 0, 1, 2 and 61 more')
    """
    parts = [str(rank) for rank in ranks]
    if len(parts) > 5:
        parts = [*parts[:3], f"{len(parts) - 3} more"]
    return f"rank {parts[0]}" if len(parts) == 1 else f"ranks {', '.join(parts[:-1])} and {parts[-1]}"


def find_waits(views: Mapping[int, FlightView], ranks: Collection[int], ended: Collection[int]) -> list[Wait]:
    """Every rank that others wait for, certain ones first.

    Args:
        views: the ranks' flight records; a rank that has not begun is missing.
        ranks: the ranks to judge. Other members of their groups are ignored.
        ended: ranks whose process is gone, or that recorded their end.
    """
    groups = list(_groups(views, ranks))
    if skipped := [wait for group in groups if (wait := _skipped(group, views))]:
        return skipped  # all other waits follow from it
    missing = {(ahead, behind): entry for group in groups for ahead, behind, entry in _missing(group)}
    blocked = {ahead for ahead, _ in missing}
    waits = []
    for rank in sorted({behind for _, behind in missing}):
        waiting = sorted(ahead for ahead, behind in missing if behind == rank)
        entry = min((missing[ahead, rank] for ahead in waiting), key=lambda entry: entry.entered_ns)
        if rank in ended:
            waits.append(Wait(rank, entry, tuple(waiting), "ended", _how_it_ended(rank, views)))
        elif rank not in blocked:
            waits.append(Wait(rank, entry, tuple(waiting), "behind", _last_seen(rank, views)))
    if missing and not waits:
        waits = [_deadlock(missing, views)]
    return sorted(waits, key=lambda wait: (not wait.certain, wait.entry.entered_ns))


@dataclass(frozen=True)
class _Group:
    """The collectives of one process group: rank -> seq -> entry, and the last seq of each rank (None: unknown)."""

    entries: Mapping[int, Mapping[int, Entry]]
    last: Mapping[int, int | None]


def _groups(views: Mapping[int, FlightView], ranks: Collection[int]) -> Iterator[_Group]:
    by_group: dict[int, dict[int, dict[int, Entry]]] = {}
    members: dict[int, set[int]] = {}
    for rank in ranks:
        for entry in views[rank].entries if rank in views else ():
            by_group.setdefault(entry.group, {}).setdefault(rank, {})[entry.seq] = entry
            members.setdefault(entry.group, {rank}).update(entry.ranks)
    for number, entries in by_group.items():
        last: dict[int, int | None] = {}
        for rank in sorted(members[number].intersection(ranks)):
            if rank in entries:
                last[rank] = max(entries[rank])
            else:  # it entered none, unless its oldest entries were overwritten
                last[rank] = None if rank in views and views[rank].count > CAPACITY else 0
        yield _Group({rank: entries.get(rank, {}) for rank in last}, last)


def _missing(group: _Group) -> Iterator[tuple[int, int, Entry]]:
    """(rank, rank that it waits for, collective) of every pair that is not equally far."""
    for ahead, far in group.last.items():
        for behind, less in group.last.items():
            if far is not None and less is not None and far > less:
                entries = group.entries[ahead]
                entry = entries.get(less + 1) or entries[min(entries)]
                if entry.sender != ahead:  # a send between pipeline stages does not wait for its receiver
                    yield ahead, behind, entry


def _skipped(group: _Group, views: Mapping[int, FlightView]) -> Wait | None:
    """The first number at which the ranks of a group came to different collectives."""
    for seq in sorted(set().union(*group.entries.values())):
        by_rank = {rank: entries[seq] for rank, entries in group.entries.items() if seq in entries}
        if len({entry.signature for entry in by_rank.values()}) > 1:
            return _blame(by_rank, views)
    return None


def _blame(by_rank: Mapping[int, Entry], views: Mapping[int, FlightView]) -> Wait:
    """The rank that is wrong at a number at which ranks disagree, by habit or majority; see the module."""
    habits = {rank: _habit(views[rank].entries, entry) for rank, entry in by_rank.items()}
    expected = {rank: habit[0] for rank, habit in habits.items() if habit}
    unusual = [rank for rank, entry in expected.items() if _call(entry) != _call(by_rank[rank])] or [
        rank for rank, entry in expected.items() if entry.signature != by_rank[rank].signature
    ]
    usual = [rank for rank in expected if rank not in unusual]
    parties: dict[tuple[str, str, str], list[int]] = {}
    for rank, entry in by_rank.items():
        parties.setdefault(entry.signature, []).append(rank)
    largest = max(parties.values(), key=len)
    decided = True
    if unusual and usual:
        wrong, right = min(unusual), min(usual)
    elif 2 * len(largest) > len(by_rank):
        wrong, right = min(set(by_rank).difference(largest)), min(largest)
    else:
        decided, wrong, right = False, max(by_rank), min(by_rank)
    missed, own = by_rank[right], by_rank[wrong]
    waiting = tuple(rank for rank in sorted(by_rank) if by_rank[rank].signature == missed.signature)
    habit = habits[wrong]
    if not decided:
        why = (
            f"it came to {_describe(own)} as #{own.seq} and {format_ranks(waiting)} to {_describe(missed)}, "
            "and nothing before shows which of them is wrong"
        )
    elif habit and _call(habit[0]) == _call(missed) and _call(own) in (later := [_call(entry) for entry in habit[1:]]):
        more = f" and {later.index(_call(own))} more," if later.index(_call(own)) else ""
        why = f"it skipped that {_describe(missed)}{more} and went on to {_describe(own)} [{own.caller}]"
    else:
        why = f"it came to {_describe(own)} [{own.caller}] instead of {_describe(missed)}"
    return Wait(wrong, missed, waiting, "skipped", why)


def _habit(entries: Sequence[Entry], entry: Entry) -> Sequence[Entry]:
    """Entries of a rank after the longest earlier stretch that equals the one before an entry; () without one.

    If there is no such stretch of all its entries, of those over the entry's own axis.
    """
    return _after_the_same(entries, entry) or _after_the_same([o for o in entries if o.axis == entry.axis], entry)


def _after_the_same(entries: Sequence[Entry], entry: Entry) -> Sequence[Entry]:
    place = next(index for index, other in enumerate(entries) if other.number == entry.number)
    kinds = [_call(other) for other in entries[:place]]
    longest, match = _HABIT - 1, 0
    for end in range(len(kinds) - 1, 0, -1):
        length = 0
        while length < end and kinds[end - 1 - length] == kinds[place - 1 - length]:
            length += 1
        if length > longest:
            longest, match = length, end
    return entries[match : min(match + _SKIPS, place)] if match else ()


def _call(entry: Entry) -> tuple[str, str, str, str]:
    """The collective of the program, without the shape that it moves."""
    return entry.name, entry.dtype, entry.axis, entry.caller


def _deadlock(missing: Mapping[tuple[int, int], Entry], views: Mapping[int, FlightView]) -> Wait:
    """Ranks that wait for each other; certain only if each is in a collective."""
    waited_for = {behind for _, behind in missing}
    unusual = [rank for rank in sorted(waited_for) if _is_unusual(views[rank])]
    rank = unusual[0] if unusual else max(waited_for)
    waiting = tuple(sorted(ahead for ahead, behind in missing if behind == rank))
    all_inside = all(views[each].inside is not None for each in waited_for)
    places = "; ".join(f"rank {each} is in {views[each].inside}" for each in sorted(waited_for) if views[each].inside)
    why = f"they wait for each other: {places}" if all_inside else _last_seen(rank, views)
    return Wait(rank, missing[waiting[0], rank], waiting, "deadlock" if all_inside else "behind", why)


def _is_unusual(view: FlightView) -> bool:
    """True if a rank's last collective is not the one that its habit predicts."""
    last = view.entries[-1]
    habit = _habit(view.entries, last)
    return bool(habit) and (habit[0].signature, habit[0].axis) != (last.signature, last.axis)


def _how_it_ended(rank: int, views: Mapping[int, FlightView]) -> str:
    if rank not in views:
        return "it ended before its first collective"
    return "it has done its part and ended" if views[rank].ended else "its process is gone"


def _last_seen(rank: int, views: Mapping[int, FlightView]) -> str:
    if rank not in views:
        return "it has not begun"
    if not views[rank].entries:
        return "it has not come to any collective"
    return f"its last was {views[rank].entries[-1]}"


def _describe(entry: Entry) -> str:
    shape = "a scalar" if entry.shape == "scalar" else entry.shape
    return f"{entry.name} of {shape} {entry.dtype}".rstrip()
