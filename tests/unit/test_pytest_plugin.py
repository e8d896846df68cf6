"""The fixtures of the plugin, as a user's own test session sees them: one with a page for each failed verdict."""

import pytest

from tests.helpers import warm
from workbench.errors import VerdictError
from workbench.pytest_plugin import _write_page

pytest_plugins = ["pytester"]

TESTS = """
from workbench import Record, RecordedStep

ONE = Record({"cp": 2}, [RecordedStep(0, loss=0.5, gradient_norms={"a": 1.0, "b": 2.0})], name="one")
TWO = Record({"cp": 2}, [RecordedStep(0, loss=0.5, gradient_norms={"a": 0.5, "b": 1.0})], name="two")


def test_same(assert_agrees):
    assert_agrees(ONE, ONE)


def test_half(assert_agrees):
    assert_agrees(TWO, ONE)


def test_other_failures_have_no_page():
    assert False


def test_fixtures_are_the_public_functions(assert_agrees, assert_proved, assert_sensitive):
    import workbench as wb

    assert (assert_agrees, assert_proved, assert_sensitive) == (wb.assert_agrees, wb.assert_proved, wb.assert_sensitive)
"""


@pytest.fixture
def session(pytester, monkeypatch):
    """Run a user's tests in a process of their own, with this plugin alone, however the package is installed."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(TESTS)

    def run(*more):
        base = f"--basetemp={pytester.path / 'base'}"
        return pytester.run(warm.python(), "-m", "pytest", base, "-p", "workbench.pytest_plugin", *more)

    return run


def test_a_failed_verdict_has_a_page(session, pytester):
    result = session("--workbench-pages", "pages")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["*two agrees with one*", "*over_cp*", "*page: pages/*test_half.html"])
    [page] = (pytester.path / "pages").iterdir()
    text = page.read_text()
    assert "over_cp" in text
    assert "<pre>two against one" in text
    assert "<div" in text  # the drawing that a notebook shows


def test_without_a_folder_no_page_is_written(session, pytester):
    result = session()
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.no_fnmatch_line("*page:*")
    assert not list(pytester.path.rglob("*.html"))


def test_the_name_of_a_test_is_no_path_and_no_markup(tmp_path):
    page = _write_page("tests/a.py::test[<b>../../x" + "y" * 300 + "]", "what <i> was found", tmp_path / "pages")
    assert page.parent == tmp_path / "pages"
    assert len(page.name) < 150
    assert "<b>" not in page.read_text()
    assert "what &lt;i&gt; was found" in page.read_text()


def test_an_error_without_a_verdict_has_none():
    assert VerdictError("a").judged is None
    assert VerdictError("a").about(3).judged == 3
