"""Programs that can be interrupted, whatever started the suite.

A shell that starts a job in the background may have it ignore SIGINT, `nohup make test &` for one. That is inherited
by every process of the suite, and Python then raises no KeyboardInterrupt. A test that sends SIGINT starts its program
behind this prefix.
"""

from __future__ import annotations

import sys

INTERRUPTIBLE = [
    sys.executable,
    "-IS",
    "-c",
    """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
""",
]
"""Followed by a command whose first word is a path; the process keeps its number."""

UNINTERRUPTIBLE = [*INTERRUPTIBLE[:3], INTERRUPTIBLE[3].replace("SIG_DFL", "SIG_IGN")]
"""As a shell starts what goes on in the background."""
