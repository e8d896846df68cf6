"""A live panel of trials, built from what is on disk and nothing else.

    panel = attach("experiments/layout_parity")   # or a run's folder, several of them, or a sweep
    panel                                         # in a notebook: rows that move while other cells run

Because it only reads, it can be made again after a kernel restart or a reload of the page, and it shows what another
process launched. One daemon thread feeds it. Buttons are answered by the kernel, which does so between cells only, so
the panel says which command does the same from a terminal.
"""

from __future__ import annotations

import shlex
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ipywidgets

from workbench.errors import RecordError
from workbench.launch.cancel import cancel_run
from workbench.launch.resume import read_record
from workbench.launch.sweep import Sweep
from workbench.records.directory import RunDirectory, project_root
from workbench.records.lookup import look_up
from workbench.report.log_tail import LogTail
from workbench.report.markup import Markup, tag
from workbench.report.rows import column_heads, heading, live_style, row, shared_place, table_of
from workbench.report.trial import Trial, TrialReader, as_line, duration, elapsed_s

POLL_S = 0.3
CONFIRM_S = 3.0
"""A second click within this time cancels."""

_DOUBLE_CLICK_S = 0.2  # a second click sooner than this is the same click, or one that waited for the kernel with it
_AFTER_THE_END_S = 1.5  # last lines of logs, and a state that a launcher still mends
_EVERY_RANK = 10  # looks after which the logs of ranks that are not shown are read too
_NO_LOG = "choose a trial"


def attach(target: Any, *, poll_s: float = POLL_S) -> Panel:
    """A panel of an experiment, of some runs, or of a sweep.

    Args:
        target: folder or name of an experiment (the runs launched last are shown), folder or name of one run, a
            `RunDirectory`, several of these, or a sweep.
        poll_s: seconds between looks at the disk.

    Raises:
        RecordError: no run is there.

    Example:
        >>> attach("experiments/layout_parity")   # doctest: +SKIP
    """
    return Panel(_subject(target), poll_s=poll_s)


