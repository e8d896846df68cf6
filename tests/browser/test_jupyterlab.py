"""The real JupyterLab in a real browser: a first own plot; then the first notebook: watched, cancelled, found again.

One test, because each thing that it does is the next thing that a person does. Pictures of every station are kept.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.chromium import chromium
from tests.helpers.jupyterlab import ROOT, jupyterlab
from workbench.launch.detached import launchers

pytestmark = pytest.mark.browser

PATIENCE_MS = 120_000  # on a busy machine; a quiet one needs a tenth
FIRST_PLOT_S = 120  # limit on a busy machine; the seconds of this run are kept next to the pictures
OWN = """\
import workbench as wb
mine = {"a": {}, "b": {"loss": {"name": "cispo"}}}
base = {"precision": "float64", "steps": 2}
own = wb.Experiment({"base": base, "reference": "a", "configurations": mine}, folder="own")
wb.figures.gradient_norm_by_step(own.run(where="processes"))"""
TWO_TRIALS = """
question: Is anybody watching?
base: {precision: float64, steps: 5000}
reference: patient
configurations: {patient: {}, stopped: {seed: 1}}
"""


@pytest.fixture
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def notebook(browser, tmp_path):
    """A copy of the first notebook, open in JupyterLab."""
    began = time.monotonic()
    served = tmp_path / "served"
    served.mkdir()
    shutil.copy(ROOT / "notebooks/01_quickstart.ipynb", served)
    (served / "two_trials.yaml").write_text(TWO_TRIALS)
    with jupyterlab(served, tmp_path / "private", WORKBENCH_FAST="1", HF_HUB_OFFLINE="1") as lab:
        opened = Notebook(browser.new_page(viewport={"width": 1280, "height": 1000}), lab, tmp_path, began)
        yield opened
        for launcher in launchers(served / "two_trials/runs"):  # of a test that failed half-way
            os.kill(launcher.pid, signal.SIGTERM)
        opened.picture("the-end")  # also of a test that failed


class Notebook:
    """A user's actions on a notebook page."""

    def __init__(self, page, lab, pictures, began):
        self.page, self.lab, self.began = page, lab, began
        kept = os.environ.get("WORKBENCH_SCREENSHOTS")
        self.folders = [pictures, *([Path(kept)] if kept else [])]
        self.frames, self.number, self.dialogs = 0, 0, []
        page.set_default_timeout(PATIENCE_MS)
        page.on("websocket", self._listen)
        page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.accept()))

    def _listen(self, socket):
        if "/channels" in socket.url:
            socket.on("framereceived", self._count)

    def _count(self, _frame):
        self.frames += 1

    def open(self, *, reset=True):
        """Open it, and wait until its kernel responds: before that, executed cells are silently dropped."""
        self.frames = 0
        self.page.goto(self.lab.address("01_quickstart.ipynb", reset=reset))
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")
        self.page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
        for _ in range(PATIENCE_MS // 100):
            if self.frames:
                break
            self.page.wait_for_timeout(100)
        assert self.frames, "no word from the kernel"
        self.until("Idle")

    def until(self, word):
        """Wait for a state of the kernel."""
        self.page.locator(".jp-StatusBar-Widget", has_text=f"| {word}").wait_for()

    @property
    def busy(self):
        return self.page.locator(".jp-StatusBar-Widget", has_text="| Busy").count() == 1

    def run_all(self):
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.locator(".lm-Menu-item[data-command='runmenu:run-all']").click()

    def run_new_cell(self, code):
        """Write a cell below the last one and run it; gives the cell."""
        cells = self.page.locator(".jp-Notebook .jp-Cell")
        count = cells.count()
        self.page.locator(".jp-Notebook-footer").click()
        cell = cells.nth(count)  # and not the last, which another one will be
        cell.locator(".cm-content").click()
        self.page.keyboard.insert_text(code)
        self.page.keyboard.press("Control+Enter")
        return cell

    def restart(self):
        """Restart the kernel, and confirm."""
        self.page.get_by_role("menuitem", name="Kernel", exact=True).click()
        self.page.locator(".lm-Menu-item[data-command='kernelmenu:restart']").click()
        self.page.get_by_role("button", name="Confirm Kernel Restart").click()

    def save(self):
        self.page.keyboard.press("Control+s")
        self.page.locator(".jp-mod-dirty").first.wait_for(state="detached")

    def picture(self, name, of=None):
        """Save a screenshot with one element in the middle."""
        if of is not None:
            of.scroll_into_view_if_needed()
        self.number += 1
        for folder in self.folders:
            folder.mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=folder / f"{self.number}-{name}.png")

    def keep(self, name, text):
        """Save a text next to the pictures."""
        for folder in self.folders:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)

    def errors(self):
        """Return the errors that cells raised."""
        return self.page.locator("[data-mime-type='application/vnd.jupyter.error']").all_inner_texts()


