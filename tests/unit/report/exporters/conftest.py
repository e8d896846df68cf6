"""Runs that every tracker is given, and a watch on the network while it writes them."""

from __future__ import annotations

import contextlib
import math
import socket
from pathlib import Path

import psutil
import pytest

from tests.helpers.hand_made import make_run
from workbench.report.exporters.export import export_runs

WATCH = """
import os, socket
_connect, _look_up = socket.socket.connect, socket.getaddrinfo
def _note(what):
    with open(os.environ["WATCHED_NETWORK"], "a") as file:
        file.write(f"{what}\\n")
def connect(self, address):
    if self.family != socket.AF_UNIX:
        _note(address)
    return _connect(self, address)
def getaddrinfo(host, *more, **named):
    _note(host)
    return _look_up(host, *more, **named)
socket.socket.connect, socket.getaddrinfo = connect, getaddrinfo
"""
"""Notes every name that is looked up and every connection that is not to this machine's own files."""


@pytest.fixture(scope="package")
def runs(tmp_path_factory):
    """One that succeeded, with every kind of number; one that failed; one that never began."""
    parity = tmp_path_factory.mktemp("exporters") / "parity"
    odd = [
        {"step": 0, "loss/total/sum": 0.1 + 0.2, "odd/one/max": math.nan, "gradient_norms": {"a.weight": 1e-300}},
        {"step": 5, "loss/total/sum": -1e300, "odd/one/max": math.inf, "gradient_norms": {"a.weight": 2.0}},
        {"step": 6, "loss/total/sum": 2.0, "odd/one/max": -math.inf, "text": "cpu"},
    ]
    return [
        make_run(parity, "cp2", records=odd, layout={"cp": 2}, faults=["shift"]),
        make_run(parity, "tp2", state="failed", done=1, layout={"tp": 2}, rank=1, error=ValueError("no <b>good</b>")),
        make_run(parity, "one_rank", state="cancelled", done=0),
    ]


@pytest.fixture(scope="package")
def exported(runs, tmp_path_factory):
    """Export the runs to a tracker once.

    Gives its folder, what was said, what a second time said, what was asked of the network, and processes left.
    """
    done: dict[str, tuple] = {}

    def export(to: str) -> tuple[Path, list, list, str, list]:
        if to not in done:
            folder, watch = tmp_path_factory.mktemp(to), tmp_path_factory.mktemp("watch")
            (watch / "sitecustomize.py").write_text(WATCH)
            network = watch / "network"
            network.touch()
            with pytest.MonkeyPatch.context() as patch, _proxy() as (address, was_asked):
                for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
                    patch.setenv(name, address)  # Go programs too go through it
                patch.setenv("PYTHONPATH", str(watch))
                patch.setenv("WATCHED_NETWORK", str(network))
                # the user's own settings, which name accounts and servers, must not be heard
                patch.setenv("WANDB_MODE", "online")
                patch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
                patch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:9?write_token=x")
                patch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
                first = export_runs(runs, to=to, folder=folder, project="bench")
                again = export_runs(runs, to=to, folder=folder, project="bench")
                done[to] = folder, first, again, network.read_text() + was_asked(), _left(network)
        return done[to]

    return export


def _left(network: Path) -> list[str]:
    """Processes that inherited the environment of the export, whatever became of their parents."""
    result = psutil.process_iter(["name", "environ"])
    return [each.info["name"] for each in result if (each.info["environ"] or {}).get("WATCHED_NETWORK") == str(network)]


@contextlib.contextmanager
def _proxy():
    """The address of a proxy that never responds, and whether it was contacted."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)

        def was_asked() -> str:
            with contextlib.suppress(BlockingIOError):
                server.accept()[0].close()
                return "the proxy"
            return ""

        yield f"http://127.0.0.1:{server.getsockname()[1]}", was_asked
