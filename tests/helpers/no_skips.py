"""A pytest plugin: with WORKBENCH_CI=1 a skipped test fails, unless it waits for a GPU.

A suite that skips what it cannot run looks green on a machine that lost its browser.
"""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    waits_for_gpu = item.get_closest_marker("gpu") or item.get_closest_marker("gpus")
    if not waits_for_gpu:
        refuse_skip(report, os.environ)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    refuse_skip(report, os.environ)
    return report


def refuse_skip(report, environment):
    """Turn a skip into a failure where skips are not allowed; an expected failure is not a skip."""
    if environment.get("WORKBENCH_CI") != "1" or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"skipped where every test has to run (WORKBENCH_CI=1): {reason}"
