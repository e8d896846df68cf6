"""Gradients in the forward pass are those of autograd over the reference, whatever a loss couples."""

import pytest
import torch

from tests.helpers.fused_case import DOCUMENT, IDS, MIXED, ROW, TOKEN, Case, T
from tests.helpers.head_problem import crossed, named, problem, wants
from tests.helpers.kernel_numbers import DEVICE
from workbench.errors import ShapeError, SpecError
from workbench.policy.logprobs import fused_loss as module
from workbench.policy.logprobs import reference
from workbench.policy.logprobs.engine import count_gemms
from workbench.policy.logprobs.fused_loss import fused_loss
from workbench.policy.logprobs.host import HostCopy

VARIANTS = (
    {},
    {"couples": "token"},
    {"couples": "row"},
    {"keep_bytes": 2**20},
    {"document_ids_T": None},
    {"document_ids_T": IDS[torch.randperm(T, generator=torch.Generator().manual_seed(1))]},
)


@pytest.mark.parametrize("name", TOKEN + DOCUMENT + MIXED + ROW)
def test_gradients_are_those_of_autograd(name):
    """For any chunking and any declaration of coupling; documents of 9 and 17 tokens do not fit into 5."""
    case = Case()
    for number, call in enumerate(VARIANTS):
        case.assert_right(
            getattr(case, name),
            chunk_tokens=5,
            factor=1.7,
            expected_logprobs_T=case.old if number % 2 else None,
            **call,
        )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", TOKEN + DOCUMENT + MIXED + ROW)
def test_gradients_are_those_of_autograd_for_every_cut(name, seed):
    case = Case(seed)
    for chunk_tokens in (1, 2, 3, 4, 7, 13, 14, 17, 40, 100):
        for call in VARIANTS:
            for expected in (None, case.old):
                case.assert_right(getattr(case, name), chunk_tokens=chunk_tokens, expected_logprobs_T=expected, **call)


@pytest.mark.parametrize("name", TOKEN + DOCUMENT + MIXED + ROW)
def test_one_document_that_is_longer_than_a_chunk_and_has_more_than_one_factor(name):
    """The only one: nothing comes before it, and it is settled as others are."""
    case = Case()
    for expected in (None, case.old):
        for chunk_tokens in (5, 14):
            label = torch.zeros(T, dtype=torch.int64)
            case.assert_right(
                getattr(case, name), document_ids_T=label, chunk_tokens=chunk_tokens, expected_logprobs_T=expected
            )


def test_a_nan_in_a_chunk_is_harmless_if_the_row_is_finite():
    case = Case()

    def standardised(said, places):
        return case.ppo(said, places) + (said.logprobs_T - said.logprobs_T.mean()).square().sum().sqrt()

    for chunk_tokens in (1, 5):
        case.assert_right(standardised, chunk_tokens=chunk_tokens)  # of one token: the gradient of a root at 0


def test_a_nan_in_the_row_is_nan_in_the_gradient():
    case = Case()
    for chunk_tokens in (5, 100):
        result = case.fused(lambda said, places: (said.logprobs_T * torch.nan).sum(), chunk_tokens=chunk_tokens)
        hidden, weight = torch.autograd.grad(result.loss, (case.hidden, case.weight))
        assert hidden[case.active].isnan().all()
        assert weight.isnan().any()
        assert not hidden[~case.active].any()


@pytest.mark.parametrize("chunk_tokens", [5, 100])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_coefficient_that_is_not_finite_spoils_its_own_row_alone(value, chunk_tokens):
    """It is the gradient of that row, and reaches the head; other rows keep theirs."""
    case = Case()
    rows = torch.nonzero(case.active)[:, 0]
    bad, weights = int(rows[2]), torch.linspace(1, 2, T, dtype=case.hidden.dtype)
    result = case.fused(lambda said, places: (weights[places] * said.logprobs_T).sum(), chunk_tokens=chunk_tokens)
    (finite,) = torch.autograd.grad(result.loss, case.hidden)
    weights[bad] = value
    result = case.fused(lambda said, places: (weights[places] * said.logprobs_T).sum(), chunk_tokens=chunk_tokens)
    hidden, weight = torch.autograd.grad(result.loss, (case.hidden, case.weight))
    assert not hidden[bad].isfinite().any()
    assert not weight.isfinite().all()
    others = torch.arange(T) != bad
    torch.testing.assert_close(hidden[others], finite[others], rtol=1e-12, atol=1e-12)


