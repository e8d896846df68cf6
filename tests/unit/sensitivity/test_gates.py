"""Tolerances of gates: what they accept, and their kill rates."""

import math

import pytest

from workbench.errors import SpecError
from workbench.sensitivity.distances import Apart, Change, Distances
from workbench.sensitivity.gates import Gate, Tolerance
from workbench.sensitivity.record import FaultResult

SAME = Apart(0.0, 0.0, 0.0, 5.0, 2.0)


def distances(loss=(1.0, 1.0), norm=(2.0, 2.0), logprobs=SAME, weights=SAME, later=None):
    second = Change(*(later or loss))
    return Distances((Change(*loss), second), (Change(*norm),) * 2, (logprobs, logprobs), weights)


@pytest.mark.parametrize(
    ("gate", "numbers", "accepted"),
    [
        (Gate(loss=0.005), {"loss": (-1.0, -1.004)}, True),
        (Gate(loss=0.005), {"loss": (-1.0, -1.006)}, False),
        (Gate(loss=0.005), {"loss": (1.0, math.nan)}, False),
        (Gate(loss=0.005), {"norm": (1.0, 9.0)}, True),
        (Gate(gradient_norm=0.03), {"norm": (2.0, 2.05)}, True),
        (Gate(gradient_norm=0.03), {"norm": (2.0, 2.1)}, False),
        (Gate(gradient_norm=Tolerance(absolute=0.2)), {"norm": (2.0, 2.1)}, True),
        (Gate(logprobs=0.03), {"logprobs": Apart(0.02, 0.01, 1.0, 5.0, 2.0)}, True),
        (Gate(logprobs=0.03), {"logprobs": Apart(0.04, 0.01, 1.0, 5.0, 2.0)}, False),
        (Gate(logprobs=Tolerance(absolute=0.03, of="mean")), {"logprobs": Apart(0.04, 0.01, 1.0, 5.0, 2.0)}, True),
        (Gate(logprobs=Tolerance(relative=0.1, of="norm")), {"logprobs": Apart(0.04, 0.01, 0.6, 5.0, 2.0)}, False),
        (Gate(weights_after=1e-3), {"weights": Apart(2e-3, 1e-4, 1.0, 5.0, 2.0)}, False),
        (Gate(weights_after=1e-3), {"weights": None}, False),
        (Gate(loss=0.005), {"later": (1.0, 2.0)}, False),
        (Gate(loss=0.005, steps=1), {"later": (1.0, 2.0)}, True),
        (Gate(loss=0.5, first_loss=Tolerance(relative=0.1)), {"loss": (1.0, 1.2)}, False),
        (Gate(loss=0.5, first_loss=Tolerance(relative=0.1)), {"later": (1.0, 1.2)}, True),
        (Gate(loss=0.1, first_loss=Tolerance(relative=0.5)), {"later": (1.0, 1.2)}, False),
        (Gate(loss=0.1, first_loss=Tolerance(relative=0.5), steps=1), {"later": (1.0, 1.2)}, True),
        (Gate(loss=Tolerance()), {"loss": (1.0, 1.0)}, True),
        (Gate(loss=Tolerance()), {"loss": (1.0, 1.0 + 1e-15)}, False),
        (Gate(gradient_norm=Tolerance(0.1, 0.2)), {"norm": (1.0, 1.25)}, True),
        (Gate(gradient_norm=Tolerance(0.1, 0.2, joined="maximum")), {"norm": (1.0, 1.25)}, False),
        (Gate(gradient_norm=Tolerance(0.1)), {"norm": (1.0, 1.105)}, False),
        (Gate(gradient_norm=Tolerance(0.1, relative_to="larger")), {"norm": (1.0, 1.105)}, True),
        (Gate(gradient_norm=Tolerance(0.1, relative_to="other")), {"norm": (1.0, 0.905)}, False),
        (Gate(gradient_norm=Tolerance(0.1, relative_to="other")), {"norm": (1.0, math.inf)}, False),
    ],
)
def test_a_gate_accepts_what_is_within_its_tolerances(gate, numbers, accepted):
    assert gate.accepts(distances(**numbers)) is accepted


def test_a_failed_run_passes_no_gate():
    assert not Gate(loss=1e9).accepts(None)


def test_the_kill_rate_counts_and_names_survivors():
    def result(name, loss):
        return FaultResult(name, "A", "", True, "run", (), "equal", "", False, distances(loss=loss))

    score = Gate(loss=0.01, name="ours", source="file").score([result("a", (1.0, 1.0)), result("b", (1.0, 2.0))])
    assert (score.killed, score.admissible, score.survivors, score.share) == (1, 2, ("a",), 0.5)
    assert (score.name, score.source) == ("ours", "file")


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: Gate(), "no tolerance"),
        (lambda: Gate(loss=-0.1), "at least 0"),
        (lambda: Gate(loss=math.nan), "at least 0"),
        (lambda: Gate(loss=0.1, steps=0), "one step or more"),
    ],
)
def test_a_gate_that_bounds_nothing_is_an_error(build, text):
    with pytest.raises(SpecError, match=text):
        build()
