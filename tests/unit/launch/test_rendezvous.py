"""Two processes of this machine connect, or the reason is reported, and neither is left."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers import warm
from tests.helpers.stand_in import stand_in
from workbench.errors import LaunchError
from workbench.launch import rendezvous
from workbench.launch.rendezvous import check_rendezvous


def test_two_ranks_connect_and_report_their_torch(monkeypatch):
    import torch

    warm.start_from(monkeypatch, rendezvous)
    facts = check_rendezvous(timeout_s=120)
    assert facts["torch"] == str(torch.__version__)
    assert facts["gloo"] is True
    assert len(facts["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert 0 < facts["met_s"] < 60


class TestWithoutLuck:
    @pytest.fixture
    def rank(self, monkeypatch):
        """In place of a rank, a little program of ours; gives the processes that were started."""

        def replace(program):
            started = []

            def start(command, **named):
                assert command[1:4] == ["-P", "-m", "workbench.launch.rendezvous"]
                started.append(subprocess.Popen([sys.executable, "-c", program], **named))
                return started[-1]

            monkeypatch.setattr(rendezvous, "subprocess", stand_in(subprocess, Popen=start))
            return started

        return replace

    def test_the_last_line_of_each_rank_is_reported(self, rank):
        started = rank("import os, sys; print('much')\nsys.exit('/home/me/lib.py: no interface ' + os.environ['RANK'])")
        with pytest.raises(LaunchError, match=r"rank 0: \.\.\./lib\.py: no interface 0; rank 1: ") as caught:
            check_rendezvous(timeout_s=120)
        assert "GLOO_SOCKET_IFNAME" in caught.value.parts["fix"]
        assert [process.returncode for process in started] == [1, 1]

    def test_ranks_that_wait_for_ever_are_ended(self, rank):
        started = rank("import time; time.sleep(60)")
        with pytest.raises(LaunchError, match="no end after 1 s"):
            check_rendezvous(timeout_s=1)
        assert [process.returncode for process in started] == [-9, -9]
