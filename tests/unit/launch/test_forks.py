"""The agent of forked ranks, as far as it is no process of its own; `test_processes` runs it whole."""

from __future__ import annotations

import signal
import sys
import types

import pytest
import torch

from tests.helpers.stand_in import stand_in
from workbench.errors import LaunchError
from workbench.launch import forks


def worker_that(ends):
    def main():
        if isinstance(ends, BaseException):
            raise ends

    return types.SimpleNamespace(main=main)


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (None, 0),
        (SystemExit(), 0),
        (SystemExit(7), 7),
        (SystemExit("no"), 1),
        (ValueError("no"), 1),
        (KeyboardInterrupt(), 1),
    ],
)
def test_a_rank_ends_as_the_interpreter_would_have(ends, code, capsys):
    assert forks._exit_code(worker_that(ends)) == code
    assert ("no" in capsys.readouterr().err) == ("no" in str(ends))


def test_ranks_are_not_forked_after_cuda_is_initialised(monkeypatch):
    forks._refuse_initialised_cuda()  # torch is loaded here, and that is no reason
    initialised = stand_in(torch, cuda=stand_in(torch.cuda, is_initialized=lambda: True))
    monkeypatch.setattr(forks, "sys", stand_in(sys, modules=sys.modules | {"torch": initialised}))
    with pytest.raises(LaunchError, match="CUDA is initialised already"):
        forks._refuse_initialised_cuda()


def test_signals_of_the_agent_are_not_for_ranks():
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGCHLD)}
    try:
        forks._reset_signals()
        assert [signal.getsignal(number) for number in before] == [signal.SIG_DFL, signal.SIG_DFL]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
