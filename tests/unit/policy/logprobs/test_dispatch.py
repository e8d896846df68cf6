"""The public API: implementations by name, the choice of auto, and agreement of all of them."""

import pytest
import torch

from tests.helpers.head_problem import PLAIN, answers, assert_same, crossed, named, problem
from workbench.errors import ShapeError, SpecError
from workbench.policy.logprobs import IMPLEMENTATIONS, TokenLogprobs, fastest, token_logprobs
from workbench.policy.logprobs.truncated_support import TruncatedSupport
from workbench.sharding.mesh import Axis

ON_CPU = ("reference", "vocabulary_parallel", "chunked", "auto")


@pytest.mark.parametrize("options", crossed(5, seed=11), ids=named)
def test_every_implementation_agrees(options):
    leaves, call = problem(options)
    expected = answers(token_logprobs, leaves, call, implementation="reference")
    for implementation in ON_CPU[1:]:
        assert_same(answers(token_logprobs, leaves, call, implementation=implementation, chunk_tokens=4), expected)


def test_auto_selects_what_runs_here():
    assert fastest(torch.float32, torch.device("cpu")) == "chunked"
    assert fastest(torch.float64, torch.device("cuda")) == "chunked"


@pytest.mark.parametrize("implementation", ON_CPU)
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"soft_cap": -1.0}, SpecError),
        ({"outputs": ("variance",)}, SpecError),
        ({"temperature": 0.0}, ShapeError),
        ({"valid": 24}, ShapeError),
        ({"support": [[1]] * 11}, ShapeError),
        ({"targets_T": torch.full((11,), 23)}, ShapeError),
    ],
)
def test_every_implementation_refuses_the_same(implementation, change, kind):
    leaves, call = problem(PLAIN)
    with pytest.raises(kind, match="token_logprobs: "):
        token_logprobs(*leaves[:2], **call | change, implementation=implementation)


def test_an_unknown_implementation_is_refused_by_the_names_there_are():
    leaves, call = problem(PLAIN)
    with pytest.raises(SpecError, match=f"one of auto, {', '.join(IMPLEMENTATIONS)}"):
        token_logprobs(*leaves[:2], **call, implementation="liger")


def test_the_reference_is_refused_where_tp_cuts_the_head():
    leaves, call = problem(PLAIN)
    with pytest.raises(SpecError, match="needs the whole vocabulary"):
        token_logprobs(*leaves[:2], **call, implementation="reference", axis=Axis("tp", 2))


@pytest.mark.parametrize("implementation", ON_CPU)
def test_a_part_of_the_vocabulary_without_the_rest_is_refused(implementation):
    leaves, call = problem(PLAIN)
    with pytest.raises(ValueError, match=r"first_token = 2|2 to 25"):
        token_logprobs(*leaves[:2], **call, implementation=implementation, first_token=2)


@pytest.mark.parametrize("implementation", ON_CPU)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn, torch.complex64])
def test_operands_that_are_no_real_numbers_of_16_bits_or_more_are_refused(dtype, implementation):
    leaves, call = problem(PLAIN)
    with pytest.raises(ShapeError, match=f"{dtype}(.|\n)*bfloat16, float16, float32 or float64"):
        token_logprobs(*(x.to(dtype) for x in leaves[:2]), **call, implementation=implementation)


@pytest.mark.parametrize("implementation", ON_CPU)
def test_a_token_that_is_ignored_spoils_nothing(implementation):
    """Neither by a non-finite hidden state, nor by a support of impossible tokens."""
    leaves, call = problem(PLAIN | {"bias": True, "support": True, "outputs": ("entropy",)})
    bias = leaves[2].clone()
    bias[0] = -torch.inf
    call["targets_T"] = call["targets_T"].clamp(min=1)
    call["targets_T"][[3, 4]] = -100
    call["support"] = TruncatedSupport.of([[0] if row == 4 else [1, 2] for row in range(11)])
    hidden = leaves[0].clone()
    hidden[3] = torch.nan
    expected = answers(
        token_logprobs,
        [leaves[0], leaves[1], bias],
        call | {"support": TruncatedSupport.of([[1, 2]] * 11)},
        implementation="chunked",
    )
    assert_same(answers(token_logprobs, [hidden, leaves[1], bias], call, implementation=implementation), expected)
    assert all(x.isfinite().all() for x in expected[1])


def test_unrequested_outputs_are_none():
    assert TokenLogprobs(torch.zeros(1))[1:] == (None,) * 6


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["chunked", "triton"])
def test_a_row_of_a_million_tokens(implementation):
    """Every thousandth token against the reference in float64, and the head's gradient against its sum over parts."""
    g = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(10**6, 64, generator=g, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(1009, 64, generator=g, device="cuda") / 4).bfloat16().requires_grad_()
    targets = torch.randint(0, 1009, (10**6,), generator=g, device="cuda")
    output = token_logprobs(hidden, weight, targets, implementation=implementation)
    output.logprobs_T.sum().backward()
    some = slice(None, None, 1000)
    exact = token_logprobs(hidden[some].double(), weight.double(), targets[some], implementation="reference")
    torch.testing.assert_close(output.logprobs_T[some].double(), exact.logprobs_T, rtol=0, atol=1e-4)
    torch.testing.assert_close(output.entropy_T[some].double(), exact.entropy_T, rtol=0, atol=1e-4)
    whole = weight.detach().double().requires_grad_()
    for piece in torch.arange(10**6, device="cuda").split(10**5):
        token_logprobs(
            hidden.detach()[piece].double(), whole, targets[piece], implementation="reference"
        ).logprobs_T.sum().backward()
    assert (weight.grad.double() - whole.grad).norm() <= 3.5e-3 * whole.grad.norm()
