"""A live panel of trials, built only from files on disk.

    panel = attach("experiments/layout_parity")   # or a run's folder, several of them, or a sweep
    panel                                         # in a notebook: rows that update while other cells run

Because it only reads, it can be recreated after a kernel restart or a reload of the page, and it shows what another
process launched. One daemon thread updates it. The kernel handles buttons only between cells, so the panel shows the
command that does the same from a terminal.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets

from workbench.columns import escaped
from workbench.launch.cancel import cancel_run
from workbench.records.directory import RunDirectory
from workbench.report.markup import style_sheet, tag
from workbench.report.numbers import duration
from workbench.report.rows import as_line, column_heads, heading, row, shared_place, table_of
from workbench.report.trial import LogTail, Subject, Trial, TrialReader, elapsed_s, subject_of

POLL_S = 0.3
CONFIRM_S = 3.0
"""A second click within this time cancels."""

_DOUBLE_CLICK_S = 0.2  # a sooner second click is the same click, or was queued with it while the kernel was busy
_AFTER_THE_END_S = 1.5  # for last lines of logs, and a state that a launcher still corrects
_EVERY_RANK = 10  # looks after which the logs of hidden ranks are read too
_NO_LOG = "choose a trial"


def attach(target: Any, *, poll_s: float = POLL_S) -> Panel:
    """Return a panel of an experiment, of some runs, or of a sweep.

    Args:
        target: folder or name of an experiment (the runs launched last are shown), folder or name of one run, a
            `RunDirectory`, several of these, or a sweep.
        poll_s: seconds between looks at the disk.

    Raises:
        RecordError: there is no run.
    """
    return Panel(subject_of(target), poll_s=poll_s)


class Panel:
    """Rows of trials that follow their directories until all have ended.

    It lives as long as it is displayed or referenced, and until `close`. Nothing in it raises into the notebook: read
    errors are shown in their row.

    Args:
        subject: the runs, from `attach`.
        poll_s: seconds between looks at the disk.
    """

    def __init__(self, subject: Subject, *, poll_s: float = POLL_S) -> None:
        self._subject = subject
        self._readers = [TrialReader(run) for run in subject.runs]
        self._trials: list[Trial] = []
        self._lock = threading.RLock()
        self._all_ended_since: float | None = None
        self._looks = 0
        self._button_error = self._place = ""
        self._logs: list[LogTail] = []
        self._build()
        self.look()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_feed, args=(weakref.ref(self), self._stop, poll_s), name=f"panel of {subject.what}", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._stop, self._box)
        self._end.atexit = False

    # ---- public API ----------------------------------------------------------------------------------

    @property
    def trials(self) -> list[Trial]:
        """Return the trials as of the last look."""
        return list(self._trials)

    @property
    def live(self) -> bool:
        """True if the panel still follows its runs."""
        return self._thread.is_alive() and not self._stop.is_set()

    def as_text(self) -> str:
        """Return a heading and a line for each trial, as they are now."""
        self.look()
        names = max((len(trial.name) for trial in self._trials), default=0)
        states = Counter(trial.state for trial in self._trials)
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        head = f"{self._subject.what}: {counts}, {duration(self._elapsed_s())}"
        return escaped("\n".join([head, *(f"  {as_line(trial, names=names)}" for trial in self._trials)]))

    def as_html(self) -> str:
        """Return the rows as static HTML, where widgets do not work."""
        return table_of(self._subject.what, self._trials, self._elapsed_s())

    def close(self) -> None:
        """Stop following, and remove the panel from the page. The runs continue."""
        self._stop.set()
        self._box.displayed_panel = None
        self._end()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def __repr__(self) -> str:
        return self.as_text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        if self._end.alive:
            self._box.displayed_panel = self  # keeps a displayed panel alive without a variable
            shown = self._box._repr_mimebundle_(include=include, exclude=exclude) or {}
        return {**shown, "text/plain": self.as_text(), "text/html": self.as_html()}

    # ---- looking -------------------------------------------------------------------------------------

    def look(self) -> bool:
        """Look at the disk once and update the page; return True if there may be more to see."""
        with self._lock:
            try:
                self._follow_trials()
                self._follow_logs()
                self._show_errors(self._button_error)
            except Exception as error:  # a broken panel must not break the notebook
                self._show_errors(f"This panel could not be updated. {type(error).__name__}: {error}")
            now = time.monotonic()
            if not all(trial.ended for trial in self._trials):
                self._all_ended_since = None
            elif self._all_ended_since is None:
                self._all_ended_since = now
                self._hint.value = self._hint_text("")
            return self._all_ended_since is None or now - self._all_ended_since < _AFTER_THE_END_S

    def _follow_trials(self) -> None:
        trials = [reader.read() for reader in self._readers]
        before: Sequence[Trial | None] = self._trials or [None] * len(trials)
        place = shared_place(trials)
        if place != self._place:
            self._place, before = place, [None] * len(trials)
        for shown, cancel, trial, old in zip(self._rows, self._cancels, trials, before, strict=True):
            if trial != old:
                shown.value = row(trial, heading_place=place)
            cancel.settle(possible=not trial.ended)
        self._trials = trials
        self._cancel_all.settle(possible=not all(trial.ended for trial in trials))
        self._heading.value = heading(self._subject.what, trials, self._elapsed_s())

    def _follow_logs(self) -> None:
        self._looks += 1
        if not self._follow.value:
            return
        for rank, (log, shown) in enumerate(zip(self._logs, self._ranks.children, strict=True)):
            # the page can switch to another rank while the kernel is busy, so none of them may stay empty for long
            if (rank == self._ranks.selected_index or self._looks % _EVERY_RANK == 0) and log.read():
                head = f"... {log.passed_over} bytes passed over\n" if log.passed_over else ""
                shown.value = tag("pre", head, log.text())

    def _elapsed_s(self) -> float | None:
        return elapsed_s(self._trials, self._subject.began_ns)

    def _show_errors(self, *errors: str) -> None:
        lines = [tag("div", line) for line in (*self._subject.unreadable, *errors) if line]
        self._trouble.value = tag("div", lines, class_="workbench-error", role="alert") if lines else ""

    # ---- the page ------------------------------------------------------------------------------------

    def _build(self) -> None:
        html = ipywidgets.HTML
        self._heading, self._trouble = html(), html()
        self._rows = [html() for _ in self._readers]
        names = [reader.read().name for reader in self._readers]
        self._cancels = [
            _Cancel(f"Cancel {name}", _weakly(self, Panel._cancel, index)) for index, name in enumerate(names)
        ]
        self._cancel_all = _Cancel("Cancel all trials", _weakly(self, Panel._cancel, None), label="Cancel all")
        rows = [_boxed(shown, cancel.button) for shown, cancel in zip(self._rows, self._cancels, strict=True)]
        self._hint = html(self._hint_text(self._subject.lifetime))
        options = [(_NO_LOG, None), *((name, index) for index, name in enumerate(names))]
        self._chosen = ipywidgets.Dropdown(options=options, description="Log of")
        self._follow = ipywidgets.Checkbox(value=True, description="follow", indent=False)
        self._ranks = ipywidgets.Tab()
        self._chosen.observe(_weakly(self, Panel._choose), names="value")
        self._ranks.observe(_weakly(self, Panel._read_all_logs), names="selected_index")
        self._follow.observe(_weakly(self, Panel._read_all_logs), names="value")
        self._box = ipywidgets.VBox(
            [
                html(tag("style", style_sheet("live.css"))),
                self._heading,
                _boxed(html(column_heads()), self._cancel_all.button),
                *rows,
                self._trouble,
                self._hint,
                _boxed(self._chosen, self._follow),
                self._ranks,
            ]
        )
        self._box.add_class("workbench-live")
        self._ranks.layout.display = "none"

    def _hint_text(self, lifetime: str) -> str:
        """The command for a terminal, and what a restart of the kernel would do to runs that have not ended."""
        text = "Buttons are answered between cells. From a terminal: "
        more = f". {lifetime}" if lifetime else ""
        return tag("span", text, tag("code", self._subject.command), more, class_="hint")

    def _choose(self, change: Any) -> None:
        with self._lock:
            self._show_logs_of(change["new"])
        self.look()

    def _read_all_logs(self, _change: Any) -> None:
        with self._lock:
            self._looks = -1  # the next look reads those of every rank
        self.look()

    def _show_logs_of(self, index: int | None) -> None:
        for old in self._ranks.children:
            old.close()
        self._logs = []
        if index is not None:
            run, ranks = self._readers[index].run, self._trials[index].ranks
            self._logs = [LogTail(run.log_path(rank)) for rank in range(ranks)]
        shown = [ipywidgets.HTML(tag("pre", "nothing yet"), tabbable=True) for _ in self._logs]
        for each in shown:
            each.add_class("workbench-log")
        self._ranks.children = shown
        self._ranks.titles = [f"rank {rank}" for rank in range(len(shown))]
        self._ranks.selected_index = 0 if shown else None
        self._ranks.layout.display = None if shown else "none"
        self._looks = -1

    def _cancel(self, index: int | None) -> None:
        chosen = range(len(self._readers)) if index is None else [index]
        runs = [self._readers[each].run for each in chosen if not self._trials[each].ended]
        # cancelling waits for the processes of a run, so it gets a thread
        threading.Thread(target=_cancel_runs, args=(runs, weakref.ref(self)), name="cancel", daemon=True).start()


class _Cancel:
    """A button that asks for confirmation before it acts."""

    def __init__(self, tooltip: str, action: Callable[[], None], *, label: str = "Cancel") -> None:
        self._label, self._action = label, action
        self._armed_at = -CONFIRM_S
        self.button = ipywidgets.Button(
            description=label,
            tooltip=f"{tooltip}: click, and click again within {CONFIRM_S:g} s. A busy kernel answers when its cell "
            "has ended.",
        )
        self.button.on_click(self._clicked)

    def settle(self, *, possible: bool) -> None:
        """Forget an unconfirmed click; disable the button if nothing can be cancelled."""
        confirming = possible and time.monotonic() - self._armed_at < CONFIRM_S
        self.button.disabled = not possible
        self.button.description = "Really? Again" if confirming else self._label
        self.button.button_style = "warning" if confirming else ""

    def _clicked(self, _button: Any) -> None:
        since = time.monotonic() - self._armed_at
        if since < _DOUBLE_CLICK_S:
            return
        if since < CONFIRM_S:
            self._armed_at = -CONFIRM_S
            self._action()
        else:
            self._armed_at = time.monotonic()
            self.settle(possible=True)


def _feed(panel: weakref.ref[Panel], stop: threading.Event, poll_s: float) -> None:
    """Poll without keeping the panel alive, until nothing more will happen."""
    while not stop.wait(poll_s):
        current = panel()
        if current is None or not current.look():
            return
        del current


def _end(stop: threading.Event, box: ipywidgets.Widget) -> None:
    """Stop the thread and remove every widget from ipywidgets' registry, which would keep them forever."""
    stop.set()
    open_widgets = [box]
    while open_widgets:
        widget = open_widgets.pop()
        parts = (getattr(widget, "layout", None), getattr(widget, "style", None))
        open_widgets += [*getattr(widget, "children", ()), *filter(None, parts)]
        widget.close()


