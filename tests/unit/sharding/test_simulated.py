"""Ranks in one process: bitwise equal to real ranks, with an error for every way in which ranks can diverge."""

import os
import threading
import time

import psutil
import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.helpers.ranks import run_ranks
from tests.parity.cases import step_on
from tests.parity.test_oracle import LOSS, documents_near
from workbench.errors import LaunchError, ShardingError
from workbench.sharding.collectives import all_gather, all_max, all_sum, gather_scatter, sum_sum
from workbench.sharding.mesh import make_mesh
from workbench.sharding.simulated import simulate

LAYOUT = {"cp": 2, "tp": 2, "order": "zigzag"}
SIZES = {"cp": 2, "tp": 2}


def settings(layout, name="gspo"):
    return {
        "model": {"source": "tiny-qwen3", "seed": 3},
        "precision": "float64",
        "layout": layout,
        "loss": {"name": name, "kl": LOSS["kl"]},
        "data": {"micro_batches": 2},
    }


def collectives(mesh):
    """Every kind of collective, forward and backward, with values that differ by rank."""
    own = 100.0 * mesh["dp"].rank + 10.0 * mesh["cp"].rank + mesh["tp"].rank
    value = torch.tensor([own, 0.1 * own], dtype=torch.float64, requires_grad=True)
    whole = gather_scatter(sum_sum(value, mesh["cp"]), mesh["tp"], dim=0)
    (whole * (1 + own)).sum().backward()
    return {
        "whole": whole.detach(),
        "gradient": value.grad,
        "most": all_max(value, mesh["dp_cp"]),
        "sum": all_sum(value, mesh["dp"]),
        "all": torch.stack(all_gather(value, mesh["dp_cp"])),
    }


def real_ranks(documents):
    """On a real rank: collectives, and a whole step."""
    return collectives(make_mesh(**SIZES)), step_on(make_mesh(**SIZES), settings(LAYOUT), documents)


def test_simulated_ranks_match_real_ranks_and_one_rank(tmp_path):
    documents = documents_near(11)
    real = run_ranks(real_ranks, 4, tmp_path, documents)
    simulated = simulate(lambda mesh: (collectives(mesh), step_on(mesh, settings(LAYOUT), documents)), **SIZES)
    one = step_on(make_mesh(alone=True), settings({}), documents)
    for (moved, result), (moved_here, here) in zip(real, simulated, strict=True):
        assert all(torch.equal(moved[name], moved_here[name]) for name in moved)
        assert here["loss"] == pytest.approx(result["loss"], rel=1e-15)
        for name, gradient in result["gradients"].items():
            assert float((here["gradients"][name] - gradient).norm()) <= 1e-15 * max(1.0, float(gradient.norm())), name
        assert_float64_parity(here["gradients"], one["gradients"], context="against one rank")
        assert here["metrics"] == pytest.approx(one["metrics"], rel=1e-10, abs=1e-13)


@pytest.mark.parametrize(
    "layout",
    [
        {"cp": 4, "attention": "hybrid", "ulysses": 2},
        {"cp": 3, "attention": "ring"},
        {"tp": 2, "sequence_parallel": True},
        {"dp": 2, "cp": 2, "order": "balanced", "block_tokens": 4},
    ],
)
def test_a_layout_of_any_kind_matches_one_rank(layout):
    documents = documents_near(11)
    one = step_on(make_mesh(alone=True), settings({}), documents)
    sizes = {name: size for name, size in layout.items() if name in ("dp", "cp", "tp", "ulysses")}
    for result in simulate(lambda mesh: step_on(mesh, settings(layout), documents), **sizes):
        assert result["loss"] == pytest.approx(one["loss"], rel=1e-12)
        assert_float64_parity(result["gradients"], one["gradients"], context=str(layout))


def test_results_come_in_rank_order_and_the_same_each_time():
    def place(mesh):
        return mesh.coordinates, [mesh[axis].ranks for axis in ("dp", "cp", "tp", "dp_cp")], mesh.world_size

    by_rank = simulate(place, dp=2, cp=1, tp=2)
    assert [coordinates for coordinates, _, _ in by_rank] == [
        {"dp": 0, "cp": 0, "tp": 0},
        {"dp": 0, "cp": 0, "tp": 1},
        {"dp": 1, "cp": 0, "tp": 0},
        {"dp": 1, "cp": 0, "tp": 1},
    ]
    assert by_rank[1][1:] == ([(1, 3), (), (0, 1), (1, 3)], 4)


def test_the_mesh_of_one_rank_has_no_groups():
    assert simulate(lambda mesh: {axis.group for axis in mesh.axes.values()}) == [{None}]


def test_cp_is_split_in_two_for_ulysses():
    def places(mesh):
        return mesh["cp_inner"].ranks, mesh["cp_inner"].rank, mesh["cp_outer"].ranks, mesh["cp_outer"].rank

    by_rank = simulate(places, cp=4, tp=2, ulysses=2)
    assert by_rank[0] == ((0, 2), 0, (0, 4), 0)
    assert by_rank[7] == ((5, 7), 1, (3, 7), 1)
    with pytest.raises(ShardingError, match="ulysses divides cp"):
        simulate(places, cp=4, ulysses=3)


def test_a_rank_has_grad_mode_and_random_numbers_of_its_own():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    expected = torch.rand(2)
    torch.set_rng_state(before)

    def drawn(mesh):
        first = torch.rand(1)
        all_sum(first, mesh["cp"])
        return torch.cat([first, torch.rand(1)]), torch.is_grad_enabled()

    with torch.no_grad():
        by_rank = simulate(drawn, cp=3)
    for numbers, grad in by_rank:
        assert torch.equal(numbers, expected), "as in a process of its own"
        assert not grad, "grad mode is the caller's"
    assert torch.equal(torch.get_rng_state(), before), "and the caller's numbers are as they were"
    assert simulate(lambda _: torch.is_grad_enabled(), cp=2) == [True, True]


