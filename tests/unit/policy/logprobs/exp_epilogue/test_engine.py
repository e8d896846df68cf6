"""The Triton engine against the reference in float64: interpreted on a CPU, compiled on a GPU."""

import itertools
import os
import random

import pytest
import torch

from tests.helpers.engine_chunks import DEVICE, EVERYTHING, RELATIVE, chunk_and_back, error, plain, triton
from tests.helpers.head_problem import answers, crossed, named, problem
from tests.helpers.interpreted_triton import repair_interpreter
from tests.helpers.ranks import run_ranks
from tests.helpers.stand_in import stand_in
from workbench.errors import SpecError
from workbench.policy.logprobs import reference
from workbench.policy.logprobs.chunked import ChunkedEngine
from workbench.policy.logprobs.engine import Accumulators, count_gemms
from workbench.policy.logprobs.exp_epilogue import engine as module
from workbench.policy.logprobs.exp_epilogue.engine import ExpEpilogueEngine
from workbench.policy.logprobs.exp_epilogue.kernels import unsupported_reason
from workbench.policy.logprobs.exp_epilogue.tiles import Tile
from workbench.policy.logprobs.head import make_head
from workbench.sharding.mesh import Axis, make_mesh

TILES = {
    "here": None,
    "wide": Tile(32, 64, 16, warps=4, stages=2, group=1),
    "low": Tile(16, 32, 32, warps=4, stages=2, group=3),
}


@pytest.mark.parametrize("options", crossed(18 if DEVICE.type == "cpu" else 10, seed=6), ids=named)
def test_equals_the_reference_through_the_driver(options):
    leaves, call = problem(options, tokens=11, dtype=torch.float32)
    wide = [None if x is None else x.double() for x in leaves]
    call["targets_T"] = call["targets_T"].to(DEVICE)
    expected = answers(reference.token_logprobs, wide, {**call, "targets_T": call["targets_T"].cpu()})
    if DEVICE.type == "cuda":
        leaves = [None if x is None else x.to(DEVICE) for x in leaves]
        call = {k: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for k, x in call.items()}
    result = answers(triton, leaves, call, chunk_tokens=4, keep_bytes=1000)
    for one, other in zip(result[0], expected[0], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one.double().cpu(), other, rtol=1e-5, atol=1e-5)
    for one, other in zip(result[1], expected[1], strict=True):
        assert one is None or error(one, other) < RELATIVE[torch.float32]


