"""The command line: thin verbs, each one call that a notebook can make too.

Only the chosen verb is imported, so `--help` answers at once. What a user can mend is printed in words with
exit code 2; a run that failed gives exit code 1.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
from collections.abc import Sequence

import workbench
from workbench.cli.terminal import safe_lines
from workbench.errors import WorkbenchError

VERBS = {
    "run": "run an ablation (or one spec), compare its runs and write the report",
    "ls": "every run of the experiments: state, steps, when, how long, where, why it failed",
    "status": "all that is known of a run, or how an experiment stands",
    "logs": "what the ranks of a run print; -f goes on until it has ended",
    "cancel": "end a run, or all runs of an experiment",
    "report": "write an experiment's report page again, from its saved comparison",
    "compare": "print the verdicts of an experiment, or whether two runs are the same bit for bit",
    "bisect": "the first module and block of tokens where two runs part",
    "prove": "whether a loss keeps the laws of parallel training, or the smallest case in which it does not",
    "diagnose": "why one run differs from another that is right: ranked causes, and what to try next",
    "export": "write runs for W&B, trackio, MLflow or TensorBoard",
    "rollouts": "import, check or record rollouts",
    "lab": "open JupyterLab on the notebooks",
    "bench": "measure what is claimed of speed, and write it down",
    "verify": "do several GPUs train the weights that one trains, in memory that stays flat",
    "doctor": "what is here, what is missing, and what to do about it",
}
"""Verb -> what it does. Each is a module of this package, with `main(arguments) -> exit code`."""

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say.

    Returns:
        0 done; 1 a comparison does not agree (different, vacuous, unsound baseline) or a run failed; 2 the input was
        refused; 130 interrupted.
    """
    try:
        code = _do(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _do(given: list[str]) -> int:
    if not given or given[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if given else 2
    if given[0] in ("-V", "--version"):
        print(f"workbench {workbench.__version__}")
        return 0
    verb, rest = given[0], given[1:]
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(VERBS)}"
        print(f"workbench: there is no verb {verb!r} ({hint})", file=sys.stderr)
        return 2
    try:
        if verb == "rollouts":
            return _rollouts(rest)
        return importlib.import_module(f"workbench.cli.{verb}").main(rest)
    except WorkbenchError as error:
        notes = [f"  {note}" for note in getattr(error, "__notes__", [])]
        said = "\n".join([f"{type(error).__name__}: {error}", *notes])
        print("\n".join(safe_lines(said)), file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in _DISK:
            raise
        said = f"workbench {verb}: {error.strerror}: {error.filename or 'no file is named'}"
        print(
            "\n".join(
                [
                    *safe_lines(said),
                    "  do: make room, or make the folder writable, and say it again: what is recorded is kept",
                ]
            ),
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _rollouts(arguments: Sequence[str]) -> int:
    """The verb that has verbs of its own."""
    import tyro

    from workbench.cli import rollouts

    code = tyro.extras.subcommand_cli_from_dict(
        {"import": rollouts.import_, "check": rollouts.check, "record": rollouts.record},
        prog="workbench rollouts",
        args=list(arguments),
        description="Import, check or record rollouts.",
        config=(tyro.conf.PositionalRequiredArgs,),
    )
    return code or 0


def _help() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:<{width}}  {meaning}" for verb, meaning in VERBS.items())
    return (
        f"usage: workbench VERB ...\n\n{(workbench.__doc__ or '').splitlines()[0]}\n\n{verbs}\n\n"
        "`workbench VERB --help` says more.\n"
        "Begin with: workbench run experiments/layout_parity/ablation.yaml"
    )
