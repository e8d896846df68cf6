"""The benchmark of the output head measures what it names, lists omissions and checks its bars."""

from __future__ import annotations

import pytest
import torch

from experiments.head import measure as head
from experiments.head.contenders import BOTH, Contender, three_gemms
from experiments.head.workloads import DOCUMENT, Size, Workload

SMALL = Size("small", 2 * DOCUMENT, 16, 50)


@pytest.fixture(scope="module")
def work():
    return Workload.make(SMALL, torch.device("cpu"), torch.float64)


def test_contenders_are_interleaved_and_the_broken_one_is_listed(work):
    def breaks(work):
        raise RuntimeError("no such kernel\nsecond line")

    contenders = (
        Contender("three products", "floor", three_gemms, "", "all tokens", loss=None),
        Contender("missing", "peer", three_gemms, "", "chunk", package="no-such-distribution"),
        Contender("elsewhere", "peer", three_gemms, "", "chunk", only=("A",)),
        Contender("broken", "peer", breaks, "", "chunk"),
    )
    result = head.interleaved(work, contenders, 2, lambda line: None)
    listed = result["contenders"]
    assert set(listed) == {"three products", "missing", "broken"}
    assert listed["missing"]["left_out"] == "no-such-distribution is not installed"
    assert listed["broken"]["left_out"] == "RuntimeError: no such kernel"
    assert len(listed["three products"]["samples_ms"]) == 2
    assert listed["three products"]["ratio"] == 1.0


def entry(ratio, kind="ours", memory="chunk", **more):
    return {"kind": kind, "memory": memory, "ratio": ratio, "median_ms": 10 * ratio, "extra_gib": 1.0} | more


def record():
    errors = {"logprob_error": 5e-5, "hidden_error": 3e-3, "weight_error": 4e-3}
    both = {
        name: entry(1.05, **errors)
        for name in (
            "fused_loss",
            "fused_loss float32",
            "fused_loss GSPO",
            "fused_loss GSPO long",
            "token_logprobs, room",
            "token_logprobs",
        )
    }
    both |= {
        "three products": entry(1.0, "floor", "all tokens"),
        "slow": entry(1.5, "peer"),
        "quick": entry(1.06, "peer", "all tokens"),
        "absent": {"kind": "peer", "memory": "chunk", "left_out": "not installed"},
    }
    forward = {"one product": entry(1.0, "floor", "all tokens"), "token_logprobs, entropy": entry(1.04, extra_gib=0.05)}
    results = {
        "device": "a device",
        "rounds": 1,
        "workloads": {
            "A": {
                "tokens": 8192,
                "dimension": 4096,
                "vocabulary": 151936,
                "forward_backward": {"floor_ms": 10.0, "contenders": both},
                "forward": {"floor_ms": 5.0, "contenders": forward},
            }
        },
    }
    return results | {"bars": head.bars(results)}


def test_bars_are_checked_against_measurements():
    bars = record()["bars"]
    assert bars["A: fused_loss"] == {"bar": 1.06, "median": 1.05, "holds": True}
    assert bars["A: gradient error"]["median"] == 4e-3
    assert not bars["A: gradient error"]["holds"]
    slow = bars["A: best peer with memory of one chunk, times ours"]
    assert slow["median"] == pytest.approx(1.5 / 1.05)
    assert slow["holds"]
    assert bars["A: best peer with memory of all tokens, times ours"]["holds"]


def test_a_bar_without_measurements_is_not_met():
    result = record()
    del result["workloads"]["A"]["forward_backward"]["contenders"]["slow"]
    bar = head.bars(result)["A: best peer with memory of one chunk, times ours"]
    assert bar["median"] is None
    assert not bar["holds"]
    assert "none, at least 1.3: MISSED" in head.format_record(result | {"bars": head.bars(result)})


@pytest.mark.slow
def test_it_runs_without_a_gpu():
    result = head.measure(pairs=1, sizes=[SMALL])
    timed = result["workloads"]["small"]["forward_backward"]["contenders"]
    assert {c.name for c in BOTH if c.kind == "ours"} <= {name for name, entry in timed.items() if "ratio" in entry}
    assert timed["fused_loss"]["weight_error"] < 1e-4
    assert result["bars"] == {}
