import math

import pytest
import torch

from workbench.errors import ShapeError
from workbench.prove.arrangement import Arrangement, Outcome, one_row
from workbench.prove.differences import GRADIENT_BAR, LOSS_BAR, difference
from workbench.prove.documents import silent_documents

DOCUMENTS = silent_documents("0", 3, group_id=0)
PLAIN = Outcome(
    2.0,
    {"a": torch.tensor([3.0, 0.0]).double(), "b": torch.tensor([0.0, 4.0]).double()},
    {"kl/mean": 0.5, "gradient/norm/all": 5.0, "nothing": math.nan, "zero": 0.0},
)


def changed(loss=2.0, a=(3.0, 0.0), b=(0.0, 4.0), **metrics):
    gradients = {"a": torch.tensor(a, dtype=torch.float64), "b": torch.tensor(b, dtype=torch.float64)}
    return Outcome(loss, gradients, {**PLAIN.metrics, **metrics})


def held(outcome, arrangement=None):
    return difference(PLAIN, outcome, (one_row(DOCUMENTS), arrangement or one_row(DOCUMENTS, cp=2)))


def test_what_is_within_its_bar_does_not_differ():
    found = held(changed(2.0 + LOSS_BAR, (3.0 + 2 * GRADIENT_BAR, 0.0), zero=1e-13))
    assert found.differing == ()
    assert 0 < found.worst < GRADIENT_BAR
    assert held(changed(2.0 + 6 * LOSS_BAR)).differing == ("loss",)
    assert held(changed(a=(3.0 + 4 * GRADIENT_BAR, 0.0))).differing == ("gradient",)


def test_a_small_parameter_is_held_to_a_floor():
    small = Outcome(2.0, {"a": torch.zeros(2).double(), "b": PLAIN.gradients["b"]})
    arrangements = one_row(DOCUMENTS), one_row(DOCUMENTS, cp=2)
    noise, signal = changed(a=(1e-14, 0.0)), changed(a=(1e-9, 0.0))
    assert difference(small, noise, arrangements).differing == ()
    assert difference(small, signal, arrangements).differing == ("gradient",)


def test_a_factor_is_measured_and_named():
    half = held(changed(1.0, (1.5, 0.0), (0.0, 2.0), **{"gradient/norm/all": 2.5}))
    assert half.differing == ("gradient", "loss"), "norms of the gradient and terms of the loss go without saying"
    assert (half.factor, half.factor_name) == (0.5, "1 / cp")
    assert half.description == "the gradient is 0.5 times the plain one (1 / cp); the loss is 1, not 2"
    other = held(changed(2.0, (2.1, 0.0), (0.0, 2.8)))
    assert (other.factor, other.factor_name) == (pytest.approx(0.7), "")
    assert held(changed(2.0, (0.0, 0.0), (0.0, 0.0))).description == "the gradient is 0"


@pytest.mark.parametrize(
    ("settings", "factor", "name"),
    [
        ({"dp": 3, "rows": ((0,), (1,), (2,))}, 3.0, "dp"),
        ({"rows": ((0,), (1, 2))}, 0.5, "1 / micro_batches"),
        ({"dp": 3, "cp": 2, "rows": ((0,), (1,), (2,))}, 6.0, "cp * dp"),
        ({"cp": 2}, 0.25, "1 / (cp * cp)"),
        ({"tp": 2}, 2.0, "tp"),
    ],
)
def test_a_factor_may_come_from_any_size(settings, factor, name):
    arrangement = Arrangement(DOCUMENTS, **settings) if "rows" in settings else one_row(DOCUMENTS, **settings)
    found = held(changed(2.0, (3.0 * factor, 0.0), (0.0, 4.0 * factor)), arrangement)
    assert found.factor_name == name


def test_a_factor_may_be_a_share():
    tokens = sum(len(document.tokens) for document in DOCUMENTS)
    padded = one_row(DOCUMENTS, multiple_of=2 * tokens + 1)
    share = tokens / padded.tokens
    found = held(changed(2.0, (3.0 * share, 0.0), (0.0, 4.0 * share)), padded)
    assert found.factor_name == "tokens / padded tokens"
    more = one_row(DOCUMENTS + silent_documents("1", 2, group_id=5))
    found = held(changed(2.0, (3.0 * 3 / 5, 0.0), (0.0, 4.0 * 3 / 5)), more)
    assert found.factor_name == "documents / all documents"


def test_another_gradient_has_no_factor():
    turned = held(changed(2.0, (3.0, 1.0), (0.0, 4.0)))
    assert (turned.factor, turned.factor_name) == (None, "")
    assert turned.description.startswith("the gradient is another one: cosine 0.981, 1.02 times as long, farthest in a")
    assert held(changed(2.0, (3.0, 0.01), (0.0, 4.0))).description.startswith(
        "the gradient is nearly 1 times the plain one"
    )


def test_what_differs_by_little_is_told_apart_in_words():
    epsilon = 1 - 5e-9
    found = held(changed(2.0 * epsilon, (3.0 * epsilon, 0.0), (0.0, 4.0 * epsilon)))
    assert found.description == "the gradient is 1 - 5.0e-09 times the plain one; the loss is 1.99999999, not 2"
    assert held(changed(2.0 + 1e-11)).description == "the loss is 2.00000000001, not 2: 1 + 5.0e-12 times"
    assert held(changed(**{"kl/mean": 0.50000001})).description == "kl/mean is 0.50000001, not 0.5"


def test_a_gradient_of_rounding_is_none():
    found = held(changed(2.0, (1e-17, 0.0), (0.0, -1e-16)))
    assert (found.factor, found.description) == (0.0, "the gradient is 0")


def test_a_loss_alone_has_a_factor_too():
    found = held(changed(4.0))
    assert (found.differing, found.factor, found.factor_name) == (("loss",), 2.0, "cp")
    assert found.description == "the loss is 4, not 2: 2 times (cp)"


def test_so_has_a_metric_alone():
    found = held(changed(zero=1.0, **{"kl/mean": 1.0}))
    assert found.differing == ("metric kl/mean", "metric zero")
    assert (found.factor, found.factor_name) == (2.0, "cp")
    assert found.description == "kl/mean is 1, not 0.5, and 1 more metrics differ"
    assert held(changed(nothing=0.0)).differing == ("metric nothing",), "a number where there is none"
    gone = Outcome(2.0, PLAIN.gradients, {"kl/mean": 0.5})
    assert held(gone).differing == ("metric gradient/norm/all", "metric zero"), "a metric that is missing is NaN"


def test_what_is_no_number_and_what_raises():
    assert held(changed(a=(math.nan, 0.0))).differing == ("not a number",)
    assert "the gradient of 1 parameter(s), a first" in held(changed(a=(math.inf, 0.0))).description
    assert held(changed(math.nan)).description == "the loss is not a number"
    error = held(Outcome(error=ShapeError("split 7 tokens", found="an odd row")))
    assert (error.differing, error.description) == (("error",), "ShapeError: split 7 tokens; found: an odd row")
    assert held(Outcome(error=KeyError())).description == "KeyError: "


def test_a_signature_is_what_stays_while_it_is_cut_down():
    assert held(changed(1.0, (1.5, 0.0), (0.0, 2.0))).signature == ("gradient", False, "1 / cp")
    assert held(changed(2.0, (3.0, 1.0))).signature == ("gradient", True, "")
