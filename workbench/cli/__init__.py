"""The command line: thin verbs, each one call that a notebook can make too.

Only the chosen verb is imported, so that `--help` is fast. User errors are printed as a message, with exit code 2; a
failed run gives exit code 1.
"""

from __future__ import annotations

import errno
import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import workbench
from workbench.cli.terminal import asked_for_json, print_json, safe_lines, safe_output
from workbench.errors import WorkbenchError, did_you_mean

VERBS = {
    "run": ("run", "run an ablation (or one spec), compare its runs and write the report"),
    "ls": ("status", "list the runs of all experiments: state, steps, start, duration, device, cause of failure"),
    "status": ("status", "show the state of a run, or of an experiment"),
    "attach": ("attach", "follow runs that another process launched, until they have ended"),
    "logs": ("logs", "print the logs of a run's ranks; -f follows until it has ended"),
    "cancel": ("experiment", "cancel a run, or all runs of an experiment"),
    "report": ("experiment", "write an experiment's report page again, from its saved comparison"),
    "compare": ("experiment", "print the verdicts of an experiment, or compare two runs bit for bit"),
    "bisect": ("checks", "find the first module and block of tokens where two runs differ"),
    "prove": (
        "checks",
        "check that a loss keeps the invariants of parallel training, or find the smallest counterexample",
    ),
    "sensitivity": ("sensitivity", "plant known bugs in an ablation, and tell which its comparison rejects"),
    "check": ("check", "recompute the loss of a trainer's dumped step, and name the first stage that differs"),
    "attribute": ("attribute", "split the gap between trainer and sampler into its causes, and measure the floor"),
    "diagnose": ("checks", "rank the causes why a run differs from a trusted one, and propose the next experiment"),
    "export": ("experiment", "export runs to W&B, trackio, MLflow or TensorBoard"),
    "rollouts": ("rollouts", "import, check or record rollouts"),
    "lab": ("lab", "open JupyterLab on the notebooks"),
    "notebooks": ("lab", "copy the notebooks, with all that they need, to a folder"),
    "bench": ("bench", "run the performance benchmarks and record the results"),
    "verify": ("bench", "check that multi-GPU training matches one GPU, with flat memory"),
    "mcp": ("mcp", "serve compare, diagnose, bisect, prove, translate and status to a program, over stdio (MCP)"),
    "describe": ("describe", "explain a setting, a preset, a fault, a metric or a verdict"),
    "schema": ("describe", "print the JSON Schema of ablation files, for editors"),
    "completion": ("completion", "print the completion script of a shell: bash, zsh or fish"),
    "doctor": ("doctor", "check the environment, and tell how to fix what is missing"),
}
"""Verb -> its module here, and a description. The function of the verb's name has its options as parameters, or one
parameter ``arguments`` if it parses them itself."""

NO_JSON = ("lab", "mcp", "completion")
"""Verbs whose output is another program's, or read by one as it is."""

_FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free disk space"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "make the folder writable"),
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit on open files (ulimit -n)"),
    errno.ENAMETOOLONG: "choose shorter names of folders and configurations",
}
"""Errors of the operating system that a user can fix; others are bugs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 done; 1 a comparison does not agree (different, vacuous, unsound baseline) or a run failed; 2 invalid input;
        130 interrupted (128 + SIGINT, as shells have it).
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    with safe_output():
        try:
            code = _dispatch(given)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader of our output, such as `head`, closed the pipe
            _drop_output()
            return 0
        except OSError as error:  # of the output itself, such as a full disk
            text, _, code = _failure(error, (given or [""])[0])
            _drop_output()
            print("\n".join(safe_lines(text)), file=sys.stderr)
    return code


def _drop_output() -> None:
    """Send what is still buffered to the null device, or the interpreter would fail on it when it ends."""
    with Path(os.devnull).open("wb") as null:
        os.dup2(null.fileno(), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    try:
        Path.cwd()
    except FileNotFoundError:
        print("workbench: the current folder was removed\n  do: cd to a folder that exists", file=sys.stderr)
        return 2
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
    if "--json" in rest and verb not in NO_JSON:
        return _as_json(verb, [argument for argument in rest if argument != "--json"])
    try:
        return _call(verb, rest)
    except SystemExit as end:
        if end.code in (0, None) and verb not in NO_JSON:
            print("--json prints the result as JSON: docs/reference/json.md")
        raise
    except (WorkbenchError, OSError, KeyboardInterrupt) as error:
        text, _, code = _failure(error, verb)
        print("\n".join(safe_lines(text)), file=sys.stderr)
        return code


def _call(verb: str, rest: list[str]) -> int:
    function = getattr(importlib.import_module(f"workbench.cli.{VERBS[verb][0]}"), verb)
    import inspect  # like tyro imported only here, because `--help` needs neither

    import tyro

    if "arguments" in inspect.signature(function).parameters:
        return function(rest)
    return tyro.cli(function, args=rest, prog=f"workbench {verb}")


def _as_json(verb: str, rest: list[str]) -> int:
    """Run a verb and print its result, or its error, as one JSON object; all other output goes to standard error."""
    error: dict[str, Any] | None = None
    with asked_for_json() as result:
        try:
            code = _call(verb, rest)
        except SystemExit as end:
            if end.code in (0, None):
                return 0  # help
            code = 2
            error = {"type": "UsageError", "requested": shlex.join(["workbench", verb, *rest])}
        except (WorkbenchError, OSError, KeyboardInterrupt) as raised:
            text, error, code = _failure(raised, verb)
            print("\n".join(safe_lines(text)), file=sys.stderr)
    if error is not None:
        print_json("workbench.error/1", {"verb": verb, "exit_code": code, "error": error})
    else:
        print_json(f"workbench.{verb}/1", {"exit_code": code, "result": result[0] if result else None})
    return code


def _failure(error: BaseException, verb: str) -> tuple[str, dict[str, Any], int]:
    """Return an expected end of a verb as text, as data, and as exit code; others are bugs, and raised again."""
    kind = {"type": type(error).__name__}
    if isinstance(error, WorkbenchError):
        notes = list(getattr(error, "__notes__", []))
        text = "\n".join([f"{type(error).__name__}: {error}", *(f"  {note}" for note in notes)])
        return text, {**kind, **error.parts, "notes": notes}, 2
    if isinstance(error, OSError):
        if error.errno not in _FIXES:
            raise error
        found = f"{error.strerror}: {error.filename or 'no file is named'}"
        fix = f"{_FIXES[error.errno]}, and run it again: what is recorded is kept"
        return f"workbench {verb}: {found}\n  do: {fix}", {**kind, "found": found, "fix": fix}, 2
    return "interrupted", {**kind, "found": "interrupted"}, 130


def _help() -> str:
    width = max(map(len, VERBS))  # not `columns`: importing rich would double the 0.06 s of --help
    verbs = "\n".join(f"  {verb:<{width}}  {meaning}" for verb, (_, meaning) in VERBS.items())
    return (
        f"usage: workbench VERB ...\n\n{(workbench.__doc__ or '').splitlines()[0]}\n\n{verbs}\n\n"
        "`workbench VERB --help` lists its options; --json prints a verb's result as JSON.\n"
        "Begin with: workbench run experiments/layout_parity/ablation.yaml"
    )
