"""Links of README, the manual and the package READMEs resolve, anchors included."""

import re

import pytest
import yaml

from tests.docs.pages import MANUAL, PAGES, ROOT, dead_links, links, name_of
from workbench.cli.tools import TOOLS

GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_and_anchors_resolve(page):
    assert list(dead_links(page, page.read_text())) == []


def test_the_index_for_language_models():
    """The form of llmstxt.org: a title, a summary as a quotation, and lists of links with a description."""
    page = ROOT / "docs/llms.txt"
    text = page.read_text()
    title, _, summary, *_ = text.splitlines()
    assert (title[:2], summary[:2]) == ("# ", "> ")
    assert list(dead_links(page, text)) == []
    listed = {(page.parent / link).resolve() for link in links(text)}
    assert listed.issuperset([*GUIDES, ROOT / "docs/SKILL.md"])
    assert all(re.fullmatch(r"- \[[^]]+\]\(\S+\): .+", line) for line in text.splitlines() if line.startswith("-"))


def test_the_skill_has_its_front_matter():
    _, front, body = (ROOT / "docs/SKILL.md").read_text().split("---\n", 2)
    assert set(yaml.safe_load(front)) == {"name", "description"}
    assert set(re.findall(r"`workbench mcp` serves (.*) as tools", body)[0].replace(" and ", ", ").split(", ")) == {
        tool.__name__ for tool in TOOLS
    }


def test_dead_links_and_anchors_are_found():
    text = "# A title, `code`\n[a](nowhere.md) [b](#a-title-code) [c](#other) [d](Makefile) `[e](code.md)` [f](https://x.y/z)"
    assert list(dead_links(ROOT / "README.md", text)) == ["nowhere.md", "#other"]


def test_every_guide_is_listed_in_readme_and_manual():
    readme = {(ROOT / link).resolve() for link in links((ROOT / "README.md").read_text())}
    manual = {(ROOT / "docs" / link).resolve() for link in links((ROOT / "docs/README.md").read_text())}
    assert len(GUIDES) >= 12
    assert readme.issuperset(GUIDES)
    assert manual.issuperset(GUIDES)


def test_every_package_readme_and_notebook_is_listed():
    listed = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in (ROOT / "docs/reference/index.md", ROOT / "notebooks/README.md")
        for link in links(page.read_text())
    }
    assert listed.issuperset((ROOT / "workbench").glob("*/README.md"))
    assert listed.issuperset((ROOT / "notebooks").glob("*.ipynb"))


def test_readme_fits_on_one_page():
    assert len((ROOT / "README.md").read_bytes()) <= 9_000


def test_the_manual_is_read():
    assert len(MANUAL) >= 18
