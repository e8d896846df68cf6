"""The verdicts as a table in a notebook, and as text elsewhere."""

from __future__ import annotations

from workbench.compare.comparison import Comparison
from workbench.report.evidence import (
    could_have_seen,
    declaration,
    divergence,
    relative_error,
    relative_text,
    warnings,
)
from workbench.report.figures import groups, worst_share
from workbench.report.markup import tag
from workbench.report.numbers import NONE, near_one, share
from workbench.report.style import VERDICT_STYLES
from workbench.report.summary import answer, failure_line, summary_table, tiles, verdict_style


def show(comparison: Comparison) -> None:
    """Show the verdicts: HTML in a notebook, and the same as plain text in a terminal.

    Example:
        >>> show(comparison)   # doctest: +SKIP
    """
    _display({"text/html": as_html(comparison), "text/plain": as_text(comparison)})


def as_html(comparison: Comparison) -> str:
    """Return the head of the report page as a fragment with scoped style."""
    return tag(
        "div",
        tag("style", verdict_style()),
        tag("p", answer(comparison), class_="answer"),
        tiles(comparison),
        summary_table(comparison),
        class_="workbench",
    )


def as_text(comparison: Comparison) -> str:
    """Return a line per configuration: sign, name, verdict, relative error, distance over budget, factor and more.

    Example:
        >>> print(as_text(comparison))   # doctest: +SKIP
        layout_parity: Does GRPO give every parameter the same gradient in every layout?
        3 of 4 configurations keep the gradient of their reference. 1 differs.
        ≠ missing_cp_factor  different  50 %  6.0 × 10¹¹ of budget  × 0.500 (1 / cp)  step 0, model.norm.weight
    """
    ordered = [c for members in groups(comparison).values() for c in members]
    names = max((len(c.name) for c in ordered), default=0)
    verdicts = max((len(c.verdict) for c in ordered), default=0)
    errors = {c.name: relative_text(relative_error(c)) for c in ordered}
    width = max(map(len, errors.values()), default=0)
    lines = [f"{comparison.experiment}: {comparison.question}", answer(comparison), ""]
    for c in ordered:
        worst = worst_share(c)
        cells = [
            f"{VERDICT_STYLES[c.verdict].sign} {c.name:<{names}}  {c.verdict:<{verdicts}}",
            f"{errors[c.name]:<{width}}",
            f"{NONE if worst is None else share(worst) + ' of budget':<22}",
        ]
        if c.factor is not None:
            cells.append(f"× {near_one(c.factor)}{f' ({c.factor_meaning})' if c.factor_meaning else ''}")
        if c.first_step is not None:
            cells.append(f"step {c.first_step}, {c.first_parameter}")
        if c.failure:
            cells.append(failure_line(c))
        seen = could_have_seen(c)
        cells += filter(None, [divergence(c), declaration(c), f"could have seen: {seen}" if seen else "", *warnings(c)])
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _display(data: dict[str, str]) -> None:
    """Display one object in several formats."""
    from IPython.display import display

    display(data, raw=True)
