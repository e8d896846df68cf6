"""Invariants of parallel training: changes of the layout, the packing or the untrained tokens that change no number.

Each invariant builds two arrangements of the same documents that differ only in its subject: a plain one, on one rank
and in one row if possible, and a changed one. An invariant about an order compares the same split in two orders, so
that a mistake in the split is not attributed to the order; and only one invariant builds ranks without trained tokens.
Besides its documents a case consists of a few integers, so that a failure can be shrunk.

Source: the property list of the workbench's reference; systems that broke each invariant are named with the mistakes in
        the tests.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.prove.arrangement import Arrangement, one_row
from workbench.prove.documents import Document, silent_documents
from workbench.sharding.orders import ORDERS

ORDER_NAMES = tuple(ORDERS)
"""Token orders; contiguous, the plain one, is first."""
ATTENTION = ("gathered", "ring", "ulysses")
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b")
HEADS = 4
"""Query heads of the model of all proofs, which ulysses deals to cp ranks."""
PERMUTATIONS = 8
"""Number of document orders, of which the one with most documents across shard edges is taken."""

Pair = tuple[Arrangement, Arrangement]
"""The plain arrangement, and the changed one."""


@dataclass(frozen=True)
class Case:
    """Input of one trial of an invariant.

    Attributes:
        numbers: parameters of the invariant, by name; "seed" decides everything random.
        together: True to keep documents of a group in one row.
    """

    documents: tuple[Document, ...]
    numbers: tuple[tuple[str, int], ...] = ()
    together: bool = False

    def __getitem__(self, name: str) -> int:
        return dict(self.numbers)[name]

    def with_number(self, name: str, number: int) -> Case:
        """The same case with one number changed."""
        return replace(self, numbers=tuple((dict(self.numbers) | {name: number}).items()))

    def random(self, what: str = "") -> random.Random:
        """Random generator, the same for the same case."""
        return random.Random(f"{self['seed']} {what}")


Arrange = Callable[[Case], Pair | None]


@dataclass(frozen=True)
class Invariant:
    """One invariant.

    Attributes:
        name: in specs and proofs.
        says: the change that it allows.
        numbers: choices for a case's numbers by name, smallest first; shrinking moves towards the first.
        arrange: builds the two arrangements of a case; None if these documents do not allow it.
        idle: True if a rank may have no trained tokens.
    """

    name: str
    says: str
    numbers: Mapping[str, Sequence[int]]
    arrange: Arrange
    idle: bool = False

    def draw(self, documents: tuple[Document, ...], number: int, seed: str, *, together: bool = False) -> Case:
        """The case with this index: the first has the greatest numbers, and as many as there are cross all choices.

        Both numbers of a pair change from one case to the next, where they have choices left.
        """
        crossed = list(itertools.product(*(tuple(reversed(choices)) for choices in self.numbers.values())))
        at = (number * _stride(self.numbers)) % len(crossed)
        numbers = dict(zip(self.numbers, crossed[at], strict=True))
        numbers["seed"] = random.Random(f"{self.name} {seed}").randrange(10**6)
        return Case(documents, tuple(numbers.items()), together)


def _stride(numbers: Mapping[str, Sequence[int]]) -> int:
    """A step through all combinations that meets each once, and changes every number from one to the next."""
    sizes = [len(choices) for choices in numbers.values()]
    total, blocks = math.prod(sizes), [math.prod(sizes[at + 1 :]) for at in range(len(sizes))]
    least = sum(blocks) % total or 1
    return next(step for step in itertools.count(least) if math.gcd(step, total) == 1)


INVARIANTS: dict[str, Invariant] = {}
"""Every invariant by name, in the order of a proof's table."""


def _invariant(says: str, *, idle: bool = False, **numbers: Sequence[int]) -> Callable[[Arrange], Arrange]:
    """Declare the invariant that a function arranges, which has its name after an underscore; see `Invariant`."""

    def declare(arrange: Arrange) -> Arrange:
        name = arrange.__name__.removeprefix("_")
        INVARIANTS[name] = Invariant(name, says, numbers, arrange, idle)
        return arrange

    return declare


