"""Text for terminals and for the `repr` of results: aligned columns, drawn by rich, without control sequences."""

from __future__ import annotations

import re
from collections.abc import Sequence

_OBEYED = re.compile("(?!\x1b\\[[0-9;]*m)[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str) -> str:
    r"""Escape what a terminal obeys, and half surrogates; line ends, tabs and colours (as of help texts) stay.

    Example:
        >>> escaped("a\x1b[2Jb"), escaped("a\tb\n"), escaped("\x1b[31mred\x1b[0m") == "\x1b[31mred\x1b[0m"
        ('a\\x1b[2Jb', 'a\tb\n', True)
    """
    return _OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def columns(
    rows: Sequence[Sequence[str]],
    heads: Sequence[str] = (),
    *,
    width: int | None = None,
    least: Sequence[int] = (),
    numbers_from: int | None = None,
) -> list[str]:
    """Return rows as lines of text with aligned columns, two spaces apart.

    Args:
        rows: as many cells each.
        heads: column heads; () for none.
        width: letters of a line; cells with spaces are folded inside their column. None folds nothing, and nothing is
            cut off: lines are longer than this if the longest words of all columns need it.
        least: minimum letters of the first columns.
        numbers_from: index of the first column that is aligned to the right.

    Example:
        >>> columns([("tp2", "different, see its gradients"), ("one_rank", "equal")], width=22)
        ['tp2       different,', '          see its', '          gradients', 'one_rank  equal']
    """
    if width is None and rows and all(cell.isprintable() for row in [heads, *rows] for cell in row):
        return _unfolded(rows, heads, least, numbers_from)
    from rich.console import Console  # 50 ms, only where a table is folded
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return []
    table = Table(box=None, show_header=bool(heads), header_style="", pad_edge=False, padding=(0, 2, 0, 0))
    for index, cells in enumerate(zip(*rows, strict=True)):
        table.add_column(
            Text(heads[index]) if heads else "",
            justify="left" if numbers_from is None or index < numbers_from else "right",
            overflow="fold",
            no_wrap=width is None or not any(" " in cell for cell in cells),
            min_width=least[index] if index < len(least) else None,
        )
    for row in rows:
        table.add_row(*map(Text, row))  # no markup: brackets stay
    console = Console(width=10**6, color_system=None)  # rich needs a width; no line is as long
    options = console.options.update(width=max(width or 10**6, console.measure(table).minimum))
    lines = console.render_lines(table, options, pad=False)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


def _unfolded(
    rows: Sequence[Sequence[str]], heads: Sequence[str], least: Sequence[int], numbers_from: int | None
) -> list[str]:
    """The same lines where nothing is folded, without rich, which takes 1 ms for a row: lists of runs are long."""
    from rich.cells import cell_len

    aligned = []
    for index, cells in enumerate(zip(*([heads] if heads else []), *rows, strict=True)):
        lengths = [len(cell) if cell.isascii() else cell_len(cell) for cell in cells]
        most = max(*lengths, least[index] if index < len(least) else 0)
        pads = [" " * (most - length) for length in lengths]
        right = numbers_from is not None and index >= numbers_from
        aligned.append([pad + cell if right else cell + pad for cell, pad in zip(cells, pads, strict=True)])
    return ["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)]
