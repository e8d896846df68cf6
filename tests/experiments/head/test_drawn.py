"""The head at drawn sizes: the record has those of the seed, and every bar; without a GPU a tiny size is measured."""

from __future__ import annotations

from experiments.head import drawn, measure
from experiments.head.workloads import SIZES
from workbench.atomic import from_json
from workbench.records.provenance import project_root


def test_the_record_has_the_drawn_sizes_and_their_bars():
    record = from_json((project_root() / "experiments/head/drawn.json").read_text())
    sizes = [(work["tokens"], work["dimension"], work["vocabulary"]) for work in record["workloads"].values()]
    assert sizes == [
        (size.tokens, size.dimension, size.vocabulary) for size in (*SIZES, *drawn.drawn_sizes(record["seed"]))
    ]
    assert record["bars"] == drawn.bars(record["workloads"])
    assert len(record["bars"]) == 3 * len(sizes)


def test_bars_are_stricter_for_known_sizes():
    work = {"forward_backward": {"fused_loss": 1.04}, "forward": dict.fromkeys(list(drawn.BARS)[1:], 1.03)}
    held = {name: bar["holds"] for name, bar in drawn.bars({"A": work, "E": work}).items()}
    assert held == {
        "A: fused_loss": False,
        "A: token_logprobs": False,
        "A: token_logprobs, entropy": True,
        "E: fused_loss": True,
        "E: token_logprobs": False,
        "E: token_logprobs, entropy": True,
    }


def test_sizes_are_within_their_limits_and_multiples():
    for size in drawn.drawn_sizes(seed=1, count=50):
        assert drawn.TOKENS[0] <= size.tokens <= drawn.TOKENS[1]
        assert size.tokens % 1024 == size.dimension % 64 == size.vocabulary % 64 == 0


def test_without_a_gpu_the_tiny_size_is_measured_with_and_without_a_known_number_of_tokens(monkeypatch):
    monkeypatch.setattr(measure, "SAMPLE_MS", 1.0)
    record = drawn.measure(seed=5, rounds=1)
    assert record["seed"] == 5
    assert list(record["bars"]) == [f"tiny: {name}" for name in drawn.BARS]
    (work,) = record["workloads"].values()
    assert {*work["forward_backward"], *work["forward"]} >= {*drawn.BARS, *drawn.COUNTED}