def test_a_rank_computes_in_the_modes_of_its_caller():
    def modes(mesh):
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype, torch.ones(1).is_inference()

    assert simulate(modes, cp=2) == [(torch.float32, False)] * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert simulate(modes, cp=2) == [(torch.bfloat16, False)] * 2
    with torch.inference_mode():
        assert simulate(modes, cp=2) == [(torch.float32, True)] * 2


def test_a_rank_computes_in_as_many_threads_as_its_caller():
    """A thread that torch has not told its number takes that of the environment, 1 in these tests."""
    matrix, cores = torch.ones(512, 512, dtype=torch.float64), len(os.sched_getaffinity(0))

    def threads():
        return {thread.id for thread in psutil.Process().threads()}

    def started(_):
        before = threads()
        matrix @ matrix
        return len(threads() - before)

    before = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            assert simulate(started, dp=2) == 2 * [min(number, cores) - 1]
    finally:
        torch.set_num_threads(before)


def test_backward_stays_in_the_thread_of_its_rank():
    assert simulate(lambda _: torch._C._is_multithreading_enabled(), cp=2) == [False, False]
    assert torch._C._is_multithreading_enabled()


def test_backward_through_collectives_after_the_end_is_refused():
    left, _ = simulate(lambda mesh: sum_sum(torch.ones(2, requires_grad=True), mesh["cp"]), cp=2)
    with pytest.raises(LaunchError, match=r"(?s)rank 0 \(dp=0, cp=0, tp=0\) has ended.*inside simulate"):
        left.sum().backward()


def ends_early(mesh):
    if mesh["cp"].rank == 0:
        all_sum(torch.ones(2), mesh["cp"])


def other_shape(mesh):
    all_sum(torch.ones(2 + mesh["cp"].rank), mesh["cp"])


def other_collective(mesh):
    (all_max if mesh["cp"].rank else all_sum)(torch.ones(2), mesh["cp"])


def other_dtype(mesh):
    all_sum(torch.ones(2, dtype=torch.float64 if mesh["cp"].rank else torch.float32), mesh["cp"])


def no_backward(mesh):
    value = torch.ones(2, requires_grad=True)
    whole = sum_sum(value, mesh["cp"])
    if mesh["cp"].rank:
        whole.sum().backward()


def crossed(mesh):
    axes = ("dp", "cp") if (mesh["dp"].rank + mesh["cp"].rank) % 2 else ("cp", "dp")
    for axis in axes:
        all_sum(torch.ones(2), mesh[axis])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            ends_early,
            r"deadlock.*rank 0 \(dp=0, cp=0, tp=0\) waits in all_sum over cp of 2 float32 "
            r"\(test_simulated\.py:\d+\).*rank 1 .*ended",
        ),
        (other_shape, r"different collectives.*rank 1 .*all_sum over cp of 3 float32.*rank 0 .*all_sum over cp of 2"),
        (other_collective, r"rank 1 .*all_max over cp.*rank 0 .*all_sum over cp"),
        (other_dtype, r"rank 1 .*of 2 float64.*rank 0 .*of 2 float32"),
        (no_backward, r"rank 1 .*waits in backward of sum_sum over cp"),
        (crossed, r"deadlock.*waits in all_sum over (cp|dp)"),
    ],
)
def test_diverging_ranks_raise_an_error(function, words):
    before = set(threading.enumerate())  # those of a rank that took too long, in another test, may end meanwhile
    with pytest.raises(LaunchError, match=f"(?s){words}"):
        simulate(function, dp=2, cp=2)
    assert set(threading.enumerate()) <= before, "no rank is left behind"


def test_an_error_of_a_rank_has_its_coordinates():
    def fails(mesh):
        value = torch.ones(2, requires_grad=True)
        whole = sum_sum(value, mesh["cp"])
        if mesh["dp"].rank == 1 and mesh["cp"].rank == 0:
            raise KeyError("mine")
        try:
            whole.sum().backward()
        except Exception as error:
            raise AssertionError("a rank that is ended hears of it and cannot go on") from error

    with pytest.raises(KeyError, match="mine") as caught:
        simulate(fails, dp=2, cp=2)
    assert caught.value.__notes__ == ["on simulated rank 2 (dp=1, cp=0, tp=0)"]
    assert caught.traceback[-1].name == "fails"


def test_a_rank_that_computes_for_ever_ends_the_simulation():
    stop = threading.Event()

    def slow(mesh):
        if mesh["cp"].rank:
            stop.wait(30)
        all_sum(torch.ones(1), mesh["cp"])

    started = time.monotonic()
    with pytest.raises(LaunchError, match=r"(?s)rank 1 \(dp=0, cp=1, tp=0\) computes for more than 0.05 s.*stop.wait"):
        simulate(slow, cp=2, timeout_s=0.05)
    assert time.monotonic() - started < 10
    stop.set()


def test_ranks_have_no_ranks_and_sizes_begin_at_one():
    with pytest.raises(ShardingError, match="simulations cannot be nested"):
        simulate(lambda mesh: simulate(lambda inner: inner.world_size, cp=2), dp=2)
    with pytest.raises(ShardingError, match="every size is at least 1"):
        simulate(lambda mesh: None, cp=0)
