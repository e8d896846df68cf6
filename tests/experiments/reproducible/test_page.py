"""The page of the reproducible mode's cost: both modes, every layout, and omissions with their reason."""

import copy
import json

import pytest

from experiments.reproducible.page import answer, main, page
from workbench.errors import RecordError
from workbench.records.provenance import project_root


def timed(step_ms, peak_gib, groups=True):
    results = {
        "warm_ms": [900.0, 700.0],
        "samples_ms": [step_ms - 1, step_ms, step_ms + 2],
        "step_ms": step_ms,
        "prepare_ms": 12.0,
        "peak_gib": peak_gib,
    }
    return results | (
        {"groups_ms": {"attention": 30.0, "matrix products": 60.0}, "kernels": 1234, "longest": []} if groups else {}
    )


SAME = {"tensors": 700, "equal": 700, "first": None}
RECORD = {
    "benchmark": "reproducible",
    "command": "workbench bench reproducible",
    "plan": {
        "question": "Does it hold?",
        "seed": 0,
        "models": {"wide": {"name": "qwen3-8b", "layers": 4}},
        "workloads": {
            name: {
                "model": "wide",
                "precision": "bfloat16",
                "rows": 4,
                "row_tokens": 16384,
                "document_tokens": [512, 8192],
                "truth": "float32",
                "reproducible": {"block_tokens": 2048, "weight_chunks": 1, "bits": 32},
            }
            for name in ("long", "short")
        },
    },
    "machines": [
        {
            "device": "a GPU",
            "gpus": 1,
            "minutes": 3.0,
            "provenance": {"git": {"commit": "abc"}},
            "workloads": {
                "long": {
                    "one_rank": {
                        "layout": "one rank",
                        "ranks": 1,
                        "timed": {"fast": timed(100.0, 20.0), "reproducible": timed(125.0, 21.0)},
                    },
                    "cp4": {"left_out": "out of memory <here>"},
                },
                "short": {
                    "one_rank": {
                        "layout": "one rank",
                        "ranks": 1,
                        "same": {"fast": SAME, "reproducible": SAME},
                        "accuracy": {"fast": 0.02, "reproducible": 0.019, "factor": 0.95},
                        "steps": {mode: [{"certificate": "c" * 64}] for mode in ("fast", "reproducible")},
                    },
                    "cp2": {
                        "layout": "cp=2 zigzag",
                        "ranks": 2,
                        "simulated": True,
                        "same": {"fast": SAME | {"equal": 12, "first": "step 0: logprobs"}, "reproducible": SAME},
                        "steps": {mode: [{"certificate": "c" * 64}] for mode in ("fast", "reproducible")},
                    },
                },
            },
        }
    ],
    "bars": {"left out": {"bar": 0.0, "median": 1.0, "holds": False}},
}


def test_the_finding_stands_first():
    assert answer(RECORD) == (
        "Of 2 runs of a workload in a layout, 2 have every bit of one rank's in the reproducible mode, 1 in the fast "
        "one. long: 1.25 times the time of the fast mode, 1.05 times its memory. Of 1 bars 1 are missed: left out."
    )
    assert answer(RECORD | {"machines": []}) == "Nothing was measured."


def test_everything_is_on_the_page():
    output = page(RECORD)
    assert output == page(copy.deepcopy(RECORD))
    for words in (
        "Does it hold?",
        "left out (out of memory &lt;here&gt;)",
        "99.0, 100.0, 102.0",
        "700 of 700",
        "12 of 700",
        "step 0: logprobs",
        "its ranks in turns on one GPU",
        "cccccccccccc",
        "0.950",
        "<b>missed</b>",
        "matrix products",
        "1234",
        "qwen3-8b with 4 layers",
        "blocks of 2048 tokens",
    ):
        assert words in output, words
    assert "http" not in output.split("</style>")[-1].replace("http://www.w3.org", "")


def test_a_dry_run_is_marked_as_meaningless_for_speed():
    dry = copy.deepcopy(RECORD)
    dry["machines"][0]["gpus"] = 0
    for result in dry["machines"][0]["workloads"]["long"]["one_rank"]["timed"].values():
        del result["groups_ms"]
    assert "Not measured without a GPU" in page(dry)


def test_the_page_of_a_folder(tmp_path):
    with pytest.raises(RecordError, match=r"no reproducible\.json"):
        main([str(tmp_path)])
    (tmp_path / "reproducible.json").write_text(json.dumps(RECORD))
    assert main([str(tmp_path)]).read_text() == page(RECORD)


def test_the_saved_page_is_that_of_the_saved_record():
    folder = project_root() / "experiments/reproducible"
    assert page(json.loads((folder / "reproducible.json").read_text())) == (folder / "report.html").read_text()
