"""A process that has torch loaded already and forks a copy of itself for every run that it is asked for.

A program, not a module to import things from: `processes` starts it by its path and talks to it through standard input,
which is one end of a socket pair. It imports nothing of the workbench, so that every copy imports the workbench as it
is on disk then, edits included.

Why not `multiprocessing`'s forkserver: it runs the caller's main module again in every child (a script without a
guard would start itself again, and a test its test runner), there is one for everybody in a process with whatever
preload the first one chose, and its children are watched by nobody but the caller.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys

READY = b"r"
"""Said once, when everything is loaded."""

LOOK_FOR_PARENT_S = 1.0


def main() -> None:
    """Load the modules that the arguments name, then fork for every connection that comes in."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is loaded stays, and a collection in a copy touches none of its pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # copies that have ended leave no zombie
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    control.sendall(READY)
    control.settimeout(LOOK_FOR_PARENT_S)
    while os.getppid() == parent:
        try:
            said, connections, _, _ = socket.recv_fds(control, 1, 1)
        except TimeoutError:
            continue
        if not said:
            return  # whoever started us has gone, or wants no more
        if os.fork() == 0:
            control.close()
            _be_a_copy(connections[0])
        os.close(connections[0])


def _be_a_copy(connection: int) -> None:
    """Start the ranks of one run, and never come back."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with socket.socket(fileno=connection) as peer:
            from_here = _path_of(peer)
            sys.path[:] = [*from_here, *(entry for entry in sys.path if entry not in from_here)]
            importlib.import_module("workbench.launch.forks").serve(peer)
        code = 0
    finally:
        os._exit(code)


def _path_of(peer: socket.socket) -> list[str]:
    """The folders that the workbench and its worker are imported from, which come first, in a line of their own."""
    line = b""
    while not line.endswith(b"\n"):
        line += peer.recv(1) or b"\n"
    return line.decode().rstrip("\n").split(os.pathsep)


if __name__ == "__main__":
    main()
