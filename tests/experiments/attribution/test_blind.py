"""Blind sets of gaps: a set is scored once, by the names of its factors; one that does not fit together is refused."""

import json
from pathlib import Path

import pytest
import yaml

from experiments.attribution.blind import score as blind
from tests.helpers.gaps import records
from workbench.errors import SpecError
from workbench.mismatch import attribute

ROOT = Path(__file__).parents[3]
ABOUT = [{"id": name, "size": "small"} for name in ("hot", "pair")]
EXPECTED = {"hot": ["temperature"], "pair": ["temperature", "offset by one"]}


def write(folder, given, **sampler):
    folder.mkdir(parents=True)
    (folder / "rollouts.jsonl").write_text("\n".join(json.dumps(one) for one in given))
    settings = {"trainer": {"model": "tiny-qwen3"}, "sampler": {"rollouts": "rollouts.jsonl", **sampler}}
    (folder / "attribute.yaml").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def attribute_once():
    """`attribute`, which gives equal cases one result: three of the set have the same records."""
    known = {}

    def attribute_case(case):
        key = tuple((path.name, path.read_bytes()) for path in sorted(case.iterdir()))
        if key not in known:
            known[key] = attribute(case, draws=0)
        return known[key]

    return attribute_case


@pytest.fixture
def folder(tmp_path, monkeypatch, attribute_once):
    write(tmp_path / "cases/planted/hot", records(temperature=0.7))
    write(tmp_path / "cases/planted/pair", records(temperature=0.7))
    write(tmp_path / "cases/clean/right", records())
    write(tmp_path / "cases/clean/wrong", records(temperature=0.7))
    (tmp_path / "cases/clean/damaged").mkdir()
    (tmp_path / "causes.yaml").write_text(yaml.safe_dump(ABOUT))
    (tmp_path / "expected.yaml").write_text(yaml.safe_dump(EXPECTED))
    monkeypatch.setattr(blind.wb, "attribute", attribute_once)
    return tmp_path


def test_a_set_is_scored_once(folder, capsys):
    blind.main([str(folder), "--once"])
    scores = json.loads((folder / "scores.json").read_text())
    found = blind.summary(scores)
    assert (found["singles"], found["first"], found["pairs"], found["both"], found["pairs_first"]) == (1, 1, 1, 0, 1)
    assert (found["clean"], found["accused"], found["extra"]) == (3, 2, 0)
    assert "pair: expected" in capsys.readouterr().out
    with pytest.raises(SpecError, match=r"scores\.json of an earlier time"):
        blind.main([str(folder), "--once"])


@pytest.mark.parametrize(
    ("name", "table", "text"),
    [
        (
            "set1",
            "singles named first **{first} of {singles}** (89 %), pairs with both named **{both} of {pairs}** (89 %), "
            "rest at the floor in {rest_at_floor} of 91, clean ones accused **{accused} of {clean}**",
            "{first} of {singles} single causes were named first and both of {both} of {pairs} pairs; "
            "{accused} of {clean}",
        ),
        (
            "set2",
            "singles named first **{first} of {singles}**, pairs with both named **{both} of {pairs}** (93 %), "
            "rest at the floor in {rest_at_floor} of 88, clean ones accused **{accused} of {clean}**",
            "{first} of {singles} and {both} of {pairs}, and {accused} of {clean} was accused",
        ),
    ],
)
def test_the_table_and_the_guide_have_the_scores_of_the_sets(name, table, text):
    found = blind.summary(json.loads((blind.FOLDER / name / blind.SCORES).read_text()))
    numbers = {name: found[name] for name in ("first", "singles", "both", "pairs", "rest_at_floor", "accused", "clean")}
    assert table.format(**numbers) in (blind.FOLDER / "README.md").read_text()
    guide = " ".join((ROOT / "docs/guides/trainer-and-sampler.md").read_text().split())
    assert text.format(**numbers) in guide


def test_results_of_an_interrupted_time_are_kept(folder, monkeypatch):
    keep = folder / "results.jsonl"
    first = blind.score(folder, keep=keep)
    lines = keep.read_text().splitlines()
    assert len(lines) == 5
    keep.write_text("\n".join(lines[:3]) + "\n")
    attributed = []

    def fails(case):
        attributed.append(case.name)
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(blind.wb, "attribute", fails)
    again = blind.score(folder, keep=keep)
    assert sorted(attributed) == sorted(json.loads(line)["case"].partition("/")[2] for line in lines[3:])
    assert again["planted"] == first["planted"]
    crashed = [row for row in again["clean"] if row["verdict"] == "crashed"]
    assert len(crashed) == 2
    assert all(map(blind.accused, crashed))


@pytest.mark.parametrize("off", ["causes.yaml", "expected.yaml", "cases"])
def test_a_set_that_does_not_fit_together_is_refused(folder, off):
    if off == "cases":
        (folder / "cases/planted/hot").rename(folder / "cases/planted/other")
    else:
        kept = ABOUT[1:] if off == "causes.yaml" else {"hot": EXPECTED["hot"]}
        (folder / off).write_text(yaml.safe_dump(kept))
    with pytest.raises(SpecError, match="not in all"):
        blind.score(folder)


@pytest.mark.parametrize(
    ("causes", "expected", "about", "first", "every"),
    [
        (["FP8"], ["FP8"], {}, True, True),
        (["FP8", "routes"], ["routes"], {}, False, True),
        (["FP8", "routes"], ["routes", "FP8"], {}, True, True),
        (["FP8"], ["routes", "FP8"], {}, True, False),
        (["FP8"], [["routes"], ["FP8"]], {}, True, True),
        ([], ["routes"], {}, False, False),
        ([], ["routes"], {"undecidable": True}, True, True),
        ([], ["tokenisation"], {"undecidable": True}, False, False),
    ],
)
def test_a_case_is_judged_by_names(causes, expected, about, first, every):
    row = blind.judged({"causes": causes, "open": ["routes"]}, about, expected)
    assert (row["first"], row["all"]) == (first, every)


def test_make_writes_the_cases_where_none_are_kept(folder):
    (folder / "cases").rename(folder / "kept")
    text = "import shutil, sys\nfrom pathlib import Path\n"
    (folder / "make.py").write_text(text + "shutil.copytree(Path(__file__).parent / 'kept', sys.argv[1])\n")
    with blind.cases_of(folder) as cases:
        assert sorted(path.name for path in (cases / "planted").iterdir()) == ["hot", "pair"]
