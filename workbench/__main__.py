"""Command line as `python -m workbench`, also from a source tree that is not installed."""

import sys

PYTHON = (3, 11)  # requires-python of pyproject.toml; a test compares them


def run() -> int:
    """Run the command line; a message and exit code 2 if this Python, or what is installed in it, cannot.

    Nothing of the package is imported before: its modules need both.
    """
    if sys.version_info < PYTHON:
        return _refuse(f"Python {sys.version.split()[0]}", "install a newer Python, and the package into it")
    try:
        from workbench.cli import main

        return main()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "workbench"):  # a mistake of the package itself
            raise
        return _refuse(f"no module {missing!r} in {sys.executable}", "pip install -e . in the folder of pyproject.toml")


def _refuse(found: str, fix: str) -> int:
    needed = ".".join(map(str, PYTHON))
    sys.stderr.write(
        f"workbench cannot start\n  found: {found}\n  rule: Python {needed} or later, with the packages that "
        f"pyproject.toml names\n  do: {fix}\n"
    )
    return 2


if __name__ == "__main__":
    sys.exit(run())
