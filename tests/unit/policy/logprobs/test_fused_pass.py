"""Splits of rows, GEMM counts of each path, and exact fallbacks with their reasons."""

import functools
import warnings

import pytest
import torch

from tests.helpers.fused_case import DOCUMENT, IDS, MIXED, ROW, TOKEN, Case, V
from tests.helpers.ranks import run_ranks
from workbench.policy.logprobs import fused_loss as module
from workbench.policy.logprobs import reference
from workbench.policy.logprobs.chunked import ChunkedEngine
from workbench.policy.logprobs.truncated_support import TruncatedSupport
from workbench.sharding.mesh import make_mesh


def test_everything_is_shown_in_the_order_of_the_row():
    """Also where documents were gathered; chunks but the last by themselves, in any."""
    case, shown = Case(), []

    def watched(said, places):
        shown.append(places)
        return case.gspo(said, places)

    scattered = torch.arange(len(IDS)) % 4
    result = case.fused(watched, chunk_tokens=14, document_ids_T=scattered)
    assert torch.equal(shown[-1], torch.nonzero(case.active)[:, 0])
    alone = torch.cat(shown[:-1])
    assert 0 < len(shown[-1]) - len(alone) <= 14
    assert len(alone) == len(alone.unique())
    assert torch.isin(alone, shown[-1]).all()
    assert not torch.equal(alone, alone.sort().values)
    torch.testing.assert_close(result.loss.detach(), case.truth(case.gspo)[0], rtol=1e-13, atol=1e-13)


# -- GEMMs and reasons -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKEN + DOCUMENT)
def test_three_products_also_where_documents_do_not_fit(name):
    case = Case()
    for chunk_tokens in (4, 7, 100):
        result = case.assert_right(getattr(case, name), chunk_tokens=chunk_tokens, expected_logprobs_T=case.old)
        assert (result.gemms, result.fallback) == (3.0, None), chunk_tokens


@pytest.mark.parametrize("name", ["ppo", "gspo", "clipped_gspo", "vespo"])
def test_three_products_without_expectations(name):
    case = Case()
    assert case.assert_right(getattr(case, name), chunk_tokens=4).gemms == 3.0


def long_rows(case, chunk_tokens):
    """Computed rows of documents that do not fit into a chunk."""
    sizes = [int(case.active[label == IDS].sum()) for label in IDS.unique()]
    return [size for size in sizes if size > chunk_tokens], sum(sizes)


def test_a_document_with_other_coefficients_goes_forward_twice():
    case = Case()
    result = case.assert_right(case.gspo_with_kl, chunk_tokens=5, expected_logprobs_T=case.old)
    long, rows = long_rows(case, 5)
    assert len(long) == 3
    assert result.gemms == pytest.approx(3 + sum(long) / rows, rel=1e-12)
    assert "a document of 13 tokens, more than 5, went forward twice" in result.fallback
    assert case.assert_right(case.gspo_with_kl, chunk_tokens=5, keep_bytes=2**20).gemms == 3.0


def test_a_row_coupled_loss_takes_four_if_declared_and_is_correct_otherwise():
    case = Case()
    rows = int(case.active.sum())
    output = case.assert_right(case.across, chunk_tokens=14, couples="row")
    assert output.gemms == 4.0
    assert output.fallback == f"all {rows} tokens, more than 14, went forward twice: the loss couples the whole row"
    unsaid = case.assert_right(case.across, chunk_tokens=14, couples="token")
    early = rows - 1 - (rows - 1) % 14  # the last chunk has the coefficients of the whole row
    assert 0 < early < rows
    assert unsaid.gemms == pytest.approx(3 + 3 * early / rows, rel=1e-12)
    assert unsaid.fallback == (
        f"{early} tokens were recomputed: the loss looks across tokens, and their "
        "coefficients in the whole row differ from those in their chunk"
    )
    assert "across documents" in case.assert_right(case.across, chunk_tokens=14).fallback
    assert case.assert_right(case.across, chunk_tokens=100, couples="token").gemms == 3.0
    assert case.assert_right(case.across, chunk_tokens=14, couples="row", keep_bytes=2**20).gemms == 3.0


