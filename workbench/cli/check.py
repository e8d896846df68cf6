"""`workbench check`: recompute the loss of a trainer's dumped step, and name the first stage that differs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from workbench.cli.terminal import answered, print_lines, safe_lines
from workbench.errors import SpecError
from workbench.specs.reading import read_yaml
from workbench.untrusted import parse_json

KEYS = ("settings", "advantages")


def check(
    dump: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DUMP")],
    *,
    system: str | None = None,
    settings: Path | None = None,
    on_policy: bool = False,
    against: Path | None = None,
    against_system: str | None = None,
    against_settings: Path | None = None,
    model: str | None = None,
    layout: str | None = None,
    precision: Literal["float64", "float32", "bfloat16"] | None = None,
    vocabulary: Path | None = None,
    page: Path | None = None,
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
        against: Dump of another system's step on the same batch: the first recorded, and the first recomputed number
            that differs, and the settings that do it.
        against_system: The trainer that wrote it; by default as that dump says.
        against_settings: YAML with its settings; by default those of that dump.
        model: Checkpoint of the weights with which the step's loss was computed: its log-probabilities and gradient are
            recomputed in float64, and compared.
        layout: Layout in which the model is passed, such as '{"cp": 2}'; its ranks are simulated on this CPU.
        precision: Of the trainer's model, whose distance from float64 is the tolerance; by default that of the dump.
        vocabulary: JSON list with the text of each token id: says if tokens of the trainer that the engine did not draw
            are the same text.
        page: HTML file to write: stages, causes and every token of the documents that differ, without a network.
    """
    given = {} if settings is None else _settings(settings)
    other = {} if against_settings is None else _settings(against_settings)
    if against is None and (against_system is not None or against_settings is not None):
        raise SpecError(
            "check a step",
            found="--against-system or --against-settings without --against",
            rule="they are about the other dump",
            fix="name it: --against OTHER_DUMP",
        )
    ranks = None if layout is None else _layout(layout)
    from workbench.check import check_step  # torch; mistakes above are told without it

    second = None if against is None else check_step(against, system=against_system, **other)
    result = check_step(
        dump,
        system=system,
        on_policy=on_policy or None,
        against=second,
        model=model,
        layout=ranks,
        precision=precision,
        vocabulary=vocabulary,
        **given,
    )
    if page is not None:
        from workbench.report.checked_step import write_page  # report imports matplotlib

        write_page(result, page)
    if not answered(result.as_json):
        print_lines(safe_lines(str(result)))
    return 0 if result.ok else 1


def _layout(text: str) -> Mapping[str, Any]:
    try:
        content = parse_json(text)
    except (ValueError, RecursionError) as error:
        content = f"{type(error).__name__}: {error}"
    if not isinstance(content, Mapping):
        raise SpecError(
            f"--layout {text}",
            found=str(content)[:80],
            rule="a JSON object of the settings of a layout",
            fix="""such as --layout '{"cp": 2, "order": "zigzag"}'""",
        )
    return content


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
