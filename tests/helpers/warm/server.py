"""Load libraries, then fork for every client: the fork runs what the client's command line says, in its environment.

A program, not a module to import from. Arguments: the number of the listening socket, the pid of the process with
which it ends, and the libraries.
"""

import array
import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from types import ModuleType

READ_ON_IMPORT = (
    "HF_",
    "HUGGINGFACE_",
    "TRANSFORMERS_",
    "TORCH",
    "PYTORCH_",
    "TRITON_",
    "MKL_",
    "OPENBLAS_",
    "LD_",
    "MPLCONFIG",
    "MATPLOTLIB",
)
"""Prefixes of variables that the loaded libraries read while they are loaded."""

SET_BY_TORCH = ("TORCHINDUCTOR_CACHE_DIR", "TORCHELASTIC_", "TORCHX_", "TORCH_NCCL_")
"""Variables that torch and its launcher of ranks set, and that are read again at each use.

Not TORCH_ELASTIC_SHUTDOWN_TIMEOUT, which an agent sets: its ranks end with their parent, and that of a fork is another.
"""

KNOWN_BY_PID = {"workbench.cli.launcher": Path(__file__).parents[1] / "warm_launcher.py"}
"""Module whose starter looks for it under the pid that it started -> program that the interpreter runs in its place."""

POLL_S = 1.0
HIGH = 500
"""Numbers from here on for files on their way to their own number."""


def main():
    listener, owner = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    if os.fork():
        os._exit(0)  # it belongs to all workers, and is no child of the first
    began = dict(os.environ)  # libraries add to it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # while libraries are loaded, as `workbench.launch.forkserver`
    for name in sys.argv[3:]:
        module, _, call = name.partition(":")
        loaded = importlib.import_module(module)
        if call:
            function, _, argument = call.partition("=")
            getattr(loaded, function)(argument)
    gc.collect()
    gc.freeze()
    gc.enable()
    woken, waker = socket.socketpair()
    for end in (woken, waker):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(waker.fileno())
    clients = {}
    try:
        while Path(f"/proc/{owner}").exists():
            readable, _, _ = select.select([listener, woken, *clients.values()], [], [], POLL_S)
            if woken in readable:
                with contextlib.suppress(BlockingIOError):
                    woken.recv(4096)
                reap(clients)
            for pid, client in list(clients.items()):
                if client in readable:
                    pass_on(pid, client)
            if listener in readable:
                client, _ = listener.accept()
                request, files = receive(client)
                if request is None:
                    client.close()
                elif not is_warm(request, began):
                    client.sendall(f"cold {stand_in(request['arguments'])}\n".encode())
                    client.close()
                elif (pid := forked(client)) == 0:
                    signal.set_wakeup_fd(-1)
                    for other in (listener, woken, waker, client, *clients.values()):
                        other.close()
                    run(request, files)
                else:
                    clients[pid] = client
                for number in files:
                    os.close(number)
    finally:
        for pid in clients:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        shutil.rmtree(Path(listener.getsockname()).parent, ignore_errors=True)


def receive(client):
    """Return a request, None of a client that has gone, and its files."""
    head, control, _, _ = client.recvmsg(8, socket.CMSG_SPACE(250 * 4))
    numbers = array.array("i")
    for _, _, data in control:
        numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    size, text = int.from_bytes(head, "big"), b""
    while head and len(text) < size:
        if not (part := client.recv(size - len(text))):
            return None, list(numbers)
        text += part
    return (json.loads(text) if head else None), list(numbers)


def is_warm(request, began):
    """Return True if a fork does the same as a new interpreter: libraries would read the same environment."""
    mine, theirs = (
        {k: v for k, v in e.items() if k.startswith(READ_ON_IMPORT) and not k.startswith(SET_BY_TORCH)}
        for e in (began, request["environment"])
    )
    words = [word for word in request["arguments"] if word not in ("-P", "-u")] or ["-"]
    if mine != theirs or stand_in(words):
        return False
    return words[0] in ("-m", "-c") or not words[0].startswith("-")


def stand_in(words):
    """Return the program that the interpreter runs in place of a module, "" if it is to run what was asked of it."""
    return str(KNOWN_BY_PID.get(words[1], "")) if words[:1] == ["-m"] and words[1:] else ""


def forked(client):
    """Fork, and tell the client, which may have gone, so that it closes its files."""
    if pid := os.fork():
        with contextlib.suppress(OSError):
            client.sendall(b"warm\n")
    return pid


def reap(clients):
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        with clients.pop(pid) as client, contextlib.suppress(OSError):
            client.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def pass_on(pid, client):
    """Send the signals that a client got; SIGKILL where it has ended itself."""
    with contextlib.suppress(OSError):
        data = client.recv(64)
        if not data:
            os.killpg(pid, signal.SIGKILL)
        for number in data:
            os.kill(pid, number)


def run(request, files):
    code = 1
    try:
        prepare(request, files)
        execute(request["arguments"])
        code = 0
    except SystemExit as ended:
        code = ended.code
        if code is None or isinstance(code, bool):
            code = int(bool(code))
        elif not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        finish()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finish()
    os._exit(code & 255)


def finish():
    """What the interpreter does at its end."""
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()


def prepare(request, files):
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, HIGH) for number in files]
    for number in files:
        os.close(number)
    for number, place in zip(moved, request["files"], strict=True):
        os.dup2(number, place)
        os.close(number)
    os.environ.clear()
    os.environ.update(request["environment"])
    if "JPY_PARENT_PID" in os.environ:
        os.environ["JPY_PARENT_PID"] = str(os.getppid())  # a kernel ends when its parent is another process
    os.umask(request["umask"])
    os.chdir(request["folder"])
    sys.executable = request["executable"]
    tempfile.tempdir = None
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "matplotlib" in sys.modules and (backend := drawing_backend()):
        sys.modules["matplotlib"].rcParams["backend"] = backend
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED")) or "-u" in request["arguments"][:2]
    sys.stdout = sys.__stdout__ = opened(1, sys.stdout, unbuffered, line_buffering=os.isatty(1) and not unbuffered)
    sys.stderr = sys.__stderr__ = opened(2, sys.stderr, unbuffered, line_buffering=not unbuffered)


def drawing_backend():
    """What MPLBACKEND says when a program imports matplotlib; a kernel sets it before that."""
    of_a_kernel = "module://matplotlib_inline.backend_inline" if "JPY_PARENT_PID" in os.environ else ""
    return os.environ.get("MPLBACKEND") or of_a_kernel


def opened(number, stream, unbuffered, *, line_buffering):
    """A stream like the server's own, which is that of a file that it can seek in, for what the client has there."""
    raw = open(number, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115 (it lives as long as the process)
    how = {"line_buffering": line_buffering, "write_through": unbuffered}
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, **how)


def execute(arguments):
    safe = False
    while arguments[0] in ("-P", "-u"):
        safe = safe or arguments[0] == "-P"
        arguments = arguments[1:]
    sys.path[:0] = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    first, *rest = arguments
    if first == "-m":
        folder, sys.argv = str(Path.cwd()), rest
    elif first == "-c":
        folder, sys.argv = "", ["-c", *rest[1:]]
    else:
        folder, sys.argv = str(Path(first).absolute().parent), [first, *rest]
    if not safe:
        sys.path.insert(0, folder)
    if first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main_module = sys.modules["__main__"] = ModuleType("__main__")
    if first != "-c":
        main_module.__file__ = first
    source, name = (rest[0], "<string>") if first == "-c" else (Path(first).read_bytes(), first)
    exec(compile(source, name, "exec"), main_module.__dict__)


main()