@pytest.mark.parametrize(("by", "again"), [(1e-15, False), (1e-9, True)])
def test_coefficients_of_tokens_may_differ_by_rounding(by, again):
    """Those of a chunk and those of the whole row, which are the last chunk's; tokens without one are equal."""
    case = Case()
    rows = int(case.active.sum())

    def loss(said, places):
        return case.ppo(said, places) * (1 + by * (len(places) == rows))

    result = case.assert_right(loss, chunk_tokens=rows - 1, couples="token")
    assert result.gemms > 5 if again else result.gemms == 3.0


def test_only_coupled_rows_are_recomputed():
    case = Case()
    few = torch.nonzero(case.active)[[3, -2], 0]

    def two(said, places):
        chosen = said.logprobs_T[(places[:, None] == few).any(1)]
        return case.ppo(said, places) + chosen.sum().square()

    result = case.assert_right(two, chunk_tokens=14)
    assert result.fallback.startswith("1 tokens were recomputed")  # the other is in the last chunk
    assert result.gemms == pytest.approx(3 + 3 / int(case.active.sum()), rel=1e-12)


def test_an_engine_hears_nothing_of_fields_that_the_loss_does_not_look_at(monkeypatch):
    case, heard = Case(), []

    class Listening(ChunkedEngine):
        def backward(self, chunk, gradients, into, rows, *, first):
            heard.append(tuple(gradient is not None for gradient in gradients))
            super().backward(chunk, gradients, into, rows, first=first)

    monkeypatch.setattr(module, "ChunkedEngine", Listening)
    for name, fields in {"gspo": (True, *[False] * 4), "every_field": (True, True, True, False, False)}.items():
        case.assert_right(getattr(case, name), chunk_tokens=5)
        assert set(heard) == {fields}
        heard.clear()


# -- rows beyond an engine ---------------------------------------------------------------------------------------------

FAR = -7.5


class NearSighted(ChunkedEngine):
    """An engine that cannot represent rows with a log-probability below a bound, and returns nonsense for them."""

    def forward(self, *rows, **how):
        chunk = super().forward(*rows, **how)
        chunk.overflowed_C = chunk.head_output.logprobs_T < FAR
        chunk.head_output.logprobs_T[chunk.overflowed_C] = torch.nan
        return chunk

    def backward(self, chunk, gradients, into, rows, *, first):
        gradients = type(gradients)(*(g if g is None else g.masked_fill(chunk.overflowed_C, 0) for g in gradients))
        chunk.head_output.logprobs_T[chunk.overflowed_C] = 0.0
        super().backward(chunk, gradients, into, rows, first=first)


