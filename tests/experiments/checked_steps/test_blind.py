"""Blind sets of dumps: a set is scored once, by kind, stage and words; a set that does not fit together is refused."""

import json

import pytest
import yaml
from safetensors.torch import save_file

from experiments.checked_steps.blind import score as blind
from tests.helpers.dumped_step import ADVANTAGES, ROWS, SETTINGS, WIDTH, dump
from workbench.errors import SpecError

FAULTS = {
    "no_denominator": lambda: dump(weights=dump().loss_mask_T.reshape(ROWS, WIDTH)),
    "sign": lambda: dump(factor=-1.0),
    "by_seven": lambda: dump(factor=1 / 7),
}
EXPECTED = {
    "no_denominator": [{"kind": "factor"}, {"kind": "denominator", "words": ["by nothing"]}],
    "sign": [{"kind": "factor", "stage": "coefficients", "words": ["Sign"]}],
    "by_seven": [{"kind": "denominator"}],
}


def write(step, folder):
    folder.mkdir(parents=True)
    tokens = {name: value.reshape(ROWS, WIDTH).contiguous() for name, value in step.tokens.items()}
    masks = {name: value.int() for name, value in tokens.items() if not value.is_floating_point()}
    save_file({**tokens, **masks, **step.documents}, folder / "step.safetensors")
    about = {"format": "rl step", "version": 1, "files": ["step.safetensors"], "dtype": "float64"}
    about |= {"settings": SETTINGS, "advantages": ADVANTAGES, "losses": dict(step.losses)}
    (folder / "step.json").write_text(json.dumps(about))


@pytest.fixture
def folder(tmp_path):
    for name, make in FAULTS.items():
        write(make(), tmp_path / "dumps/faults" / name)
    write(dump(), tmp_path / "dumps/clean/0")
    write(dump(factor=2.0), tmp_path / "dumps/clean/1")
    (tmp_path / "faults.yaml").write_text(yaml.safe_dump([{"id": name} for name in FAULTS]))
    (tmp_path / "expected.yaml").write_text(yaml.safe_dump(EXPECTED))
    return tmp_path


def test_a_set_is_scored_once(folder, capsys):
    blind.main([str(folder), "--once"])
    scores = json.loads((folder / "scores.json").read_text())
    assert {row["id"]: row["rank"] for row in scores["faults"]} == {"no_denominator": 1, "sign": 1, "by_seven": None}
    assert [row["verdict"] for row in scores["clean"]] == ["agrees", "differs"]
    counts = {"faults": 3, "first": 2, "in_three": 2, "differs": 3, "clean": 2, "accused": 1, "vacuous": 0}
    assert blind.summary(scores) == counts
    assert "by_seven: rank None; named factor" in capsys.readouterr().out
    with pytest.raises(SpecError, match=r"scores\.json of an earlier time"):
        blind.main([str(folder), "--once"])


@pytest.mark.parametrize("off", ["faults.yaml", "expected.yaml", "dumps"])
def test_a_set_that_does_not_fit_together_is_refused(folder, off):
    if off == "dumps":
        (folder / "dumps/faults/sign").rename(folder / "dumps/faults/other")
    else:
        content = yaml.safe_load((folder / off).read_text())
        kept = content[1:] if isinstance(content, list) else {"sign": content["sign"]}
        (folder / off).write_text(yaml.safe_dump(kept))
    with pytest.raises(SpecError, match="not in all"):
        blind.score(folder)


@pytest.mark.parametrize(
    ("expected", "right"),
    [
        ({"kind": "mask"}, True),
        ({"kind": "shift"}, False),
        ({"kind": "mask", "stage": "loss"}, False),
        ({"kind": "mask", "words": ["TOOL", "trains"]}, True),
        ({"kind": "mask", "words": ["padding"]}, False),
    ],
)
def test_a_cause_is_right_by_kind_stage_and_words(expected, right):
    cause = {"kind": "mask", "stage": "coefficients", "description": "every token trains, also what a tool wrote"}
    assert blind.is_right(cause, [{"kind": "no such kind"}, expected]) is right


def test_make_writes_the_dumps_where_none_are_kept(folder):
    (folder / "dumps").rename(folder / "kept")
    text = "import shutil, sys\nfrom pathlib import Path\n"
    text += "shutil.copytree(Path(__file__).parent / 'kept', sys.argv[1])\n"
    (folder / "make.py").write_text(text)
    with blind.dumps_of(folder) as dumps:
        assert {path.name for path in (dumps / "faults").iterdir()} == set(FAULTS)


def test_readme_and_guide_state_the_scores_of_the_one_time():
    scores = json.loads((blind.FOLDER / "set1/scores.json").read_text())
    found = blind.summary(scores)
    page = " ".join((blind.FOLDER / "README.md").read_text().split())
    guide = " ".join((blind.FOLDER.parents[2] / "docs/guides/check-a-step.md").read_text().split())
    faults, clean = found["faults"], found["clean"]
    assert f"first {found['first']} of {faults}, in three {found['in_three']}, {found['differs']} differ" in page
    assert f"accused {found['accused']} of {clean}" in page
    assert f"named {found['first']} of {faults} first and saw all {found['differs']}" in guide
    assert f"accused {found['accused']} of {clean} dumps" in guide
