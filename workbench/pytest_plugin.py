"""A pytest plugin: tests of a user's loss, trainer and comparisons, with a page for each that fails.

Installed with the package (entry point ``pytest11``). It has three fixtures, the functions of the same names, so that a
test needs no import, and writes what a failed one found:

    def test_our_loss_means_the_same_on_every_layout(assert_proved):
        assert_proved(grpo, engine="mean")

    def test_two_ranks_train_as_one(assert_agrees):
        assert_agrees("records/two_ranks", "records/one_rank")

    def test_our_parity_check_would_see_most_bugs(assert_sensitive):
        assert_sensitive("ablation.yaml", at_least=0.6)

Nothing of the workbench is imported before a fixture is requested, and nothing else of pytest changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

OPTION = "--workbench-pages"
LONGEST = 120
"""Characters of a page's name: most file systems take 255 bytes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the folder of pages."""
    parser.getgroup("workbench").addoption(
        OPTION, metavar="DIR", help="write a page for each failed verdict of the workbench into this folder"
    )


@pytest.fixture
def assert_proved() -> Callable[..., Any]:
    """See `workbench.assert_proved`."""
    import workbench

    return workbench.assert_proved


@pytest.fixture
def assert_agrees() -> Callable[..., Any]:
    """See `workbench.assert_agrees`."""
    import workbench

    return workbench.assert_agrees


@pytest.fixture
def assert_sensitive() -> Callable[..., Any]:
    """See `workbench.assert_sensitive`."""
    import workbench

    return workbench.assert_sensitive


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write the page of a verdict that failed a test, and name it in the test's report."""
    report = yield
    judged = getattr(call.excinfo and call.excinfo.value, "judged", None)
    folder = item.config.getoption(OPTION)
    if judged is not None and folder is not None:
        report.sections.append(("workbench", f"page: {_write_page(item.nodeid, judged, Path(folder))}"))
    return report


def _write_page(test: str, judged: Any, folder: Path) -> Path:
    from markupsafe import Markup

    from workbench.atomic import write_whole
    from workbench.report.rich import as_html

    try:
        drawn = as_html(judged)
    except TypeError:  # it has no drawing
        drawn = ""
    document = Markup('<!doctype html><meta charset="utf-8"><title>{0}</title><h1>{0}</h1>{1}<pre>{2}</pre>\n')
    content = document.format(test, Markup(drawn), str(judged))
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', test)[-LONGEST:]}.html"
    write_whole(page, content.encode())
    return page