def _cancel_runs(runs: Sequence[RunDirectory], panel: weakref.ref[Panel]) -> None:
    """Cancel runs; all are requested first, so that none is started while another is waited for."""
    for cancel in (RunDirectory.request_cancel, lambda run, by: cancel_run(run, by=by)):
        for run in runs:
            try:
                cancel(run, "a panel in a notebook")
            except Exception as error:
                _report_error(panel(), f"{run.path.name} could not be cancelled. {type(error).__name__}: {error}")


def _weakly(panel: Panel, method: Callable[..., None], *first: Any) -> Callable[..., None]:
    """Return a callback that keeps nothing alive, and that shows its errors in the panel."""
    reference = weakref.ref(panel)

    def call(*arguments: Any) -> None:
        alive = reference()
        if alive is None:
            return
        _report_error(alive, "")
        try:
            method(alive, *first, *arguments)
        except Exception as error:
            _report_error(alive, f"{type(error).__name__}: {error}")

    return call


def _report_error(panel: Panel | None, message: str) -> None:
    """Show the error of a button or a choice, until the next one."""
    if panel is not None:
        panel._button_error = message
        if message:
            panel.look()


def _boxed(*widgets: ipywidgets.Widget) -> ipywidgets.HBox:
    box = ipywidgets.HBox(widgets)
    box.add_class("workbench-row")
    return box