def dealt(case: Case, rows: int, what: str = "") -> tuple[tuple[int, ...], ...] | None:
    """Documents dealt at random, each row with trained tokens; None if there are too few."""
    rng = case.random(what)
    bundles: dict[int, list[int]] = {}
    for number, document in enumerate(case.documents):
        bundles.setdefault(document.group_id if case.together else number, []).append(number)
    mixed = rng.sample(list(bundles.values()), len(bundles))
    mixed.sort(key=lambda bundle: not any(case.documents[number].trained for number in bundle))
    if sum(any(case.documents[number].trained for number in bundle) for bundle in mixed) < rows:
        return None
    hands: list[list[int]] = [[] for _ in range(rows)]
    for at, bundle in enumerate(mixed):
        hands[at if at < rows else rng.randrange(rows)] += bundle
    return tuple(tuple(rng.sample(hand, len(hand))) for hand in hands)


@_invariant("documents may be dealt to any number of data-parallel ranks", dp=(2, 3, 4))
def _dp_split(case: Case) -> Pair | None:
    rows = dealt(case, case["dp"])
    return None if rows is None else (one_row(case.documents), Arrangement(case.documents, rows, dp=case["dp"]))


@_invariant("a rank may take its documents in any number of micro-batches", micro_batches=(2, 3, 4))
def _micro_batch_split(case: Case) -> Pair | None:
    rows = dealt(case, case["micro_batches"])
    return None if rows is None else (one_row(case.documents), Arrangement(case.documents, rows))


@_invariant("micro-batches may come in any order", micro_batches=(2, 3))
def _micro_batch_order(case: Case) -> Pair | None:
    rows = dealt(case, case["micro_batches"])
    if rows is None:
        return None
    return Arrangement(case.documents, rows), Arrangement(case.documents, rows[1:] + rows[:1])


@_invariant("any document may share a row with any other, in any order", micro_batches=(1, 2))
def _packing_order(case: Case) -> Pair | None:
    rows, others = (dealt(case, case["micro_batches"], what) for what in ("", "other"))
    if rows is None or others is None or rows == others:
        return None
    return Arrangement(case.documents, rows), Arrangement(case.documents, others)


def straddling(case: Case, cp: int, multiple_of: int) -> Arrangement:
    """One row in a document order in which many documents train on both sides of an edge between shards."""
    tries = [one_row(case.documents, multiple_of=multiple_of)]
    for number in range(PERMUTATIONS):
        tries += [replace(tries[0], rows=rows)] if (rows := dealt(case, 1, f"order {number}")) else []
    return max(tries, key=lambda arrangement: straddled(arrangement, cp))


