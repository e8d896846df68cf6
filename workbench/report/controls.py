"""Controls of the report page: filter, order and group the verdicts, and compare the settings of two configurations.

The page's script shows them; without it the page has all rows, and no control that does nothing. What the script reads
is data in the page, in which no name can end the element it stands in.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from pathlib import Path
from typing import Any

from workbench.compare.comparison import Comparison, flatten
from workbench.report.evidence import setting_text, worst_share
from workbench.report.markup import Markup, tag
from workbench.report.summary import anchor

SCRIPT = (Path(__file__).parent / "page.js").read_text(encoding="utf8")
SCRIPT_POLICY = f"script-src 'sha256-{base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}'"
"""The page's content security policy lets this script run and no other, whatever a name contains."""


def differing(comparison: Comparison) -> dict[str, dict[str, str]]:
    """Return configuration -> setting -> text, of every setting that is not the same in all configurations."""
    flat = {c.name: flatten(c.settings) for c in comparison.configurations}
    keys = sorted({key for settings in flat.values() for key in settings})
    keys = [key for key in keys if len({repr(settings.get(key)) for settings in flat.values()}) > 1]
    return {name: {key: setting_text(settings.get(key)) for key in keys} for name, settings in flat.items()}


def settings_difference(comparison: Comparison, one: str, other: str) -> dict[str, tuple[str, str]]:
    """Return setting -> its text in each of two configurations, where these differ.

    Example:
        >>> settings_difference(comparison, "one_rank", "cp2")   # doctest: +SKIP
        {'layout.cp': ('1', '2')}
    """
    a, b = (differing(comparison)[comparison[name].name] for name in (one, other))
    return {key: (a[key], b[key]) for key in a if a[key] != b[key]}


def controls(comparison: Comparison) -> Markup:
    """Build the controls above the verdicts, hidden until the script runs."""
    keys = next(iter(differing(comparison).values()), {})
    groups = [("reference", "reference"), ("verdict", "verdict"), *((f"={key}", key) for key in keys)]
    return tag(
        "div",
        tag("label", "Filter ", tag("input", id="filter", type="search", placeholder="name, verdict, setting …")),
        tag(
            "label", "Order ", _select("order", [("ablation", "as declared"), ("largest", "largest difference first")])
        ),
        tag("label", "Group by ", _select("group", groups)),
        tag("span", id="shown", aria_live="polite"),
        class_="controls",
        id="controls",
        hidden=True,
    )


def pair() -> Markup:
    """Build two selects and the place of the settings that differ between them, hidden until the script runs."""
    chosen = [tag("label", label, tag("select", id=id)) for label, id in (("Compare ", "left"), (" with ", "right"))]
    where = tag("div", id="difference", class_="scroll", tabindex="0", aria_live="polite")
    return tag("div", tag("div", chosen, class_="controls"), where, id="pair", hidden=True)


def script(comparison: Comparison) -> Markup:
    """Build the data and the script, for the end of the page."""
    settings = differing(comparison)
    rows: list[dict[str, Any]] = []
    for c in comparison.configurations:
        worst = worst_share(c)
        rows.append(
            {
                "id": anchor(comparison, c),
                "name": c.name,
                "verdict": c.verdict,
                "reference": c.against or c.name,
                "share": "inf" if worst is not None and not math.isfinite(worst) else worst,
                "settings": settings[c.name],
            }
        )
    data = json.dumps(rows, ensure_ascii=True, sort_keys=True).replace("<", "\\u003c")  # no </script>, no <!--
    blocks = tag("script", Markup(data), id="configurations", type="application/json")
    return Markup(blocks + tag("script", Markup(SCRIPT)))


def _select(id: str, choices: list[tuple[str, str]]) -> Markup:
    return tag("select", [tag("option", text, value=value) for value, text in choices], id=id)
