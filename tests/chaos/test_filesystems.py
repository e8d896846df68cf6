"""A run on a file system that is full, has no inode left or becomes read-only keeps what its writer was told."""

from __future__ import annotations

import random

import pytest

from tests.chaos import filesystems


@pytest.mark.parametrize("kind", filesystems.KINDS)
def test_what_was_recorded_survives_a_file_system_that_fails(tmp_path, kind):
    try:
        outcomes = [filesystems.tell(tmp_path / str(seed), kind, random.Random(seed)) for seed in range(6)]
    except filesystems.Unavailable as error:
        pytest.skip(str(error))
    assert "refused" in outcomes
