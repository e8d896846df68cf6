import pytest

from tests.helpers.comparisons import layout_parity
from workbench.compare.comparison import Comparison
from workbench.errors import RecordError


def test_saved_and_read_back_is_the_same(tmp_path):
    comparison = layout_parity()
    comparison.save(tmp_path / "comparison.json")
    assert Comparison.load(tmp_path / "comparison.json") == comparison
    assert list(tmp_path.iterdir()) == [tmp_path / "comparison.json"]


def test_a_damaged_file_is_refused_by_name(tmp_path):
    layout_parity().save(tmp_path / "comparison.json")
    text = (tmp_path / "comparison.json").read_text()
    (tmp_path / "comparison.json").write_text(text[: len(text) // 2])
    with pytest.raises(RecordError, match=r"comparison\.json"):
        Comparison.load(tmp_path / "comparison.json")


def test_tables_have_a_row_for_everything():
    comparison = layout_parity()
    assert list(comparison.table().index) == [c.name for c in comparison.configurations]
    assert len(comparison.parameters()) == sum(len(c.parameters) for c in comparison.configurations)
    assert len(comparison.steps()) == sum(len(c.steps) for c in comparison.configurations)


def test_only_settings_that_differ_are_shown():
    differing = layout_parity().settings_that_differ()
    assert "precision" in differing.columns
    assert all(differing[column].map(repr).nunique() > 1 for column in differing.columns)


def test_an_unknown_configuration_is_refused_with_the_known_ones():
    comparison = layout_parity()
    with pytest.raises(RecordError, match=comparison.configurations[0].name):
        comparison["nobody"]
