"""The report page: the whole comparison as one self-contained HTML file.

No address, no external font, and one small script of its own; a content security policy in the file forbids all
others. Without scripts the page is whole. The same comparison gives the same bytes. The verdicts come first, then the
evidence, and the provenance at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from workbench.atomic import write_whole
from workbench.compare.comparison import Comparison, Configuration, ParameterDifference, flatten
from workbench.compare.seeds import seed_groups
from workbench.report import figures, style
from workbench.report.arms import arm_verdicts
from workbench.report.controls import SCRIPT_POLICY, controls, pair, script
from workbench.report.evidence import (
    changed_settings,
    limits,
    relative_text,
    setting_text,
    share_of_budget,
)
from workbench.report.first_ratio import first_ratio_section
from workbench.report.markup import Markup, breakable, join, style_sheet, table, tag
from workbench.report.numbers import NONE, moment, near_one, share, significant
from workbench.report.online import CAPTION as ONLINE_CAPTION
from workbench.report.online import online_answer, online_curves, online_groups, online_table
from workbench.report.score import saved_score, score_note
from workbench.report.seeds import seeds_by_step, seeds_table
from workbench.report.style import VERDICT_STYLES, inline_svg
from workbench.report.summary import (
    answer,
    chip,
    failure_line,
    shared_note,
    summary_table,
    tiles,
    where_it_ran,
)
from workbench.sensitivity.record import Sensitivity

CAPTIONS = {
    "gradient_norm_by_step": "L2 norm over all parameters, each counted once, before clipping.",
    "norm_ratios": "Norm of each parameter's gradient over the reference's, at step 0; parameters run downwards in the "
    "model's order. A correct configuration lies on 1 from top to bottom. A wrong direction can hide "
    "behind a right norm: the verdict weighs the distance, not this ratio. Hollow: judged by the floor. "
    "Arrow: beyond the axis, with the range under the name.",
    "importance_ratios": "Probability of each trained token under the policy over its probability at the start of the "
    "update. Dotted: the clip bounds. The vertical axis is logarithmic.",
    "loss_by_step": "The loss of the whole optimizer step. It can look right while gradients are wrong; no verdict "
    "rests on it alone.",
    "seeds_by_step": "The mean over seeds is the line, one standard deviation to each side the band.",
    "online_curves": ONLINE_CAPTION,
    "time_and_memory": "A mark for every step; the first one, which also warms up, is hollow. The bar is the median of "
    "the others.",
}
BROAD_CAPTION = " The broad grey line is the reference; configurations that agree with it share one dashed line."
FLOOR_CAPTION = (
    "These gradients are too small to be measured against themselves; their budget comes from the model's "
    "typical gradient instead. They are judged like all others, and none is skipped."
)
CPU_CAPTION = (
    "Ranks on CPU share this machine's cores: these times say what the run cost, not how fast a layout is. "
    "Memory on CPU is the whole process, Python and its libraries included."
)
WHOLE_CAPTION = (
    "In float64 the whole gradient is judged by the parameter nearest to its budget; below float64 it has a measured "
    "budget of its own."
)
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_report(comparison: Comparison, path: Path) -> Path:
    """Write the report page, atomically, and return its path.

    A figure ``verdicts.svg`` that stands beside it, as a README shows it, is drawn again.
    """
    figure = Path(path).with_name("verdicts.svg")
    if figure.exists():
        write_whole(figure, style.svg_text(figures.verdicts(comparison), outlines=True).encode())
    text = page(comparison, score=saved_score(Path(path).parent))
    return write_whole(Path(path), text.encode(errors="backslashreplace"))  # half surrogates


def page(comparison: Comparison, *, score: Sensitivity | None = None) -> str:
    """Return the report page as text, with the mutation score of the comparison, or how to measure it."""
    draw = functools.partial(_figure, comparison)
    broad = BROAD_CAPTION if any(c.against and c.steps for c in comparison.configurations) else ""
    sections: list[tuple[str, Markup]] = []
    if online_groups(comparison):
        online = join([draw(online_curves), online_table(comparison), arm_verdicts(comparison)])
        sections.append(("Online: reward and mismatch by step", online))
    if first := first_ratio_section(comparison):
        sections.append(("Ratio at step 0", first))
    settings = join([differences(comparison), pair() if len(comparison.configurations) > 1 else None])
    sections += [
        ("What differs between configurations", settings),
        ("Verdicts", join([score_note(comparison, score), _verdicts(comparison)])),
    ]
    if seed_groups(comparison):
        sections.append(("Across seeds", join([seeds_table(comparison), draw(seeds_by_step)])))
    sections += [
        ("Gradient norm by step", draw(figures.gradient_norm_by_step, more=broad)),
        ("Per-parameter norm ratios", _norm_ratios(comparison)),
        ("Importance ratios", draw(figures.importance_ratios)),
        ("Loss", draw(figures.loss_by_step)),
        ("Time and memory", _time_and_memory(comparison)),
        ("Failed runs", _failed_runs(comparison)),
        ("Provenance", provenance(comparison)),
    ]
    eyebrow = tag("p", "workbench report · ", tag("b", comparison.experiment), class_="eyebrow")
    masthead = tag(
        "header",
        eyebrow,
        tag("h1", comparison.question),
        [tag("p", text, class_="answer") for text in _answers(comparison)],
        tiles(comparison),
    )
    opening = [masthead, "\n", tag("div", controls(comparison), summary_table(comparison), class_="first")]
    return document(comparison.experiment, opening, sections, end=script(comparison))


def document(
    name: str, opening: Sequence[Any], sections: Sequence[tuple[str, Any]], *, end: Markup | None = None
) -> str:
    """Return a whole page as text: one self-contained HTML file with a title, an opening and titled sections.

    Only a page with an ``end``, which holds its script, may run that script.
    """
    policy = f"{POLICY}; {SCRIPT_POLICY}" if end else POLICY
    contents = [tag("a", title, href=f"#section-{i}") for i, (title, _) in enumerate(sections)]
    body = [tag("section", tag("h2", title), content, id=f"section-{i}") for i, (title, content) in enumerate(sections)]
    metas = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
    ]
    sheets = tag("style", style_sheet("verdicts.css"), style_sheet("page.css"))
    head = join([*([meta, "\n"] for meta in metas), tag("title", f"{name} · workbench report"), sheets])
    main = tag(
        "main", join(opening), "\n", tag("nav", contents, aria_label="Contents"), "\n", [join([s, "\n"]) for s in body]
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n'
        f'<body class="workbench">\n{main}\n{end or ""}</body>\n</html>\n'
    )


def drawing(name: str, caption: str, figure: Figure) -> Markup:
    """Return a figure with its caption as markup; the name must be unique on the page."""
    prefix = name.replace("_", "-")
    svg, label = Markup(inline_svg(figure, prefix=prefix)), f"{prefix}-caption"
    drawn = tag("div", svg, class_="drawing", role="img", aria_labelledby=label)
    return tag("figure", tag("figcaption", caption, id=label), drawn)


# ---- sections -----------------------------------------------------------------------------------------


def differences(comparison: Comparison) -> Markup:
    """Tabulate the settings that differ; bold where a configuration differs from its reference."""
    settings = {c.name: flatten(c.settings) for c in comparison.configurations}
    keys = sorted({key for flat in settings.values() for key in flat})
    keys = [key for key in keys if len({repr(flat.get(key)) for flat in settings.values()}) > 1]
    if not keys:
        return tag("p", "Nothing: all configurations have the same settings.")
    rows = []
    for c in comparison.configurations:
        changed = changed_settings(comparison, c)
        texts = {key: breakable(setting_text(settings[c.name].get(key))) for key in keys}
        cells = [tag("b", text) if key in changed else tag("span", text, class_="same") for key, text in texts.items()]
        rows.append([tag("code", breakable(c.name)), *cells])
    note = (
        "Every setting that is not the same in all configurations. Bold: other than in the configuration's own "
        "reference."
    )
    head = ["configuration", *(tag("code", breakable(key)) for key in keys)]
    return join([tag("p", note), table(head, rows, class_="settings")])


def _verdicts(comparison: Comparison) -> Markup:
    """Tabulate the verdicts with their reasons, and the whole gradient's distance step by step."""
    rows = []
    for c in comparison.configurations:
        why = [tag("span", line, class_="line") for line in (c.why or NONE, *limits(c))]
        against = tag("code", c.against) if c.against else NONE
        rows.append([tag("code", c.name), chip(c.verdict), against, join(why), where_it_ran(comparison, c)])
    steps = [
        [
            tag("code", c.name),
            w.get("step"),
            significant(w.get("distance"), 2),
            significant(w.get("budget"), 2),
            share(share_of_budget(w.get("distance"), w.get("budget"))),
            relative_text(w.get("relative_l2")),
            {True: "yes", False: "no", None: NONE}.get(w.get("bitwise_equal"), NONE),
            NONE if w.get("flipped_clips") is None else w["flipped_clips"],
        ]
        for c in comparison.configurations
        for w in c.whole_gradient
    ]
    head = ["configuration", "step", "distance", "budget", "÷ budget", "relative L2", "bitwise equal", "flipped clips"]
    whole = join([tag("p", WHOLE_CAPTION), table(head, steps, numbers=(1, 2, 3, 4, 5, 7))])
    more = _details(f"The whole gradient, step by step ({len(steps)} rows)", whole) if steps else None
    return join([table(["configuration", "verdict", "against", "why", "where it ran"], rows, class_="prose"), more])


