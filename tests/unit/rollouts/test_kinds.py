"""Files that can be imported, told from others by name, without torch."""

import subprocess
import sys

import pytest

from workbench.errors import SpecError
from workbench.rollouts.importers import _READERS
from workbench.rollouts.kinds import SUFFIXES, check_importable


def test_they_are_those_that_have_a_reader():
    assert set(SUFFIXES) == set(_READERS)


@pytest.mark.parametrize(
    ("name", "folder", "found"),
    [
        ("a.pkl", False, "suffix '.pkl'"),
        ("gone.jsonl", None, "no such file"),
        ("shards.jsonl", True, "a folder with part-0.jsonl, part-1.jsonl"),
        ("dataset", True, "a folder with part-0.jsonl"),
    ],
)
def test_others_are_refused_with_what_is_there(tmp_path, name, folder, found):
    path = tmp_path / name
    if folder:
        path.mkdir()
        for number in range(2):
            (path / f"part-{number}.jsonl").touch()
    elif folder is False:
        path.touch()
    with pytest.raises(SpecError) as caught:
        check_importable(path)
    assert caught.value.parts["found"].startswith(found)
    assert all(suffix in caught.value.parts["rule"] for suffix in SUFFIXES)


def test_a_file_of_a_kind_is_none_of_them(tmp_path):
    (tmp_path / "a.npz").touch()
    assert check_importable(tmp_path / "a.npz") is None


def test_no_torch_is_needed():
    code = "import sys, workbench.rollouts.kinds, workbench.systems.translate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
