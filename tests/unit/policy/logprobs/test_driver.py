"""The driver over the torch engine: against the reference with all options crossed, and its memory and skipped work."""

import functools
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.head_problem import PLAIN, answers, assert_same, crossed, named, problem
from tests.helpers.ranks import run_ranks
from workbench.errors import ShapeError, SpecError
from workbench.policy.logprobs import driver, reference, vocabulary_parallel
from workbench.policy.logprobs.chunked import ChunkedEngine
from workbench.policy.logprobs.engine import count_gemms
from workbench.policy.logprobs.host import HostCopy
from workbench.policy.logprobs.truncated_support import TruncatedSupport
from workbench.sharding.mesh import make_mesh

CUTS = ((1, 0), (4, 0), (4, 4 * 23 * 8 * 2), (100, 2**20))
"""chunk_tokens and keep_bytes: one row, a remainder, two chunks kept of three, everything kept in one."""


def chunked(*tensors, engine=ChunkedEngine, **call):
    return driver.token_logprobs(*tensors, engine=engine, **call)


def held_to_the_reference(options, cut):
    leaves, call = problem(options)
    chunk_tokens, keep_bytes = cut
    assert_same(
        answers(chunked, leaves, call, chunk_tokens=chunk_tokens, keep_bytes=keep_bytes),
        answers(reference.token_logprobs, leaves, call),
    )


@pytest.mark.parametrize(
    ("options", "cut"),
    [(options, CUTS[number % len(CUTS)]) for number, options in enumerate(crossed(160))],
    ids=lambda x: named(x) if isinstance(x, dict) else "-".join(map(str, x)),
)
def test_equals_the_reference(options, cut):
    held_to_the_reference(options, cut)


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
def test_equals_the_reference_with_every_combination(cut):
    for options in crossed(None):
        held_to_the_reference(options, cut)


@pytest.mark.parametrize(("tokens", "vocabulary", "width"), [(1, 1, 1), (3, 2, 1), (17, 101, 3), (0, 5, 2)])
def test_sizes_that_divide_nothing(tokens, vocabulary, width):
    leaves, call = problem(
        PLAIN | {"bias": True, "outputs": ("entropy", "logsumexp", "mean_squared_logit")},
        tokens=tokens,
        vocabulary=vocabulary,
        width=width,
    )
    assert_same(answers(chunked, leaves, call, chunk_tokens=5), answers(reference.token_logprobs, leaves, call))