def _norm_ratios(comparison: Comparison) -> Markup:
    """Draw the figure of norm ratios; tabulate the parameters judged by the floor, and all numbers."""
    compared = [c for c in comparison.configurations if c.parameters]
    if not compared:
        return tag("p", "No parameter's gradient was compared with another's.")
    floored: dict[str, list[tuple[str, ParameterDifference]]] = {}
    for c in compared:
        for p in c.parameters:
            if p.judged_by == "floor":
                floored.setdefault(p.parameter, []).append((c.name, p))
    floor = [tag("p", "Every parameter was judged by its own gradient; none needed the floor.")]
    if floored:
        rows = [
            [
                tag("code", name),
                len({c for c, _ in entries}),
                significant(max(p.norm for _, p in entries), 2),
                share(max(share_of_budget(p.distance, p.budget) for _, p in entries)),
            ]
            for name, entries in floored.items()
        ]
        head = ["parameter", "configurations", "largest norm", "worst distance ÷ budget"]
        floor = [tag("h3", "Judged by the floor"), tag("p", FLOOR_CAPTION), table(head, rows, numbers=(1, 2, 3))]
    listed = figures.notable(comparison)
    more = ""
    if len(listed) < len(compared):
        more = (
            f" Drawn and listed below are {len(listed)} of {len(compared)} configurations: those that do not agree, "
            "then those that use most of their budget. comparison.json has the others."
        )
    heading = tag("h3", "All numbers, one step a configuration")
    figure = _figure(comparison, figures.norm_ratios, more=more)
    return join([figure, floor, heading, [_parameter_table(c) for c in listed]])


