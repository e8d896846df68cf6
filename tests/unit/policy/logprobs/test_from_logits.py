"""Both implementations against the reference, whole and in slices of the vocabulary, the gradient in either place."""

import itertools
import random

import pytest
import torch

from tests.helpers.interpreted_triton import repair_interpreter
from tests.helpers.ranks import run_ranks
from workbench.errors import ShapeError, SpecError
from workbench.policy.logprobs import from_logits, reference
from workbench.policy.logprobs.from_logits import token_logprobs_from_logits
from workbench.sharding.mesh import make_mesh

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EVERYTHING = ("entropy", "logsumexp", "mean_squared_logit", "mean_logit")
T, V = 7, 23
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-5}
RELATIVE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-3}


def rows(dtype=torch.float64, seed=1):
    g = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(T, V, generator=g, dtype=torch.float64)).to(dtype)
    return logits, torch.randint(0, V, (T,), generator=g), 0.4 + torch.rand(T, generator=g, dtype=torch.float64)


def answers(logits, targets, **call):
    """The outputs, and the gradient of a random sum of all of them."""
    leaf = logits.clone().requires_grad_()
    output = token_logprobs_from_logits(leaf * 1, targets, **call)
    return [None if x is None else x.detach() for x in output[:5]], weighted(output, leaf)


def expected_of(logits, targets, temperature, outputs):
    leaf = logits.double().requires_grad_()
    ignored = targets < 0
    output = reference.token_logprobs_from_logits(
        leaf, targets.masked_fill(ignored, 0), temperature=temperature, outputs=outputs
    )
    output = [None if x is None else x.masked_fill(ignored, 0) for x in output[:5]]
    return [None if x is None else x.detach() for x in output], weighted(output, leaf)


def weighted(said, leaf):
    g = torch.Generator().manual_seed(2)
    wants = [torch.randn(len(leaf), generator=g, dtype=torch.float64).to(leaf.device) for _ in range(5)]
    total = sum((x * w).sum() for x, w in zip(said, wants, strict=False) if x is not None)
    return torch.autograd.grad(total, leaf)[0]


def cases(count):
    implementations = [
        ("torch", torch.float64),
        ("torch", torch.bfloat16),
        ("triton", torch.float32),
        ("triton", torch.bfloat16),
    ]
    everything = itertools.product(
        implementations, ("one", "each"), ((), ("entropy",), EVERYTHING), (False, True), ("plain", "padding", "ignored")
    )
    return random.Random(3).sample(list(everything), count)


