"""The manual builds as a site without a warning, with every page in its search index."""

import os
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

pytest.importorskip("sphinx")
pytest.importorskip("myst_nb")


def test_every_page_of_the_manual_is_in_its_contents():
    contents = (ROOT / "docs/conf.py").read_text().splitlines()
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md") if "api" not in page.parts]
    missing = {str(page.with_suffix("")) for page in pages} - {*contents, "README"}
    assert not {page for page in missing if not page.startswith("_build")}


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path):
    options = ["-W", "--keep-going", "-q", "-b", "html", "-c", "docs", "-d", str(tmp_path / "doctrees")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, ".", str(tmp_path / "html")],
        cwd=ROOT,
        env=os.environ | {"DOCS_NOTEBOOKS": "off"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    index = (tmp_path / "html/searchindex.js").read_text()
    for name in (
        "docs/guides/prove",
        "notebooks/01_quickstart",
        "docs/reference/api/losses",
        "workbench/losses/README",
    ):
        assert f'"{name}"' in index, name
    assert "docs/README.html" in (tmp_path / "html/index.html").read_text()