def _time_and_memory(comparison: Comparison) -> Markup:
    """Draw the figure of time and memory, with a warning where ranks shared a CPU."""
    notes = sorted({c.device_note for c in comparison.configurations if c.device_note} - {shared_note(comparison)})
    on_cpu = any(c.device == "cpu" and c.world_size > 1 for c in comparison.configurations)
    caution = tag("p", CPU_CAPTION, class_="caution") if on_cpu else None
    moved = tag("p", "Ran on CPU with gloo: ", "; ".join(notes), class_="caution") if notes else None
    return join([_figure(comparison, figures.time_and_memory), caution, moved])


def _failed_runs(comparison: Comparison) -> Markup:
    """List each failed run with its rank, exception and traceback."""
    failed = [c for c in comparison.configurations if c.verdict == "failed" or c.failure]
    if not failed:
        return tag("p", "None: every run ended well.")
    return join(_failure(c) for c in failed)


def provenance(comparison: Comparison) -> Markup:
    """Tabulate versions, git state, command and machine, and the folder of each run."""
    facts = sorted(flatten(comparison.provenance).items())
    rows = [[tag("code", key), moment(value) if key.endswith("_ns") else setting_text(value)] for key, value in facts]
    runs = [
        [tag("code", c.name), tag("code", c.run or NONE), c.state, c.device, c.world_size]
        for c in comparison.configurations
    ]
    what = table(["what", "value"], rows, class_="prose") if rows else tag("p", "Nothing was recorded.")
    where = table(["configuration", "folder", "state", "device", "ranks"], runs, numbers=(4,))
    return join([what, _details("Run folders, relative to the experiment", where)])


