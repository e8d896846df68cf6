"""The table of facts that several pages end with."""

from experiments.pages import provenance


def test_facts_are_sorted_and_missing_ones_are_marked():
    page = str(provenance({"device": "a <GPU>", "provenance": {"git": {"commit": "abc"}}}, minutes="1.5"))
    places = [page.index(name) for name in ("command", "device", "git.commit", "minutes")]
    assert places == sorted(places)
    assert "a &lt;GPU&gt;" in page
