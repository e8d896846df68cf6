"""`workbench check`: recompute the loss of a trainer's dumped step, and name the first stage that differs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro

from workbench.cli.terminal import answered, print_lines, safe_lines
from workbench.errors import SpecError
from workbench.specs.reading import read_yaml

KEYS = ("settings", "advantages")


def check(
    dump: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DUMP")],
    *,
    system: str | None = None,
    settings: Path | None = None,
    on_policy: bool = False,
) -> int:
    """Recompute the loss of a trainer's step from its dump, and name the first stage that differs, with its cause.

    Exit code 0 if everything that was recorded agrees, 1 if something differs or nothing could have, 2 for invalid
    input, such as a damaged file or one with a class that is not known.

    Args:
        dump: Folder of a step in the interchange format (docs/guides/check-a-step.md), or a file of a system.
        system: The trainer, such as verl; by default as the dump says.
        settings: YAML with the keys "settings" (of the loss) and "advantages" (of the estimator), by the system's
            names; by default those of the dump.
        on_policy: The loss was computed on the old policy itself, before any update.
    """
    given = {} if settings is None else _settings(settings)
    from workbench.check import check_step  # torch; mistakes above are told without it

    result = check_step(dump, system=system, on_policy=on_policy or None, **given)
    if not answered(result.as_json):
        print_lines(safe_lines(str(result)))
    return 0 if result.ok else 1


def _settings(path: Path) -> dict[str, Any]:
    content = read_yaml(path)
    if not isinstance(content, Mapping) or not set(content) <= set(KEYS):
        found = ", ".join(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
        raise SpecError(
            f"settings of a step in {path}",
            found=found,
            rule=f"the keys {' and '.join(KEYS)}",
            fix="put the options of the loss under settings:",
        )
    return dict(content)
