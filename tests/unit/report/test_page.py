"""The report page: whole, safe against the names in it, free of addresses, and the same bytes every time."""

import base64
import hashlib
import html.parser
import os
import re
from collections import Counter
from dataclasses import replace

import pytest

from tests.helpers.comparisons import FAILED, FLOORED, PARAMETERS, bare, layout_parity, renamed
from tests.helpers.stand_in import stand_in
from workbench import atomic as whole_files
from workbench.compare.comparison import Comparison
from workbench.report import figures, style
from workbench.report.evidence import worst_share
from workbench.report.page import _failed_runs, _norm_ratios, page, write_report

SECTIONS = [
    "What differs between configurations",
    "Verdicts",
    "Gradient norm by step",
    "Per-parameter norm ratios",
    "Importance ratios",
    "Loss",
    "Time and memory",
    "Failed runs",
    "Provenance",
]
HOSTILE = '<script>alert("1")</script>&\'"><img src=x onerror=y>'


class Reader(html.parser.HTMLParser):
    """Every tag with its attributes, every id, the text, and whether tags are balanced."""

    VOID = frozenset({"meta", "br", "wbr", "input"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.open, self.crossed = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.crossed.append(tag)

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def text(comparison):
    return page(comparison)


@pytest.fixture(scope="module")
def read(text):
    return Reader(text)


def section(text, title):
    return next(part for part in text.split("<section")[1:] if f"<h2>{title}</h2>" in part)


def test_the_page_names_no_address_and_loads_nothing(text, read):
    assert not re.search(r"https?:|//[a-z]|url\((?!#)|@import", text)
    loading = {"src", "srcset", "data", "action", "poster", "background"}
    assert not [tag for tag, attributes in read.tags if loading & attributes.keys()]
    assert not {"link", "img", "iframe", "object", "form"} & {tag for tag, _ in read.tags}
    links = [a["href"] for tag, a in read.tags if tag in ("a", "use") and "href" in a]
    assert links
    assert all(link.startswith("#") for link in links)
    policies = [a["content"] for tag, a in read.tags if a.get("http-equiv") == "Content-Security-Policy"]
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", text, re.DOTALL)
    assert [re.sub('"[^"]*"', "", attributes).split() for attributes, _ in scripts] == [["id=", "type="], []]
    digest = base64.b64encode(hashlib.sha256(scripts[1][1].encode()).digest()).decode()
    assert policies == [f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"]


def test_the_page_is_well_formed_with_unique_ids(read):
    assert read.crossed == []
    assert read.open == []
    ids = Counter(a["id"] for _, a in read.tags if "id" in a)
    assert [name for name, count in ids.items() if count > 1] == []
    for tag, attributes in read.tags:
        for key in ("href", "xlink:href"):
            if key in attributes:
                assert attributes[key][1:] in ids, (tag, attributes)


def test_the_same_comparison_gives_the_same_bytes(text, comparison, tmp_path):
    comparison.save(tmp_path / "comparison.json")
    assert page(Comparison.load(tmp_path / "comparison.json")) == text


def test_settings_have_one_order_before_and_after_saving(comparison, tmp_path):
    """Two settings that the alphabet puts the other way round than the spec: fused_loss, then chunk_tokens."""
    reference, one = bare(comparison["one_rank-float64"]), bare(comparison["tp2-float64"])
    policy = one.settings["policy"] | {"fused_loss": True, "chunk_tokens": 64}
    assert [key for key in policy if key in ("fused_loss", "chunk_tokens")] == ["fused_loss", "chunk_tokens"]
    other = replace(one, settings=one.settings | {"policy": policy})
    changed = replace(comparison, configurations=[reference, other])
    changed.save(tmp_path / "comparison.json")
    assert page(Comparison.load(tmp_path / "comparison.json")) == page(changed)


def test_verdicts_come_first_and_every_section_follows(text, read):
    headings = re.findall(r"<h[12]>(.*?)</h[12]>", text)
    assert headings == ["Does GRPO give every parameter the same gradient in every layout?", *SECTIONS]
    assert text.index('class="summary"') < text.index("<h2>")
    assert "9 of 13 configurations keep the gradient of their reference." in read.text


def test_every_configuration_is_in_the_summary(text, comparison):
    summary = text[text.index('class="summary"') : text.index("<nav")].replace("<wbr>", "")
    for c in comparison.configurations:
        assert f'<span class="name">{c.name}</span>' in summary


def test_changed_settings_are_bold(text):
    rows = section(text, "What differs between configurations").split("<tr>")
    row = next(row for row in (row.replace("<wbr>", "") for row in rows) if "fault_missing_cp_factor" in row)
    assert re.findall(r"<b>(.*?)</b>", row) == ["missing_cp_factor", "2", "zigzag"]
    assert "optimizer" not in section(text, "What differs between configurations")


def test_parameters_judged_by_the_floor_are_listed_and_all_parameters_are_there(text):
    part = section(text, "Per-parameter norm ratios")
    listed = part[part.index("Judged by the floor") : part.index("All numbers")]
    assert f"<code>{FLOORED}</code>" in listed
    details = part[part.index("All numbers") :]
    for name in PARAMETERS:
        assert details.count(f"<code>{name}</code>") == 12
    assert details.count("36 of 36 parameters out of budget") == 3
    assert details.count("0 of 36 parameters out of budget") == 9


def test_no_floored_parameters_are_reported(comparison):
    c = comparison["tp2-float64"]
    own = replace(c, parameters=[replace(p, judged_by="gradient") for p in c.parameters])
    assert "none needed the floor" in _norm_ratios(Comparison("x", "?", [comparison["one_rank-float64"], own]))


def test_where_nothing_was_judged_the_page_speaks_of_no_reference_and_no_floor(text, comparison):
    broad = "The broad grey line is the reference"
    assert broad in section(text, "Gradient norm by step")
    baseline, other = (bare(comparison[name], "steps") for name in ("one_rank-float64", "one_rank-float32"))
    alone = page(Comparison("x", "?", [baseline, other]))
    assert broad not in alone
    assert "before clipping.</figcaption>" in section(alone, "Gradient norm by step")
    ratios = Reader(section(alone, "Per-parameter norm ratios")).text
    assert ratios.endswith("Per-parameter norm ratios No parameter's gradient was compared with another's.")
    lost = replace(comparison["tp2-float64"], steps=[], parameters=[])
    assert broad not in page(Comparison("x", "?", [baseline, lost]))


def test_a_failed_run_shows_rank_coordinates_exception_and_traceback(text):
    part = section(text, "Failed runs")
    assert FAILED in part
    assert "rank 1: ShardingError (at cp=0, dp=0, tp=1)" in part
    assert "File &#34;workbench/train/worker.py&#34;, line 88" in part


def test_no_failed_runs_are_reported(comparison):
    well = Comparison("x", "?", [comparison["one_rank-float64"], comparison["tp2-float64"]])
    assert "None: every run ended well." in _failed_runs(well)


def test_provenance_is_shown(text):
    part = section(text, "Provenance")
    for value in ("2.13.0", "0123456789abcdef", "workbench run experiments/layout_parity/ablation.yaml"):
        assert value in part


def test_a_run_that_left_no_record_is_still_reported(comparison):
    gone = replace(comparison[FAILED], settings={}, run="", failure={"exception": "lost"}, why="")
    made = page(Comparison("x", "?", [bare(comparison["one_rank-float32"]), gone]))
    assert "lost" in section(made, "Failed runs")


def test_hostile_names_stay_text():
    whole = renamed(layout_parity(), "tp2-float64", HOSTILE)
    changed = []
    for c in [whole[name] for name in ("one_rank-float64", HOSTILE, "fault_missing_cp_factor", FAILED)]:
        hostile = dict.fromkeys(("why", "device_note", "factor_meaning", "run"), HOSTILE)
        hostile["against"] = c.against and "one_rank-float64"
        parameters = [replace(p, parameter=HOSTILE + p.parameter) for p in c.parameters[:5]]
        failure = c.failure and c.failure | {"exception": HOSTILE, "traceback": HOSTILE}
        first = c.first_parameter and HOSTILE
        changed.append(
            replace(
                c,
                **hostile,
                parameters=parameters,
                failure=failure,
                first_parameter=first,
                ratios={},
                settings=dict(c.settings) | {HOSTILE: HOSTILE + c.name},
            )
        )
    made = page(Comparison(HOSTILE, HOSTILE, changed, {HOSTILE: {HOSTILE: HOSTILE}}))
    read = Reader(made)
    assert "img" not in {tag for tag, _ in read.tags}
    assert [tag for tag, _ in read.tags].count("script") == 2  # the page's own data and script
    assert not [a for _, a in read.tags if any(key.startswith("on") for key in a)]
    assert (read.crossed, read.open) == ([], [])
    assert HOSTILE in read.text


def test_the_page_that_was_there_stays_until_the_new_one_is_on_disk(comparison, tmp_path, monkeypatch):
    path, small = tmp_path / "report.html", Comparison("x", "?", [bare(comparison["one_rank-float64"])])
    path.write_text("before")

    def crash(*_):
        raise OSError("disk full")

    monkeypatch.setattr(whole_files, "os", stand_in(os, fsync=crash))
    with pytest.raises(OSError, match="disk full"):
        write_report(small, path)
    assert path.read_text() == "before"


def test_a_figure_next_to_the_page_is_redrawn(comparison, tmp_path):
    (tmp_path / "verdicts.svg").write_text("of another comparison")
    judged = bare(comparison["tp2-float64"], "whole_gradient")
    small = replace(comparison, configurations=[bare(comparison["one_rank-float64"]), judged])
    write_report(small, tmp_path / "report.html")
    assert (tmp_path / "verdicts.svg").read_text() == style.svg_text(figures.verdicts(small), outlines=True)


def test_write_report_writes_the_page_and_nothing_else(comparison, tmp_path):
    small = Comparison("x", "?", [bare(comparison["one_rank-float32"], "steps"), comparison[FAILED]])
    path = write_report(small, tmp_path / "report.html")
    assert path == tmp_path / "report.html"
    assert path.read_text(encoding="utf8") == page(small)
    assert list(tmp_path.iterdir()) == [path]


def test_of_many_configurations_the_furthest_are_drawn_and_listed_and_the_page_says_so(monkeypatch, comparison):
    monkeypatch.setattr(figures, "MOST_COLUMNS", 2)
    compared = [c for c in comparison.configurations if c.parameters]
    kept = figures.notable(comparison)
    assert [c for c in compared if c in kept] == kept, "in their order"
    assert {c.verdict for c in kept} == {"different"}
    others = [worst_share(c) for c in compared if c not in kept and c.verdict == "different"]
    assert min(map(worst_share, kept)) >= max(others)
    text = str(_norm_ratios(comparison))
    assert f"2 of {len(compared)} configurations" in text
    assert text.count("<details") == 2


def test_of_few_configurations_all_are_drawn_and_listed(text, comparison):
    compared = [c for c in comparison.configurations if c.parameters]
    assert figures.notable(comparison) == compared
    part = section(text, "Per-parameter norm ratios")
    assert part.count("<details") == len(compared)
    assert "comparison.json has the others" not in part