class Panel:
    """Rows of trials that follow their directories until all have ended.

    It lives as long as it is shown or held, and until `close`. Nothing in it raises into the notebook: what cannot be
    read is said in its row.

    Args:
        subject: what it is about; `attach` finds it.
        poll_s: seconds between looks at the disk.
    """

    def __init__(self, subject: _Subject, *, poll_s: float = POLL_S) -> None:
        self._subject = subject
        self._readers = [TrialReader(run) for run in subject.runs]
        self._trials: list[Trial] = []
        self._lock = threading.RLock()
        self._all_ended_since: float | None = None
        self._looks = 0
        self._trouble_of_buttons = self._place = ""
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

    # ---- for whoever holds it ------------------------------------------------------------------------

    @property
    def trials(self) -> list[Trial]:
        """The trials as they were at the last look."""
        return list(self._trials)

    @property
    def live(self) -> bool:
        """Whether the panel still follows its runs."""
        return self._thread.is_alive() and not self._stop.is_set()

    def as_text(self) -> str:
        """A heading and a line for each trial, as they are now."""
        self.look()
        names = max((len(trial.name) for trial in self._trials), default=0)
        return "\n".join(
            [
                f"{self._subject.what}: {self._counts()}, {duration(self._elapsed_s())}",
                *(f"  {as_line(trial, names=names)}" for trial in self._trials),
            ]
        )

    def as_html(self) -> str:
        """The rows without life, for places where widgets do not work."""
        return table_of(self._subject.what, self._trials, self._elapsed_s())

    def close(self) -> None:
        """Stop following, and take the panel off the page. The runs go on."""
        self._stop.set()
        self._box.held_by_the_page = None
        self._end()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def __repr__(self) -> str:
        return self.as_text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        shown = {}
        if self._end.alive:
            self._box.held_by_the_page = self  # shown, it lives on without a name
            shown = self._box._repr_mimebundle_(include=include, exclude=exclude) or {}
        return {**shown, "text/plain": self.as_text(), "text/html": self.as_html()}

    # ---- looking -------------------------------------------------------------------------------------

    def look(self) -> bool:
        """Look at the disk once and bring the page up to date; say whether there may be more to see."""
        with self._lock:
            try:
                self._follow_trials()
                self._follow_logs()
                self._say(self._trouble_of_buttons)
            except Exception as error:  # a panel that is broken says so and does not break the notebook
                self._say(f"This panel could not be brought up to date. {type(error).__name__}: {error}")
            now = time.monotonic()
            if not all(trial.ended for trial in self._trials):
                self._all_ended_since = None
            elif self._all_ended_since is None:
                self._all_ended_since = now
            return self._all_ended_since is None or now - self._all_ended_since < _AFTER_THE_END_S

    def _follow_trials(self) -> None:
        trials = [reader.read() for reader in self._readers]
        before = self._trials or [None] * len(trials)
        place = shared_place(trials)
        if place != self._place:
            self._place, before = place, [None] * len(trials)
        for shown, cancel, trial, old in zip(self._rows, self._cancels, trials, before, strict=True):
            if trial != old:
                shown.value = row(trial, said_once=place)
            cancel.settle(possible=not trial.ended)
        self._trials = trials
        self._cancel_all.settle(possible=not all(trial.ended for trial in trials))
        self._heading.value = heading(self._subject.what, trials, self._elapsed_s())

    def _follow_logs(self) -> None:
        self._looks += 1
        if not self._follow.value:
            return
        for rank, (log, shown) in enumerate(zip(self._logs, self._ranks.children, strict=True)):
            # The page can turn to another rank while the kernel is busy, so none of them may stay empty for long.
            if (rank == self._ranks.selected_index or self._looks % _EVERY_RANK == 0) and log.read():
                shown.value = _log_markup(log)

    def _elapsed_s(self) -> float | None:
        return elapsed_s(self._trials, self._subject.began_ns)

    def _counts(self) -> str:
        states = [trial.state for trial in self._trials]
        return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))

    def _say(self, *trouble: str) -> None:
        lines = [tag("div", line) for line in (*self._subject.unreadable, *trouble) if line]
        self._trouble.value = tag("div", lines, class_="workbench-error", role="alert") if lines else ""

    # ---- the page ------------------------------------------------------------------------------------

    def _build(self) -> None:
        html = ipywidgets.HTML
        self._heading, self._trouble = html(), html()
        self._rows = [html() for _ in self._readers]
        names = [reader.read().name for reader in self._readers]
        self._cancels = [_Cancel(f"Cancel {name}", _weakly(self._cancel, index)) for index, name in enumerate(names)]
        self._cancel_all = _Cancel("Cancel all trials", _weakly(self._cancel, None), words="Cancel all")
        rows = [_boxed(shown, cancel.button) for shown, cancel in zip(self._rows, self._cancels, strict=True)]
        hint = html(
            tag(
                "span",
                "Buttons are answered between cells. From a terminal: ",
                tag("code", self._subject.command),
                class_="hint",
            )
        )
        options = [(_NO_LOG, None), *((name, index) for index, name in enumerate(names))]
        self._chosen = ipywidgets.Dropdown(options=options, description="Log of")
        self._follow = ipywidgets.Checkbox(value=True, description="follow", indent=False)
        self._ranks = ipywidgets.Tab()
        self._chosen.observe(_weakly(self._choose), names="value")
        self._ranks.observe(_weakly(self._read_all_logs), names="selected_index")
        self._follow.observe(_weakly(self._read_all_logs), names="value")
        self._style = html(tag("style", live_style()))
        self._box = ipywidgets.VBox(
            [
                self._style,
                self._heading,
                _boxed(html(column_heads()), self._cancel_all.button),
                *rows,
                self._trouble,
                hint,
                _boxed(self._chosen, self._follow),
                self._ranks,
            ]
        )
        self._box.add_class("workbench-live")
        self._ranks.layout.display = "none"

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
        # who ends a run waits for its processes, so that is not done here
        threading.Thread(target=_see_to, args=(runs, weakref.ref(self)), name="cancel", daemon=True).start()


class _Cancel:
    """A button that asks once more before it does something."""

    def __init__(self, tooltip: str, do: Callable[[], None], *, words: str = "Cancel") -> None:
        self._words, self._do = words, do
        self._armed_at = -CONFIRM_S
        self.button = ipywidgets.Button(
            description=words,
            tooltip=f"{tooltip}: click, and click again within {CONFIRM_S:g} s. A busy kernel "
            "answers when its cell has ended.",
        )
        self.button.on_click(self._clicked)

    def settle(self, *, possible: bool) -> None:
        """Forget a click that was not confirmed; nothing to click where nothing can be cancelled."""
        asking = possible and time.monotonic() - self._armed_at < CONFIRM_S
        self.button.disabled = not possible
        self.button.description = "Really? Again" if asking else self._words
        self.button.button_style = "warning" if asking else ""

    def _clicked(self, _button: Any) -> None:
        since = time.monotonic() - self._armed_at
        if since < _DOUBLE_CLICK_S:
            return
        if since < CONFIRM_S:
            self._armed_at = -CONFIRM_S
            self._do()
        else:
            self._armed_at = time.monotonic()
            self.settle(possible=True)


