"""Kernels below are compiled where a GPU is and interpreted elsewhere."""

from __future__ import annotations

import os

import numpy
import pytest

from tests.helpers.interpreted_triton import repair_interpreter

if os.environ.get("TRITON_INTERPRET") == "1":
    repair_interpreter()


@pytest.fixture(autouse=True)
def _numbers_of_a_gpu():
    """Overflow and not-a-number are values on a GPU, and warnings in numpy, which interprets."""
    with numpy.errstate(all="ignore"):
        yield
