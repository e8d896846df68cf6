"""The clusters of these tests: one of each kind a session, at the paths that this process and its children use."""

from __future__ import annotations

import pytest

from tests.slurm.cluster import Cluster, missing, running


@pytest.fixture(scope="session", params=[False, True], ids=["no_accounting", "accounting"])
def any_slurm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A cluster without accounting, then one with it."""
    yield from _cluster(tmp_path_factory, accounting=request.param)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory):
    """A cluster without accounting."""
    yield from _cluster(tmp_path_factory, accounting=False)


def _cluster(folders: pytest.TempPathFactory, *, accounting: bool):
    assert not (names := missing(accounting=accounting)), f"{', '.join(names)} missing: make test-slurm installs them"
    with running(folders.mktemp("slurm"), accounting=accounting) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _reached(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """The commands of Slurm find the cluster that a test uses; nothing of a test stays in its queue."""
    names = [name for name in ("slurm", "any_slurm") if name in request.fixturenames]
    if not names:
        yield None
        return
    cluster: Cluster = request.getfixturevalue(names[0])
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    yield cluster
    cluster.empty()
