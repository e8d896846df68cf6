"""A real JupyterLab for a test: settings of its own, a free port, and gone afterwards with all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import warm

TOKEN = "of-this-test"
ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = (
    "JUPYTER_CONFIG_DIR",
    "JUPYTER_DATA_DIR",
    "IPYTHONDIR",
    "JUPYTERLAB_SETTINGS_DIR",
    "JUPYTERLAB_WORKSPACES_DIR",
    "TMPDIR",
)
_SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # every cell stays on the page, also those out of sight
    "notebook-extension/tracker": {"windowingMode": "none"},
}


@dataclass(frozen=True)
class Lab:
    """A running server."""

    port: int

    def address(self, notebook: str, *, reset: bool = True) -> str:
        """Return the address of a notebook of the served folder."""
        return f"http://127.0.0.1:{self.port}/lab/tree/{notebook}?{'reset&' if reset else ''}token={TOKEN}"


@contextlib.contextmanager
def jupyterlab(served: Path, private: Path, *, start_s: float = 60.0, **environment: str) -> Iterator[Lab]:
    """Serve a folder in JupyterLab.

    Args:
        served: folder of the notebooks.
        private: folder for settings and temporary files; the user's own are not touched.
        start_s: how long it may take to answer.
        **environment: more variables for server and kernels.
    """
    folders = {name: private / name.lower() for name in _FOLDERS}
    for folder in folders.values():
        folder.mkdir(parents=True)
    # kernels are reached through files, whose names must be short: a port that was free can be taken before it is bound
    folders["JUPYTER_RUNTIME_DIR"] = Path(tempfile.mkdtemp(prefix="lab-"))
    for name, settings in _SETTINGS.items():
        path = folders["JUPYTERLAB_SETTINGS_DIR"] / f"@jupyterlab/{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(settings))
    port = _free_port()
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        f"--port={port}",
        "--ServerApp.port_retries=0",
        f"--IdentityProvider.token={TOKEN}",
        f"--ServerApp.root_dir={served}",
        "--ServerApp.disable_check_xsrf=True",
        "--KernelManager.transport=ipc",
    ]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    warm.kernels(private / "warm")
    folders["JUPYTER_PATH"] = private / "warm"
    given = os.environ | {name: str(folder) for name, folder in folders.items()} | {"PYTHONPATH": path} | environment
    with (private / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env=given, cwd=served, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait_until_it_answers(server, port, private / "server.log", start_s)
            yield Lab(port)
        finally:
            _stop(server)
            shutil.rmtree(folders["JUPYTER_RUNTIME_DIR"], ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as result:
        result.bind(("127.0.0.1", 0))
        return result.getsockname()[1]


def _wait_until_it_answers(server: subprocess.Popen[bytes], port: int, log: Path, start_s: float) -> None:
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token={TOKEN}", timeout=2).close()
            return
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not come up: {log.read_text(errors='replace')[-2000:]}")


def _stop(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the process group of the server and its kernels; SIGKILL to the rest."""
    for number, patience_s in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(patience_s)
            return