@pytest.mark.parametrize("case", cases(36), ids=lambda case: " ".join(map(str, case)).replace("torch.", ""))
def test_equals_the_reference(case):
    (implementation, dtype), temperature, outputs, inplace, kind = case
    logits, targets, temperatures = rows(dtype)
    temperature = temperatures if temperature == "each" else 0.7
    if kind == "padding":
        logits[:, 17:], targets = -torch.inf, targets % 17
    if kind == "ignored":
        targets[::3] = -100
    given = temperature.to(DEVICE) if isinstance(temperature, torch.Tensor) else temperature
    text, gradient = answers(
        logits.to(DEVICE),
        targets.to(DEVICE),
        implementation=implementation,
        temperature=given,
        outputs=outputs,
        inplace_backward=inplace,
    )
    expected, wanted_gradient = expected_of(logits, targets, temperature, outputs)
    for one, other in zip(text, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one.double().cpu(), other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert gradient.dtype == dtype
    assert (gradient.cpu().double() - wanted_gradient).norm() < RELATIVE[dtype] * wanted_gradient.norm()


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_extreme_logits_are_exact(implementation):
    logits, targets, _ = rows(torch.float32)
    logits[0, :] -= 1e4
    logits[1, targets[1]] = -200
    logits[2, targets[2]] = 1e4
    logits[3, targets[3] - 1] = 1e4
    logits[4, targets[4]] = -torch.inf
    text, gradient = answers(logits.to(DEVICE), targets.to(DEVICE), implementation=implementation, outputs=EVERYTHING)
    expected, wanted_gradient = expected_of(logits, targets, 1.0, EVERYTHING)
    for one, other in zip(text, expected, strict=True):
        torch.testing.assert_close(one.double().cpu(), other, rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(gradient.double().cpu(), wanted_gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_where_two_gradients_cancel_the_target_is_left(implementation):
    """The sum of log-probability and normaliser is the target's own logit: its gradient is 1 there, 0 elsewhere."""
    logits, targets, _ = rows(torch.float32)
    leaf = logits.to(DEVICE).requires_grad_()
    output = token_logprobs_from_logits(leaf, targets.to(DEVICE), implementation=implementation)
    (output.logprobs_T + output.logsumexp_T).sum().backward()
    expected = torch.nn.functional.one_hot(targets, V).to(leaf)
    torch.testing.assert_close(leaf.grad, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_a_row_that_is_not_finite_and_moves_nothing_spoils_nothing(implementation):
    logits, targets, _ = rows(torch.float32)
    logits[2] = torch.nan
    leaf = logits.to(DEVICE).requires_grad_()
    output = token_logprobs_from_logits(leaf, targets.to(DEVICE), implementation=implementation)
    wants = (torch.arange(T, device=DEVICE) != 2).float()
    output.logprobs_T.backward(wants)
    assert output.logprobs_T.isnan().tolist() == [row == 2 for row in range(T)]
    assert torch.equal(leaf.grad.isnan().any(), torch.tensor(False, device=DEVICE))
    assert (leaf.grad.abs().sum(1) > 0).tolist() == [row != 2 for row in range(T)]


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_the_gradient_overwrites_the_logits_only_on_request(implementation):
    logits, targets, _ = rows(torch.float32)
    for inplace in (False, True):
        leaf = logits.clone().to(DEVICE).requires_grad_()
        copy = leaf * 1
        copy.retain_grad()
        token_logprobs_from_logits(
            copy, targets.to(DEVICE), implementation=implementation, inplace_backward=inplace
        ).logprobs_T.sum().backward()
        assert torch.equal(copy.detach(), leaf.grad) == inplace
        assert torch.equal(copy.detach(), leaf.detach()) != inplace


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_an_operation_that_saved_the_logits_raises(implementation):
    logits, targets, _ = rows(torch.float32)
    copy = logits.to(DEVICE).requires_grad_() * 1
    other = copy.square().sum()
    output = token_logprobs_from_logits(copy, targets.to(DEVICE), implementation=implementation, inplace_backward=True)
    output.logprobs_T.sum().backward(retain_graph=True)
    for loss in (other, output.logprobs_T.sum()):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward(retain_graph=True)


@pytest.mark.parametrize("changed", ["targets", "temperature"])
def test_a_change_after_forward_is_detected(changed):
    logits, targets, temperatures = rows()
    output = token_logprobs_from_logits(logits.requires_grad_(), targets, temperature=temperatures)
    {"targets": targets, "temperature": temperatures}[changed].mul_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.logprobs_T.sum().backward()


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (lambda x: x, "outlives its gradient"),
        (lambda x: x[:, 1:], "outlives its gradient"),
        (lambda x: (x[:1] * 1).expand(T, V), "each logit has its own memory"),
    ],
)
def test_logits_that_must_stay_are_not_written_over(seen, words):
    logits, targets, _ = rows(torch.float32)
    with pytest.raises(SpecError, match=words):
        token_logprobs_from_logits(seen(logits.requires_grad_()), targets % (V - 1), inplace_backward=True)


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("inplace", [False, True])
def test_logits_may_lie_in_memory_as_they_like(implementation, inplace):
    logits, targets, _ = rows(torch.float32)
    expected = expected_of(logits, targets, 1.0, ("entropy",))[1]
    for laid in (torch.zeros(V, T).T, torch.zeros(T, 2 * V)[:, 1 : V + 1]):
        leaf = torch.zeros(T, V).copy_(logits).to(DEVICE).requires_grad_()
        view = laid.to(DEVICE).copy_(leaf)
        output = token_logprobs_from_logits(
            view, targets.to(DEVICE), implementation=implementation, outputs=("entropy",), inplace_backward=inplace
        )
        torch.testing.assert_close(
            weighted([output.logprobs_T, output.entropy_T], leaf).double().cpu(), expected, rtol=1e-4, atol=1e-5
        )


def split(implementation, inplace):
    repair_interpreter()
    import numpy

    axis = make_mesh(tp=3)["tp"]
    logits, targets, temperatures = rows(torch.float32)
    targets[2] = -1
    logits[3, :9] = -torch.inf  # the first rank has no finite logit of this row
    targets[3] = 20
    start, stop = ((0, 9), (9, 23), (23, 23))[axis.rank]
    with numpy.errstate(all="ignore"):
        return answers(
            logits[:, start:stop].contiguous(),
            targets,
            implementation=implementation,
            axis=axis,
            first_token=start,
            temperature=temperatures,
            outputs=EVERYTHING,
            inplace_backward=inplace,
        )


@pytest.mark.skipif(DEVICE != "cpu", reason="ranks of gloo are interpreted")
@pytest.mark.parametrize(("implementation", "inplace"), [("torch", False), ("triton", True)])
def test_ranks_with_uneven_and_with_empty_slices(implementation, inplace, tmp_path):
    logits, targets, temperatures = rows(torch.float32)
    targets[2], targets[3] = -1, 20
    logits[3, :9] = -torch.inf
    expected, wanted_gradient = expected_of(logits, targets, temperatures, EVERYTHING)
    ranks = run_ranks(split, 3, tmp_path, implementation, inplace)
    for text, _ in ranks:
        for one, other in zip(text, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    gradient = torch.cat([gradient for _, gradient in ranks], dim=1)
    torch.testing.assert_close(gradient.double(), wanted_gradient, rtol=1e-4, atol=1e-5)


def test_several_blocks_of_rows_match_one(monkeypatch):
    logits, targets, temperatures = rows()
    whole = answers(logits, targets, temperature=temperatures, outputs=EVERYTHING)
    monkeypatch.setattr(from_logits, "BLOCK_BYTES", 3 * 8 * V)
    pieces = answers(logits, targets, temperature=temperatures, outputs=EVERYTHING)
    for one, other in zip((*whole[0], whole[1]), (*pieces[0], pieces[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-15)


def test_no_rows_give_empty_outputs():
    text, gradient = answers(torch.zeros(0, V), torch.zeros(0, dtype=torch.int64), outputs=EVERYTHING)
    assert [x.shape for x in (*text, gradient)] == [(0,)] * 5 + [(0, V)]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        ({"implementation": "fast"}, SpecError, "one of auto, torch, triton"),
        ({"implementation": "triton"}, SpecError, "float64; the kernels sum in float32"),
        ({"outputs": ("variance",)}, SpecError, "any of entropy, logsumexp, mean_squared_logit, mean_logit"),
        ({"temperature": 0.0}, ShapeError, "positive and finite"),
        ({"first_token": 3}, ShapeError, "3 to 26"),
    ],
)
def test_invalid_options_are_refused(call, error, words):
    logits, targets, _ = rows()
    with pytest.raises(error, match=words):
        token_logprobs_from_logits(logits, targets, **call)


def test_a_target_outside_the_vocabulary_is_named():
    logits, targets, _ = rows()
    targets[4] = V
    with pytest.raises(ShapeError, match=f"id < {V}"):
        token_logprobs_from_logits(logits, targets)


def test_unsupported_operands_are_refused():
    logits, targets, _ = rows()
    for wrong, words in (
        ((logits, targets.double()), "targets(.|\n)*float64"),
        ((logits.long(), targets), "logits(.|\n)*int64"),
    ):
        with pytest.raises(ShapeError, match=words):
            token_logprobs_from_logits(*wrong)
