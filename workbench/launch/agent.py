"""`torch.distributed.run`, which leaves when the process that started it is gone.

torchx puts a job in a session of its own, so neither a restarted nor a killed notebook kernel would take
its ranks along. The environment variable WB_PARENT_PID names the process to leave with; 0, or none, means
to stay.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import psutil


def leave_with(parent_pid: int, *, poll_s: float = 0.5, grace_s: float = 10.0) -> threading.Thread:
    """End this process and its children soon after the parent has gone.

    First a SIGTERM to this process, on which torch.distributed.run stops its ranks; after the grace, whatever
    is left is killed. Polls, because the kernel's own parent-death signal is tied to a thread of the parent.

    Args:
        parent_pid: this process's parent; if it is another process already, the parent is gone.
        poll_s: how often to look.
        grace_s: how long the orderly way may take.
    """
    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(poll_s)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(128 + signal.SIGTERM)

    thread = threading.Thread(target=watch, name="leave-with-parent", daemon=True)
    thread.start()
    return thread


def main() -> None:
    """Start the ranks and wait for them."""
    parent_pid = int(os.environ.get("WB_PARENT_PID", "0"))
    if parent_pid:
        leave_with(parent_pid)
    from torch.distributed.run import main as run_ranks

    run_ranks(sys.argv[1:])


if __name__ == "__main__":
    main()
