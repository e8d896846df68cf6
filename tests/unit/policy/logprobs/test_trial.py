"""Trial coefficients of a chunk have the shape of the true ones, whatever the rest of its document turns out to be."""

import pytest
import torch

from workbench.policy.logprobs import TokenLogprobs
from workbench.policy.logprobs.row_outputs import RowOutputs
from workbench.policy.logprobs.trial import Trials

N = 9
WHOLE, FIRST = slice(0, N), slice(0, 4)
G = torch.Generator().manual_seed(0)
OLD = -1 - torch.rand(N, generator=G, dtype=torch.float64)
NOW = OLD + 0.1 * torch.randn(N, generator=G, dtype=torch.float64)
ADVANTAGES = torch.randn(N, generator=G, dtype=torch.float64)


def token(output, places):
    return (ADVANTAGES[places] * (output.logprobs_T - OLD[places]).exp()).sum()


def mean(output, places):
    return token(output, places) / len(places)


def sequence(output, places):
    return N * (output.logprobs_T - OLD[places]).sum().div(N).exp()


def clipped(output, places):
    return (output.logprobs_T - OLD[places]).sum().clamp(-9.0, -8.0)


def window(output, places):
    """Clipped on both sides."""
    total = (output.logprobs_T - OLD[places]).sum()
    return total * (total.detach().abs() < 0.5)


def entangled(output, places):
    return token(output, places) + (output.logprobs_T.sum() * output.logprobs_T.square()).sum()


def trials(loss, expected=None):
    rows = RowOutputs(loss, ("logprobs_T",), torch.arange(N), None, expected, None, torch.float64)
    rows.record(TokenLogprobs(logprobs_T=NOW[FIRST]), FIRST)
    return rows, Trials(rows, None)


@pytest.mark.parametrize("expected", [None, OLD])
@pytest.mark.parametrize(
    ("loss", "effect"),
    [(token, "nothing"), (mean, "data"), (sequence, "factor"), (window, "factor"), (entangled, "more")],
)
def test_the_effect_of_the_rest_is_measured(loss, effect, expected):
    assert trials(loss, expected)[1].rest_effect(WHOLE, FIRST) == effect


@pytest.mark.parametrize("expected", [None, OLD])
@pytest.mark.parametrize("loss", [mean, sequence])
def test_a_trial_is_right_up_to_one_factor(loss, expected):
    rows, trial = trials(loss, expected)
    effect = trial.rest_effect(WHOLE, FIRST)
    coefficients = trial.take(WHOLE, FIRST)
    assert torch.equal(coefficients, trial.take(WHOLE, FIRST)), "the first, which was queued early, is none other"
    rows.record(TokenLogprobs(logprobs_T=NOW), rows.everything)
    truth = rows.loss(WHOLE)[1][:, FIRST]
    factors = truth / coefficients
    torch.testing.assert_close(factors, factors[:, :1].expand_as(factors), rtol=1e-12, atol=0)
    if effect == "data":
        torch.testing.assert_close(coefficients, truth, rtol=1e-12, atol=0)


def test_a_document_without_a_gradient_decides_nothing():
    _, trial = trials(clipped, OLD)
    assert trial.rest_effect(WHOLE, FIRST) == "nothing"
    trial.outputs.loss_fn = sequence
    assert trial.rest_effect(WHOLE, FIRST) == "factor"


def test_without_expectations_such_a_document_is_even():
    _, trial = trials(clipped)
    assert trial.rest_effect(WHOLE, FIRST) == "factor"
    assert trial.take(WHOLE, FIRST).tolist() == [[1.0] * 4]
