from pathlib import Path

import pytest

from tests.helpers.memory import folder_for_temporary_files


def test_there_is_a_folder_where_there_is_memory(tmp_path):
    first, second = (Path(folder_for_temporary_files(tmp_path, least=1)) for _ in range(2))
    assert first != second
    assert first.parent == second.parent == tmp_path
    assert first.is_dir()


@pytest.mark.parametrize(("shared", "least"), [("", 2**60), ("nowhere", 0)], ids=["too little", "no such file system"])
def test_there_is_none_where_there_is_not(shared, least, tmp_path):
    assert folder_for_temporary_files(tmp_path / shared, least) is None
    assert not list(tmp_path.iterdir())
