"""`workbench describe` and `workbench schema`: what a name means, and the JSON Schema of ablation files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import tyro

from workbench.atomic import write_whole
from workbench.cli.terminal import answered, print_lines, safe, table, width
from workbench.compare.comparison import VERDICTS
from workbench.errors import SpecError, did_you_mean
from workbench.faults import fault_names
from workbench.launch.ablation import AblationSpec
from workbench.launch.schema import Setting, ablation_schema, settings_by_name
from workbench.specs.descriptions import describe_fields
from workbench.specs.losses import PRESETS, LossSpec
from workbench.specs.mistakes import nearest_settings
from workbench.specs.precision import ALIASES
from workbench.specs.precision import PRESETS as PRECISIONS
from workbench.specs.reading import flatten
from workbench.specs.run import RunSpec

_MOST_CHOICES = 24  # a list of more, such as that of the faults, is named and not printed


def describe(name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = "") -> int:
    """Explain a setting, a group of settings, a preset, a fault, a metric, a verdict, or a key of an ablation.

    Args:
        name: Such as loss.surrogate.clip_high, layout, grpo, missing_cp_factor, or vacuous; none lists the groups.
    """
    described = description(name) if name else {"name": "settings of a run", "settings": _first_level()}
    if not answered(lambda: described):
        print_lines(_lines(described))
    return 0


def schema(file: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")] = None) -> int:
    """Print the JSON Schema of ablation files, or write it to a file.

    Editors complete and check a YAML file that begins with `# yaml-language-server: $schema=FILE`.

    Args:
        file: Gets the schema; by default it is printed.
    """
    content = ablation_schema()
    if answered(lambda: content):
        return 0
    text = json.dumps(content, indent=1) + "\n"
    if file is None:
        print(text, end="")
    else:
        print(f"schema: {write_whole(file, text.encode())}")
    return 0


def description(name: str) -> dict[str, Any]:
    """Return what a name means, as JSON data: its kind, meaning, and what else is known of it.

    Raises:
        SpecError: nothing of that name; the nearest ones are named.
    """
    if (setting := settings_by_name().get(name)) is not None:
        return _setting(setting)
    if name in AblationSpec.model_fields:
        describe_fields([AblationSpec])
        return {"name": name, "is": "key of an ablation file", "meaning": AblationSpec.model_fields[name].description}
    if name in PRESETS:
        default = flatten(LossSpec().model_dump(mode="json"))
        preset = flatten(LossSpec(name=name).model_dump(mode="json"))
        changed = {key: value for key, value in preset.items() if key not in default or default[key] != value}
        return {"name": name, "is": "preset: the value of loss.name", "differs_from_default": changed}
    if (precision := ALIASES.get(name, name)) in PRECISIONS:
        return {"name": name, "is": "preset: a value of precision", "dtypes": asdict(PRECISIONS[precision])}
    if name in fault_names():
        from workbench.faults import load_fault

        fault = load_fault(name)
        keys = ("what", "signature", "origin", "seam", "shows_in", "hidden_in")
        return {"name": name, "is": "fault: a value of faults"} | {key: getattr(fault, key) for key in keys}
    if name in VERDICTS:
        return {"name": name, "is": "verdict", "meaning": VERDICTS[name]}
    from workbench.metrics.definitions import metric_table  # torch, and pandas

    metrics = metric_table()
    if name in metrics.index:
        return {"name": name, "is": "metric"} | {str(key): value for key, value in metrics.loc[name].items()}
    raise _unknown(name, list(metrics.index))


def _setting(setting: Setting) -> dict[str, Any]:
    found = {key: value for key, value in asdict(setting).items() if value not in ((), "")}
    if setting.settings:
        inner = {name.rpartition(".")[2]: settings_by_name()[name] for name in setting.settings}
        found.pop("default", None)
        found["settings"] = {name: each.meaning for name, each in inner.items()}
        return found
    flag = "--" + setting.name.replace("_", "-")
    return found | {"default": setting.default, "on_the_command_line": f"workbench run FILE.yaml {flag} VALUE"}


def _first_level() -> dict[str, str]:
    return {name: settings_by_name()[name].meaning for name in RunSpec.model_fields}


def _unknown(name: str, metrics: list[str]) -> SpecError:
    settings = nearest_settings(name, RunSpec)[:3]
    others = [*AblationSpec.model_fields, *PRESETS, *PRECISIONS, *fault_names(), *VERDICTS, *metrics]
    near = " or ".join(map(repr, settings)) if settings else ""
    return SpecError(
        f"describe {name!r}",
        found=f"nothing of that name; did you mean {near}?" if near else f"nothing of that name {_near(name, others)}",
        rule="a setting (dotted), a preset, a fault, a metric, a verdict, or a key of an ablation",
        fix="`workbench describe` lists the groups of settings, `workbench describe GROUP` what is in one",
    )


def _near(name: str, known: list[str]) -> str:
    return did_you_mean(name, known, most=3)


def _lines(described: dict[str, Any]) -> list[str]:
    """Return a description as text: a row for each fact, and the settings of a group below."""
    facts = {key: value for key, value in described.items() if key not in ("name", "settings")}
    rows = [[f"  {key.replace('_', ' ')}", text] for key, value in facts.items() for text in _texts(value)]
    inner = [[f"  {name}", meaning] for name, meaning in described.get("settings", {}).items()]
    return [
        safe(described["name"]),
        *table(rows, width=width()),
        *([""] if inner else []),
        *table(inner, width=width()),
    ]


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [f"{key}: {json.dumps(each)}" for key, each in value.items()] or ["nothing"]
    if isinstance(value, tuple | list):
        shown = list(map(str, value))
        more = [f"and {len(shown) - _MOST_CHOICES} more (--json lists all)"] if len(shown) > _MOST_CHOICES else []
        return [", ".join([*shown[:_MOST_CHOICES], *more])]
    return [value if isinstance(value, str) else json.dumps(value)]