@pytest.mark.parametrize("name", [*TOKEN, "gspo", "gmpo", *MIXED, *ROW])
def test_rows_beyond_an_engine_use_an_exact_one(name, monkeypatch):
    monkeypatch.setattr(module, "ChunkedEngine", NearSighted)
    case = Case()
    far = int((reference.token_logprobs(case.hidden, case.weight, case.targets).logprobs_T[case.active] < FAR).sum())
    assert 0 < far < 10
    for call in ({"chunk_tokens": 5}, {"chunk_tokens": 100}, {"chunk_tokens": 14, "couples": "row"}):
        result = case.assert_right(getattr(case, name), expected_logprobs_T=case.old, **call)
        assert f"{far} beyond the exponents of the engine" in result.fallback
        assert result.head_output.logprobs_T.isfinite().all()
    with torch.no_grad():
        result = case.fused(getattr(case, name), chunk_tokens=5)
    torch.testing.assert_close(result.loss, case.truth(getattr(case, name))[0], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("engine", [ChunkedEngine, NearSighted])
@pytest.mark.parametrize("name", ["ppo", "gspo_with_kl", "across"])
def test_a_huge_coefficient_of_a_certain_token_hides_no_other(name, engine, monkeypatch):
    """A token of probability 1 moves nothing, whatever its coefficient; the others are corrected as without it."""
    monkeypatch.setattr(module, "ChunkedEngine", engine)
    case = Case()
    certain = int(torch.nonzero(case.active)[6, 0])
    with torch.no_grad():
        case.hidden[certain] *= 1e3
        case.targets[certain] = (case.weight @ case.hidden[certain]).argmax()
        case.old[certain] = 0.0

    def loss(said, places):
        return getattr(case, name)(said, places) + 1e16 * said.logprobs_T[places == certain].sum()

    for call in ({"couples": "token"}, {}, {"couples": "row"}):
        case.assert_right(loss, chunk_tokens=5, expected_logprobs_T=case.old, **call)


@pytest.mark.parametrize("chunk_tokens", [5, 100])
def test_a_row_beyond_an_engine_is_corrected_however_small_its_coefficient(chunk_tokens, monkeypatch):
    """It was not sent back: its gradient is the whole one, and no rounding of it."""
    monkeypatch.setattr(module, "ChunkedEngine", NearSighted)
    case = Case()
    far = reference.token_logprobs(case.hidden, case.weight, case.targets).logprobs_T.detach() < FAR

    def loss(said, places):
        return (said.logprobs_T * torch.where(far, 1e-20, 1.0).double()[places]).sum()

    result = case.fused(loss, chunk_tokens=chunk_tokens)
    found, truth = (torch.autograd.grad(result.loss, case.hidden)[0], case.truth(loss)[1])
    assert truth[far & case.active].any()
    torch.testing.assert_close(found[far], truth[far], rtol=1e-12, atol=0)


@pytest.mark.parametrize("chunk_tokens", [5, 100])
def test_rows_beyond_an_engine_are_told_if_they_have_no_gradient(chunk_tokens, monkeypatch):
    monkeypatch.setattr(module, "ChunkedEngine", NearSighted)
    case = Case()
    near = reference.token_logprobs(case.hidden, case.weight, case.targets).logprobs_T.detach() >= FAR

    def loss(said, places):
        return torch.where(near[places], said.logprobs_T * case.advantages[places], 0.0).sum()

    result, far = case.assert_right(loss, chunk_tokens=chunk_tokens), int((~near & case.active).sum())
    assert result.gemms == pytest.approx(3 + far / int(case.active.sum()), rel=1e-12)
    assert result.fallback == f"{far} tokens beyond the exponents of the engine were computed again"


@pytest.mark.parametrize("chunk_tokens", [5, 100])
def test_the_support_of_a_row_beyond_an_engine_is_not_repeated(chunk_tokens, monkeypatch):
    """Its pairs are no matter of the engine: they went back the first time, and must not go again."""
    monkeypatch.setattr(module, "ChunkedEngine", NearSighted)
    case = Case()
    kept = TruncatedSupport.of([[row % V, (row + 3) % V, (row + 4) % V] for row in range(len(IDS))])

    def loss(said, places):
        return (case.advantages[places] * (said.support_logprobs_T + said.logprobs_T)).sum()

    result = case.fused(loss, support=kept, chunk_tokens=chunk_tokens)
    assert "beyond the exponents" in result.fallback
    for one, other in zip(
        torch.autograd.grad(result.loss, (case.hidden, case.weight)), case.truth(loss, support=kept)[1:], strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# -- on a device -----------------------------------------------------------------------------------------------------


def on_device(tokens, loss, **call):
    """A row of bfloat16 on the GPU, in documents of 64 tokens, one of them of 256."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(*shape, generator=g).to("cuda", torch.bfloat16).requires_grad_()
        for shape in ((tokens, 64), (304, 64))
    )
    targets = torch.randint(0, 304, (tokens,), generator=g).cuda()
    ids = (torch.arange(tokens) // 64).clamp_min(3)
    advantages, ids = torch.randn(tokens, generator=g).cuda()[ids], ids.cuda()
    said = reference.token_logprobs(hidden.detach().float(), weight.detach().float(), targets)
    old = said.logprobs_T + 0.01 * torch.randn(tokens, generator=g).cuda()
    lengths = torch.zeros(tokens, device="cuda").index_add(0, ids, torch.ones(tokens, device="cuda")).clamp_min(1)

    def value(said, places):
        gap, label = said.logprobs_T - old.index_select(0, places), ids.index_select(0, places)
        if loss == "gspo":
            sums = torch.zeros_like(lengths, dtype=gap.dtype).index_add(0, label, gap) / lengths
            gap = sums.index_select(0, label)
        return -(gap.exp() * advantages.index_select(0, places)).sum()

    def run(implementation, chunk_tokens):
        result = module.fused_loss(
            hidden,
            weight,
            targets,
            value,
            document_ids_T=ids,
            expected_logprobs_T=old,
            chunk_tokens=chunk_tokens,
            implementation=implementation,
            **call,
        )
        return result, torch.autograd.grad(result.loss, (hidden, weight))

    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    truth = value(reference.token_logprobs(*exact, targets), torch.arange(tokens, device="cuda"))
    return run, torch.autograd.grad(truth, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", ["float32", "weight"])
@pytest.mark.parametrize("loss", ["ppo", "gspo"])
@pytest.mark.parametrize("implementation", ["chunked", "triton"])
def test_on_a_device_gradients_are_right_for_three_products(implementation, loss, accumulate):
    run, truth = on_device(1000, loss, accumulate=accumulate)
    for chunk_tokens in (100, 1000):
        result, gradients = run(implementation, chunk_tokens)
        assert (result.gemms, result.fallback) == (3.0, None)
        for one, other in zip(gradients, truth, strict=True):
            assert float((one.double() - other).norm() / other.norm()) < (6e-3 if accumulate == "float32" else 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("loss", ["ppo", "gspo"])
@pytest.mark.parametrize("implementation", ["chunked", "triton"])
def test_nothing_waits_for_the_device_between_chunks(implementation, loss):
    waits = []
    run, _ = on_device(2048, loss)
    run(implementation, 128)
    for chunk_tokens in (128, 512):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            run(implementation, chunk_tokens)
            torch.cuda.set_sync_debug_mode("default")
        waits.append(sorted((w.filename, w.lineno) for w in caught if "workbench" in w.filename))
    assert len(waits[1]) < 10
    assert len(waits[0]) <= len(waits[1]) + 1, "a document that is too long is looked at once"


# -- several ranks --------------------------------------------------------------------------------------------------


def of_two_minds(rank, case):
    """A loss whose last bits the second rank computes in another way than the first, in the whole row alone."""
    everything = int(case.active.sum())

    def loss(said, places):
        return case.ppo(said, places) * (1 + 1e-9 * rank * (len(places) == everything))

    return loss


def sharded_of_two_minds():
    mesh, case = make_mesh(tp=2), Case()
    rank = mesh["tp"].rank
    weight = case.weight.detach()[5 * rank : 5 + 8 * rank].clone().requires_grad_()
    result = module.fused_loss(
        case.hidden,
        weight,
        case.targets,
        of_two_minds(rank, case),
        active_T=case.active,
        chunk_tokens=5,
        axis=mesh["tp"],
        first_token=5 * rank,
    )
    return result.gemms, result.fallback


def test_a_fallback_on_one_rank_is_taken_by_all(tmp_path):
    one, other = run_ranks(sharded_of_two_minds, 2, tmp_path, timeout_s=120)
    assert one == other
    assert one[0] > 5


def sharded(cases, engine):
    """The results of one rank of tp: its rows of the head, split unevenly."""
    mesh, case = make_mesh(tp=2), Case()
    first, last = ((0, 5), (5, V))[mesh["tp"].rank]
    weight = case.weight.detach()[first:last].clone().requires_grad_()
    module.ChunkedEngine = engine
    answers = []
    for name, keep_bytes in cases:
        result = module.fused_loss(
            case.hidden,
            weight,
            case.targets,
            getattr(case, name),
            document_ids_T=IDS,
            expected_logprobs_T=case.old,
            active_T=case.active,
            chunk_tokens=5,
            axis=mesh["tp"],
            first_token=first,
            keep_bytes=keep_bytes,
        )
        answers.append(
            (result.loss.detach(), *torch.autograd.grad(result.loss, (case.hidden, weight)), result.fallback)
        )
    return answers


@pytest.mark.parametrize("engine", [ChunkedEngine, NearSighted])
def test_a_vocabulary_that_two_ranks_share(engine, tmp_path):
    # 13 rows of the first rank's 5 columns fit into 600 bytes, and none of the second's 8: both go by the larger
    cases = [*((name, 0) for name in ("every_field", "gspo", *MIXED, *ROW)), *((name, 600) for name in MIXED)]
    ranks, case = run_ranks(functools.partial(sharded, cases, engine), 2, tmp_path, timeout_s=120), Case()
    for number, (name, _) in enumerate(cases):
        loss, hidden, weight = case.truth(getattr(case, name))
        for answers in ranks:
            torch.testing.assert_close(answers[number][0], loss, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(answers[number][1], hidden, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.cat([answers[number][2] for answers in ranks]), weight, rtol=1e-12, atol=1e-12)
        assert ranks[0][number][3] == ranks[1][number][3]
