"""The saved score of diagnose covers every fault and follows from its reports, and the page matches it."""

import hashlib
import importlib.util
import itertools
import json
import re
from pathlib import Path

import pytest
import yaml

from workbench.diagnose.diagnosis import CAUSES
from workbench.faults import fault_names, load_fault

FOLDER = Path(__file__).parents[2] / "experiments/diagnosis"
PRECISIONS = ("float64", "float32", "bfloat16")
NAMES = [name for name in fault_names() if load_fault(name).changes_numbers]
EXPECTED = yaml.safe_load((FOLDER / "expected.yaml").read_text())


@pytest.fixture(scope="module")
def results():
    return json.loads((FOLDER / "results.json").read_text())


@pytest.fixture(scope="module")
def unseen():
    return json.loads((FOLDER / "unseen.json").read_text())


def module_of_the_page():
    result = importlib.util.spec_from_file_location("page", FOLDER / "page.py")
    module = importlib.util.module_from_spec(result)
    result.loader.exec_module(module)
    return module


def test_the_saved_page_is_the_page_of_the_saved_results(results, unseen):
    assert module_of_the_page().page(results, unseen) == (FOLDER / "report.md").read_text()


def test_the_page_reports_unseen_faults_from_their_first_record(results, unseen):
    page = module_of_the_page().page
    assert "When they were unseen: first 37 of 44" in page(results, unseen)
    worse = unseen | {"shown": [row | {"rank": None} for row in unseen["shown"]]}
    assert "When they were unseen: first 0 of 44" in page(results, worse)
    today = results | {"shown": [row | {"rank": 1} for row in results["shown"]]}
    assert "When they were unseen: first 37 of 44" in page(today, unseen)


def test_the_stored_rows_of_unseen_faults_match_their_report(unseen):
    blind, report = (FOLDER / "blind.txt").read_text().split(), (FOLDER / "unseen.md").read_text()
    rows = unseen["shown"]
    assert sorted((row["fault"], row["precision"]) for row in rows) == sorted(itertools.product(blind, PRECISIONS))
    assert all(row["blind"] for row in rows)
    assert re.findall(r"\b[0-9a-f]{64}\b", report) == [unseen["diagnose_sha256"]]
    assert [row["expected"] for row in rows] == [EXPECTED[row["fault"]] for row in rows]
    scored = [row for row in rows if "right" not in row["class"]]
    for precision in PRECISIONS:
        here = [row for row in scored if row["precision"] == precision]
        first, three = (sum(row["rank"] in range(1, most + 1) for row in here) for most in (1, 3))
        assert (
            f"| unseen | {precision} | {len(here)} | {first} ({first / len(here):.1%}) | "
            f"{three} ({three / len(here):.1%}) |" in report
        )
    told = {(row["fault"], row["precision"]): row for row in scored if row["rank"] != 1}
    missed = re.findall(r"^\| (\w+)\* \| (\w+) \| (\w+) \| .* \| (\w+) [\d.]+", report, re.MULTILINE)
    assert {(name, precision): (place, cause) for name, precision, place, cause in missed} == {
        key: (str(row["rank"] or "none"), row["causes"][0][0]) for key, row in told.items()
    }


def test_every_fault_has_expected_causes_that_there_are():
    assert set(EXPECTED) == set(NAMES)
    assert {cause for causes in EXPECTED.values() for cause in causes} <= {cause.name for cause in CAUSES}


def test_every_fault_is_scored_in_every_precision(results):
    shown = results["shown"]
    assert sorted((row["fault"], row["precision"]) for row in shown) == sorted(itertools.product(NAMES, PRECISIONS))
    assert results["expected_sha256"] == hashlib.sha256((FOLDER / "expected.yaml").read_bytes()).hexdigest()
    assert [row["expected"] for row in shown] == [EXPECTED[row["fault"]] for row in shown]


def test_a_rank_follows_from_the_class_and_the_reported_causes(results, unseen):
    for row in (*results["shown"], *unseen["shown"]):
        assert row["fault"] in row["class"], row
        right = {cause for name in row["class"] for cause in EXPECTED.get(name, ["no_difference"])}
        places = [place for place, (name, _) in enumerate(row["causes"], 1) if name in right]
        assert row["rank"] == (places[0] if places else None), row
        scores = [score for _, score in row["causes"]]
        assert scores == sorted(scores, reverse=True), row


def test_in_float64_every_fault_is_seen(results):
    unseen = [row["fault"] for row in results["shown"] if row["precision"] == "float64" and "right" in row["class"]]
    assert unseen == []


def test_the_unseen_faults_stay_the_unseen_ones(results):
    blind = (FOLDER / "blind.txt").read_text().split()
    assert sorted({row["fault"] for row in results["shown"] if row["blind"]}) == sorted(blind)
    assert len(blind) >= 44, "of the guide's figure; faults that are added since are known to diagnose"


def test_every_fault_that_hides_was_tried_where_it_does(results):
    hiding = [name for name in NAMES if load_fault(name).hidden_in is not None]
    result = [(row["fault"], row["precision"]) for row in results["hidden"]]
    assert sorted(result) == sorted(itertools.product(hiding, PRECISIONS))
    assert [row["equal"] for row in results["hidden"]] == [
        row["causes"][0][0] == "no_difference" for row in results["hidden"]
    ]


def test_two_hundred_correct_pairs_were_compared(results):
    pairs = results["pairs"]
    assert [row["pair"] for row in pairs] == list(range(200))
    assert {row["precision"] for row in pairs} == {"float32", "bfloat16"}
    assert all(row["layouts"][0] != row["layouts"][1] for row in pairs)
    assert [row["equal"] for row in pairs] == [row["causes"][0][0] == "no_difference" for row in pairs]


@pytest.mark.parametrize(
    "name", ["results.json", "report.md", "unseen.json", "unseen.md", "expected.yaml", "blind.txt"]
)
def test_nothing_saved_names_a_machine(name):
    assert re.findall(r"/(?:home|root|tmp|work|opt)/[\w./-]*", (FOLDER / name).read_text()) == []


def test_docs_match_the_records_of_diagnose(results):
    readme, concepts, guide = (
        " ".join((FOLDER.parents[1] / page).read_text().split())
        for page in ("README.md", "docs/concepts.md", "docs/guides/diagnose.md")
    )
    unseen = [row for row in json.loads((FOLDER / "unseen.json").read_text())["shown"] if row["precision"] == "float64"]
    today = [row for row in results["shown"] if row["precision"] == "float64"]
    for page in (readme, concepts):
        assert f"{len(fault_names())} known bugs of the field" in page
    assert f"{len(unseen)} of {len(today)} faults were written" in guide
    assert f"true cause of {sum(row['rank'] == 1 for row in unseen)} of {len(unseen)} first in float64" in guide
    first, in_three = (sum((row["rank"] or 9) <= most for row in today) for most in (1, 3))
    assert f"Of all {len(today)}, known since, it names {first} first and {in_three} in its first three" in guide
    missed = [row["fault"] for row in today if (row["rank"] or 9) > 3]
    assert missed == ["router_in_bfloat16"]
    assert "`router_in_bfloat16`" in guide
    assert f"{len(results['pairs'])} pairs of right runs (float32 and bfloat16) are never accused" in guide
    assert all(row["equal"] for row in results["pairs"])
