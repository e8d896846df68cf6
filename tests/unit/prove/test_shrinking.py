from workbench.prove.documents import Document
from workbench.prove.invariants import Case, Invariant
from workbench.prove.shrinking import shrink, smaller_cases

LAW = Invariant("made up", "nothing", {"ranks": (2, 3, 4), "kind": (0, 1)}, lambda case: None)


def document(length, group=0):
    zeros = (0.0,) * length
    return Document((1,) * length, (True,) * length, zeros, zeros, zeros, zeros, zeros, 0.0, group, 0)


def case(*lengths, **numbers):
    return Case(tuple(document(length, at) for at, length in enumerate(lengths)), tuple(numbers.items()))


def shape(found):
    return [len(each.tokens) for each in found.documents], dict(found.numbers)


def test_the_smallest_case_that_still_fails_is_found():
    def fails(smaller):
        lengths = [len(each.tokens) for each in smaller.documents]
        return max(lengths) >= 5 and len(lengths) >= 2 and smaller["ranks"] >= 3

    found = shrink(case(9, 4, 12, 3, 7, ranks=4, kind=1), LAW, fails, lambda: True)
    assert sorted(shape(found)[0]) == [1, 5]
    assert shape(found)[1] == {"ranks": 3, "kind": 0}


def test_what_fails_whatever_it_is_becomes_one_token():
    assert shape(shrink(case(9, 4, 3, ranks=2, kind=1), LAW, lambda _: True, lambda: True)) == (
        [1],
        {"ranks": 2, "kind": 0},
    )


def test_a_case_that_cannot_be_smaller_stays():
    start = case(9, 4, ranks=4, kind=1)
    assert shrink(start, LAW, lambda _: False, lambda: True) == start


def test_when_time_is_over_the_best_so_far_is_given_back():
    tries = iter([True, True, False])
    found = shrink(case(8, 8, 8, 8, ranks=2, kind=0), LAW, lambda _: True, lambda: next(tries))
    assert shape(found)[0] == [8], "half of them gone, and half again"


def test_greatest_steps_come_first():
    steps = [shape(smaller) for smaller in smaller_cases(case(4, 4, 6, 1, ranks=3, kind=0), LAW)]
    assert steps[0] == ([4, 4, 6, 1], {"ranks": 2, "kind": 0}), "fewer ranks make all that follows cheaper"
    assert [len(lengths) for lengths, _ in steps[1:7]] == [2, 2, 3, 3, 3, 3]
    assert [lengths for lengths, _ in steps[7:]] == [
        [2, 4, 6, 1],
        [3, 4, 6, 1],
        [4, 2, 6, 1],
        [4, 3, 6, 1],
        [4, 4, 3, 1],
        [4, 4, 5, 1],
    ]
