"""Talking to torchx: no signal handler replaced, and nothing asked about a job that has ended."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from torchx import specs

from workbench.errors import LaunchError
from workbench.launch import jobs


def app(*command):
    role = specs.Role(name="trainer", image="", entrypoint=command[0], args=list(command[1:]), num_replicas=1,
                      resource=specs.Resource(cpu=1, gpu=0, memMB=64))
    return specs.AppDef(name="job", roles=[role])


@pytest.fixture
def wait():
    import time

    def wait(job):
        until = time.monotonic() + 20
        while job.poll() == "running":
            assert time.monotonic() < until
            time.sleep(0.02)
        return job.poll()
    return wait


def test_signal_handlers_stay_as_they_were(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    jobs._runner.cache_clear()
    jobs.submit(app("true"), tmp_path).cancel()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(("command", "expected"), [("true", "succeeded"), ("false", "failed")])
def test_a_job_ends_and_says_how(tmp_path, wait, command, expected):
    assert wait(jobs.submit(app(command), tmp_path)) == expected


def test_an_ended_job_is_never_signalled_again(tmp_path, wait, monkeypatch):
    job = jobs.submit(app("true"), tmp_path)
    wait(job)
    signalled = []
    monkeypatch.setattr(os, "killpg", lambda *arguments: signalled.append(arguments))
    assert job.poll() == "succeeded"
    job.cancel()
    jobs._runner().close()  # what a scheduler does when it is deleted
    assert signalled == []


def test_cancel_stops_the_process(tmp_path):
    job = jobs.submit(app(sys.executable, "-c", "import time; time.sleep(60)"), tmp_path)
    assert job.poll() == "running"
    job.cancel()
    assert job.poll() == "cancelled"


# torchx leaves its log files open when a job does not start
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_cannot_start_is_said_in_words(tmp_path):
    with pytest.raises(LaunchError, match="start job job"):
        jobs.submit(app("/no/such/program"), tmp_path)


def test_the_output_of_the_agent_can_be_read(tmp_path, wait):
    wait(jobs.submit(app(sys.executable, "-c", "import sys; sys.exit('no port for me')"), tmp_path))
    assert "no port for me" in jobs.agent_output(tmp_path)
