"""Synthetic records: a gradient, a loss, tokens of three documents on two ranks."""

import pytest

from tests.helpers.hand_records import make_record


@pytest.fixture
def right():
    return make_record()
