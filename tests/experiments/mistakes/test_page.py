"""docs/reference/mistakes.md is the page of the saved record, and the record is of the list."""

import yaml

from experiments.mistakes.measure import FOLDER
from experiments.mistakes.page import PAGE, page
from workbench.atomic import from_json

RECORD = from_json((FOLDER / "mistakes.json").read_bytes())


def test_the_page_is_that_of_the_record():
    assert PAGE.read_text() == page(RECORD), "python -m experiments.mistakes.page writes it"


def test_the_record_is_of_the_list_and_its_sums_are_right():
    cases = [case["id"] for case in yaml.safe_load((FOLDER / "mistakes.yaml").read_text())]
    assert sorted(RECORD["entries"]) == sorted(cases)
    right = [entry for entry in RECORD["entries"].values() if not entry["problem"]]
    assert RECORD["right"] == len(right) >= 50
    assert RECORD["right_in_2_s_with_torch"] == sum(entry["seconds"] <= 2 for entry in right)


def test_what_is_not_right_is_shown_as_such():
    entry = {"seconds": 3.0, "import_torch_seconds": 2.1, "problem": "no error", "message": "", "area": "a"}
    record = RECORD | {"entries": {"a-mistake": entry}}
    assert "| a-mistake | 3.0 | 2.1 | **not right**: no error |" in page(record)
