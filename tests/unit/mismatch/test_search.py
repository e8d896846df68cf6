import math

import pytest
import torch

from tests.helpers.gaps import computation, recorded, records
from workbench.mismatch import search
from workbench.mismatch.configuration import Configuration
from workbench.mismatch.factors import BY_NAME, State, Switch
from workbench.mismatch.search import GAIN, LIKELIER, Found, _fitted_again, _pruned, better, explain, likelier, score


def named(explanation):
    return [(switch.factor, dict(switch.changes)) for switch in explanation.switches]


@pytest.fixture(scope="module")
def own():
    return computation(records())


def test_a_column_as_stated_has_no_switch(own):
    assert named(explain(own, Configuration(), recorded(own))) == []


def test_rounding_alone_has_no_switch(own):
    generator = torch.Generator().manual_seed(0)
    noise_T = 3e-3 * torch.randn(96, generator=generator, dtype=torch.float64)
    assert named(explain(own, Configuration(), own.column(Configuration()) + noise_T, noise=3e-3)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.7},
        {"head": "bfloat16"},
        {"precision": "bfloat16"},
        {"gemms": "fp8_rowwise"},
        {"offset": "values -1"},
        {"prefix": "drop_first:1"},
        {"prefix": "of:+1"},
        {"top_k": 7},
    ],
    ids=str,
)
def test_each_is_named_from_its_column(own, changes):
    column_T = own.column(Configuration(**changes)).nan_to_num(-1.0)
    [(factor, found)] = named(explain(own, Configuration(), column_T))
    assert {name: found[name] for name in changes} == changes, factor


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.7, "precision": "bfloat16"},
        {"offset": "values +1", "gemms": "fp8_weights_rowwise"},
        {"prefix": "drop_last:1", "top_p": 0.7},
        {"head": "bfloat16", "prefix": "before:3"},
    ],
    ids=str,
)
def test_pairs_are_named_from_their_column(own, changes):
    column_T = own.column(Configuration(**changes)).nan_to_num(-1.0)
    found = {
        name: value
        for _, switched in named(explain(own, Configuration(), column_T))
        for name, value in switched.items()
    }
    assert {name: found.get(name) for name in changes} == changes


def test_a_cause_of_some_documents_acts_in_them_alone(own):
    column_T = own.column(Configuration()).clone()
    inside = (own.document_T == 2) | (own.document_T == 5)
    column_T[inside] = own.column(Configuration(prefix="drop_first:1"))[inside]
    [switch] = explain(own, Configuration(), column_T).switches
    assert (switch.factor, switch.documents) == ("wrong prefix", frozenset({2, 5}))


