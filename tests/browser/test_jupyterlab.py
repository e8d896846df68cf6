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

PATIENCE_MS = 300_000  # on a busy machine; a quiet one needs a thirtieth
FIRST_PLOT_S = 120  # limit where each process has a core; the seconds of this run are kept next to the pictures
OWN = """\
import workbench as wb
mine = {"a": {}, "b": {"loss": {"name": "cispo"}}}
base = {"precision": "float64", "steps": 2}
own = wb.Experiment({"base": base, "reference": "a", "configurations": mine}, folder="own")
wb.figures.gradient_norm_by_step(own.run(where="processes"))"""
# so many steps that no machine has done them before the last line of the test; slow and small, which leave it the cores
TWO_TRIALS = """
question: Is anybody watching?
base: {precision: float64, steps: 1000000, loss: {name: "patience.py:loss"}, data: {documents_per_step: 1}}
reference: patient
configurations: {patient: {}, stopped: {seed: 1}}
"""
PATIENCE = """\
import time


def loss(inputs):
    time.sleep(0.4)
    return -inputs.advantages_T * inputs.policy_logprobs_T
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
    (served / "patience.py").write_text(PATIENCE)
    with jupyterlab(served, tmp_path / "private", WORKBENCH_FAST="1", HF_HUB_OFFLINE="1") as lab:
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        opened = Notebook(page, lab, served, tmp_path, began)
        yield opened
        for launcher in launchers(served / "two_trials/runs"):  # of a test that failed half-way
            os.kill(launcher.pid, signal.SIGTERM)
        opened.picture("the-end")  # also of a test that failed


class Notebook:
    """A user's actions on a notebook page."""

    def __init__(self, page, lab, served, pictures, began):
        self.page, self.lab, self.served, self.began = page, lab, served, began
        kept = os.environ.get("WORKBENCH_SCREENSHOTS")
        self.folders = [pictures, *([Path(kept)] if kept else [])]
        self.sockets, self.heard, self.number, self.dialogs = 0, 0, 0, []
        page.set_default_timeout(PATIENCE_MS)
        page.on("websocket", self._listen)
        page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.accept()))

    def _listen(self, socket):
        if "/channels" in socket.url:
            self.sockets += 1
            number = self.sockets
            socket.on("framereceived", lambda _frame: self._hear(number))

    def _hear(self, number):
        self.heard = max(self.heard, number)

    def open(self, *, reset=True):
        """Open it, and wait until its kernel responds: before that, executed cells are silently dropped."""
        before = self.sockets  # a panel still speaks through those of the page that is left
        self.page.goto(self.lab.address("01_quickstart.ipynb", reset=reset))
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")
        self.page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
        assert in_time(self.page, lambda: self.heard > before), "no word from the kernel"
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

    def until_beyond(self, name, steps):
        """Wait until more than these steps are shown; gives those shown then."""
        assert in_time(self.panel.page, lambda: self.steps(name) > steps), f"{name} is not seen beyond step {steps}"
        return self.steps(name)

    def button(self, name):
        row = self.panel.locator(".workbench-row", has=self.panel.page.locator("b", has_text=name))
        return row.get_by_role("button")

    def press_twice(self, button):
        """Click and confirm, so that nothing is left to cancel; again where a busy machine let the time for it pass."""
        page = self.panel.page
        asked = button.and_(page.get_by_role("button", name="Really? Again", exact=True))
        for _ in range(6):
            button.click()
            if in_time(page, asked.is_visible, 10_000):
                page.wait_for_timeout(300)  # longer than a double click
                button.click()
                if in_time(page, button.is_disabled, 20_000):
                    return
        raise AssertionError("six times clicked and confirmed, and not all is cancelled")


def in_time(page, happened, milliseconds=PATIENCE_MS):
    """Look until it has happened; gives whether it has."""
    for _ in range(milliseconds // 100):
        if happened():
            return True
        page.wait_for_timeout(100)
    return False


@pytest.mark.timeout(1800)
def test_a_person_runs_watches_cancels_reloads_and_finds_again(notebook):
    page = notebook.page
    notebook.open()
    own = notebook.run_new_cell(OWN)
    own.locator(".jp-OutputArea-output svg, .jp-OutputArea-output img").first.wait_for()
    seconds = time.monotonic() - notebook.began
    notebook.keep("seconds_to_first_own_plot.txt", f"{seconds:.1f}\n")
    assert seconds < FIRST_PLOT_S * max(1.0, os.getloadavg()[1] / (os.cpu_count() or 1))
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
    notebook.run_new_cell('while not Path("seen").exists():\n    time.sleep(0.1)')  # ends when the test has seen enough
    notebook.until("Busy")
    shown = trials.steps("patient")
    for _ in range(3):
        shown = trials.until_beyond("patient", shown)
    notebook.picture("live", trials.panel)
    trials.until_beyond("patient", shown)
    assert notebook.busy
    (notebook.served / "seen").touch()
    notebook.until("Idle")

    # one of the two is cancelled by its button, after a confirmation
    trials.press_twice(trials.button("stopped"))
    trials.wait_for("stopped", "cancelled")
    trials.wait_for("patient", "running")
    notebook.picture("cancelled", trials.panel)
    assert trials.button("stopped").is_disabled()

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
    result.until_beyond("patient", at_restart + 1)
    assert "continues them without this notebook" in result.panel.inner_text()
    notebook.picture("after-the-restart", result.panel)
    assert re.search(r"[▁-█]|\d", result.row("patient").inner_text())

    # and it is not read-only: all running runs are cancelled from the new panel
    result.press_twice(result.panel.locator(".workbench-row").first.get_by_role("button"))
    result.wait_for("patient", "cancelled")
    notebook.picture("all-cancelled", result.panel)
    assert notebook.errors() == []
    assert notebook.dialogs == []
