"""Style: the same figure gives the same bytes, on a page it needs nothing, and drawing leaves no trace."""

import io
import re
from xml.etree import ElementTree

import matplotlib
import pytest

from workbench.report import style


def figure():
    made = style.chart(2.0)
    axes = style.panels(made, 2)[0]
    style.tidy(axes, title="title <&>", x="x (s)", y="y (nats)")
    axes.plot([1, 2, 3], [1, 4, 2], marker="o", color=style.SERIES[1])
    return made


def test_svg_has_the_same_bytes_every_time_and_no_date():
    text = style.svg_text(figure())
    assert style.svg_text(figure()) == text
    assert "metadata" not in text


def test_axes_are_where_savefig_places_them_and_the_figure_keeps_its_layout():
    drawn, buffer = figure(), io.StringIO()
    with matplotlib.rc_context(style.RC):
        drawn.savefig(buffer, format="svg", metadata=style.NO_METADATA)
    other = figure()
    engine, canvas, dpi = other.get_layout_engine(), other.canvas, other.dpi
    assert style.svg_text(other) == style.compact(buffer.getvalue())
    assert (other.get_layout_engine(), other.canvas, other.dpi) == (engine, canvas, dpi)


def places(text):
    """Kind, position and inherited style of every element that is drawn."""
    root = ElementTree.fromstring(text)
    by_id = {each.get("id"): each for each in root.iter() if each.get("id")}

    def walk(element, look, shifts):
        look = look | dict(part.split(": ") for part in (element.get("style") or "").split("; ") if part)
        shifts = [*shifts, *([element.get("transform")] if element.get("transform") else [])]
        kind = element.tag.rpartition("}")[2]
        if kind in ("style", "defs"):
            return
        if kind in ("path", "text", "use", "rect"):
            marker = by_id.get((element.get("{http://www.w3.org/1999/xlink}href") or "#")[1:])
            own = {} if marker is None else {"d": marker.get("d")}
            if marker is not None and marker.get("style"):
                look = look | dict(part.split(": ") for part in marker.get("style").split("; "))
            numbers = re.findall(r"-?\d+(?:\.\d+)?", " ".join([element.get("d") or own.get("d") or "", *shifts]))
            numbers += [element.get("x") or "0", element.get("y") or "0"]
            yield kind, element.text or "", look, [float(number) for number in numbers]
        for child in element:
            yield from walk(child, look, shifts)

    return list(walk(root, {}, []))


@pytest.mark.parametrize("outlines", [False, True])
def test_a_compact_svg_draws_the_same_in_fewer_bytes(outlines, monkeypatch):
    drawn = figure()
    drawn.axes[0].plot(range(200), [at % 7 for at in range(200)], marker="s", color=style.SERIES[2])
    small = style.svg_text(drawn, outlines=outlines)
    monkeypatch.setattr(style, "compact", lambda text: text)
    whole = style.svg_text(drawn, outlines=outlines)
    whole = re.sub(r' transform="rotate\(-0 [^"]*"', "", whole)
    assert len(small) < 0.6 * len(whole)
    assert "text_1" not in small
    for (kind, text, look, numbers), (kind_w, text_w, look_w, numbers_w) in zip(
        places(small), places(whole), strict=True
    ):
        assert (kind, text.strip(), look) == (kind_w, text_w.strip(), look_w)
        assert numbers == pytest.approx(numbers_w, abs=0.0051)


def test_inline_svg_names_no_address_and_prefixes_every_id():
    text = style.inline_svg(figure(), prefix="one")
    assert text.startswith("<svg ")
    assert "://" not in text
    ids = re.findall(r'\sid="([^"]*)"', text)
    assert ids
    assert all(name.startswith("one-") for name in ids)
    references = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', text)
    assert references
    assert {a or b for a, b in references} <= set(ids)


def test_inline_svg_takes_its_size_from_the_page_and_its_colours_from_variables():
    text = style.inline_svg(figure(), prefix="one")
    opening = text[: text.index(">")]
    assert "viewBox" in opening
    assert "width=" not in opening
    assert "height=" not in opening
    assert "var(--series-1)" in text
    assert style.SERIES[1] not in text
    assert "title &lt;&amp;&gt;" in text


def test_text_stays_text_on_a_page_and_becomes_curves_in_a_file(tmp_path):
    assert "<text" in style.inline_svg(figure(), prefix="one")
    saved = style.save_svg(figure(), tmp_path / "new" / "figure.svg").read_text(encoding="utf8")
    assert "<text" not in saved
    assert "xmlns" in saved


def test_a_chart_shows_itself_and_drawing_changes_no_setting_outside():
    before = dict(matplotlib.rcParams)
    assert "<svg" in figure()._repr_svg_()
    assert dict(matplotlib.rcParams) == before


def test_every_verdict_has_a_sign_and_hue_of_its_own():
    styles = list(style.VERDICT_STYLES.values())
    for attribute in ("name", "sign", "color"):
        assert len({getattr(s, attribute) for s in styles}) == len(styles)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(-0.09, 8.0, [0, 0.1, 1]), (-8.0, 0.09, [-1, -0.1, 0]), (-0.01, 0.5, [-0.01, 0, 0.01, 0.1]), (0.01, 1e-3, [0])],
)
def test_decades_around_zero_omit_values_too_close(low, high, ticks):
    assert style.DecadesAroundZero(0.02).tick_values(low, high) == ticks


def test_many_panels_take_several_rows_and_none_collapses():
    figure = style.chart(6.0)
    made = style.panels(figure, 8, sharey=True)
    figure.canvas.draw()
    assert len(made) == 8
    rows = {round(axes.get_position().y0, 3) for axes in made}
    assert len(rows) == 2
    assert all(axes.get_position().width > 0.05 for axes in made)
