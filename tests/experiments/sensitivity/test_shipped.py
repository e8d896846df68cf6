"""The comparisons of this repository are all in the table; page and guide are those of the record."""

from pathlib import Path

import pytest

from experiments.sensitivity.shipped import (
    FOLDER,
    MEASURED,
    NOT_MEASURED,
    ablation_of,
    entries,
    kind_of,
    load_record,
    main,
    rows,
)
from workbench.atomic import from_json

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs/guides/what-a-check-can-see.md"


@pytest.fixture(scope="module")
def saved():
    return load_record(), from_json((FOLDER / "sensitivity.json").read_text())


def test_every_shipped_ablation_and_notebook_is_measured_or_says_why_not():
    files = [path for path in ROOT.glob("experiments/*/*.yaml") if "\nreference:" in path.read_text()]
    names = {str(path.relative_to(ROOT)) for path in (*files, *ROOT.glob("notebooks/*.ipynb"))}
    known = {*MEASURED, *NOT_MEASURED, "experiments/layout_parity/ablation.yaml"}
    assert {name for name in names if name not in known and str(Path(name).parent) not in known} == set()


def test_every_measured_comparison_is_in_the_record_with_its_predictions(saved):
    record, _ = saved
    assert [entry["name"] for entry in record["ablations"]] == [*MEASURED]
    for entry in record["ablations"]:
        results = entry["results"]
        assert (entry["killed"], entry["admissible"]) == (sum(r["killed"] for r in results.values()), len(results))
        wrong = [name for name, result in results.items() if result["killed"] == bool(result["missing"])]
        assert wrong == entry["disagreements"]


def test_the_page_and_the_guide_are_those_of_the_record(saved, tmp_path):
    record, own = saved
    assert main(["--page", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert all(name in text for entry in entries(record, own) for name in entry["results"])
    for row in rows(record, own):
        assert "| " + " | ".join(row) + " |" in GUIDE.read_text()


@pytest.mark.parametrize(
    ("missing", "kind"),
    [
        (["no hole in a mask"], "data"),
        (["no hole in a mask", "one cp rank"], "settings"),
        (["one cp rank"], "settings"),
        (["the loss is not gmpo"], "settings"),
        (["changes reported numbers only, and the comparison judges gradients"], "a gradient"),
        ([], "nothing"),
    ],
)
def test_what_a_survivor_lacks(missing, kind):
    assert kind_of(missing) == kind


def test_a_notebook_s_ablation_is_the_one_that_it_assigns():
    ablation = ablation_of("notebooks/12_what_a_check_can_see.ipynb", ROOT)
    assert ablation["configurations"]["cp2"] == {"layout": {"cp": 2, "order": "zigzag"}}
    assert (
        ablation_of("experiments/expert_layouts/ablation.yaml", ROOT)
        == ROOT / "experiments/expert_layouts/ablation.yaml"
    )