@pytest.mark.parametrize(("precision", "named_factors"), [("bfloat16", ["trunk precision"]), ("float32", [])])
def test_weights_are_told_by_the_middle_of_another_rounding(own, precision, named_factors):
    """The sampler's rounding is its own: no column comes much nearer; exact values of its weights are in the middle."""
    noise_T = 3e-3 * torch.randn(96, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    column_T = own.exact_column(Configuration(precision=precision)) + noise_T
    assert [factor for factor, _ in named(explain(own, Configuration(), column_T))] == named_factors


@pytest.mark.parametrize(
    ("temperature", "truncation", "start"),
    [(0.6, ("top_p", 0.8), (0.5, 0.9)), (0.6, ("top_p", 0.9), (0.8, 0.6)), (0.5, ("min_p", 0.1), (0.4, 0.05))],
    ids=str,
)
def test_a_temperature_and_a_truncation_are_fitted_in_turn(own, temperature, truncation, start):
    """Each was fitted under a wrong value of the other: one turn corrects the first alone."""
    name, value = truncation
    recorded_T = own.column(Configuration(temperature=temperature, **{name: value}))
    switches = (
        Switch("temperature", "", (("temperature", start[0]),)),
        Switch("truncation", "", ((name, start[1]),)),
    )
    column_T = own.assembled(Configuration(), switches)
    far = Found(switches, column_T, score(column_T, recorded_T, own.counted_T))
    [one] = _fitted_again(own, Configuration(), [far], recorded_T, own.counted_T)
    found = dict(change for switch in one.switches for change in switch.changes)
    assert (found["temperature"], found[name]) == (temperature, value)


def test_readings_of_the_prompt_are_proposed_where_every_document_is_off(own):
    """None stands out as right: each has a reading of its own, all equally far off."""
    names = ["drop_first:1", "drop_last:1"]
    table = own.add_prefixes([names[n % 2] for n in range(len(own.documents))])
    column_T = own.column(Configuration(prefix=table))
    far_T = column_T + 30.0
    view = State(own, Configuration(), column_T, torch.where(own.counted_T, far_T, column_T))
    assert [switch.factor for switch in BY_NAME["wrong prefix"].propose(view)] == ["wrong prefix"] * 4


def test_few_tokens_that_come_nearer_are_no_likelier_weights():
    """Six of 96 tokens are eight deviations off, and come out: routes that flip. All tokens by half: other weights."""
    noise_T = torch.randn(96, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    far_T = noise_T.clone()
    far_T[:6] = 8.0
    assert math.log(float(far_T.square().mean().sqrt() / noise_T.square().mean().sqrt())) * 96 > LIKELIER
    assert likelier(far_T, noise_T) == 0
    assert likelier(1.5 * noise_T, noise_T) == pytest.approx(96 * math.log(1.5))
    assert likelier(far_T, noise_T[:90]) == 0


def test_a_rounding_is_tried_again_on_weights_that_were_told_by_their_middle(own, monkeypatch):
    def told(computation, stated, best, recorded_T, counted_T):
        switches = (Switch("head precision", "", (("head", "bfloat16"),)),)
        column_T = computation.assembled(stated, switches)
        return Found(switches, column_T, score(column_T, recorded_T, counted_T))

    monkeypatch.setattr(search, "_refined", told)
    monkeypatch.setattr(search, "DEPTH", 0)
    column_T = own.column(Configuration(head="bfloat16", precision="float16"))
    assert named(explain(own, Configuration(), column_T)) == [
        ("head precision", {"head": "bfloat16"}),
        ("trunk precision", {"precision": "float16"}),
    ]


def test_a_cause_in_few_of_many_documents_is_found_too():
    """Nine tokens of ten are exact, and the mean is within the noise; two documents of 24 are not."""
    own = computation(records() * 3)
    column_T = own.column(Configuration()).clone()
    inside = (own.document_T == 3) | (own.document_T == 17)
    column_T[inside] = own.column(Configuration(prefix="drop_first:1"))[inside]
    for noise in (0.0, float((column_T - own.column(Configuration())).abs().mean())):
        [switch] = explain(own, Configuration(), column_T, noise=noise).switches
        assert (switch.factor, switch.documents) == ("wrong prefix", frozenset({3, 17}))


TWELVE = torch.arange(12).repeat_interleave(8)
"""Documents of eight tokens each."""


def found(distance, switches=()):
    return Found(switches, torch.full((96,), -1.0, dtype=torch.float64) + distance, 0.0)


def test_what_rounding_could_do_is_not_better():
    recorded_T, counted_T = torch.full((96,), -1.0, dtype=torch.float64), torch.ones(96, dtype=torch.bool)
    wide, narrow, half = found(1e-2), found(1e-4), found(0.7e-2)
    assert better(narrow, wide, recorded_T, counted_T, TWELVE[: len(recorded_T)], noise=0.0)
    assert not better(half, wide, recorded_T, counted_T, TWELVE[: len(recorded_T)], noise=0.0)
    assert not better(wide, narrow, recorded_T, counted_T, TWELVE[: len(recorded_T)], noise=0.0)
    few = torch.zeros(96, dtype=torch.bool)
    few[:15] = True
    assert not better(narrow, wide, recorded_T, few, TWELVE, noise=0.0)


def test_gains_of_either_sign_are_not_better_for_their_mean():
    """Half of the tokens come 40 times nearer, and almost half go 10 times further: a mean that chance can bring."""
    recorded_T, counted_T = torch.full((40,), -1.0, dtype=torch.float64), torch.ones(40, dtype=torch.bool)
    before = Found((), recorded_T + 1e-2, 0.0)
    off_T = torch.where(torch.arange(40) % 2 == 0, 1e-2 / 40, 1e-1).double()
    after = Found((), recorded_T + off_T, 0.0)
    assert float((1e-2 / off_T).log().mean()) > GAIN
    assert not better(after, before, recorded_T, counted_T, TWELVE[: len(recorded_T)], noise=0.0)


def test_another_rounding_has_to_come_out_in_most_documents():
    """Three documents of twelve come out by chance: nothing flipped in them."""
    recorded_T, counted_T = torch.full((96,), -1.0, dtype=torch.float64), torch.ones(96, dtype=torch.bool)
    by = {name: (Switch(name, name, ()),) for name in ("attention kernel", "temperature")}
    few_T, most_T = torch.where(TWELVE < 3, 1e-9, 1e-2).double(), torch.where(TWELVE < 11, 1e-9, 1e-2).double()
    for factor, off_T, expected in (
        ("attention kernel", few_T, False),
        ("attention kernel", most_T, True),
        ("temperature", few_T, True),
    ):
        after = Found(by[factor], recorded_T + off_T, 0.0)
        assert better(after, found(1e-2), recorded_T, counted_T, TWELVE, noise=0.0) == expected


def test_a_switch_without_which_the_column_is_as_near_is_left_out(own):
    needed = Switch("temperature", "0.7", (("temperature", 0.7),))
    idle = Switch("attention kernel", "eager", (("attention", "eager"),))
    column_T, counted_T = own.column(Configuration(temperature=0.7)), own.counted_T
    both = own.assembled(Configuration(), (needed, idle))
    best = Found((needed, idle), both, score(both, column_T, counted_T))
    left = _pruned(own, Configuration(), best, column_T, counted_T, 1e-3)
    assert [switch.factor for switch in left.switches] == ["temperature"]
