"""Who waits for whom: read from what each rank recorded of its collectives (`workbench.sharding.flight`).

In a right program all ranks of a process group enter the same collectives in the same order, so entry #17 of a group
has one name, shape and dtype on all of them. From the ranks' files alone follows

certainly
    *skipped*    two ranks came to different things as #17. Nothing that happens later can mend that.
    *ended*      a rank is gone, and another one stands in #17 to which it never came.
    *deadlock*   ranks stand in collectives (entered, not left) and wait for each other in a ring.
and not certainly
    *behind*     a rank has not come to #17 yet, and waits for nobody itself. It may still load a model, compile a
                 kernel, write a checkpoint or run on a slower device; or it may hang outside of all collectives.
                 No clock can tell these apart, so it is named and left alone until the collective's own time-out.

Not seen at all: ranks that all hang outside of collectives (nobody waits), and two equal collectives that were
paired wrongly (same name, shape and dtype); the latter comes out with the first that differs, or at the end.

Who is wrong where two ranks disagree? Training repeats itself: the rank that left its own habit is. A habit is of
calls, since rows change their length from step to step; where all ranks kept to theirs, it is of shapes too. Where that
does not decide (a first step has no habit), the smaller party of three or more. Where neither decides, that is said.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from workbench.sharding.flight import CAPACITY, Entry, FlightView

_HABIT = 3  # that many collectives in a row must have been seen before to say what comes next
_SKIPS = 8  # what comes later than that after a missing one is a coincidence


@dataclass(frozen=True)
class Wait:
    """Ranks that wait for a rank.

    Attributes:
        rank: who is waited for.
        entry: the collective in which it is missed, as the first of those who wait recorded it.
        waiting: the ranks that wait there, by number.
        kind: skipped, ended, deadlock or behind.
        why: what the rank did instead, a sentence without its full stop; "" if nothing is known.
    """

    rank: int
    entry: Entry
    waiting: tuple[int, ...]
    kind: str
    why: str = ""

    @property
    def certain(self) -> bool:
        """Whether no patience can mend it."""
        return self.kind != "behind"

    @property
    def key(self) -> tuple[int, str, int, int]:
        """The same for the same wait, whenever it is looked at."""
        return self.rank, self.kind, self.entry.group, self.entry.seq

    def in_words(self, now_ns: int) -> str:
        """Say it in a sentence.

        Args:
            now_ns: until when they have waited.
        """
        seconds = max(0, now_ns - self.entry.entered_ns) / 1e9
        tail = f"; {self.why}" if self.why else ""
        return (
            f"rank {self.rank} has not come to {self.entry}, in which {ranks_in_words(self.waiting)} "
            f"{'has' if len(self.waiting) == 1 else 'have'} waited for {seconds:.0f} s{tail}"
        )


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Some ranks in a few words.

    Example:
        >>> ranks_in_words([0]), ranks_in_words([0, 2, 3]), ranks_in_words(range(64))
        ('rank 0', 'ranks 0, 2 and 3', 'ranks 0, 1, 2 and 61 more')
    """
    said = [str(rank) for rank in ranks]
    if len(said) > 5:
        said = [*said[:3], f"{len(said) - 3} more"]
    return f"rank {said[0]}" if len(said) == 1 else f"ranks {', '.join(said[:-1])} and {said[-1]}"


def find_waits(views: Mapping[int, FlightView], ranks: Collection[int], ended: Collection[int]) -> list[Wait]:
    """Every rank that others wait for, those first of whom it is certain.

    Args:
        views: what the ranks recorded; one that has not begun is missing.
        ranks: the ranks that can be judged. Others that belong to a group are left out of account.
        ended: those whose process is gone, or that said they were done.
    """
    groups = list(_groups(views, ranks))
    skipped = [wait for group in groups for wait in _skipped(group, views)]
    if skipped:
        return skipped  # whatever else stands still, stands still because of it
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
        waits = list(_deadlock(missing, views))
    return sorted(waits, key=lambda wait: (not wait.certain, wait.entry.entered_ns))


@dataclass(frozen=True)
class _Group:
    """The collectives of one process group: rank -> seq -> entry, and how far each rank has come (None: unknown)."""

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
            else:  # it never came, unless its oldest entries were written over
                last[rank] = None if rank in views and views[rank].count > CAPACITY else 0
        yield _Group({rank: entries.get(rank, {}) for rank in last}, last)


def _missing(group: _Group) -> Iterator[tuple[int, int, Entry]]:
    """(rank, rank that it waits for, collective in which) of every pair that is not equally far."""
    for ahead, far in group.last.items():
        for behind, less in group.last.items():
            if far is not None and less is not None and far > less:
                entries = group.entries[ahead]
                yield ahead, behind, entries.get(less + 1) or entries[min(entries)]


