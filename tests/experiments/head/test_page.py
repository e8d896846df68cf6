"""The page of the output head's cost has figures, bars and omissions, with reproducible bytes."""

from __future__ import annotations

import pytest

from experiments.head.page import answer, main, page, write_head_report
from workbench.atomic import to_json
from workbench.errors import RecordError


def entry(ratio, kind="ours", memory="chunk", **more):
    return {
        "kind": kind,
        "memory": memory,
        "ratio": ratio,
        "median_ms": 10 * ratio,
        "extra_gib": 1.0,
        "what": "",
        "version": "1",
        "samples_ms": [10 * ratio],
    } | more


def record():
    both = {
        "three products": entry(1.0, "floor", "all tokens"),
        "fused_loss": entry(1.05, hidden_error=3e-3),
        "slow": entry(1.5, "peer"),
        "absent": {"kind": "peer", "memory": "chunk", "left_out": "not installed"},
    }
    rows = {
        "fused_loss": {"rows": [{"tokens": 8, "peak_gib": 1.0}, {"tokens": 16, "peak_gib": 1.5}], "end": "time"},
        "plain torch": {"rows": [{"tokens": 8, "peak_gib": 9.0}], "end": "out of memory"},
        "absent": {"rows": [], "end": "out of memory"},
    }
    return {
        "device": "a device",
        "rounds": 1,
        "longest_rows": {"a head": rows},
        "provenance": {"torch": "2"},
        "bars": {
            "one": {"bar": 1.0, "median": 0.5, "holds": True},
            "two": {"bar": 1.3, "median": None, "holds": False, "least": True},
        },
        "workloads": {
            "A": {
                "tokens": 8192,
                "dimension": 4096,
                "vocabulary": 151936,
                "forward_backward": {"floor_ms": 10.0, "contenders": both},
                "forward": {"floor_ms": 5.0, "contenders": {"one product": entry(1.0, "floor", "all tokens")}},
            }
        },
    }


def several():
    return {
        "device": "a device",
        "provenance": {},
        "sizes": {"A": {"tokens": 8192, "dimension": 4096, "vocabulary": 151936}},
        "heads": {
            "A": {
                "1": {"median_ms": 10.0, "efficiency": 1.0, "samples_ms": [10.0]},
                "2": {"median_ms": 5.5, "efficiency": 0.909, "samples_ms": [5.5]},
            }
        },
    }


@pytest.fixture(scope="module")
def text():
    return page(record(), several())


def test_figures_bars_and_omissions(text):
    assert text.count("<figure") == 4
    assert "Left out: absent (not installed)" in text
    assert "<b>missed</b>" in text
    assert "A: 8192 × 4096, vocabulary 151936" in text


def test_the_summary_counts_the_bars():
    assert answer(record()) == "On a device: fused_loss takes A 1.050 times three GEMMs. 1 of 2 bars hold."
    assert answer(record() | {"bars": {}}).endswith("No bar is stated for this device.")


def test_written_from_a_folder_in_the_same_bytes(text, tmp_path):
    with pytest.raises(RecordError, match="run workbench bench head first"):
        write_head_report(tmp_path)
    (tmp_path / "head.json").write_bytes(to_json(record()))
    alone = write_head_report(tmp_path).read_text()
    assert alone.count("<figure") == 3
    (tmp_path / "head_parallel.json").write_bytes(to_json(several()))
    assert main([str(tmp_path)]).read_text() == text != alone


def test_memory_is_unknown_without_a_gpu():
    result = record() | {"longest_rows": {}}
    for contender in result["workloads"]["A"]["forward_backward"]["contenders"].values():
        contender["extra_gib"] = None
    text = page(result)
    assert "Not measured: memory is that of a GPU." in text
    assert text.count("<figure") == 1