def _feed(panel: weakref.ref[Panel], stop: threading.Event, poll_s: float) -> None:
    """Look again and again, without keeping the panel alive, until nothing more will happen."""
    while not stop.wait(poll_s):
        alive = panel()
        if alive is None or not alive.look():
            return
        del alive


def _end(stop: threading.Event, box: ipywidgets.Widget) -> None:
    """Stop the thread and take every widget out of ipywidgets' own register, which would keep them for ever."""
    stop.set()
    left = [box]
    while left:
        widget = left.pop()
        left += [
            *getattr(widget, "children", ()),
            *filter(None, (getattr(widget, "layout", None), getattr(widget, "style", None))),
        ]
        widget.close()


def _see_to(runs: Sequence[RunDirectory], panel: weakref.ref[Panel]) -> None:
    """End runs, with whatever that takes: all are asked first, so that none is started while another is waited for."""
    for end in (RunDirectory.request_cancel, lambda run, by: cancel_run(run, by=by)):
        for run in runs:
            try:
                end(run, "a panel in a notebook")
            except Exception as error:
                _tell(panel(), f"{run.path.name} could not be cancelled. {type(error).__name__}: {error}")


def _weakly(method: Callable[..., None], *first: Any) -> Callable[..., None]:
    """A callback that keeps nothing alive, and that says in the panel what goes wrong."""
    held = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        alive = held()
        if alive is None:
            return
        _tell(alive.__self__, "")
        try:
            alive(*first, *arguments)
        except Exception as error:
            _tell(alive.__self__, f"{type(error).__name__}: {error}")

    return call


def _tell(panel: Panel | None, trouble: str) -> None:
    """Say what went wrong with a button or a choice, until the next one."""
    if panel is not None:
        panel._trouble_of_buttons = trouble
        if trouble:
            panel.look()


def _boxed(*widgets: ipywidgets.Widget) -> ipywidgets.HBox:
    box = ipywidgets.HBox(widgets)
    box.add_class("workbench-row")
    return box


def _log_markup(log: LogTail) -> Markup:
    text = log.text()
    head = f"... {log.passed_over} bytes passed over\n" if log.passed_over else ""
    return tag("pre", head, text)


# ---- what is meant by a target ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Subject:
    """What a panel is about.

    Attributes:
        what: name of the whole.
        runs: what to follow.
        began_ns: when they were launched, in nanoseconds since 1970; 0 if nobody wrote it down.
        command: what cancels them from a terminal.
        unreadable: what should be there and cannot be opened, each in a line.
    """

    what: str
    runs: Sequence[RunDirectory]
    began_ns: int = 0
    command: str = ""
    unreadable: tuple[str, ...] = ()


def _subject(target: Any) -> _Subject:
    if isinstance(target, Sweep):
        record = read_record(target.experiment_dir / "runs")
        its_own = record is not None and set(record["latest"].values()) == {run.path.name for run in target.runs}
        return _Subject(
            target.experiment_dir.name,
            target.runs,
            record["created_ns"] if record and its_own else 0,
            _command(target.experiment_dir),
        )
    if isinstance(target, RunDirectory):
        return _Subject(target.path.name, [target], 0, _command(target.path))
    if not isinstance(target, str | Path):
        return _several([_subject(each) for each in target])
    found = look_up(target)
    if found.experiment is None:
        return _subject(found.opened()[0])
    runs_dir = found.experiment / "runs"
    record = read_record(runs_dir)
    shown = found.runs
    if record is not None:
        order = list(record["latest"].values())
        launched = [each for each in found.runs if each.path.name in order]
        shown = tuple(sorted(launched, key=lambda each: order.index(each.path.name))) or shown
    return _Subject(
        found.experiment.name,
        [each.run for each in shown if each.run is not None],
        record["created_ns"] if record else 0,
        _command(found.experiment),
        tuple(f"{each.path.name}: {each.problem}" for each in shown if each.run is None),
    )


def _several(parts: Sequence[_Subject]) -> _Subject:
    runs = list({run.path: run for part in parts for run in part.runs}.values())
    if not runs:
        raise RecordError(
            "attach to no run",
            found="an empty list",
            rule="at least one run or experiment",
            fix="give the folder of an experiment, such as experiments/layout_parity",
        )
    names = list(dict.fromkeys(run.path.parent.parent.name for run in runs))
    return _Subject(
        ", ".join(names),
        runs,
        0,
        parts[0].command if len(parts) == 1 else "workbench cancel RUN",
        tuple(line for part in parts for line in part.unreadable),
    )


def _command(folder: Path) -> str:
    """What to type at the project's root."""
    project = project_root()
    if folder.parent == project / "experiments":
        asked = folder.name
    else:
        asked = str(folder.relative_to(project) if folder.is_relative_to(project) else folder)
    return shlex.join(["workbench", "cancel", asked])
