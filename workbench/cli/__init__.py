"""The command line: thin verbs, each one call that a notebook can make too.

Only the chosen verb is imported, so that `--help` is fast. User errors are printed as a message, with exit code 2; a
failed run gives exit code 1.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

import workbench
from workbench.cli.terminal import safe_lines
from workbench.errors import WorkbenchError, did_you_mean

VERBS = {
    "run": ("run", "run an ablation (or one spec), compare its runs and write the report"),
    "ls": ("status", "list the runs of all experiments: state, steps, start, duration, device, cause of failure"),
    "status": ("status", "show the state of a run, or of an experiment"),
    "logs": ("logs", "print the logs of a run's ranks; -f follows until it has ended"),
    "cancel": ("experiment", "cancel a run, or all runs of an experiment"),
    "report": ("experiment", "write an experiment's report page again, from its saved comparison"),
    "compare": ("experiment", "print the verdicts of an experiment, or compare two runs bit for bit"),
    "bisect": ("checks", "find the first module and block of tokens where two runs differ"),
    "prove": (
        "checks",
        "check that a loss keeps the invariants of parallel training, or find the smallest counterexample",
    ),
    "diagnose": ("checks", "rank the causes why a run differs from a trusted one, and propose the next experiment"),
    "export": ("experiment", "export runs to W&B, trackio, MLflow or TensorBoard"),
    "rollouts": ("rollouts", "import, check or record rollouts"),
    "lab": ("lab", "open JupyterLab on the notebooks"),
    "notebooks": ("lab", "copy the notebooks, with all that they need, to a folder"),
    "bench": ("bench", "run the performance benchmarks and record the results"),
    "verify": ("bench", "check that multi-GPU training matches one GPU, with flat memory"),
    "doctor": ("doctor", "check the environment, and tell how to fix what is missing"),
}
"""Verb -> its module here, and a description. The function of the verb's name has its options as parameters, or one
parameter ``arguments`` if it parses them itself."""

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)  # what a user can fix; others are bugs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 done; 1 a comparison does not agree (different, vacuous, unsound baseline) or a run failed; 2 invalid input;
        130 interrupted (128 + SIGINT, as shells have it).
    """
    try:
        code = _dispatch(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output, such as `head`, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"workbench {workbench.__version__}")
        return 0
    verb, rest = arguments[0], arguments[1:]
    if verb not in VERBS:
        hint = did_you_mean(verb, VERBS, otherwise=f"one of {', '.join(VERBS)}")
        print(f"workbench: there is no verb {verb!r} ({hint})", file=sys.stderr)
        return 2
    try:
        function = getattr(importlib.import_module(f"workbench.cli.{VERBS[verb][0]}"), verb)
        import inspect  # like tyro imported only here, because `--help` needs neither

        import tyro

        if "arguments" in inspect.signature(function).parameters:
            return function(rest)
        return tyro.cli(function, args=rest, prog=f"workbench {verb}")
    except WorkbenchError as error:
        notes = [f"  {note}" for note in getattr(error, "__notes__", [])]
        message = "\n".join([f"{type(error).__name__}: {error}", *notes])
        print("\n".join(safe_lines(message)), file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in _DISK:
            raise
        message = f"workbench {verb}: {error.strerror}: {error.filename or 'no file is named'}"
        fix = "  do: free disk space, or make the folder writable, and run it again: what is recorded is kept"
        print("\n".join([*safe_lines(message), fix]), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _help() -> str:
    width = max(map(len, VERBS))  # not `columns`: importing rich would double the 0.06 s of --help
    verbs = "\n".join(f"  {verb:<{width}}  {meaning}" for verb, (_, meaning) in VERBS.items())
    return (
        f"usage: workbench VERB ...\n\n{(workbench.__doc__ or '').splitlines()[0]}\n\n{verbs}\n\n"
        "`workbench VERB --help` lists its options.\n"
        "Begin with: workbench run experiments/layout_parity/ablation.yaml"
    )