def _skipped(group: _Group, views: Mapping[int, FlightView]) -> Iterator[Wait]:
    """The first number at which the ranks of a group came to different things."""
    seen: dict[int, dict[int, Entry]] = {}
    for rank, entries in group.entries.items():
        for seq, entry in entries.items():
            seen.setdefault(seq, {})[rank] = entry
    for seq in sorted(seen):
        came = seen[seq]
        if len({entry.what for entry in came.values()}) > 1:
            yield _who_skipped(came, views)
            return


def _who_skipped(came: Mapping[int, Entry], views: Mapping[int, FlightView]) -> Wait:
    habits = {rank: _habit(views[rank].entries, entry) for rank, entry in came.items()}
    known = {rank: habit[0] for rank, habit in habits.items() if habit}
    strange = [rank for rank, entry in known.items() if _call(entry) != _call(came[rank])] or [
        rank for rank, entry in known.items() if entry.what != came[rank].what
    ]
    usual = [rank for rank in known if rank not in strange]
    parties: dict[tuple[str, str, str], list[int]] = {}
    for rank, entry in came.items():
        parties.setdefault(entry.what, []).append(rank)
    largest = max(parties.values(), key=len)
    decided = True
    if strange and usual:
        guilty, right = min(strange), min(usual)
    elif 2 * len(largest) > len(came):
        guilty, right = min(set(came).difference(largest)), min(largest)
    else:
        decided, guilty, right = False, max(came), min(came)
    theirs, its = came[right], came[guilty]
    waiting = tuple(rank for rank in sorted(came) if came[rank].what == theirs.what)
    habit = habits[guilty]
    if not decided:
        why = (
            f"it came to {_brought(its)} as #{its.seq} and {ranks_in_words(waiting)} to {_brought(theirs)}, and "
            "nothing before says which of them is wrong"
        )
    elif habit and _call(habit[0]) == _call(theirs) and _call(its) in (later := [_call(entry) for entry in habit[1:]]):
        more = f" and {later.index(_call(its))} more," if later.index(_call(its)) else ""
        why = f"it skipped that {_brought(theirs)}{more} and went on to {_brought(its)} [{its.caller}]"
    else:
        why = f"it came to {_brought(its)} [{its.caller}] instead of {_brought(theirs)}"
    return Wait(guilty, theirs, waiting, "skipped", why)


def _habit(entries: Sequence[Entry], entry: Entry) -> Sequence[Entry]:
    """What a rank did next after the longest like stretch of its past; nothing if there was none like it."""
    place = next(index for index, other in enumerate(entries) if other.number == entry.number)
    kinds = [_call(other) for other in entries[:place]]
    best, found = _HABIT - 1, 0
    for end in range(len(kinds) - 1, 0, -1):
        length = 0
        while length < end and kinds[end - 1 - length] == kinds[place - 1 - length]:
            length += 1
        if length > best:
            best, found = length, end
    return entries[found : min(found + _SKIPS, place)] if found else ()


def _call(entry: Entry) -> tuple[str, str, str, str]:
    """Which collective of the program this is, whatever it moves."""
    return entry.name, entry.dtype, entry.axis, entry.caller


def _deadlock(missing: Mapping[tuple[int, int], Entry], views: Mapping[int, FlightView]) -> Iterator[Wait]:
    """Ranks that wait for each other; certain only if each stands in a collective."""
    waited_for = {behind for _, behind in missing}
    strange = [rank for rank in sorted(waited_for) if _is_strange(views[rank])]
    rank = strange[0] if strange else max(waited_for)
    waiting = tuple(sorted(ahead for ahead, behind in missing if behind == rank))
    standing = all(views[each].inside is not None for each in waited_for)
    stands = "; ".join(f"rank {each} is in {views[each].inside}" for each in sorted(waited_for) if views[each].inside)
    yield Wait(
        rank,
        missing[waiting[0], rank],
        waiting,
        "deadlock" if standing else "behind",
        f"they wait for each other: {stands}" if standing else _last_seen(rank, views),
    )


def _is_strange(view: FlightView) -> bool:
    last = view.entries[-1]
    habit = _habit(view.entries, last)
    return bool(habit) and (habit[0].what, habit[0].axis) != (last.what, last.axis)


def _how_it_ended(rank: int, views: Mapping[int, FlightView]) -> str:
    if rank not in views:
        return "it ended before its first collective"
    return "it has done its part and ended" if views[rank].ended else "its process is gone"


def _last_seen(rank: int, views: Mapping[int, FlightView]) -> str:
    if rank not in views:
        return "it has not begun"
    if not views[rank].entries:
        return "it has not come to any collective"
    last = views[rank].entries[-1]
    return f"its last was {last}"


def _brought(entry: Entry) -> str:
    shape = "a scalar" if entry.shape == "scalar" else entry.shape
    return f"{entry.name} of {shape} {entry.dtype}".rstrip()