# ---- parts of sections --------------------------------------------------------------------------------


def _answers(comparison: Comparison) -> list[str]:
    """Return the opening paragraphs: the verdicts, unless no run has a reference, and the result of online runs."""
    sampled = online_answer(comparison)
    judged = any(c.against or c.verdict == "failed" for c in comparison.configurations)
    return [*([answer(comparison)] if judged or not sampled else []), *([sampled] if sampled else [])]


def _figure(comparison: Comparison, draw: Callable[[Comparison], Figure], *, more: str = "") -> Markup:
    return drawing(draw.__name__, CAPTIONS[draw.__name__] + more, draw(comparison))


def _parameter_table(c: Configuration) -> Markup:
    """Tabulate all parameters in the first step that differs, or else in the step closest to its budget."""
    step, why = c.first_step, "the first that differs"
    if step is None:
        nearest = max(c.parameters, key=lambda p: (share_of_budget(p.distance, p.budget), -p.step))
        step, why = nearest.step, "the closest to its budget"
    shown = [p for p in c.parameters if p.step == step]
    rows = [
        [
            tag("code", p.parameter),
            significant(p.norm),
            significant(p.reference_norm),
            near_one(p.norm_ratio),
            significant(p.relative_l2, 2),
            near_one(p.cosine),
            tag("span" if p.within else "b", share(share_of_budget(p.distance, p.budget))),
            p.judged_by,
        ]
        for p in shown
    ]
    outside = sum(not p.within for p in shown)
    text = f" · step {step}, {why} · {outside} of {len(shown)} parameters out of budget"
    head = ["parameter", "norm", "reference", "ratio", "relative L2", "cosine", "÷ budget", "judged by"]
    title = tag("span", chip(c.verdict), " ", tag("code", c.name), text)
    return _details(title, table(head, rows, numbers=range(1, 7)))


def _failure(c: Configuration) -> Markup:
    failure = c.failure or {}
    place = failure.get("coordinates")
    axes = sorted(place.items()) if isinstance(place, Mapping) else ()
    where = ", ".join(f"{axis}={index}" for axis, index in axes)
    return tag(
        "article",
        tag("h3", chip(c.verdict), " ", tag("code", c.name)),
        tag("p", failure_line(c), f" (at {where})" if where else None),
        tag("p", c.why) if c.why else None,
        tag("pre", failure["traceback"], tabindex="0") if failure.get("traceback") else None,
        class_=f"failure {VERDICT_STYLES[c.verdict].name}",
    )


def _details(title: Any, content: Markup) -> Markup:
    return tag("details", tag("summary", title), content)
