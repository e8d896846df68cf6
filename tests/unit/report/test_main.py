"""python -m workbench.report: one figure of a saved comparison as a file."""

import pytest

from workbench.report.__main__ import main


@pytest.mark.parametrize("figure", ["verdicts", "loss_by_step"])
def test_a_saved_comparison_becomes_an_svg(figure, comparison, tmp_path):
    comparison.save(tmp_path / "comparison.json")
    out = main([str(tmp_path), str(tmp_path / "docs" / "out.svg"), "--figure", figure])
    assert out == tmp_path / "docs" / "out.svg"
    first = out.read_bytes()
    assert first.startswith(b"<?xml")
    assert main([str(tmp_path), str(out), "--figure", figure]).read_bytes() == first
