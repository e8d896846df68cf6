"""Truncated supports: contents, edges, and no allocation of the size of the vocabulary."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.head_problem import PLAIN, answers, assert_same, problem
from workbench.errors import ShapeError
from workbench.policy.logprobs import TokenLogprobs, chunked, driver, reference, truncated_support
from workbench.policy.logprobs.engine import Accumulators
from workbench.policy.logprobs.head import make_head
from workbench.policy.logprobs.truncated_support import TruncatedSupport


def among(sets, targets, outputs=("entropy",), **more):
    """The driver's outputs over supports, and the gradient of hidden of the sum of both fields."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(len(targets), 3, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 3, generator=g, dtype=torch.float64)
    output = driver.token_logprobs(
        hidden,
        weight,
        torch.tensor(targets),
        engine=chunked.ChunkedEngine,
        support=TruncatedSupport.of(sets),
        outputs=outputs,
        **more,
    )
    output.support_logprobs_T.sum().backward()
    return output, hidden.grad, hidden.detach() @ weight.T


def test_the_sets_of_some_tokens():
    sets = TruncatedSupport.of([[3, 1], [], [2], [5, 6, 7]])
    assert len(sets) == 4
    for rows in (slice(1, 4), torch.tensor([3, 0, 1]), torch.tensor([], dtype=torch.int64), slice(0, 0)):
        some = sets.rows(rows)
        expected = [[[3, 1], [], [2], [5, 6, 7]][row] for row in torch.arange(4)[rows].tolist()]
        assert [ids.tolist() for ids in some.ids_P.split(some.offsets_S.diff().tolist())][: len(expected)] == expected
        assert len(some) == len(expected)
    assert sets.untruncated("cpu").tolist() == [False, True, False, False]
    assert sets.rows(slice(2, 4)).untruncated("cpu") is None


def test_a_set_renormalises():
    text, _, logits = among([[1, 4, 7], [2, 0]], [4, 2])
    expected = torch.stack([logits[0, [1, 4, 7]].log_softmax(0)[1], logits[1, [2, 0]].log_softmax(0)[0]])
    torch.testing.assert_close(text.support_logprobs_T.detach(), expected, rtol=0, atol=1e-14)
    assert (text.support_logprobs_T > text.logprobs_T).all()


def test_the_support_has_the_target_and_counts_repeats_once():
    told, gradient, _ = among([[1, 4, 7, 8]], [8])
    for sets in ([[1, 4, 7]], [[7, 8, 1, 4, 4, 1]]):
        result, other, _ = among(sets, [8])
        assert torch.equal(result.support_logprobs_T, told.support_logprobs_T)
        assert torch.equal(other, gradient)


def test_a_support_of_one_is_exactly_zero_without_gradient():
    text, gradient, _ = among([[5], [3]], [5, 3], temperature=0.7, soft_cap=2.0)
    assert torch.equal(text.support_logprobs_T, torch.zeros(2, dtype=torch.float64))
    assert torch.equal(text.support_entropy_T, torch.zeros(2, dtype=torch.float64))
    assert torch.equal(gradient, torch.zeros(2, 3, dtype=torch.float64))


def test_an_empty_set_stands_for_the_whole_vocabulary():
    text, gradient, _ = among([[], [1, 2]], [4, 1])
    assert text.support_logprobs_T[0] == text.logprobs_T[0]
    assert text.support_entropy_T[0] == text.entropy_T[0]
    _, whole, _ = among([list(range(9)), [1, 2]], [4, 1])
    torch.testing.assert_close(gradient, whole, rtol=0, atol=1e-14)


def test_an_empty_support_means_the_whole_vocabulary():
    """Its output in a chunk is 0 and not NaN, so that nothing a loss multiplies with 0 becomes one."""
    chunk = truncated_support.forward(
        make_head(torch.randn(9, 3)), torch.randn(2, 3), torch.tensor([4, 1]), 1.0, TruncatedSupport.of([[], [1, 2]])
    )
    assert (chunk.logprobs_C[0], chunk.entropy_C[0]) == (0, 0)
    assert (chunk.logprobs_C[1] < 0, chunk.entropy_C[1] > 0) == (True, True)


