"""The page of layout costs: every layout is on it, those left out with the reason."""

import copy
import json

import pytest

from experiments.gpu_layouts.page import answer, costs, main, page, write_layout_report
from workbench.errors import RecordError


def found(ranks, step_ms, *, within=True, **more):
    return {
        "layout": f"{ranks} ranks",
        "ranks": ranks,
        "samples_ms": [step_ms - 1, step_ms, step_ms + 2],
        "step_ms": step_ms,
        "prepare_ms": 12.0,
        "tokens_per_second": 1e6 / step_ms,
        "peak_gib": 40 / ranks,
        "padding": 0.01,
        "attention_max_over_mean": 1.25,
        "attention_in_lock_step": 1.5,
        "efficiency": 100 / ranks / step_ms,
        "parity": {
            "loss": 0.1,
            "distance": 0.002,
            "norm": 2.0,
            "logprobs_apart_nats": 1e-3,
            "flipped_clips": 3,
            "distance_in_one_ranks": 1.1 if within else 1.9,
            "worst_parameter": "lm_head",
            "worst_in_one_ranks": 1.3,
            "within": within,
        },
    } | more


RECORD = {
    "benchmark": "layouts",
    "device": "a GPU",
    "gpus": 4,
    "minutes": 7.25,
    "command": "workbench bench layouts",
    "plan": {
        "question": "What do they cost?",
        "model": "qwen3-0.6b",
        "seed": 0,
        "old_policy": {"relative": 0.1, "seed": 1},
        "layouts": {},
        "workloads": {
            "long": {
                "precision": "bfloat16",
                "rows": 4,
                "row_tokens": 32768,
                "document_tokens": [512, 8192],
                "truth": {"precision": "float32", "row_tokens": 8192},
            }
        },
    },
    "rollouts": {
        "long": {
            "documents": 50,
            "tokens": 131000,
            "trained_tokens": 98000,
            "loss": 0.1,
            "clipped": 0.14,
            "old_policy_apart_nats": 0.05,
        }
    },
    "workloads": {
        "long": {
            "one_rank": found(1, 100.0),
            "cp4_ring": found(4, 30.0),
            "tp4": found(4, 50.0, within=False),
            "cp4_hybrid": {"left_out": "out of memory <here>"},
        }
    },
    "provenance": {"git": {"commit": "abc"}, "argv": []},
}


def test_the_finding_stands_first():
    assert answer(RECORD) == (
        "On 4 × a GPU. long: 2 of 3 layouts are within the budget of one rank's own rounding; fastest is cp4_ring with "
        "33333 tokens a second, efficiency 0.83."
    )


def test_every_layout_is_on_the_page():
    text = page(RECORD)
    assert text == page(copy.deepcopy(RECORD))
    for words in (
        "What do they cost?",
        "bfloat16, 4 packed rows of 32768 tokens",
        "cp4_ring",
        "<b>over</b>",
        "left out (out of memory &lt;here&gt;)",
        "29.0, 30.0, 32.0",
        ">1.25<",
        "14% of trained tokens clipped",
        "moved by 0.1 standard deviations",
        "rows of 8192 tokens; clip decisions are the truth",
    ):
        assert words in text, words
    assert "http" not in text.split("</style>")[-1].replace("http://www.w3.org", "")


def test_a_workload_of_which_nothing_was_measured():
    nothing = RECORD | {"workloads": {"long": {"one_rank": {"left_out": "not reached"}}}}
    assert answer(nothing) == "On 4 × a GPU. long: nothing was measured."
    assert "left out (not reached)" in page(nothing)


def test_a_dry_run_is_marked_as_meaningless_for_speed():
    assert "Ranks on CPU share" not in page(RECORD)
    assert "Ranks on CPU share" in page(RECORD | {"gpus": 0, "device": "cpu"})


def test_the_figure_has_every_layout_that_ran():
    figure = costs(RECORD["workloads"]["long"])
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["one_rank", "cp4_ring", "tp4"]
    drawn = [line.get_xdata()[0] for line in figure.axes[2].get_lines() if len(line.get_xdata()) == 1]
    assert drawn == [1.1, 1.1, 1.9]


def test_the_page_of_a_folder(tmp_path):
    with pytest.raises(RecordError, match=r"no layouts\.json"):
        main([str(tmp_path)])
    (tmp_path / "layouts.json").write_text(json.dumps(RECORD))
    assert main([str(tmp_path)]).read_text() == page(RECORD)
    assert write_layout_report(RECORD, tmp_path).name == "report.html"