def test_uninitialised_memory_is_never_read():
    """With deterministic algorithms torch fills new memory with NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        for options in crossed(30, seed=1):
            leaves, call = problem(options)
            text, gradients = answers(chunked, leaves, call, chunk_tokens=4, keep_bytes=4 * 23 * 8)
            for x in (*text, *gradients):
                assert x is None or x.isfinite().all(), named(options)
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def products(keep_bytes=0, active_T=None, wants=None, needs=(True, True), **more):
    """GEMMs with the head, forward and backward, per row."""
    hidden = torch.randn(12, 4, requires_grad=needs[0])
    weight = torch.randn(9, 4, requires_grad=needs[1])
    with count_gemms() as count:
        output = chunked(
            hidden,
            weight,
            torch.zeros(12, dtype=torch.int64),
            chunk_tokens=4,
            keep_bytes=keep_bytes,
            active_T=active_T,
            **more,
        )
        if any(needs):
            (output.logprobs_T * (torch.ones(12) if wants is None else wants)).sum().backward()
    return count.rows / 12


CHUNK = 4 * 9 * 4
"""Bytes of the logits of a chunk of `products`."""


@pytest.mark.parametrize(
    ("keep_bytes", "expected"),
    [(0, 4), (CHUNK - 1, 4), (CHUNK, 11 / 3), (2 * CHUNK, 10 / 3), (3 * CHUNK, 3), (10 * CHUNK, 3)],
)
def test_saved_chunks_are_not_recomputed(keep_bytes, expected):
    assert products(keep_bytes) == pytest.approx(expected)


def test_inactive_rows_cost_nothing():
    half = torch.arange(12) % 2 == 0
    assert products(active_T=half) == pytest.approx(4 / 2)
    assert products(active_T=torch.zeros(12, dtype=torch.bool)) == 0


@pytest.mark.parametrize(("keep_bytes", "expected"), [(0, 1 + 3 * 2 / 12), (3 * CHUNK, 1 + 2 * 4 / 12)])
def test_rows_without_gradient_cost_no_backward(keep_bytes, expected):
    wants = torch.zeros(12)
    wants[5], wants[6] = 1.0, -2.0
    assert products(keep_bytes, wants=wants) == pytest.approx(expected)


def test_a_frozen_head_costs_no_product_for_its_gradient():
    assert products(needs=(True, False)) == 3
    assert products(needs=(False, True)) == 3
    assert products(needs=(False, False), keep_bytes=10 * CHUNK) == 1


def test_nothing_is_saved_without_a_gradient():
    held = []

    class Watched(ChunkedEngine):
        def forward(self, *tensors, keep, **more):
            held.append(keep)
            return super().forward(*tensors, keep=keep, **more)

    hidden, weight = torch.randn(12, 4, requires_grad=True), torch.randn(9, 4)
    with torch.no_grad():
        chunked(hidden, weight, torch.zeros(12, dtype=torch.int64), engine=Watched, chunk_tokens=4, keep_bytes=2**20)
    assert held == ["no"] * 3
    chunked(hidden, weight, torch.zeros(12, dtype=torch.int64), engine=Watched, chunk_tokens=4, keep_bytes=2**20)
    assert held == ["no"] * 3 + ["own"] * 3


def test_a_rank_without_rows_stays_in_the_graph():
    hidden, weight = torch.randn(5, 3, requires_grad=True), torch.randn(7, 3, requires_grad=True)
    bias = torch.randn(7, requires_grad=True)
    output = chunked(hidden, weight, torch.full((5,), -100), bias_V=bias)
    for x_T in output[:3]:
        for leaf, gradient in zip(
            (hidden, weight, bias),
            torch.autograd.grad(x_T.sum(), (hidden, weight, bias), retain_graph=True),
            strict=True,
        ):
            assert torch.equal(gradient, torch.zeros_like(leaf))


def test_backward_can_run_twice():
    leaves, call = problem(PLAIN | {"outputs": ("entropy",)})
    hidden, weight = (x.requires_grad_() for x in leaves[:2])
    output = chunked(hidden, weight, **call, chunk_tokens=4, keep_bytes=2**20)
    loss = output.logprobs_T.sum() + output.entropy_T.square().sum()
    once, twice = (torch.autograd.grad(loss, (hidden, weight), retain_graph=True) for _ in range(2))
    for one, other in zip(once, twice, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


@pytest.mark.parametrize("changed", ["weight", "targets", "temperature", "sets"])
def test_a_change_after_forward_is_detected(changed):
    hidden, weight = torch.randn(5, 3, requires_grad=True), torch.randn(7, 3, requires_grad=True)
    targets, temperature, sets = torch.zeros(5, dtype=torch.int64), torch.ones(5), TruncatedSupport.of([[1, 2]] * 5)
    output = chunked(hidden, weight, targets, temperature=temperature, support=sets)
    with torch.no_grad():
        {"weight": weight, "targets": targets, "temperature": temperature, "sets": sets.ids_P}[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.logprobs_T.sum().backward()


def test_a_head_tied_to_the_embedding_gets_both_gradients():
    g = torch.Generator().manual_seed(2)
    tokens, targets = torch.randint(0, 7, (9,), generator=g), torch.randint(0, 7, (9,), generator=g)
    grads = []
    for implementation in (chunked, reference.token_logprobs):
        weight = torch.randn(7, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()
        implementation(weight[tokens].tanh(), weight, targets).logprobs_T.sum().backward()
        grads.append(weight.grad)
    torch.testing.assert_close(*grads, rtol=0, atol=1e-13)


def test_an_fp32_head_gives_gradients_in_the_dtype_of_the_originals():
    leaves, call = problem(PLAIN | {"fp32_head": True, "bias": True}, dtype=torch.bfloat16)
    result = answers(chunked, leaves, call)
    assert [x.dtype for x in result[1]] == [torch.bfloat16] * 3
    assert result[0].logprobs_T.dtype == torch.float32
    wide = answers(chunked, [x.float() for x in leaves], call)
    assert torch.equal(result[0].logprobs_T, wide[0].logprobs_T)
    assert all(torch.equal(one, other.bfloat16()) for one, other in zip(result[1], wide[1], strict=True))


def test_the_weight_gradient_of_a_bfloat16_head_is_summed_in_float32():
    g = torch.Generator().manual_seed(4)
    hidden = (1 + 0.1 * torch.randn(512, 4, generator=g)).bfloat16()
    weight = (0.1 * torch.randn(9, 4, generator=g)).bfloat16()
    targets = torch.randint(0, 9, (512,), generator=g)
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    reference.token_logprobs(*exact, targets).logprobs_T.sum().backward()
    weight.requires_grad_()
    chunked(hidden, weight, targets, chunk_tokens=1).logprobs_T.sum().backward()
    torch.testing.assert_close(weight.grad.double(), exact[1].grad, rtol=2**-8, atol=0.02)


class HalfBlind(ChunkedEngine):
    """An engine that cannot represent every third row: it returns 1e30 and gives no gradient there."""

    says_exactly = False

    def forward(self, hidden_CD, targets_C, temperature, **more):
        chunk = super().forward(hidden_CD, targets_C, temperature, **more)
        chunk.overflowed_C = (hidden_CD[:, 0] * 1e6).long() % 3 == 0
        if not self.says_exactly:
            chunk.head_output = chunk.head_output._replace(
                logprobs_T=chunk.head_output.logprobs_T.masked_fill(chunk.overflowed_C, 1e30)
            )
        chunk.outputs_are_exact = self.says_exactly
        return chunk

    def backward(self, chunk, gradients, into, rows, *, first):
        seen = [None if g_C is None else g_C.masked_fill(chunk.overflowed_C, 0) for g_C in gradients]
        super().backward(chunk, type(gradients)(*seen), into, rows, first=first)


class HalfMended(HalfBlind):
    """The same with correct outputs."""

    says_exactly = True


@pytest.mark.parametrize("engine", [HalfBlind, HalfMended])
@pytest.mark.parametrize("keep_bytes", [0, 4 * 23 * 8, 2**20])
@pytest.mark.parametrize("options", crossed(6, seed=3), ids=named)
def test_rows_that_an_engine_cannot_represent_are_computed_exactly(options, keep_bytes, engine):
    options = options | {"active": "some"}
    leaves, call = problem(options, tokens=40)
    result = answers(chunked, leaves, call, engine=engine, chunk_tokens=4, keep_bytes=keep_bytes)
    assert_same(result, answers(reference.token_logprobs, leaves, call))


def test_rows_for_an_exact_engine_run_in_small_groups(monkeypatch):
    """Their logits are in memory together with those of the current chunk."""
    monkeypatch.setattr(driver, "EXACT_TOKENS", 3)
    sizes = []
    watched = ChunkedEngine.forward

    def forward(self, hidden_CD, *tensors, **more):
        sizes.append((type(self), len(hidden_CD)))
        return watched(self, hidden_CD, *tensors, **more)

    monkeypatch.setattr(ChunkedEngine, "forward", forward)
    hidden, weight = torch.randn(40, 4, requires_grad=True), torch.randn(9, 4)
    chunked(hidden, weight, torch.zeros(40, dtype=torch.int64), engine=HalfBlind).logprobs_T.sum().backward()
    assert max(size for kind, size in sizes if kind is HalfBlind) > 3
    assert max(size for kind, size in sizes if kind is ChunkedEngine) == 3


@pytest.mark.parametrize(
    ("engine", "more", "expected"),
    [
        (ChunkedEngine, {}, torch.bfloat16),
        (ChunkedEngine, {"chunk_tokens": 8}, torch.float32),
        (ChunkedEngine, {"support": TruncatedSupport.of([[1, 2]] * 12)}, torch.float32),
        (HalfBlind, {}, torch.float32),
    ],
)
def test_sums_in_a_bfloat16_head_run_in_float32(engine, more, expected):
    """One GEMM alone is rounded once in either case; chunks, supports and rows of an exact engine are added."""
    dtypes = set()

    class Watched(engine):
        def backward(self, chunk, gradients, into, rows, *, first):
            dtypes.add(into.weight_VD.dtype)
            super().backward(chunk, gradients, into, rows, first=first)

    g = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(rows, 4, generator=g).bfloat16().requires_grad_() for rows in (12, 9))
    output = chunked(hidden, weight, torch.zeros(12, dtype=torch.int64), engine=Watched, **more)
    (
        output.logprobs_T if output.support_logprobs_T is None else output.support_logprobs_T + output.logprobs_T
    ).sum().backward()
    assert dtypes == {expected}
    assert weight.grad.dtype == torch.bfloat16


def test_exact_outputs_are_not_recomputed():
    hidden, weight = torch.randn(12, 4), torch.randn(9, 4)
    rows = []
    for engine in (HalfMended, HalfBlind):
        with count_gemms() as count:
            chunked(hidden, weight, torch.zeros(12, dtype=torch.int64), engine=engine, chunk_tokens=4)
        rows.append(count.rows)
    assert rows == [12, 12 + int(((hidden[:, 0] * 1e6).long() % 3 == 0).sum())]
    assert rows[1] > 12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_policy_and_its_own_old_self_give_a_ratio_of_exactly_one(dtype, temperature):
    """Sampler and old passes request other outputs, save nothing, have no gradient; the bits are those of training."""
    leaves, call = problem(PLAIN | {"support": True}, tokens=57, vocabulary=101, width=16, dtype=dtype)
    call |= {"temperature": temperature, "chunk_tokens": 16}
    with torch.no_grad():
        old = chunked(*leaves[:2], **call | {"outputs": ("entropy",)})
    for keep_bytes in (0, 16 * 101 * 4, 2**20):
        leaves = [x.requires_grad_() for x in leaves[:2]]
        new = chunked(*leaves, **call, keep_bytes=keep_bytes)
        assert torch.equal((new.logprobs_T - old.logprobs_T).exp(), torch.ones(57, dtype=new.logprobs_T.dtype))
        assert torch.equal(new.support_logprobs_T, old.support_logprobs_T)


class Largest(TorchDispatchMode):
    """The most elements that any result of an operation had."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        out = function(*arguments, **(named or {}))
        self.elements = max(self.elements, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)), 0)
        return out


