"""Searches without their second half."""

import pytest

from workbench.prove import searching


@pytest.fixture
def unshrunk(monkeypatch):
    """Failures stay as they were found: for tests of the verdict, since most steps of a search are for shrinking."""
    monkeypatch.setattr(searching, "TRIES", 0)
