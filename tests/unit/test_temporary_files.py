import os
from pathlib import Path

import pytest

from tests.helpers.memory import PREFIX, YOUNG_S, folder_for_temporary_files


@pytest.fixture
def make(tmp_path):
    """Make a folder as a run of tests does, which ends with the test."""
    locks = []

    def make_one():
        folder, lock = folder_for_temporary_files(tmp_path, least=1)
        locks.append(lock)
        return Path(folder)

    yield make_one
    for lock in locks:
        os.close(lock)


def test_there_is_a_folder_where_there_is_memory(tmp_path, make):
    first, second = make(), make()
    assert first != second
    assert first.parent == second.parent == tmp_path
    assert first.is_dir()


@pytest.mark.parametrize(("shared", "least"), [("", 2**60), ("nowhere", 0)], ids=["too little", "no such file system"])
def test_there_is_none_where_there_is_not(shared, least, tmp_path):
    assert folder_for_temporary_files(tmp_path / shared, least) is None
    assert not list(tmp_path.iterdir())


def test_folders_of_runs_that_were_killed_are_removed_and_those_of_others_stay(tmp_path, make):
    begun_long_ago = -2 * YOUNG_S
    living = make()
    killed, young, unlike = (tmp_path / name for name in (f"{PREFIX}killed", f"{PREFIX}young", "wb-warm"))
    for folder in (killed, young, unlike):
        (folder / "runs").mkdir(parents=True)
    for folder in (living, killed, unlike):
        at = folder.stat().st_mtime + begun_long_ago
        os.utime(folder, (at, at))
    made = make()
    assert {*tmp_path.iterdir()} == {living, young, unlike, made}
