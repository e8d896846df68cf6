"""Blind sets: what is saved fits together, the README states it, and a pair of a set can be scored."""

import re
import sys

import pytest
import yaml

import workbench as wb
from experiments.diagnosis.blind import score as blind
from workbench.atomic import from_json

SETS = sorted(path.name for path in blind.FOLDER.glob("set*"))
QUOTA = 40


@pytest.fixture(params=SETS)
def folder(request):
    return blind.FOLDER / request.param


def test_every_fault_has_a_cause_and_a_score(folder):
    faults = yaml.safe_load((folder / "faults.yaml").read_text())
    expected = yaml.safe_load((folder / "expected.yaml").read_text())
    scores = from_json((folder / "scores.json").read_text())["groups"]
    names = [fault["id"] for fault in faults]
    assert len(names) >= QUOTA
    assert len({fault["kind"] for fault in faults}) >= 5
    assert names == list(expected)
    for group in blind.GROUPS:
        assert [row["id"] for row in scores[group]["faults"]] == names
    assert 4 * len(scores["float32-rich"]["pairs"]) >= 60


def times_noise(moved):
    """How far a fault moves the gradient, or the weights, over the noise of its loop."""
    for name in ("times_noise", "times"):
        if name in moved:
            return float(moved[name])
    return max(float(moved[part]) / float(moved[f"noise_{part}"]) for part in ("gradient", "weights"))


def test_faults_move_the_gradient_by_ten_times_its_noise(folder):
    measured = folder / "measured.yaml"
    own = yaml.safe_load(measured.read_text())["faults"] if measured.is_file() else {}
    for fault in yaml.safe_load((folder / "faults.yaml").read_text()):
        moved = own[fault["id"]] if own else fault["moved"]
        assert times_noise(moved.get("float32", moved)) >= 10, fault["id"]


def test_the_readme_and_the_guide_state_the_figures_of_the_newest_set():
    groups = from_json((blind.FOLDER / SETS[-1] / "scores.json").read_text())["groups"]
    rich, poor, bf16, bf16_poor = (blind.summary(groups[name]) for name in blind.GROUPS)
    pairs, accused = (sum(blind.summary(group)[key] for group in groups.values()) for key in ("pairs", "accused"))
    text = (
        f"named the cause of {rich['first']} of {rich['faults']} faults first where float32 records have gradients and "
        f"values of tokens ({bf16['first']} in bfloat16), of {poor['first']} ({bf16_poor['first']}) from loss and "
        f"norms alone, and accused {accused} of {pairs} pairs of right runs"
    )
    root = blind.FOLDER.parents[2]
    for page in (root / "README.md", root / "docs/guides/diagnose.md"):
        assert text in " ".join(page.read_text().split()), text


def test_the_readme_states_the_scores_of_the_one_time(folder):
    groups = {
        name: blind.summary(group) for name, group in from_json((folder / "scores.json").read_text())["groups"].items()
    }
    [row] = re.findall(rf"^\| \[{folder.name}\].*$", (blind.FOLDER / "README.md").read_text(), re.M)
    rich, *others = groups.values()
    assert f"first {rich['first']}, in three {rich['in_three']}" in row
    for group in others:
        assert f"{group['first']}, {group['in_three']}" in row
    accused, pairs = (sum(group[key] for group in groups.values()) for key in ("accused", "pairs"))
    assert row.endswith(f"{accused} of {pairs} |")


def test_ranks_and_confidence_are_counted():
    rows = [
        {"rank": 1, "causes": [["a", 0.9]]},
        {"rank": 2, "causes": [["b", 0.6], ["a", 0.5]]},
        {"rank": None, "causes": [["no_difference", 0.99]]},
        {"rank": None, "causes": [["c", 0.4]]},
    ]
    pairs = [{"equal": True}, {"equal": False}]
    assert blind.summary({"faults": rows, "pairs": pairs}) == {
        "faults": 4,
        "first": 1,
        "in_three": 2,
        "confident_and_wrong": 1,
        "pairs": 2,
        "accused": 1,
    }


def test_a_loop_of_a_set_still_runs_and_is_diagnosed(tmp_path, monkeypatch):
    """One fault of which the recorder sees the cause by itself: a frozen block."""
    monkeypatch.syspath_prepend(str(blind.FOLDER / "set1"))
    monkeypatch.delitem(sys.modules, "loops", raising=False)
    from loops import LOOPS

    [fault] = [each for each in yaml.safe_load((blind.FOLDER / "set1/faults.yaml").read_text()) if each["id"] == "I3"]
    for name, planted in (("right", None), ("wrong", fault["fault"])):
        LOOPS[fault["kind"]](fault["settings"], planted, fault["seed"], "float32", (tmp_path / name, "poor"))
    assert wb.diagnose(tmp_path / "right", tmp_path / "wrong").causes[0].name == "other_parameters"
