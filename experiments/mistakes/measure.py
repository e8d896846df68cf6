"""Mistakes of users, and the messages that they get.

``python -m experiments.mistakes.measure`` makes every mistake of ``mistakes.yaml`` in an empty folder, as a command or
a script, and writes ``mistakes.json``: seconds, the message, and whether it is right. The list was written by an author
who had read the manual and no code, before any of it was run; while messages were improved, some of its cases were
looked at. A message is right if it names what the author asked for (one of each group of texts), shows no traceback
of the package, and fits a screen.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from workbench.atomic import to_json, write_whole

FOLDER = Path(__file__).parent
PROJECT = FOLDER.parent.parent
LIMIT_S = 2.0
"""Of a message, the start of Python and of this package included, and without `import torch`, which takes as long: a
script of the user imports it anyway, and most messages come without it."""
LINES = 30
_IMPORT = re.compile(r"^import time:.*\n", re.MULTILINE)
_TORCH = re.compile(r"^import time: +\d+ \| +(\d+) \| +torch$", re.MULTILINE)


def measure() -> dict[str, Any]:
    """Make every mistake and return the record."""
    cases = yaml.safe_load((FOLDER / "mistakes.yaml").read_text(encoding="utf8"))
    entries = {}
    for case in cases:
        entries[case["id"]] = entry = answer(case)
        print(f"{case['id']:<40} {entry['seconds']:5.1f} s  {entry['problem'] or 'right'}", flush=True)
    right = [entry for entry in entries.values() if not entry["problem"]]
    return {
        "command": "python -m experiments.mistakes.measure",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "mistakes": len(entries),
        "right": len(right),
        "right_in_2_s_with_torch": sum(entry["seconds"] <= LIMIT_S for entry in right),
        "entries": entries,
    }


def answer(case: Mapping[str, Any]) -> dict[str, Any]:
    """Make one mistake; the result with its problem, "" if the message is right."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, text in (case.get("files") or {}).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf8")
        command = case.get("command")
        if command is None:
            (folder / "script.py").write_text(case["python"], encoding="utf8")
            command = "python script.py"
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "PYTHONPROFILEIMPORTTIME": "1"}
        began = time.monotonic()
        try:
            done = subprocess.run(
                command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
            )
            output, code = done.stdout + done.stderr, done.returncode
        except subprocess.TimeoutExpired as error:
            output, code = f"no answer in {error.timeout} s", -1
        seconds = time.monotonic() - began
        torch_s = sum(map(int, _TORCH.findall(output))) / 1e6
        output = _IMPORT.sub("", output)
        message = output.replace(str(folder), "FOLDER").replace(str(PROJECT), "PROJECT")
        message = message.replace(tempfile.gettempdir(), "TEMPORARY").replace(sys.base_prefix, "PYTHON")
    return {
        "area": case["area"],
        "seconds": round(seconds, 2),
        "import_torch_seconds": round(torch_s, 2),
        "exit_code": code,
        "problem": problem(case, message, code, seconds - torch_s),
        "message": message[-1500:],
    }


def problem(case: Mapping[str, Any], message: str, code: int, seconds: float) -> str:
    """Return why a message is not right; "" if it is."""
    if case.get("ok"):
        return "" if code == 0 else f"exit code {code}, and it is supported"
    if code == 0:
        return "no error"
    # of a script Python prints the frames that lead to an error too, so only a command's message has a length
    text = message.lower()
    missing = [group for group in case.get("must_name") or [] if not any(str(each).lower() in text for each in group)]
    if missing:
        return "does not name " + " nor ".join(map(repr, missing[0]))
    if "command" in case and "Traceback (most recent call last)" in message:
        return "a traceback"
    if "python" not in case and len(message.splitlines()) > LINES:
        return f"{len(message.splitlines())} lines"
    return "" if seconds <= LIMIT_S else f"took {seconds:.1f} s"


if __name__ == "__main__":
    write_whole(FOLDER / "mistakes.json", to_json(measure()))
