"""A process that has torch loaded already and forks a copy of itself for every requested run.

A program, not a module to import from: `processes` starts it by its path, with a listening socket, to which a launcher
or the process of a torchx job connects for every run. Its standard input is one end of a socket pair: it says there
that it is ready, and leaves when the other end is closed. It imports nothing of the workbench, so that every copy
imports the workbench as it is on disk then, edits included.

Why not `multiprocessing`'s forkserver: it runs the caller's main module again in every child (a script without a
guard would start itself again, and a test its test runner), a process has only one, with the preload of its first
user, and its children are watched by the caller alone.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys

READY = b"r"
"""Sent once, when everything is loaded."""

PARENT_POLL_S = 1.0


def main() -> None:
    """Load libraries, then fork for every incoming connection.

    The first argument is the number of the listening socket. The others name modules, or module:function=argument, a
    call that fills a cache.
    """
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # its passes over what is being loaded find next to nothing
    for name in sys.argv[2:]:
        module, _, call = name.partition(":")
        loaded = importlib.import_module(module)
        if call:
            function, _, argument = call.partition("=")
            getattr(loaded, function)(argument)
    gc.collect()
    gc.freeze()  # a collection in a copy then touches no page of the loaded modules
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended copies leave no zombie
    control, listener = socket.socket(fileno=os.dup(0)), socket.socket(fileno=int(sys.argv[1]))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    control.sendall(READY)
    while os.getppid() == parent:
        readable, _, _ = select.select([control, listener], [], [], PARENT_POLL_S)
        if control in readable:
            break  # the parent is gone, or has closed its end
        if listener in readable:
            connection, _ = listener.accept()
            if os.fork() == 0:
                control.close()
                listener.close()
                _serve_run(connection)
            connection.close()
    with contextlib.suppress(OSError):  # a parent that ends in order has removed them
        address = listener.getsockname()
        os.unlink(address)  # noqa: PTH108 (no import for one name)
        os.rmdir(os.path.dirname(address))  # noqa: PTH106, PTH120


def _serve_run(peer: socket.socket) -> None:
    """Start the ranks of one run; never returns."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with peer:
            folders = _path_of(peer)
            sys.path[:] = [*folders, *(entry for entry in sys.path if entry not in folders)]
            importlib.import_module("workbench.launch.forks").serve(peer)
        code = 0
    finally:
        os._exit(code)


def _path_of(peer: socket.socket) -> list[str]:
    """The folders that the workbench and its worker are imported from: the first line of a connection."""
    line = b""
    while not line.endswith(b"\n"):
        line += peer.recv(1) or b"\n"
    return line.decode().rstrip("\n").split(os.pathsep)


if __name__ == "__main__":
    main()
