"""Functions of torch that a recorder watches."""

import torch
from torch import nn

from workbench.records.watching import watch_clipping, watch_losses, weakly, when_backward_begins


def backward(model):
    model(torch.ones(1, 2)).sum().backward()


def test_clipping_is_seen_with_its_bound_and_the_parameters_that_are_watched():
    model, other, seen = nn.Linear(2, 1), nn.Linear(2, 1), []
    backward(model)
    backward(other)
    original = torch.nn.utils.clip_grad_norm_
    stop = watch_clipping(dict(model.named_parameters()), lambda bound, found: seen.append((bound, list(found))))
    torch.nn.utils.clip_grad_norm_(model.weight, 0.5)
    torch.nn.utils.clip_grad_norm_(other.parameters(), 0.25)
    assert (0.5, ["weight"]) in seen
    assert {bound for bound, _ in seen} == {0.5}
    stop()
    assert torch.nn.utils.clip_grad_norm_ is original


def test_numbers_that_are_back_propagated_are_seen_until_watching_stops():
    seen = []
    stop = watch_losses(lambda loss: seen.append(float(loss)))
    value = torch.tensor(3.0, requires_grad=True)
    (2 * value).backward()
    torch.autograd.backward([value * 1], [torch.ones(())])  # from a gradient, at no loss
    stop()
    (4 * value).backward()
    assert seen == [6.0]


def test_a_method_is_called_as_long_as_its_object_lives():
    class Counter:
        def __init__(self):
            self.calls = 0

        def count(self):
            self.calls += 1

    counter = Counter()
    call = weakly(counter.count)
    call()
    assert counter.calls == 1
    del counter
    call()


def test_a_gradient_that_is_there_is_passed_on_before_a_backward_adds_to_it():
    model, seen = nn.Linear(2, 1), []
    hooks = when_backward_begins(
        dict(model.named_parameters()), lambda gradient: seen.append(None if gradient is None else gradient.clone())
    )
    backward(model)
    backward(model)
    assert seen[0] is None
    assert torch.equal(seen[1], torch.ones(1, 2))
    for hook in hooks:
        hook.remove()
    backward(model)
    assert len(seen) == 2


def test_hundreds_of_watchers_nest_no_calls_and_the_function_comes_back():
    before, seen = torch.autograd.backward, []
    stops = [watch_losses(lambda loss: seen.append(float(loss))) for _ in range(1200)]  # beyond the recursion limit
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    assert len(seen) == 1200
    for stop in stops:
        stop()
    assert torch.autograd.backward is before
