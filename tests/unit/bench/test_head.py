"""The benchmark of the output head measures what it names, lists what it leaves out, and holds its bars to what it found."""

from __future__ import annotations

import json

import pytest
import torch

from workbench.bench import head
from workbench.bench.head_contenders import BOTH, TOKEN, Contender, three_products
from workbench.bench.head_workloads import DOCUMENT, Size, Truth, Workload, exact_logprobs, relative_error
from workbench.runs.store import to_json

SMALL = Size("small", 2 * DOCUMENT, 16, 50)


@pytest.fixture(scope="module")
def work():
    return Workload.make(SMALL, torch.device("cpu"), torch.float64)


def test_a_workload_looks_like_a_language_model_s(work):
    exact_T = exact_logprobs(work.hidden_TD, work.weight_VD, work.targets_T, torch.float64)
    assert -3.0 < float(exact_T.mean()) < -0.01
    assert 0.02 < float((work.old_logprobs_T - exact_T).abs().mean()) < 0.06
    assert work.advantages_T.unique().numel() == 2


def test_the_truth_is_what_autograd_says(work):
    part = work.loss_of(TOKEN, work.documents(DOCUMENT))
    truth = Truth.of(work, part, rows=300)
    hidden_TD, weight_VD = (value.detach().clone().requires_grad_() for value in (work.hidden_TD, work.weight_VD))
    logprobs_T = torch.log_softmax(hidden_TD @ weight_VD.T, -1).gather(1, work.targets_T[:, None])[:, 0]
    part.whole(logprobs_T).backward()
    assert float((truth.logprobs_T - logprobs_T).detach().abs().max()) < 1e-12
    assert relative_error(hidden_TD.grad, truth.hidden_TD) < 1e-12
    assert relative_error(weight_VD.grad, truth.weight_VD) < 1e-12


def test_a_part_s_share_adds_up_to_the_whole(work):
    from workbench.policy.logprobs import TokenLogprobs

    part = work.loss_of(TOKEN, work.documents(DOCUMENT))
    logprobs_T = work.old_logprobs_T + 0.1
    shares = [part(TokenLogprobs(logprobs_T[index]), index) for index in torch.arange(2 * DOCUMENT).split(700)]
    assert float((sum(shares) - part.whole(logprobs_T)).abs()) < 1e-12


def test_contenders_are_interleaved_and_the_broken_one_is_listed(work):
    def breaks(work):
        raise RuntimeError("no such kernel\nsecond line")

    contenders = (Contender("three products", "floor", three_products, "", "all tokens", loss=None),
                  Contender("missing", "peer", three_products, "", "chunk", package="no-such-distribution"),
                  Contender("elsewhere", "peer", three_products, "", "chunk", only=("A",)),
                  Contender("broken", "peer", breaks, "", "chunk"))
    found = head._interleaved(work, contenders, 2, lambda line: None)
    listed = found["contenders"]
    assert set(listed) == {"three products", "missing", "broken"}
    assert listed["missing"]["left_out"] == "no-such-distribution is not installed"
    assert listed["broken"]["left_out"] == "RuntimeError: no such kernel"
    assert len(listed["three products"]["samples_ms"]) == 2
    assert listed["three products"]["ratio"] == 1.0


def entry(ratio, kind="ours", memory="chunk", **more):
    return {"kind": kind, "memory": memory, "ratio": ratio, "median_ms": 10 * ratio, "extra_gib": 1.0, "what": "",
            "version": "1", "samples_ms": [10 * ratio]} | more


def record():
    errors = {"logprob_error": 5e-5, "hidden_error": 3e-3, "weight_error": 4e-3}
    both = {name: entry(1.05, **errors) for name in ("fused_loss", "fused_loss float32", "fused_loss GSPO",
                                                     "fused_loss GSPO long", "token_logprobs, room", "token_logprobs")}
    both |= {"three products": entry(1.0, "floor", "all tokens"), "slow": entry(1.5, "peer"),
             "quick": entry(1.06, "peer", "all tokens"), "absent": {"kind": "peer", "left_out": "not installed"}}
    forward = {"one product": entry(1.0, "floor", "all tokens"),
               "token_logprobs, entropy": entry(1.04, extra_gib=0.05)}
    found = {"device": "a device", "rounds": 1, "longest_rows": {
        "a head": {"fused_loss": {"rows": [{"tokens": 8, "peak_gib": 1.0}, {"tokens": 16, "peak_gib": 1.5}],
                                  "end": "time"},
                   "plain torch": {"rows": [{"tokens": 8, "peak_gib": 9.0}], "end": "out of memory"},
                   "absent": {"rows": [], "end": "out of memory"}}},
        "vocabulary_parallel": {"A": {"1": {"median_ms": 10.0, "efficiency": 1.0},
                                      "2": {"median_ms": 5.5, "efficiency": 0.909}}},
        "provenance": {"torch": "2"}, "workloads": {"A": {
            "tokens": 8192, "dimension": 4096, "vocabulary": 151936,
            "forward_backward": {"floor_ms": 10.0, "contenders": both},
            "forward": {"floor_ms": 5.0, "contenders": forward}}}}
    return found | {"bars": head.bars(found)}


def test_bars_are_held_to_what_was_found():
    bars = record()["bars"]
    assert bars["A: fused_loss"] == {"bar": 1.06, "median": 1.05, "holds": True}
    assert bars["A: gradient error"]["median"] == 4e-3
    assert not bars["A: gradient error"]["holds"]
    slow = bars["A: best peer with memory of one chunk, times ours"]
    assert slow["median"] == pytest.approx(1.5 / 1.05)
    assert slow["holds"]
    assert bars["A: best peer with memory of all tokens, times ours"]["holds"]


def test_a_bar_without_numbers_does_not_hold():
    found = record()
    del found["workloads"]["A"]["forward_backward"]["contenders"]["slow"]
    bar = head.bars(found)["A: best peer with memory of one chunk, times ours"]
    assert bar["median"] is None
    assert not bar["holds"]
    assert "none, at least 1.3: MISSED" in head.in_words(found | {"bars": head.bars(found)})


def test_the_page_shows_figures_bars_and_what_was_left_out(tmp_path):
    path = head.write_page(json.loads(to_json(record())), tmp_path)
    text = path.read_text()
    assert text.count("<figure") == 4
    assert "Left out: absent (not installed)" in text
    assert "A: gradient error" in text
    assert "missed" in text
    assert text == head.write_page(record(), tmp_path).read_text()


@pytest.mark.slow
def test_it_runs_without_a_gpu():
    found = head.measure(pairs=1, sizes=[SMALL])
    timed = found["workloads"]["small"]["forward_backward"]["contenders"]
    assert {c.name for c in BOTH if c.kind == "ours"} <= {name for name, entry in timed.items() if "ratio" in entry}
    assert timed["fused_loss"]["weight_error"] < 1e-4
    assert found["bars"] == {}