def test_the_logits_of_more_than_a_chunk_never_exist():
    leaves, call = problem(PLAIN | {"support": True, "outputs": ("entropy",)}, tokens=60, vocabulary=50, width=3)
    for chunk_tokens in (4, 60):
        with Largest() as largest:
            answers(chunked, leaves, call, chunk_tokens=chunk_tokens)
        pairs = 4 * (len(call["support"].ids_P) // 60 + 50)
        assert (largest.elements <= max(4 * 50, 60 * 3, 50 * 3, pairs * 3, len(call["support"].ids_P))) == (
            chunk_tokens == 4
        )


def sliced(implementation, options, tokens, chunk_tokens, keep_bytes, folds=1):
    """This rank's part of a problem whose vocabulary two ranks share unevenly; with padding, the second has no more."""
    axis = make_mesh(tp=torch.distributed.get_world_size())["tp"]
    (hidden, weight, bias), call = problem(options, tokens=tokens)
    border = 20 if options["padding"] else 7
    start, stop = ((0, border), (border, 23))[axis.rank]
    if call["valid"] is not None:
        call["valid"] = min(max(call["valid"] - start, 0), stop - start)
    leaves = [hidden, weight[start:stop], None if bias is None else bias[start:stop]]
    more = {"axis": axis, "first_token": start}
    if implementation == "vocabulary_parallel":
        return answers(vocabulary_parallel.token_logprobs, leaves, call, **more), (start, stop)
    folded = driver.identity_sum
    try:
        driver.identity_sum = lambda x, axis: functools.reduce(lambda y, _: folded(y, axis), range(folds), x)
        return answers(chunked, leaves, call, chunk_tokens=chunk_tokens, keep_bytes=keep_bytes, **more), (start, stop)
    finally:
        driver.identity_sum = folded


ON_RANKS = [
    {**options, "active": active}
    for options, active in zip(crossed(12, seed=5), ("all", "some", "none", "some") * 3, strict=True)
]
ON_RANKS.append(PLAIN | {"support": True, "outputs": ("entropy",)})


def on_two_ranks():
    results = [
        sliced("chunked", options, 11, chunk_tokens, keep_bytes)
        for options in ON_RANKS
        for chunk_tokens, keep_bytes in CUTS
    ]
    results += [sliced("vocabulary_parallel", options, 11, 0, 0) for options in ON_RANKS]
    return results, [sliced("chunked", PLAIN, 11, 4, 0, folds) for folds in (0, 1, 2)], rounded_away()


def rounded_away():
    """Gradients of hidden where a rank rounded to 0 and the other did not: both recompute the same rows."""
    axis = make_mesh(tp=2)["tp"]
    (hidden, weight, _), call = problem(PLAIN)
    start, stop = ((0, 7), (7, 23))[axis.rank]
    results = []
    for implementation, more in ((chunked, {"chunk_tokens": 4}), (vocabulary_parallel.token_logprobs, {})):
        hidden = hidden.detach().clone().requires_grad_()
        gradient = torch.ones(11, dtype=torch.float64)
        gradient[axis.rank] = 0
        output = implementation(hidden, weight[start:stop], call["targets_T"], axis=axis, first_token=start, **more)
        output.logprobs_T.backward(gradient)
        results.append(hidden.grad)
    return results


def assert_parts(parts, expected):
    """The ranks' outputs, gathered; and the slices of the gradients of weight and bias."""
    for (text, (d_hidden, d_weight, d_bias)), (start, stop) in parts:
        whole = [expected[1][0], expected[1][1][start:stop], None if d_bias is None else expected[1][2][start:stop]]
        assert_same((text, [d_hidden, d_weight, d_bias]), (expected[0], whole))


def test_two_ranks_with_uneven_slices_equal_the_reference(tmp_path):
    ranks = run_ranks(on_two_ranks, 2, tmp_path)
    asked = [options for options in ON_RANKS for _ in CUTS] + ON_RANKS
    for options, *parts in zip(asked, *(result for result, *_ in ranks), strict=True):
        leaves, call = problem(options)
        assert_parts(parts, answers(reference.token_logprobs, leaves, call))
    # Added up across ranks once: neither not at all, nor twice.
    expected = answers(reference.token_logprobs, *problem(PLAIN))
    for folds, *parts in zip((0, 1, 2), *(more for _, more, _ in ranks), strict=True):
        right = all(torch.allclose(answer[1][0], expected[1][0], rtol=1e-12, atol=1e-12) for answer, _ in parts)
        assert right == (folds == 1)
    for *_, (one, other) in ranks:
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_hidden_states_and_head_may_lie_in_memory_as_they_like():
    leaves, call = problem(PLAIN | {"active": "some"})
    strided = [x.T.contiguous().T for x in leaves[:2]]

    class Strict(ChunkedEngine):
        def forward(self, hidden_CD, targets_C, temperature, **more):
            assert hidden_CD.is_contiguous()
            return super().forward(hidden_CD, targets_C, temperature, **more)

    assert not strided[0].is_contiguous()
    for active_T in (None, call["active_T"]):
        call |= {"active_T": active_T, "targets_T": call["targets_T"].clamp(min=0)}
        expected = answers(chunked, leaves, call, chunk_tokens=4)
        assert_same(answers(chunked, [*strided, None], call, engine=Strict, chunk_tokens=4), expected)


@pytest.mark.parametrize("expected", ["none", "fewer", "right", "more", "all"])
def test_an_expected_number_of_rows_changes_no_value(expected):
    """Another number than that of the computed rows is noticed, however many that leaves out or adds."""
    options = PLAIN | {"outputs": ("entropy", "logsumexp"), "active": "some"}
    leaves, call = problem(options)
    whole = answers(chunked, leaves, call, chunk_tokens=4)
    count, tokens = int(((call["targets_T"] >= 0) & call["active_T"]).sum()), len(call["targets_T"])
    assert 1 < count < tokens - 1
    rows = {"none": 0, "fewer": count - 1, "right": count, "more": count + 1, "all": tokens}[expected]
    assert_same(answers(chunked, leaves, call, chunk_tokens=4, expected_rows=rows), whole)


def test_the_host_waits_for_the_number_of_rows_only_if_none_is_expected(monkeypatch):
    order = []

    class Seen(ChunkedEngine):
        def forward(self, *args, **more):
            order.append("forward")
            return super().forward(*args, **more)

    wait = HostCopy.wait
    monkeypatch.setattr(HostCopy, "wait", lambda copy: (order.append("wait"), wait(copy))[1])
    targets = torch.arange(5)
    for expected, seen in ((None, ["wait", "forward"]), (5, ["forward", "wait"]), (4, ["forward", "wait", "forward"])):
        order.clear()
        chunked(torch.ones(5, 2), torch.ones(6, 2), targets, engine=Seen, expected_rows=expected)
        assert order == seen


def test_the_length_of_chunks_follows_from_the_computed_rows(monkeypatch):
    asked, right = [], driver.default_chunk
    monkeypatch.setattr(driver, "default_chunk", lambda head, rows: (asked.append(rows), right(head, rows))[1])
    active = torch.tensor([True, False, True, True, False])
    chunked(torch.ones(5, 2), torch.ones(6, 2), torch.arange(5), active_T=active)
    assert asked == [3]


@pytest.mark.parametrize("rows", [-1, 4])
def test_a_number_of_rows_that_cannot_be_is_refused(rows):
    with pytest.raises(ShapeError, match=f"expected_rows = {rows}.*\n.*3 tokens"):
        chunked(torch.zeros(3, 2), torch.zeros(5, 2), torch.zeros(3, dtype=torch.int64), expected_rows=rows)


def test_an_id_outside_the_vocabulary_is_refused_after_a_pass_that_did_not_wait():
    with pytest.raises(ShapeError, match=r"ids \[7\]"):
        chunked(torch.zeros(3, 2), torch.zeros(5, 2), torch.tensor([0, 7, 1]), expected_rows=3)


@pytest.mark.gpu
def test_the_host_synchronises_once_each_way(monkeypatch):
    copies = []
    wait = HostCopy.wait
    monkeypatch.setattr(HostCopy, "wait", lambda copy: (copies.append(1), wait(copy))[1])
    hidden, weight = (torch.randn(rows, 64, device="cuda", requires_grad=True) for rows in (100, 1000))
    targets = torch.arange(100, device="cuda")
    active = targets % 3 > 0
    chunked(hidden, weight, targets, active_T=active, chunk_tokens=16).logprobs_T.sum().backward()

    def waits():
        return sum("called a synchronizing" in str(warning.message) for warning in caught)

    copies.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            loss = chunked(hidden, weight, targets, active_T=active, chunk_tokens=16).logprobs_T.sum()
            forward = waits() + len(copies)
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert (forward, waits() + len(copies)) == (1, 2)


@pytest.mark.parametrize("settings", [{"chunk_tokens": 0}, {"keep_bytes": -1}])
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(SpecError, match="a chunk has at least one row, and a budget is not negative"):
        chunked(torch.zeros(3, 2), torch.zeros(5, 2), torch.zeros(3, dtype=torch.int64), **settings)