def straddled(arrangement: Arrangement, cp: int) -> int:
    """Number of edges between contiguous shards of the first row with one document that trains on both sides."""
    size, begin, edges = arrangement.tokens // cp, 0, set()
    for number in arrangement.rows[0]:
        mask = arrangement.documents[number].loss_mask
        shards = {(begin + at - 1) // size for at, counts in enumerate(mask) if counts}  # a target is one place earlier
        edges |= set(range(min(shards), max(shards))) if shards else set()
        begin += len(mask)
    return len(edges)


@_invariant("a row may be cut for any number of context-parallel ranks", cp=(2, 3, 4), attention=range(len(ATTENTION)))
def _cp_degree(case: Case) -> Pair | None:
    plain = straddling(case, case["cp"], case["cp"])
    attention = ATTENTION[case["attention"]]
    if attention == "ulysses" and HEADS % case["cp"]:
        attention = "ring"
    return plain, replace(plain, cp=case["cp"], attention=attention)


@_invariant(
    "context-parallel ranks may hold a row's tokens in any order", cp=(2, 3, 4), order=range(1, len(ORDER_NAMES))
)
def _cp_order(case: Case) -> Pair | None:
    plain = replace(straddling(case, case["cp"], 2 * case["cp"]), cp=case["cp"])
    return plain, replace(plain, order=ORDER_NAMES[case["order"]])


@_invariant("any number of tensor-parallel ranks may compute the same tokens", tp=(2,), sequence_parallel=(0, 1))
def _tp(case: Case) -> Pair | None:
    plain = one_row(case.documents, multiple_of=case["tp"])
    return plain, replace(plain, tp=case["tp"], sequence_parallel=bool(case["sequence_parallel"]))


@_invariant(
    "the micro-batches of a rank may pass through pipeline stages, in any schedule",
    micro_batches=(1, 2, 3),
    schedule=range(len(SCHEDULES)),
)
def _pipeline(case: Case) -> Pair | None:
    rows, schedule = dealt(case, case["micro_batches"]), SCHEDULES[case["schedule"]]
    if rows is None:
        return None
    plain = Arrangement(case.documents, rows)
    return plain, replace(plain, pp=2, schedule=schedule, stages_per_rank=2 if schedule == SCHEDULES[-1] else 1)


@_invariant("ranks with different tokens may share the experts of a mixture", ep=(2,), cp=(0, 1))
def _expert_degree(case: Case) -> Pair | None:
    if case["cp"]:
        plain = replace(straddling(case, case["ep"], case["ep"]), cp=case["ep"], mixture=True)
        return plain, replace(plain, ep=case["ep"])
    rows = dealt(case, case["ep"])
    if rows is None:
        return None
    plain = Arrangement(case.documents, rows, dp=case["ep"], mixture=True)
    return plain, replace(plain, ep=case["ep"])


@_invariant("routers may replay the routes that they choose themselves", ranks=(1, 2), cp=(0, 1))
def _routes(case: Case) -> Pair | None:
    if case["cp"]:
        plain = replace(straddling(case, case["ranks"], case["ranks"]), cp=case["ranks"], mixture=True)
        return plain, replace(plain, ep=case["ranks"], replay=True)
    rows = dealt(case, case["ranks"])
    if rows is None:
        return None
    plain = Arrangement(case.documents, rows, dp=case["ranks"], mixture=True)
    return plain, replace(plain, ep=case["ranks"], replay=True)


@_invariant("the head may take the tokens of a row a few at a time", chunk_tokens=(1, 2, 3, 7, 16), fused=(0, 1))
def _head_chunking(case: Case) -> Pair | None:
    changed = one_row(case.documents, chunk_tokens=case["chunk_tokens"], fused=bool(case["fused"]))
    return one_row(case.documents), changed


@_invariant("a row may have any padding", extra=(1, 2, 5, 30))
def _padding(case: Case) -> Pair | None:
    plain = one_row(case.documents)
    return plain, one_row(case.documents, multiple_of=plain.tokens + case["extra"])


@_invariant("documents in which nothing trains may be added", documents=(2, 4))
def _masked_rows(case: Case) -> Pair | None:
    added = _silent(case, case["documents"])
    places = list(range(len(case.documents) + len(added)))
    first, *more = case.random("places").sample(places, len(added))
    for place, number in zip(sorted((first, *more)), range(len(case.documents), len(places)), strict=True):
        places.insert(place, places.pop(places.index(number)))
    return one_row(case.documents), Arrangement(case.documents + added, (tuple(places),))


@_invariant(
    "a rank or a micro-batch may have nothing to train", idle=True, kind=(0, 1, 2), documents=(0, 1), first=(0, 1)
)
def _empty_ranks(case: Case) -> Pair | None:
    """Add a dp rank, a micro-batch or a cp rank that has only padding, or only documents without trained tokens."""
    kind, silent = case["kind"], _silent(case, 2) if case["documents"] else ()
    documents = case.documents + silent
    working, idle = tuple(range(len(case.documents))), tuple(range(len(case.documents), len(documents)))
    length = sum(len(document.tokens) for document in case.documents)
    if kind == 2:
        half = max(length, sum(len(document.tokens) for document in silent))
        plain = one_row(documents, multiple_of=2 * half)
        # The first shard ends with the last document that trains, or later: the second has nothing to train.
        return plain, one_row(documents, multiple_of=2 * half, cp=2)
    rows = (idle, working) if case["first"] else (working, idle)
    return one_row(documents), Arrangement(documents, rows, dp=2 - kind)


@_invariant("all of this at once", idle=True, order=range(1, len(ORDER_NAMES)), tp=(1, 2))
def _together(case: Case) -> Pair | None:
    rows, order = dealt(case, 4), ORDER_NAMES[case["order"]]
    if rows is None:
        return None
    changed = Arrangement(case.documents, rows, dp=2, cp=2, tp=case["tp"], order=order, multiple_of=12, chunk_tokens=5)
    return one_row(case.documents), changed


def _silent(case: Case, number: int) -> tuple[Document, ...]:
    free = max((document.group_id for document in case.documents), default=0) + 1
    return silent_documents(f"{case['seed']} silent", number, group_id=free)


DECLARED: dict[str, tuple[str, ...]] = {
    "dp": ("dp_split", "empty_ranks"),
    "cp": ("cp_degree", "cp_order", "empty_ranks"),
    "micro_batch": ("micro_batch_split", "micro_batch_order", "empty_ranks"),
    "packing": ("packing_order",),
    "masked_rows": ("masked_rows",),
}
"""Entry of `LossSpec.breaks` -> the invariants that the loss may then break."""

EMPTY = ("dp", "micro_batch", "cp")
"""Empty axis for each number "kind" of the invariant empty_ranks, as a spec declares it."""


def shrink(case: Case, invariant: Invariant, fails: Callable[[Case], bool], has_time: Callable[[], bool]) -> Case:
    """The smallest case that greedy steps from a failing one find, while there is time; each fails in the same way.

    Steps of a kind are taken until none succeeds, and all kinds again until none of any does. No case is tried twice.
    """
    passed: set[Case] = set()
    before = None
    while case != before:
        before = case
        for steps in _STEPS:
            tries = steps(case, invariant)
            while (smaller := next(tries, None)) is not None:
                if smaller in passed:
                    continue
                if not has_time():
                    return case
                if fails(smaller):
                    case, tries = smaller, steps(smaller, invariant)
                else:
                    passed.add(smaller)
    return case


def smaller_cases(case: Case, invariant: Invariant) -> Iterator[Case]:
    """Cases one step smaller, largest steps first: a number, half of the documents, one of them, tokens."""
    for steps in _STEPS:
        yield from steps(case, invariant)


def _fewer(case: Case, invariant: Invariant) -> Iterator[Case]:
    for name, choices in invariant.numbers.items():
        at = list(choices).index(case[name])
        for smaller in list(choices)[:at]:
            yield case.with_number(name, smaller)


def _without_documents(case: Case, _: Invariant) -> Iterator[Case]:
    count = len(case.documents)
    for size in dict.fromkeys((count // 2, count // 4, 1) if count > 3 else (1,) if count > 1 else ()):
        for begin in range(0, count, size):
            yield replace(case, documents=case.documents[:begin] + case.documents[begin + size :])


def _without_tokens(case: Case, _: Invariant) -> Iterator[Case]:
    for number, document in enumerate(case.documents):
        length = len(document.tokens)
        for shorter in dict.fromkeys((length // 2, length - length // 4, length - 1)):
            if 0 < shorter < length:
                cut = (*case.documents[:number], document.cut(shorter), *case.documents[number + 1 :])
                yield replace(case, documents=cut)


_STEPS = (_fewer, _without_documents, _without_tokens)
