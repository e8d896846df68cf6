"""Stand for the interpreter: hand arguments, environment and open files to the server, pass signals on, end alike.

Started with -I and -S, so it takes some milliseconds. Where a fork would not do the same, that is with options of the
interpreter other than -P, -u, -c and -m, or with other variables that libraries read while they are loaded, it becomes
the interpreter itself.
"""

import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)


def main():
    address, arguments = sys.argv[0].removesuffix("python") + "forks", sys.argv[1:]
    ignored = [int(number) for number in FORWARDED if signal.getsignal(number) is signal.SIG_IGN]
    server = socket.socket(socket.AF_UNIX)
    for number in FORWARDED:
        if number not in ignored:
            signal.signal(number, lambda number, frame: server.send(bytes([number])))
    try:
        server.connect(address)
    except OSError:
        become_the_interpreter(arguments)
    numbers = map(int, os.listdir("/proc/self/fd"))  # noqa: PTH208 (the same)
    opened = [number for number in numbers if number != server.fileno() and is_open(number)]
    umask = os.umask(0o22)
    os.umask(umask)
    request = {
        "executable": sys.argv[0],
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109 (pathlib takes longer to import than all of this)
        "files": opened,
        "ignored": ignored,
        "umask": umask,
    }
    text = json.dumps(request).encode()
    socket.send_fds(server, [len(text).to_bytes(8, "big")], opened)
    server.sendall(text)
    answer = line_of(server)
    if answer != b"warm":  # or nothing: the server ended while it loaded its libraries
        become_the_interpreter(arguments, answer.decode().partition(" ")[2])
    for number in opened:  # whoever reads from a pipe sees its end when the fork has closed it
        os.close(number)
    answer = line_of(server) or b"-9"  # the server was killed, and its forks with it
    code = int(answer)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def line_of(server):
    line = b""
    while not line.endswith(b"\n"):
        try:
            part = server.recv(1)
        except ConnectionResetError:
            part = b""
        if not part:
            return b""
        line += part
    return line.rstrip()


def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def become_the_interpreter(arguments, stand_in=""):
    """Run what was asked, or another program in place of a module: it is this process, and what it starts is warm."""
    if stand_in:
        os.environ["WARM_PYTHON"], arguments = sys.argv[0], ["-P", stand_in, *arguments[2:]]
    for number in FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    os.execv(sys.executable, [sys.executable, *arguments])


main()
