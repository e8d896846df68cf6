"""One comparison for all tests of the layer; it is frozen data, so tests share it."""

import pytest

from tests.helpers.comparisons import layout_parity


@pytest.fixture(scope="session")
def comparison():
    return layout_parity()
