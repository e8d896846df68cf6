"""Pages of systems: every command is executed, on the dump that the page names, and exits as the page says."""

import contextlib
import io
import re
import shlex
import shutil

import pytest

from tests.docs.pages import ROOT, blocks
from workbench.check.stages import STAGES
from workbench.cli import main

PAGES = sorted((ROOT / "docs/guides/systems").glob("*.md"))
SAMPLE = ("verl", "pipelinerl")
"""Pages of the default suite: one with every stage, one without a live policy."""


def executed(text, folder):
    """Execute the block of a page in a folder; return exit codes and output of its checks."""
    results = []
    lines = iter(blocks(text, "bash")[0].splitlines())
    for line in lines:
        words = shlex.split(line)
        if words[:2] == ["cp", "-r"]:
            for source in words[2:-1]:
                path = ROOT / source
                copy = shutil.copytree if path.is_dir() else shutil.copy
                copy(path, folder / path.name)
        elif words[0] == "cat":
            body = iter(lambda: next(lines), "END")
            (folder / words[2]).write_text("\n".join(body))
        else:
            assert words[:3] == ["python", "-m", "workbench"]
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                code = main(words[3:])
            results.append((code, out.getvalue()))
    return results


def decided():
    """System -> stages that its dump decides, by the table of the guide."""
    text = (ROOT / "docs/guides/check-a-step.md").read_text().partition("## Dumps of other systems")[2]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[4].split(", ") for row in rows if len(row) == 5}


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=p.stem, marks=() if p.stem in SAMPLE else pytest.mark.slow) for p in PAGES]
)
def test_the_three_commands(page, tmp_path, monkeypatch):
    text = page.read_text()
    monkeypatch.chdir(tmp_path)
    (agrees, doubted, compared) = executed(text, tmp_path)
    codes = [int(code) for code in re.findall(r"\((?:exit code )?(\d)\)", text)]
    assert [code for code, _ in (agrees, doubted, compared)] == codes == [0, 1, 1], [
        out for _, out in (agrees, doubted)
    ]
    assert agrees[1].startswith("agrees")
    assert [stage for stage in STAGES if re.search(rf"^{stage}\s+agrees", agrees[1], re.MULTILINE)] == decided()[
        page.stem
    ]
    assert doubted[1].startswith("differs")
    assert "first difference" in doubted[1]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for phrase in re.findall(r"\*([^*\n]+)\*", prose):
        assert phrase in doubted[1], phrase


def test_every_reader_has_a_page():
    readers = {path.parent.name for path in (ROOT / "workbench/systems").glob("*/dump.py")}
    assert {page.stem for page in PAGES} == readers == {*decided()}
