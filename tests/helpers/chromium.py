"""The browser of the tests: Debian's Chromium, driven by playwright."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from workbench.cli.doctor import BROWSERS

if TYPE_CHECKING:
    from playwright.sync_api import Browser

LIBRARY = "libatomic.so.1"
"""Of playwright's driver, a node; on Debian it comes with gcc, or with the package libatomic1."""


def missing() -> str:
    """Debian's packages that the browser needs and this machine lacks, "" if it has them."""
    packages = [] if any(map(shutil.which, BROWSERS)) else ["chromium"]
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        packages.append("libatomic1")
    return " ".join(packages)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Start it, or skip the test."""
    if packages := missing():
        pytest.skip(f"no Chromium here, or no driver for it: apt-get install {packages}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=next(filter(None, map(shutil.which, BROWSERS))),
            args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"],
        )
        yield browser
        browser.close()
