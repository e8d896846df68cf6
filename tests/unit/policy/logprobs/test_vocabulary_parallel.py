"""Against the slow reference: values and gradients, on 1, 2 and 4 ranks, with an uneven vocabulary."""

import pytest
import torch

from tests.helpers.head_problem import answers, assert_same, crossed, named
from tests.helpers.head_problem import problem as drawn
from tests.helpers.ranks import run_ranks
from workbench.errors import ShapeError, SpecError
from workbench.policy.logprobs import reference, vocabulary_parallel
from workbench.sharding.mesh import Axis, make_mesh
from workbench.sharding.tensor_parallel import shard_range

V, D, T = 19, 6, 11


def problem():
    g = torch.Generator().manual_seed(5)
    hidden = 3 * torch.randn(T, D, generator=g, dtype=torch.float64)
    weight = torch.randn(V, D, generator=g, dtype=torch.float64)
    bias = torch.randn(V, generator=g, dtype=torch.float64)
    return hidden, weight, bias, torch.randint(0, V, (T,), generator=g), torch.randn(3, T, generator=g).double()


SLICES = ((0, 7), (7, 7), (7, 18), (18, 19))
TEMPERATURES = {"one": 0.7, "per token": 0.2 + torch.arange(T, dtype=torch.float64) / 5}


def sliced(temperature):
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    axis = make_mesh(tp=world)["tp"]
    hidden, weight, bias, targets, gradients = problem()
    cut = temperature == "per token"
    start, stop = SLICES[axis.rank] if cut else shard_range(V, axis, what="vocabulary")
    hidden.requires_grad_()
    # Where slices are uneven, each is followed by two rows of padding, which look like the next rank's.
    weight, bias = (torch.cat([x[start:stop], x[: 2 * cut]]).requires_grad_() for x in (weight, bias))
    output = vocabulary_parallel.token_logprobs(
        hidden,
        weight,
        targets,
        axis=axis,
        first_token=start,
        temperature=TEMPERATURES[temperature],
        bias_V=bias,
        valid=stop - start,
    )[:3]
    (torch.stack(output) * gradients).sum().backward()
    return torch.stack(output).detach(), hidden.grad, (start, stop), weight.grad, bias.grad


@pytest.mark.parametrize(("world", "temperature"), [(1, "one"), (2, "one"), (4, "one"), (4, "per token")])
def test_equals_the_reference_forward_and_backward(world, temperature, tmp_path):
    hidden, weight, bias, targets, gradients = problem()
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    expected = torch.stack(
        reference.token_logprobs(*leaves[:2], targets, temperature=TEMPERATURES[temperature], bias_V=bias)[:3]
    )
    (expected * gradients).sum().backward()
    for result, d_hidden, (start, stop), d_weight, d_bias in run_ranks(sliced, world, tmp_path, temperature):
        pairs = [
            (result, expected.detach()),
            (d_hidden, hidden.grad),
            (d_weight[: stop - start], weight.grad[start:stop]),
            (d_bias[: stop - start], bias.grad[start:stop]),
        ]
        assert not d_weight[stop - start :].any()
        assert not d_bias[stop - start :].any()
        for actual, outputs in pairs:
            torch.testing.assert_close(actual, outputs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("options", crossed(40, seed=9), ids=named)
def test_equals_the_reference_with_every_option(options):
    leaves, call = drawn(options)
    result = answers(vocabulary_parallel.token_logprobs, leaves, call, axis=Axis("tp"), first_token=0)
    assert_same(result, answers(reference.token_logprobs, leaves, call))


def test_gradient_agrees_with_finite_differences():
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def all_three(logits):
        return vocabulary_parallel._FromLocalLogits.apply(logits, torch.tensor([0, 4, 2]), Axis("tp"))

    assert torch.autograd.gradcheck(all_three, (logits,))


def test_a_second_derivative_is_refused_and_not_half_given():
    hidden, weight, _, targets, _ = problem()
    weight.requires_grad_()
    output = vocabulary_parallel.token_logprobs(
        hidden.requires_grad_(), weight, targets, axis=Axis("tp"), first_token=0
    )
    with pytest.raises(SpecError, match="no derivative of its own"):
        torch.autograd.grad(output.logprobs_T.sum(), hidden, create_graph=True)


def test_a_column_that_does_not_exist_has_no_probability_and_no_nan():
    hidden = torch.randn(2, D, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor([0.0, 0.0, -torch.inf], dtype=torch.float64)
    output = vocabulary_parallel.token_logprobs(
        hidden,
        torch.randn(3, D, dtype=torch.float64),
        torch.tensor([0, 1]),
        axis=Axis("tp"),
        first_token=0,
        bias_V=bias,
    )[:3]
    torch.cat(output).sum().backward()
    assert torch.isfinite(torch.cat(output)).all()
    assert torch.isfinite(hidden.grad).all()


def test_a_target_outside_the_vocabulary_is_refused_and_a_negative_one_ignored():
    hidden, weight, *_ = problem()
    targets = torch.zeros(T, dtype=torch.int64)
    targets[3] = 19
    with pytest.raises(ShapeError, match=r"ids \[19\] at \[3\](.|\n)*0 <= id < 19"):
        vocabulary_parallel.token_logprobs(hidden, weight, targets, axis=Axis("tp"), first_token=0)
    targets[3] = -1
    output = vocabulary_parallel.token_logprobs(hidden, weight, targets, axis=Axis("tp"), first_token=0)
    assert output.logprobs_T[3] == 0
    assert (output.logprobs_T != 0).sum() == T - 1