class Trials:
    """A panel on the page, inside an output."""

    def __init__(self, inside):
        self.panel = inside.locator(".workbench-live.widget-vbox").last

    def row(self, name):
        return self.panel.locator(".trial[role=group]", has=self.panel.page.locator("b", has_text=name))

    def wait_for(self, name, state):
        self.row(name).locator(f".chip.{state}").wait_for()

    def steps(self, name):
        return int(self.row(name).get_by_role("progressbar").get_attribute("aria-valuenow"))

    def button(self, name, words):
        row = self.panel.locator(".workbench-row", has=self.panel.page.locator("b", has_text=name))
        return row.get_by_role("button", name=words, exact=True)


@pytest.mark.timeout(600)
def test_a_person_runs_watches_cancels_reloads_and_finds_again(notebook):
    page = notebook.page
    notebook.open()
    own = notebook.run_new_cell(OWN)
    own.locator(".jp-OutputArea-output svg, .jp-OutputArea-output img").first.wait_for()
    seconds = time.monotonic() - notebook.began
    notebook.keep("seconds_to_first_own_plot.txt", f"{seconds:.1f}\n")
    assert seconds < FIRST_PLOT_S
    notebook.picture("first-own-plot", own)

    notebook.run_all()
    page.get_by_text("two_ranks: 1 cancelled", exact=False).first.wait_for()
    notebook.until("Idle")
    assert notebook.errors() == []
    first = Trials(page.locator(".jp-CodeCell", has=page.get_by_text("experiment.panel()", exact=True)).first)
    for name in ("one_rank", "cp2_zigzag", "fault"):
        first.wait_for(name, "succeeded")
    notebook.picture("run-all", first.panel)

    # a widget of the notebook's own: the slider redraws the figure
    slider = page.locator(".widget-slider").first
    drawing = page.locator(".widget-interact .jp-RenderedSVG img").first
    before = drawing.get_attribute("src")
    slider.locator(".noUi-handle").focus()
    slider.locator(".noUi-handle").press("ArrowRight")
    page.locator(".widget-readout", has_text="0.32").wait_for()
    page.wait_for_function(
        "before => document.querySelector('.widget-interact .jp-RenderedSVG img').src !== before", arg=before
    )
    notebook.picture("slider", slider)

    # a panel that moves while another cell keeps the kernel busy
    trials = Trials(
        notebook.run_new_cell('two = wb.Experiment("two_trials.yaml").launch(where="processes")\ntwo.panel()')
    )
    trials.wait_for("patient", "running")
    notebook.until("Idle")
    notebook.run_new_cell(
        "begun = len(two.runs[0].steps())\nwhile len(two.runs[0].steps()) < begun + 8:\n    time.sleep(0.1)"
    )
    notebook.until("Busy")
    seen = set()
    while notebook.busy:
        now = trials.steps("patient")
        if notebook.busy and now not in seen:  # still busy, so the panel moved meanwhile
            seen.add(now)
            if len(seen) == 3:
                notebook.picture("live", trials.panel)
        page.wait_for_timeout(100)
    assert len(seen) > 3, f"steps seen while a cell ran: {sorted(seen)}"

    # one of the two is cancelled by its button, after a confirmation
    trials.button("stopped", "Cancel").click()
    again = trials.button("stopped", "Really? Again")
    again.wait_for()
    page.wait_for_timeout(300)
    again.click()
    trials.wait_for("stopped", "cancelled")
    trials.wait_for("patient", "running")
    notebook.picture("cancelled", trials.panel)
    assert trials.button("stopped", "Cancel").is_disabled()

    # the tab is reloaded: the panel on the page is restored, and a new one shows the same
    notebook.save()
    at_reload = trials.steps("patient")
    notebook.open(reset=False)
    old = Trials(page.locator(".jp-CodeCell", has=page.get_by_text("two_trials.yaml", exact=False)).first)
    old.wait_for("stopped", "cancelled")
    result = Trials(notebook.run_new_cell('wb.Experiment("two_trials.yaml").panel()'))
    result.wait_for("stopped", "cancelled")
    result.wait_for("patient", "running")
    assert result.steps("patient") >= at_reload
    notebook.picture("found-again", result.panel)

    # the kernel is restarted: the launcher is a process of its own, and its runs continue and are found again
    at_restart = result.steps("patient")
    notebook.restart()
    forgotten = notebook.run_new_cell('"experiment" in globals()')
    forgotten.get_by_text("False", exact=True).wait_for()
    result = Trials(notebook.run_new_cell('import workbench as wb\nwb.Experiment("two_trials.yaml").panel()'))
    result.wait_for("patient", "running")
    for _ in range(PATIENCE_MS // 100):
        if result.steps("patient") > at_restart + 1:
            break
        page.wait_for_timeout(100)
    assert result.steps("patient") > at_restart + 1
    assert "continues them without this notebook" in result.panel.inner_text()
    notebook.picture("after-the-restart", result.panel)
    assert re.search(r"[▁-█]|\d", result.row("patient").inner_text())

    # and it is not read-only: all running runs are cancelled from the new panel
    result.panel.get_by_role("button", name="Cancel all", exact=True).click()
    again = result.panel.get_by_role("button", name="Really? Again", exact=True)
    again.wait_for()
    page.wait_for_timeout(300)
    again.click()
    result.wait_for("patient", "cancelled")
    notebook.picture("all-cancelled", result.panel)
    assert notebook.errors() == []
    assert notebook.dialogs == []
