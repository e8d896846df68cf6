"""A pytest plugin: where several workers share the files, the long ones start first.

pytest-xdist hands out the files with most tests first, so that a file whose single test takes a minute would start
last, and one worker would wait for it. Without xdist nothing moves, and the order stays random in either part.
"""

from __future__ import annotations

import pytest

LONG = (
    ("tests/notebooks/",),
    ("tests/browser/", "tests/chaos/", "tests/unit/launch/", "tests/parity/"),
    ("tests/experiments/", "tests/faults/", "tests/unit/cli/", "tests/unit/prove/", "tests/unit/train/"),
)
"""Folders with the files that take longest: a minute; up to half of one; up to 20 s (CPU time, 2026-11-26)."""


def pytest_configure(config: pytest.Config) -> None:
    """Let pytest-xdist hand out the files in the order in which the workers collected them."""
    if hasattr(config.option, "loadscopereorder"):  # pytest-xdist 3.7 or newer
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Move what is long to the front, after pytest-randomly shuffled."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: [not item.nodeid.startswith(folders) for folders in LONG])  # stable