def test_outputs_over_both_supports_are_returned():
    """A ratio takes the kept support, a KL to a reference the full one: both carry their own gradient."""
    leaves, call = problem(PLAIN | {"support": True, "outputs": ("entropy",)})
    hidden = leaves[0].requires_grad_()
    output = driver.token_logprobs(hidden, leaves[1], engine=chunked.ChunkedEngine, **call)
    expected = reference.token_logprobs(hidden, leaves[1], **call)
    for field in ("logprobs_T", "entropy_T", "support_logprobs_T", "support_entropy_T"):
        one, other = (
            torch.autograd.grad(getattr(x, field).sum(), hidden, retain_graph=True)[0] for x in (output, expected)
        )
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
        assert one.abs().max() > 0.1


@pytest.mark.parametrize("block_bytes", [1, 100, 1000])
def test_pairs_are_taken_a_block_at_a_time(block_bytes, monkeypatch):
    options = PLAIN | {"support": True, "outputs": ("entropy",), "bias": True, "soft_cap": 2.0}
    leaves, call = problem(options)
    monkeypatch.setattr(truncated_support, "BLOCK_BYTES", block_bytes)
    assert_same(
        answers(driver.token_logprobs, leaves, call, engine=chunked.ChunkedEngine, chunk_tokens=4),
        answers(reference.token_logprobs, leaves, call),
    )


