"""The page of bridge costs: the summary, every path, and both drawings of each pair."""

import copy
import json

from experiments.encoder_bridge.page_bridge import answer, page, write_bridge_report


def entry(forward_ms, backward_ms):
    return {
        "forward_ms": forward_ms,
        "backward_ms": backward_ms,
        "forward_samples_ms": [forward_ms, 7.5],
        "backward_samples_ms": [backward_ms],
        "forward_bytes": 3 * 2**20,
        "backward_bytes": 0,
        "wrong_numbers": 0,
    }


RECORD = {
    "benchmark": "bridge",
    "device": "a GPU",
    "ranks": 2,
    "activation": "samples of 8192 x 4096 bfloat16",
    "bars": {"exact": {"holds": True}},
    "command": "workbench bench bridge",
    "provenance": {"git": {"commit": "abc"}},
    "bridges": {
        "fan-in": {
            "source": {"tp": 1, "cp": 1, "dp": 2},
            "destination": {"tp": 1, "cp": 2, "dp": 1},
            "ways": {"one way": entry(1.0, 4.0), "another <way>": entry(2.0, 2.5)},
        }
    },
}


def test_the_finding_stands_first():
    assert answer(RECORD) == (
        "On 2 × a GPU, samples of 8192 x 4096 bfloat16. Every way is exact. fan-in: "
        "fastest is the another <way>, 4.50 ms both ways."
    )


def test_wrong_paths_are_reported_first():
    assert "Some ways are wrong" in answer(RECORD | {"bars": {"exact": {"holds": False}}})


def test_every_way_and_both_drawings_are_on_the_page():
    text = page(RECORD)
    assert text == page(copy.deepcopy(RECORD))
    for words in ("another &lt;way&gt;", "3.00 MiB", "1.00, 7.50", "dp2 → cp2: fan-in", "dp2 → cp2: general", "abc"):
        assert words in text, words
    assert text.count("Ranks on CPU share") == 0
    assert page(RECORD | {"device": "cpu"}).count("Ranks on CPU share") == 1
    assert "http" not in text.split("</style>")[-1]


def test_the_page_is_written_whole(tmp_path):
    record = json.loads(json.dumps(RECORD))
    assert write_bridge_report(record, tmp_path).read_text() == page(RECORD)
    assert [path.name for path in tmp_path.iterdir()] == ["bridge.html"]