CUTS = [
    {"chunk_tokens": chunk_tokens, "couples": couples, "keep_bytes": keep_bytes}
    for chunk_tokens, keep_bytes in ((1, 0), (4, 0), (4, 2**20), (100, 0))
    for couples in ("token", "document", "row")
]


@pytest.mark.parametrize(
    ("options", "cut"),
    [(options, CUTS[number % len(CUTS)]) for number, options in enumerate(crossed(72, seed=5))],
    ids=lambda x: named(x) if "outputs" in x else "-".join(map(str, x.values())),
)
def test_every_option_of_the_head(options, cut):
    held_to_the_reference(options, **cut)


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS[3:], ids=lambda cut: "-".join(map(str, cut.values())))
def test_every_combination_of_options(cut):
    for options in crossed(None):
        held_to_the_reference(options, **cut)


def held_to_the_reference(options, **call):
    leaves, head = problem(options)
    hidden, weight, bias = (None if leaf is None else leaf.clone().requires_grad_() for leaf in leaves)
    given = head | {"bias_V": bias}
    said = reference.token_logprobs(hidden, weight, **given)
    weights = wants(said)
    expected = sum((x * w).sum() for x, w in zip(said, weights, strict=True) if x is not None)

    def linear(said, places):
        return sum((x * w[places]).sum() for x, w in zip(said, weights, strict=True) if x is not None)

    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    result = fused_loss(hidden, weight, loss_fn=linear, document_ids_T=torch.arange(len(hidden)) // 5, **given, **call)
    torch.testing.assert_close(result.loss.detach(), expected.detach(), rtol=1e-12, atol=1e-12)
    assert result.fallback is None or (call["couples"] == "row" and result.gemms <= 4)
    for one, other in zip(result.head_output, said, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other.detach(), rtol=1e-12, atol=1e-12)
    for one, other in zip(torch.autograd.grad(result.loss, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_frozen_parts_cost_no_product():
    case = Case()
    rows = int(case.active.sum())
    for hidden, weight, products in ((True, False, 2), (False, True, 2), (False, False, 1)):
        case.hidden.requires_grad_(hidden), case.weight.requires_grad_(weight)
        with count_gemms() as count:
            result = case.fused(case.gspo, chunk_tokens=4, expected_logprobs_T=case.old)
        assert (result.gemms, count.rows) == (products, products * rows)
        assert result.loss.requires_grad == (hidden or weight)
    with torch.no_grad():
        assert case.fused(case.gspo, chunk_tokens=4).gemms == 1.0


@pytest.mark.parametrize("name", ["ppo", "every_field", "gspo", "across"])
def test_an_expected_number_of_rows_changes_no_value(name):
    """A wrong one is noticed, and said, unless the labels of documents tell the number."""
    case = Case()
    count = int(case.active.sum())
    for expected in (0, count - 1, count, T):
        call = {"document_ids_T": None, "couples": "row"} if name == "across" else {}
        call |= {"document_ids_T": None} if name in ("ppo", "every_field") else {}
        result = case.assert_right(getattr(case, name), chunk_tokens=5, expected_rows=expected, **call)
        told = f"{count} tokens are computed, but {expected} were expected"
        assert (told in (result.fallback or "")) == (expected != count and name != "gspo")
        if name == "ppo":
            assert result.gemms == pytest.approx(3 + (0 if expected == count else 3 * expected / count))


def test_the_loss_is_evaluated_before_the_host_waits_for_an_expected_number_of_rows(monkeypatch):
    case, order, wait = Case(), [], HostCopy.wait
    monkeypatch.setattr(HostCopy, "wait", lambda copy: (order.append("wait"), wait(copy))[1])

    def loss(said, places):
        order.append("loss")
        return case.ppo(said, places)

    for expected, first in ((None, "wait"), (int(case.active.sum()), "loss")):
        order.clear()
        case.fused(loss, document_ids_T=None, expected_rows=expected)
        assert order[0] == first
        assert "wait" in order


@pytest.mark.parametrize("rows", [-1, T + 1])
def test_a_number_of_rows_that_cannot_be_is_refused(rows):
    case = Case()
    with pytest.raises(ShapeError, match=f"expected_rows = {rows}"):
        case.fused(case.ppo, expected_rows=rows)


@pytest.mark.parametrize(("couples", "even"), [("token", True), ("row", True), ("document", False)])
def test_the_length_of_chunks_follows_from_the_computed_rows(monkeypatch, couples, even):
    """Documents end where they end."""
    case, asked, right = Case(), [], module.default_chunk
    monkeypatch.setattr(module, "default_chunk", lambda head, rows: (asked.append(rows), right(head, rows))[1])
    case.fused(case.ppo, couples=couples)
    assert asked == [int(case.active.sum()) if even else None]


def test_no_row_at_all_gives_zeros_and_not_nothing():
    case = Case()
    result = case.fused(case.ppo, active_T=torch.zeros(T, dtype=torch.bool))
    hidden, weight = torch.autograd.grad(result.loss, (case.hidden, case.weight))
    assert (result.loss.item(), result.gemms) == (0.0, 0.0)
    assert not hidden.any()
    assert not weight.any()


@pytest.mark.parametrize("accumulate", ["float32", "weight"])
@pytest.mark.parametrize("fp32_head", [False, True])
def test_half_precision_gradients_come_in_half_precision(accumulate, fp32_head):
    case = Case(dtype=torch.bfloat16)
    exact = Case()
    exact.hidden, exact.weight = (x.detach().double().requires_grad_() for x in (case.hidden, case.weight))
    exact.old, exact.lengths = case.old.double(), case.lengths.double()
    for name in ("ppo", "gspo"):
        result = case.fused(
            getattr(case, name),
            chunk_tokens=5,
            expected_logprobs_T=case.old,
            accumulate=accumulate,
            fp32_head=fp32_head,
        )
        gradients = torch.autograd.grad(result.loss, (case.hidden, case.weight))
        assert result.fallback is None
        for one, other in zip(gradients, exact.truth(getattr(exact, name))[1:], strict=True):
            assert one.dtype == torch.bfloat16
            assert float((one.double() - other).norm() / other.norm()) < (0.01 if accumulate == "float32" else 0.02)


@pytest.mark.skipif(DEVICE != "cpu", reason="these tensors are interpreted; test_fused_pass.py has those of a device")
@pytest.mark.parametrize("name", ["every_field", "gspo", *ROW])
def test_the_triton_engine_serves_as_well(name):
    """In float32: on a CPU its kernels are interpreted."""
    case, exact = Case(dtype=torch.float32), Case()
    exact.hidden, exact.weight = (x.detach().double().requires_grad_() for x in (case.hidden, case.weight))
    exact.old = case.old.double()
    result = case.fused(getattr(case, name), implementation="triton", chunk_tokens=12, expected_logprobs_T=case.old)
    for one, other in zip(
        torch.autograd.grad(result.loss, (case.hidden, case.weight)), exact.truth(getattr(exact, name))[1:], strict=True
    ):
        assert float((one.double() - other).norm() / other.norm()) < 1e-5


def test_the_upstream_gradient_is_applied_once_and_losses_add_up():
    case = Case()
    result = case.fused(case.ppo, chunk_tokens=5)
    (result.loss * 3 - result.loss).backward()
    for one, other in zip((case.hidden.grad, case.weight.grad), case.truth(case.ppo)[1:], strict=True):
        torch.testing.assert_close(one, 2 * other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("with_gradient", [True, False])
def test_a_loss_may_be_changed_in_place(with_gradient):
    """It is no view of a head output, even if one token's is the whole loss."""
    case = Case()
    hidden, target = case.hidden.detach()[3:4].requires_grad_(), case.targets[3:4]
    with torch.set_grad_enabled(with_gradient):
        result = fused_loss(hidden, case.weight, target, lambda said, places: said.logprobs_T.squeeze())
    logprob, total = result.head_output.logprobs_T.item(), result.loss
    total += 1
    total *= 3
    assert (total.item(), result.head_output.logprobs_T.item()) == (3 * (logprob + 1), logprob)
    if with_gradient:
        exact = reference.token_logprobs(hidden, case.weight, target).logprobs_T.sum()
        gradients = (torch.autograd.grad(value, (hidden, case.weight)) for value in (total, exact))
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, 3 * other, rtol=1e-12, atol=1e-12)


def test_outputs_may_be_named_by_an_iterator():
    case = Case()
    case.assert_right(case.every_field, outputs=(name for name in ("entropy", "logsumexp")))


def test_gradients_are_handed_out_and_not_copied(monkeypatch):
    """In the dtype of the parameter the very tensor that was filled becomes its .grad."""
    case, filled, fetch = Case(), [], module._Gradients.fetch

    def watched(self):
        result = fetch(self)
        filled.extend([result.hidden_TD.data_ptr(), result.weight_VD.data_ptr()])
        return result

    monkeypatch.setattr(module._Gradients, "fetch", watched)
    case.fused(case.gspo, active_T=None, chunk_tokens=5).loss.backward()
    assert [case.hidden.grad.data_ptr(), case.weight.grad.data_ptr()] == filled


def test_a_second_backward_is_refused():
    result = Case().fused(Case().ppo, chunk_tokens=5)
    result.loss.backward(retain_graph=True)
    with pytest.raises(SpecError, match="a second time\n  found: gradients that were returned already"):
        result.loss.backward()


def test_a_gradient_that_would_be_lost_is_refused():
    case = Case()
    trained = torch.ones(T, dtype=torch.float64, requires_grad=True)
    with pytest.raises(SpecError, match=r"found: a gradient to another tensor, \[41\]"):
        case.fused(lambda said, places: (said.logprobs_T * trained[places]).sum())


@pytest.mark.parametrize(
    ("loss", "found"), [(lambda said, places: said.logprobs_T, "shape "), (lambda said, places: 1.0, "a float")]
)
def test_a_loss_that_is_not_one_number_is_refused(loss, found):
    with pytest.raises(ShapeError, match=f"loss_fn\n  found: {found}"):
        Case().fused(loss)


@pytest.mark.parametrize(
    ("call", "asked"),
    [
        ({"couples": "pairs"}, "couples = 'pairs'"),
        ({"accumulate": "bfloat16"}, "accumulate = 'bfloat16'"),
        ({"implementation": "reference"}, "implementation = 'reference'"),
        ({"chunk_tokens": 0}, "chunk_tokens = 0"),
        ({"keep_bytes": -1}, "keep_bytes = -1"),
        ({"outputs": ("entrpy",)}, "outputs = 'entrpy'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(call, asked):
    with pytest.raises(SpecError, match=asked):
        Case().fused(Case().ppo, **call)


def test_a_loss_without_a_gradient_gives_zeros():
    case = Case()
    result = case.fused(lambda said, places: torch.ones(()), chunk_tokens=5)
    hidden, weight = torch.autograd.grad(result.loss, (case.hidden, case.weight))
    assert result.loss.item() == 1.0
    assert not hidden.any()
    assert not weight.any()