def test_an_impossible_token_in_the_support_adds_nothing():
    """A bias of -inf, and a probability that underflows: the same as sets without those tokens."""
    bias = torch.zeros(9, dtype=torch.float64)
    bias[2], bias[5] = -torch.inf, -1e4
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 3, generator=g, dtype=torch.float64) for rows in (1, 9))
    results = []
    for ids in ([1, 2, 4, 5, 7], [1, 4, 7]):
        leaf = hidden.clone().requires_grad_()
        output = driver.token_logprobs(
            leaf,
            weight,
            torch.tensor([4]),
            engine=chunked.ChunkedEngine,
            bias_V=bias,
            support=TruncatedSupport.of([ids]),
        )
        (output.support_logprobs_T + output.support_entropy_T).sum().backward()
        results.append((output.support_logprobs_T.detach(), output.support_entropy_T.detach(), leaf.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


class Sizes(TorchDispatchMode):
    """Return the largest number of elements in the result of an operation."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        out = function(*arguments, **(named or {}))
        if "add" not in str(function):  # in place, of the gradient that is there
            self.most = max(self.most, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)), 0)
        return out


def test_nothing_of_the_size_of_the_vocabulary_is_made_for_sets_of_any_size():
    head = make_head(torch.randn(5000, 4))
    hidden, targets = torch.randn(3, 4), torch.tensor([1, 2, 4999])
    sets = TruncatedSupport.of([range(10), range(700), [3]])
    into = Accumulators(torch.zeros(3, 4), torch.zeros(5000, 4))
    with Sizes() as sizes:
        chunk = truncated_support.forward(head, hidden, targets, 1.0, sets)
        truncated_support.backward(head, chunk, torch.ones(3), torch.ones(3), into, slice(0, 3))
    assert sizes.most == (10 + 700 + 2) * 4
    assert into.weight_VD.abs().sum() > 0


def test_the_same_call_adds_the_same_bits():
    leaves, call = problem(PLAIN | {"support": True}, tokens=40, dtype=torch.float32)
    first, again = (answers(driver.token_logprobs, leaves, call, engine=chunked.ChunkedEngine) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first[1][:2], again[1][:2], strict=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TruncatedSupport(torch.tensor([1, 2]), torch.tensor([0, 1])), "to the number of ids"),
        (lambda: TruncatedSupport(torch.tensor([1, 2]), torch.tensor([0, 2, 1, 2])), "never decreasing"),
        (lambda: TruncatedSupport(torch.tensor([1, 2]), torch.tensor([1, 2])), "from 0"),
        (
            lambda: TruncatedSupport(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64)),
            "T \\+ 1 offsets",
        ),
        (lambda: TruncatedSupport.of([[1, -1]]), "id -1"),
        (lambda: TruncatedSupport(torch.ones(2), torch.tensor([0, 2])), "torch.float32"),
        (lambda: TruncatedSupport(torch.ones(2, 2, dtype=torch.int64), torch.tensor([0, 1, 2])), r"\(2, 2\)"),
        (lambda: TruncatedSupport(torch.tensor([1, 2]), torch.tensor([0.0, 2.0])), "torch.float32"),
        (lambda: TruncatedSupport([1, 2], [0, 2]), "list"),
        (lambda: among([[1]], [0, 1]), "1 sets for 2 tokens"),
        (lambda: among([[9], [1]], [0, 1]), "0 <= id < 9"),
    ],
)
def test_invalid_supports_are_refused(make, message):
    with pytest.raises(ShapeError, match=message):
        make()


def test_without_sets_nothing_is_put_in_their_place():
    output = TokenLogprobs(torch.zeros(2))
    assert truncated_support.full_where_empty(output, torch.tensor([True, False])) is output


def test_supports_are_compared_without_comparing_tensors():
    one, other = TruncatedSupport.of([[1, 2]]), TruncatedSupport.of([[1, 2]])
    assert one != other
    assert len({one, other}) == 2


def test_a_row_that_is_not_finite_and_moves_nothing_spoils_nothing():
    hidden = torch.randn(2, 3, dtype=torch.float64)
    hidden[1] = torch.nan
    head = make_head(torch.randn(9, 3, dtype=torch.float64))
    chunk = truncated_support.forward(head, hidden, torch.tensor([4, 1]), 1.0, TruncatedSupport.of([[1, 2], [1, 2]]))
    into = Accumulators(torch.zeros(2, 3, dtype=torch.float64), torch.zeros(9, 3, dtype=torch.float64))
    truncated_support.backward(
        head, chunk, torch.tensor([1.0, 0.0]).double(), torch.tensor([1.0, 0.0]).double(), into, slice(0, 2)
    )
    assert chunk.logprobs_C.isnan().tolist() == [False, True]
    assert into.hidden_TD.isfinite().all()
    assert into.weight_VD.isfinite().all()
    assert into.weight_VD[4].abs().sum() > 0


def test_a_target_that_is_no_token_stays_in_its_own_row():
    """Of a row that is computed only because the number of computed rows was guessed."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 3, generator=g, dtype=torch.float64) for rows in (3, 9))
    head, sets = make_head(weight), TruncatedSupport.of([[1, 2], [1, 2], [7]])
    alone = truncated_support.forward(head, hidden[1:2], torch.tensor([4]), 1.0, sets.rows(slice(1, 2)))
    for before, after in ((-100, -1), (-1, 9), (12, 10**6)):
        chunk = truncated_support.forward(head, hidden, torch.tensor([before, 4, after]), 1.0, sets)
        assert chunk.row_P.unique().tolist() == [0, 1, 2]
        assert torch.equal(chunk.logprobs_C[1:2], alone.logprobs_C)


@pytest.mark.parametrize("expected", [3, 7, 11])
def test_too_many_expected_rows_change_no_output_within_supports(expected):
    leaves, call = problem(PLAIN | {"active": "some", "support": True, "temperature": "each"})
    call["targets_T"][~call["active_T"]] = -1000
    whole = answers(driver.token_logprobs, leaves, call, engine=chunked.ChunkedEngine)
    guessed = answers(driver.token_logprobs, leaves, call, engine=chunked.ChunkedEngine, expected_rows=expected)
    assert_same(guessed, whole)
