"""Which files of tests start first where several workers share them."""

from types import SimpleNamespace

from tests.helpers.long_first import LONG, pytest_collection_modifyitems, pytest_configure
from workbench.records.provenance import project_root

NAMES = ["unit/a.py::x", "faults/e.py::x", "parity/b.py::x", "unit/a.py::y", "parity/d.py::x", "notebooks/c.py::x"]
NAMES = [f"tests/{name}" for name in NAMES]


def ordered(**config):
    items = [SimpleNamespace(nodeid=name) for name in NAMES]
    pytest_collection_modifyitems(SimpleNamespace(**config), items)
    return [item.nodeid for item in items]


def test_a_worker_begins_with_what_is_long_and_keeps_the_order_in_every_part():
    assert ordered(workerinput={}) == [NAMES[number] for number in (5, 2, 4, 1, 0, 3)]


def test_alone_nothing_moves():
    assert ordered() == NAMES


def test_xdist_keeps_the_order_of_the_workers():
    option = SimpleNamespace(loadscopereorder=True)
    pytest_configure(SimpleNamespace(option=option))
    assert option.loadscopereorder is False
    pytest_configure(SimpleNamespace(option=(without := SimpleNamespace())))
    assert vars(without) == {}, "an older xdist has no such option"


def test_the_long_folders_exist():
    assert [folder for folders in LONG for folder in folders if not (project_root() / folder).is_dir()] == []
