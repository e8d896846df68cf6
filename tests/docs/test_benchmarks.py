"""docs/benchmarks.md is the page of the saved records."""

from experiments import summary


def test_the_page_is_current():
    assert summary.PAGE.read_text() == summary.page(), "python -m experiments.summary writes it"


def test_the_page_follows_its_records(monkeypatch):
    record = summary._record("benchmarks/verify.json")
    record["runs"]["torch_sum"]["over_one_rank"] = 4.567
    monkeypatch.setattr(summary, "_record", lambda name: record)
    assert "at most 4.57 times as far" in summary.verify()