def cases(count):
    """A sample of all combinations of an engine's inputs."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    everything = itertools.product(
        dtypes,
        TILES,
        [(21, 51, 40), (17, 65, 17)],
        [1.0, "each"],
        [False, True],
        [1.0, 0.6],
        [None, 4.0],
        [0, 5],
        ["scratch", "own"],
        [(1, 0, 0, 0, 0), (1, 0, 1, 0, 1), (1, 1, 0, 0, 0), (0, 1, 1, 1, 1), (1, 0, 0, 1, 0)],
    )
    return random.Random(7).sample(list(everything), count)


@pytest.mark.parametrize(
    "case",
    cases(16 if DEVICE.type == "cpu" else 6),
    ids=lambda case: " ".join(str(x).replace("torch.", "") for x in case),
)
def test_a_chunk_equals_an_exact_one(case):
    dtype, tile, (rows, columns, depth), temperature, bias, scale, cap, padding, keep, uses = case
    g = torch.Generator().manual_seed(8)
    hidden = torch.randn(rows, depth, generator=g).to(dtype)
    weight = (torch.randn(columns, depth, generator=g) / 3).to(dtype)
    bias_V = torch.randn(columns, generator=g).to(dtype) if bias else None
    targets = torch.randint(0, columns - padding, (rows,), generator=g)
    temperature = 0.5 + torch.rand(rows, generator=g) if temperature == "each" else temperature
    gradients = [torch.randn(rows, generator=g) if use else None for use in uses]
    outputs = EVERYTHING
    if cap is not None:  # the mean of capped logits is refused, see below
        outputs, gradients[4] = EVERYTHING - {"mean_logit"}, None
    result, expected = (
        chunk_and_back(
            make, *moved, keep=keep, outputs=outputs, logit_scale=scale, soft_cap=cap, valid=columns - padding
        )
        for make, moved in (
            (
                lambda head: ExpEpilogueEngine(head, tile=TILES[tile] if DEVICE.type == "cpu" else None),
                [
                    x.to(DEVICE) if isinstance(x, torch.Tensor) else x
                    for x in (hidden, weight, bias_V, targets, temperature, gradients)
                ],
            ),
            (
                ChunkedEngine,
                (
                    hidden.double(),
                    weight.double(),
                    None if bias_V is None else bias_V.double(),
                    targets,
                    temperature,
                    gradients,
                ),
            ),
        )
    )
    assert not result[0].overflowed_C.any()
    for one, other in zip(result[0].head_output[:4], expected[0].head_output[:4], strict=True):
        torch.testing.assert_close(one.double().cpu(), other, rtol=1e-5, atol=2e-5)
    for name in ("hidden_TD", "weight_VD", "bias_V"):
        one, other = getattr(result[1], name), getattr(expected[1], name)
        assert one is None or error(one, other) < RELATIVE[dtype], name
    assert (result[1].weight_VD[columns - padding :] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_for_any_budget_outputs_and_position(dtype):
    hidden, weight, _, targets, temperature, _ = plain(dtype)
    engine = ExpEpilogueEngine(make_head(weight))
    alone = engine.forward(hidden, targets, temperature, outputs=frozenset(), keep="no").head_output
    order = torch.randperm(21, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for keep, outputs, places in (
        ("scratch", EVERYTHING, slice(None)),
        ("own", frozenset({"entropy"}), order),
        ("no", EVERYTHING, order[:5]),
        ("no", frozenset(), slice(20, 21)),
    ):
        each = torch.full((len(targets[places]),), temperature, device=DEVICE)
        for given in (temperature, each):
            output = engine.forward(
                hidden[places].contiguous(), targets[places], given, outputs=outputs, keep=keep
            ).head_output
            assert torch.equal(output.logprobs_T, alone.logprobs_T[places])
            assert torch.equal(output.logsumexp_T, alone.logsumexp_T[places])


def test_the_ratio_to_the_policy_s_own_old_self_is_exactly_one():
    hidden, weight, _, targets, _, _ = plain(torch.bfloat16)
    with torch.no_grad():
        old = triton(hidden, weight, targets, temperature=0.7, chunk_tokens=21).logprobs_T
    new = triton(
        hidden.requires_grad_(),
        weight,
        targets,
        temperature=0.7,
        outputs=("entropy",),
        chunk_tokens=9,
        keep_bytes=10**5,
    ).logprobs_T
    assert (new - old).exp().eq(1).all()
    assert new.requires_grad


def test_gradients_of_chunks_are_added_and_the_first_overwrites():
    hidden, weight, _, targets, temperature, gradients = plain()
    bias = torch.randn(53, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    whole = chunk_and_back(ExpEpilogueEngine, hidden, weight, bias, targets, temperature, gradients, valid=53)[1]
    into = Accumulators(None, torch.full_like(weight, torch.nan), torch.full_like(bias, torch.nan))
    for number, rows in enumerate((slice(0, 12), slice(12, 21))):
        chunk_and_back(
            ExpEpilogueEngine,
            hidden[rows],
            weight,
            bias,
            targets[rows],
            temperature,
            [gradients[0][rows], None, None, None],
            into=into,
            first=number == 0,
        )
    torch.testing.assert_close(into.weight_VD, whole.weight_VD, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(into.bias_V, whole.bias_V, rtol=1e-5, atol=1e-5)


def test_a_gradient_may_be_summed_in_the_width_of_the_weight():
    made = plain(torch.bfloat16)
    exact = chunk_and_back(ExpEpilogueEngine, *made)[1].weight_VD
    into = Accumulators(None, torch.full_like(made[1], torch.nan))
    chunk_and_back(ExpEpilogueEngine, *made, into=into)
    assert into.weight_VD.dtype == torch.bfloat16
    assert error(into.weight_VD, exact) < 5e-3


@pytest.mark.parametrize(("wants", "expected"), [((True, True), 2), ((True, False), 1), ((False, True), 1)])
def test_unused_gemms_are_skipped(wants, expected):
    hidden, weight, *rest = plain()
    into = Accumulators(torch.empty_like(hidden) if wants[0] else None, torch.empty_like(weight) if wants[1] else None)
    with count_gemms() as count:
        chunk_and_back(ExpEpilogueEngine, hidden, weight, *rest, into=into)
    assert count.rows == 21 * (1 + expected)


def test_uninitialised_memory_is_never_read():
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        for depth, dtype in ((40, torch.float32), (33, torch.bfloat16)):
            made = plain(dtype, depth=depth)
            for uses in ((1, 0), (1, 1)):
                gradients = [made[5][0], made[5][0] if uses[1] else None, None, None]
                chunk, into = chunk_and_back(ExpEpilogueEngine, *made[:5], gradients)
                for x in (*chunk.head_output[:4], into.hidden_TD, into.weight_VD):
                    assert x.isfinite().all()
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.mark.parametrize("layout", ["rows of a wider matrix", "columns first", "from an odd address"])
def test_operands_may_lie_in_memory_as_they_like(layout):
    hidden, weight, *rest = plain(torch.bfloat16)
    expected = chunk_and_back(ExpEpilogueEngine, hidden, weight, *rest)
    if layout == "rows of a wider matrix":
        laid = hidden.new_empty(21, 45)[:, 3:43], weight.new_empty(53, 99)[:, :40]
    elif layout == "columns first":
        laid = hidden.new_empty(40, 21).T, weight.new_empty(40, 53).T
    else:
        laid = hidden.new_empty(21 * 40 + 1)[1:].view(21, 40), weight.new_empty(53 * 40 + 1)[1:].view(53, 40)
    for empty, value in zip(laid, (hidden, weight), strict=True):
        empty.copy_(value)
    result = chunk_and_back(ExpEpilogueEngine, *laid, *rest)
    assert torch.equal(result[0].head_output.logprobs_T, expected[0].head_output.logprobs_T)
    assert torch.equal(result[1].hidden_TD, expected[1].hidden_TD)
    assert torch.equal(result[1].weight_VD, expected[1].weight_VD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", [False, True])
def test_a_row_beyond_the_range_of_exponentials_is_reported_and_moves_nothing(dtype, entropy):
    hidden, weight, _, targets, _, gradients = plain(dtype)
    if entropy:
        gradients[1] = gradients[0]
    outputs = frozenset({"entropy"}) if entropy else frozenset()
    expected = chunk_and_back(
        ExpEpilogueEngine,
        hidden[1:-1],
        weight,
        None,
        targets[1:-1],
        1.0,
        [None if x is None else x[1:-1] for x in gradients],
        outputs=outputs,
    )
    hidden[0] = -200 * weight[targets[0]] / weight[targets[0]].square().sum()
    hidden[-1] = torch.nan
    chunk, into = chunk_and_back(ExpEpilogueEngine, hidden, weight, None, targets, 1.0, gradients, outputs=outputs)
    assert chunk.overflowed_C.nonzero()[:, 0].tolist() == [0, 20]
    assert (into.hidden_TD[[0, -1]] == 0).all()
    torch.testing.assert_close(into.hidden_TD[1:-1], expected[1].hidden_TD, rtol=1e-2, atol=1e-4)
    torch.testing.assert_close(into.weight_VD, expected[1].weight_VD, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [{}, {"soft_cap": 90.0, "temperature": "each"}, {"bias": True, "valid": 140}],
    ids=lambda options: " ".join(options) or "plain",
)
def test_a_row_beyond_the_exponential_range_matches_its_logits(options):
    hidden, weight, _, targets, temperature, _ = plain(columns=150 if "bias" in options else 53)
    hidden[::4] = -200 * weight[targets[::4]] / weight[targets[::4]].square().sum(-1, keepdim=True)
    hidden[-1] = torch.nan
    options = dict(options)
    g = torch.Generator().manual_seed(4)
    if options.pop("temperature", None):
        temperature = (0.5 + torch.rand(21, generator=g)).to(DEVICE)
    bias = torch.randn(150, generator=g).to(DEVICE) if options.pop("bias", False) else None
    if bias is not None:
        bias[3] = -torch.inf
        targets = targets % 140
        targets[1::4] = 3
    result, expected = (
        chunk_and_back(
            engine,
            hidden.to(dtype),
            weight.to(dtype),
            None if bias is None else bias.to(dtype),
            targets,
            temperature,
            [None] * 4,
            outputs=EVERYTHING - ({"mean_logit"} if "soft_cap" in options else set()),
            **options,
        )[0]
        for engine, dtype in ((ExpEpilogueEngine, torch.float32), (ChunkedEngine, torch.float64))
    )
    assert result.overflowed_C[::4].all()
    assert result.outputs_are_exact
    for one, other in zip(result.head_output[:4], expected.head_output[:4], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4, equal_nan=True)
        assert one[-1].isnan()


def test_extreme_logits_are_exact_through_the_driver():
    g = torch.Generator().manual_seed(11)
    hidden = torch.randn(9, 6, generator=g, dtype=torch.float64)
    weight = torch.randn(19, 6, generator=g, dtype=torch.float64)
    bias = torch.zeros(19, dtype=torch.float64)
    bias[4], bias[7] = -torch.inf, 1e4
    targets = torch.arange(9)
    targets[4] = 8  # a target of probability 0 has no gradient
    hidden[1] = -200 * weight[1] / weight[1].square().sum()  # e^-200 and less
    leaves = [x.float() for x in (hidden, weight, bias)]
    call = {"targets_T": targets, "outputs": ("entropy", "logsumexp", "mean_squared_logit")}
    expected = answers(reference.token_logprobs, [x.double() for x in leaves], call)
    result = answers(triton, [x.to(DEVICE) for x in leaves], {**call, "targets_T": targets.to(DEVICE)}, chunk_tokens=4)
    for one, other in zip(result[0][:4], expected[0][:4], strict=True):
        torch.testing.assert_close(one.double().cpu(), other, rtol=1e-5, atol=2e-3)
    for one, other in zip(result[1], expected[1], strict=True):
        assert error(one, other) < 1e-4


def split(uses, temperature):
    if os.environ.get("TRITON_INTERPRET") == "1":
        repair_interpreter()
    import numpy

    axis = make_mesh(tp=torch.distributed.get_world_size())["tp"]
    hidden, weight, _, targets, _, _ = (x.cpu() if isinstance(x, torch.Tensor) else x for x in plain())
    g = torch.Generator().manual_seed(12)
    bias, gradients = torch.randn(53, generator=g), torch.randn(5, 21, generator=g)
    given = 0.5 + torch.rand(21, generator=g) if temperature == "each" else temperature
    hidden[5] = -200 * weight[targets[5]] / weight[targets[5]].square().sum()
    start, stop, exist = ((0, 32, 32), (32, 53, 21), (53, 60, 0))[axis.rank]
    padded = torch.cat([weight, torch.full((7, 40), torch.nan)])[start:stop]
    padded_bias = torch.cat([bias, torch.full((7,), torch.nan)])[start:stop]
    with numpy.errstate(all="ignore"):
        chunk, into = chunk_and_back(
            ExpEpilogueEngine,
            hidden,
            padded,
            padded_bias,
            targets,
            given,
            [x if use else None for x, use in zip(gradients, uses, strict=True)],
            valid=exist,
            axis=axis,
            first_token=start,
            soft_cap=6.0 if temperature == 0.7 else None,
            outputs=EVERYTHING - ({"mean_logit"} if temperature == 0.7 else set()),
        )
    return (
        [x_C for x_C in chunk.head_output[:5] if x_C is not None],
        chunk.overflowed_C,
        into.hidden_TD,
        into.weight_VD[:exist],
        into.bias_V[:exist],
        into.weight_VD[exist:],
    )


@pytest.mark.skipif(DEVICE.type != "cpu", reason="ranks of gloo are interpreted")
@pytest.mark.parametrize(("uses", "temperature"), [((1, 0, 0, 0, 1), "each"), ((1, 1, 1, 1, 0), 0.7)])
def test_ranks_with_uneven_and_with_empty_slices_of_the_vocabulary(uses, temperature, tmp_path):
    ranks = run_ranks(split, 3, tmp_path, uses, temperature)
    hidden, weight, _, targets, _, _ = plain()
    g = torch.Generator().manual_seed(12)
    bias, gradients = torch.randn(53, generator=g), torch.randn(5, 21, generator=g)
    each = 0.5 + torch.rand(21, generator=g) if temperature == "each" else temperature
    hidden[5] = -200 * weight[targets[5]] / weight[targets[5]].square().sum()
    capped = temperature == 0.7
    lost = torch.zeros(21, dtype=torch.bool)
    lost[5] = not capped
    chunk, into = chunk_and_back(
        ChunkedEngine,
        hidden.double(),
        weight.double(),
        bias.double(),
        targets,
        each,
        [x.masked_fill(lost, 0).double() if use else None for x, use in zip(gradients, uses, strict=True)],
        soft_cap=6.0 if capped else None,
        outputs=EVERYTHING - ({"mean_logit"} if capped else set()),
    )
    for text, overflowed, *_, beyond in ranks:
        assert torch.equal(overflowed, lost)
        for one, other in zip(text, filter(lambda x: x is not None, chunk.head_output), strict=True):
            torch.testing.assert_close(one[~lost].double(), other[~lost], rtol=1e-5, atol=1e-5)
        assert (beyond == 0).all()
    assert error(sum(rank[2] for rank in ranks), into.hidden_TD) < 2e-5
    assert error(torch.cat([rank[3] for rank in ranks]), into.weight_VD) < 2e-5
    assert error(torch.cat([rank[4] for rank in ranks]), into.bias_V) < 2e-5


def test_an_axis_of_one_rank_is_none():
    made = plain()
    alone = chunk_and_back(ExpEpilogueEngine, *made)
    result = chunk_and_back(ExpEpilogueEngine, *made, axis=Axis("tp"))
    assert torch.equal(result[0].head_output.logprobs_T, alone[0].head_output.logprobs_T)
    assert torch.equal(result[1].hidden_TD, alone[1].hidden_TD)


def test_saved_bytes_match_the_estimate():
    hidden, weight, _, targets, temperature, _ = plain(torch.bfloat16)
    engine = ExpEpilogueEngine(make_head(weight))
    saved = engine.forward(hidden, targets, temperature, outputs=EVERYTHING, keep="own").saved
    held = sum(x.untyped_storage().nbytes() for x in (saved.exponentials_CV, saved.totals_FC, saved.shifts_C))
    assert held <= engine.saved_bytes(21) <= held + 21 * 16


@pytest.mark.parametrize("temperature", [0.7, "each", "each in float64"])
def test_the_mean_of_logits_equals_an_exact_one(temperature):
    hidden, weight, _, targets, _, _ = plain()
    g = torch.Generator().manual_seed(5)
    bias, slope = torch.randn(53, generator=g).to(DEVICE), torch.randn(21, generator=g).to(DEVICE)
    drawn = (0.5 + torch.rand(21, generator=g)).to(DEVICE, torch.float32 if temperature == "each" else torch.float64)
    each = drawn if isinstance(temperature, str) else temperature
    result, expected = (
        chunk_and_back(
            engine,
            hidden.to(dtype),
            weight.to(dtype),
            bias.to(dtype),
            targets,
            each,
            [None, None, None, None, slope],
            outputs=frozenset({"mean_logit"}),
            logit_scale=0.6,
            valid=50,
        )
        for engine, dtype in ((ExpEpilogueEngine, torch.float32), (ChunkedEngine, torch.float64))
    )
    mean_C = result[0].head_output.mean_logit_T
    assert mean_C.dtype == torch.float32
    torch.testing.assert_close(mean_C.double(), expected[0].head_output.mean_logit_T, rtol=1e-5, atol=1e-5)
    for name in ("hidden_TD", "weight_VD", "bias_V"):
        assert error(getattr(result[1], name), getattr(expected[1], name)) < RELATIVE[torch.float32], name


def test_the_mean_of_capped_logits_is_refused_by_name():
    hidden, weight, _, targets, _, _ = plain()
    with pytest.raises(SpecError, match=r"(?s)mean_logit by implementation 'triton'.*chunked"):
        triton(hidden, weight, targets, outputs=("mean_logit",), soft_cap=4.0)


def test_one_scratch_serves_every_chunk():
    hidden, weight, _, targets, temperature, _ = plain()
    engine = ExpEpilogueEngine(make_head(weight))
    places = {
        engine.forward(hidden[rows], targets[rows], temperature, outputs=frozenset(), keep="scratch")
        .saved.exponentials_CV.untyped_storage()
        .data_ptr()
        for rows in (slice(0, 12), slice(12, 21))
    }
    assert len(places) == 1


def test_unsupported_operands_are_refused():
    with pytest.raises(SpecError, match=r"float64; the kernels sum in float32"):
        ExpEpilogueEngine(make_head(torch.zeros(3, 2, dtype=torch.float64)))


def test_a_missing_gpu_and_interpreter_are_reported(monkeypatch):
    monkeypatch.setattr(module.kernels, "exp_gemm", object())
    assert "Triton needs CUDA" in unsupported_reason(torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(("capability", "refused"), [((7, 5), True), ((8, 0), False), ((9, 0), False)])
def test_a_gpu_must_multiply_bfloat16(capability, refused, monkeypatch):
    monkeypatch.setattr(
        module.kernels, "torch", stand_in(torch, cuda=stand_in(torch.cuda, get_device_capability=lambda _: capability))
    )
    assert (unsupported_reason(torch.bfloat16, torch.device("cuda", 0)) is not None) == refused
