import pytest
import torch

from tests.helpers.ranks import run_ranks
from workbench.errors import ShapeError, SpecError
from workbench.policy.logprobs.head import active_rows, check_rows, make_head
from workbench.sharding.mesh import make_mesh

W = torch.zeros(5, 2)
T3 = torch.zeros(3, dtype=torch.int64)


def checked(hidden=None, targets=T3, temperature=1.0, active=None, outputs=(), **more):
    return check_rows(
        make_head(W, **more),
        torch.zeros(3, 2) if hidden is None else hidden,
        targets,
        temperature=temperature,
        active_T=active,
        outputs=outputs,
    )


def test_logits_and_their_adjoint():
    g = torch.Generator().manual_seed(0)
    dots = torch.randn(3, 5, generator=g, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, generator=g, dtype=torch.float64)
    divisor = torch.tensor([[0.5], [1.0], [3.0]], dtype=torch.float64)
    head = make_head(W, bias_V=bias, logit_scale=1.7, soft_cap=2.0)
    expected = 2 * torch.tanh(1.7 * (dots + bias) / 2) / divisor
    result = head.logits_(dots.detach().clone(), bias, divisor)
    torch.testing.assert_close(result, expected.detach(), rtol=0, atol=1e-15)
    gradient = torch.randn(3, 5, generator=g, dtype=torch.float64)
    torch.testing.assert_close(
        head.back_(gradient.clone(), result, divisor),
        torch.autograd.grad(expected, dots, gradient)[0],
        rtol=0,
        atol=1e-14,
    )


@pytest.mark.parametrize(
    ("targets", "active", "expected"),
    [
        ([3, -100, 0, 1], None, [0, 2, 3]),
        ([3, -100, 0, 1], [False, True, True, False], [2]),
        ([3, -1, 0, 1], [False, True, False, False], []),
        ([3, 4, 0, 1], None, None),
        ([], None, None),
    ],
)
def test_rows_that_are_computed(targets, active, expected):
    targets = torch.tensor(targets, dtype=torch.int64)
    active = None if active is None else torch.tensor(active)
    count = checked(torch.zeros(len(targets), 2), targets, active=active)
    index = active_rows(targets, active, count)
    assert (None if index is None else index.tolist()) == expected
    assert count == (len(targets) if expected is None else len(expected))


def test_the_vocabulary_counts_valid_rows():
    head = make_head(W, valid=3)
    assert (head.vocabulary, head.valid, head.is_split) == (3, 3, False)


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"valid": 6}, ShapeError, "5 local rows of the head"),
        ({"valid": -1}, ShapeError, "rows beyond are padding"),
        ({"valid": 0}, ShapeError, "there is at least one"),
        ({"first_token": 2}, ShapeError, "2 to 7"),
        ({"bias_V": torch.zeros(4)}, ShapeError, "bias_V has V=4"),
        ({"logit_scale": 0.0}, SpecError, "logit_scale = 0.0"),
        ({"logit_scale": float("nan")}, SpecError, "logit_scale = nan"),
        ({"soft_cap": 0.0}, SpecError, "soft_cap = 0.0"),
        ({"soft_cap": float("inf")}, SpecError, "soft_cap = inf"),
        ({"hidden": torch.zeros(3, 4)}, ShapeError, "D=4"),
        ({"hidden": torch.zeros(3, 2).bfloat16()}, ShapeError, "fp32_head=True"),
        ({"targets": T3.double()}, ShapeError, "targets(.|\n)*torch.float64"),
        ({"targets": T3.bool()}, ShapeError, "targets(.|\n)*torch.bool"),
        ({"active": torch.zeros(3)}, ShapeError, "active_T(.|\n)*torch.float32"),
        ({"active": torch.zeros(2, dtype=torch.bool)}, ShapeError, "active_T has T=2"),
        ({"targets": T3 + 5}, ShapeError, r"ids \[5, 5, 5\] at \[0, 1, 2\]"),
        ({"targets": T3 + 3, "valid": 3}, ShapeError, "0 <= id < 3"),
        ({"temperature": torch.tensor([1.0, 1.0, -1.0])}, ShapeError, r"at \[2\]"),
        ({"temperature": torch.ones(3, requires_grad=True)}, ShapeError, "given, not trained"),
        ({"outputs": ("entropy", "perplexity")}, SpecError, "outputs = 'perplexity'"),
    ],
)
def test_invalid_options_are_refused(settings, kind, message):
    with pytest.raises(kind, match=message):
        checked(**settings)


def test_a_target_that_is_not_computed_may_be_anything():
    results = []
    for active in (torch.tensor([True, False, True]), None):
        try:
            checked(targets=torch.tensor([0, 99, 1]), active=active)
            results.append("taken")
        except ShapeError:
            results.append("refused")
    assert results == ["taken", "refused"]


def heads_of_ranks():
    axis = make_mesh(tp=2)["tp"]
    outputs = []
    for starts, sizes in (
        ((0, 3), (3, 2)),
        ((0, 3), (3, 0)),
        ((9, 0), (0, 5)),
        ((0, 2), (3, 2)),
        ((0, 0), (3, 2)),
        ((3, 0), (2, 3)),
    ):
        try:
            outputs.append(make_head(W, valid=sizes[axis.rank], axis=axis, first_token=starts[axis.rank]).vocabulary)
        except ShapeError as error:
            outputs.append(error.parts["found"])
    return outputs


def test_slices_that_do_not_tile_the_vocabulary_are_refused_on_every_rank(tmp_path):
    for text in run_ranks(heads_of_ranks, 2, tmp_path):
        assert text == [5, 3, 5, "0 to 3, 2 to 4", "0 to 3, 0 to 2", "3 to 5, 0 to 3"]
