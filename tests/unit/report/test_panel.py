"""The panel: built from disk, fed by one thread, cheap, quiet in the kernel, and gone when it is closed."""

import gc
import os
import shutil
import threading
import time
import weakref
from pathlib import Path

import psutil
import pytest
from ipywidgets.widgets import widget as registry

from tests.helpers.audited import files_opened
from tests.helpers.trials import HOSTILE, Writer, make_run, make_sweep, rename, wait_for, write_steps
from workbench.atomic import to_json, write_whole
from workbench.errors import RecordError
from workbench.launch.detached import recorded
from workbench.report import panel as module
from workbench.report.panel import Panel, attach

FAST_S = 0.02


@pytest.fixture
def experiment(tmp_path):
    return tmp_path / "exp"


@pytest.fixture
def attached():
    """Attach quickly, and close in the end."""
    panels = []

    def attach_it(target, **how):
        panels.append(attach(target, poll_s=how.pop("poll_s", FAST_S), **how))
        return panels[-1]

    yield attach_it
    for each in panels:
        each.close()


def button(panel, name):
    """The cancel button of a trial."""
    [index] = [i for i, trial in enumerate(panel.trials) if trial.name == name]
    return panel._cancels[index].button


def confirm(which):
    """Click, and click again as a person does."""
    which.click()
    time.sleep(module._DOUBLE_CLICK_S + 0.05)
    which.click()


# ---- targets --------------------------------------------------------------------------------------------------


def test_an_experiment_is_its_last_launch_in_order(experiment, attached):
    names = ["c", "a", "b"]
    runs = {name: make_run(experiment, name) for name in sorted(names)}
    make_run(experiment, "older")
    record = {"identity": "0", "created_ns": 5, "latest": {name: runs[name].path.name for name in names}, "runs": {}}
    write_whole(experiment / "runs/sweep.json", to_json(record))
    assert [trial.name for trial in attached(experiment).trials] == names


def test_an_experiment_that_no_launcher_described_shows_the_newest_of_each_name(experiment, attached):
    first = make_run(experiment, "a")
    second = make_run(experiment, "a")
    make_run(experiment, "b")
    assert [trial.name for trial in attached(experiment).trials] == ["a", "b"]
    assert attached(str(experiment)).trials[0].folder == second.path.name != first.path.name


def test_accepts_one_run_or_several_in_any_form(experiment, attached):
    a, b = make_run(experiment, "a"), make_run(experiment, "b")
    assert [t.name for t in attached(a.path).trials] == ["a"]
    assert [t.name for t in attached(a).trials] == ["a"]
    assert [t.name for t in attached([b, a.path, str(b.path)]).trials] == ["b", "a"]


def test_a_sweep_shows_its_runs(experiment, attached):
    shown = attached(make_sweep(experiment, "a", "b"))
    assert [trial.name for trial in shown.trials] == ["a", "b"]
    assert repr(shown).startswith("exp: 2 pending, 0 s")


def test_time_counts_from_the_launch_also_for_reused_runs(experiment, attached):
    sweep = make_sweep(experiment, "a", "b")
    sweep.runs[0].note(created_ns=time.time_ns() - 3600 * 10**9)
    assert repr(attached(sweep)).startswith("exp: 2 pending, 1 h 0 min")
    latest = {run.name: run.path.name for run in sweep.runs}
    record = {"identity": "0", "created_ns": time.time_ns() - 120 * 10**9, "latest": latest, "runs": latest}
    write_whole(experiment / "runs/sweep.json", to_json(record))
    assert repr(attached(sweep)).startswith("exp: 2 pending, 2 min ")
    assert repr(attached(experiment)).startswith("exp: 2 pending, 2 min ")


@pytest.mark.parametrize("target", ["nowhere-to-be-found", []])
def test_a_target_without_runs_is_refused(target):
    with pytest.raises(RecordError, match=r"do: "):
        attach(target)


def test_a_run_that_cannot_be_opened_is_named_and_hides_no_other(experiment, attached):
    broken, whole = make_run(experiment, "broken"), make_run(experiment, "whole")
    (broken.path / "config.json").write_text('{"nonsense": 1}')
    shown = attached(experiment)
    assert [trial.name for trial in shown.trials] == ["whole"]
    assert broken.path.name in shown._trouble.value
    assert whole.path.name not in shown._trouble.value


def test_it_names_the_command_that_cancels_from_a_terminal(experiment, attached):
    make_run(experiment, "a")
    assert f"workbench cancel {experiment}" in all_markup(attached(experiment))


def test_it_says_what_a_restart_of_the_kernel_would_do_while_that_matters(experiment, attached):
    run = make_run(experiment, "a")
    assert "They end with this kernel." in all_markup(attached(experiment))
    with recorded(experiment / "runs"):
        assert f"Process {os.getpid()} continues them without this notebook" in all_markup(attached(experiment))
    run.note(launcher=run.state["launcher"] | {"pid": os.getppid(), "create_time": parent_started()})
    assert f"They end with the process that launched them, {os.getppid()}." in all_markup(attached(experiment))
    run.note(backend="slurm", handle="slurm://x/1")
    shown = attached(experiment)
    assert "jobs continue without this notebook" in all_markup(shown)
    run.set_state("cancelled")
    shown.look()
    text = all_markup(shown)
    assert "workbench cancel" in text
    assert "continue" not in text


def parent_started():
    return psutil.Process(os.getppid()).create_time()


# ---- following --------------------------------------------------------------------------------------------


def test_it_moves_by_itself_until_all_have_ended_and_then_its_thread_is_gone(experiment, attached, monkeypatch):
    monkeypatch.setattr(module, "_AFTER_THE_END_S", 0.1)
    writer = Writer(make_run(experiment, "a", steps=6))
    shown = attached(experiment)
    fed_by = set()
    shown._rows[0].observe(lambda change: fed_by.add(threading.current_thread().name), names="value")
    writer.start()
    assert wait_for(lambda: shown.trials[0].state == "succeeded")
    assert shown.trials[0].steps_done == 6
    assert len(shown.trials[0].loss) == 6
    assert wait_for(lambda: not shown._thread.is_alive())
    assert not shown.live
    assert fed_by == {"panel of exp"}
    assert "6/6" in shown._rows[0].value


def test_attaching_again_shows_the_same(experiment, attached):
    run = make_run(experiment, "a")
    run.set_state("running")
    write_steps(run, [0.5, 0.25])
    first = attached(experiment)
    second = attached(experiment)
    assert second.trials == first.trials
    assert second.trials[0].loss == (0.5, 0.25)


def test_the_text_twin_has_a_line_for_each_trial(experiment, attached):
    for name in ("a", "longer"):
        make_run(experiment, name).set_state("cancelled")
    shown = attached(experiment)
    lines = shown.as_text().splitlines()
    assert lines[0] == "exp: 2 cancelled, 0 s"
    assert [line.split()[:2] for line in lines[1:]] == [["a", "cancelled"], ["longer", "cancelled"]]
    assert repr(shown) == shown.as_text()


def test_a_page_without_widgets_gets_the_rows_and_a_terminal_the_text(experiment, attached):
    make_run(experiment, "a")
    shown = attached(experiment)
    bundle = shown._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html", "application/vnd.jupyter.widget-view+json"}
    assert bundle["text/plain"] == shown.as_text()
    assert bundle["text/html"].startswith('<div class="workbench-live"><style>')


def test_nothing_is_sent_while_nothing_changes(experiment, attached):
    for name in ("a", "b"):
        make_run(experiment, name).set_state("succeeded")
    shown = attached(experiment, poll_s=60)
    sent = []
    for each in every_widget(shown):
        each.observe(sent.append)
    for _ in range(5):
        shown.look()
    assert sent == []


def test_only_the_row_that_changed_is_sent(experiment, attached):
    run, _ = make_run(experiment, "a"), make_run(experiment, "b")
    shown = attached(experiment, poll_s=60)
    sent = []
    for each in every_widget(shown):
        each.observe(sent.append)
    write_steps(run, [0.5])
    shown.look()
    assert [change["owner"] for change in sent if change["owner"] is not shown._heading] == [shown._rows[0]]


def test_many_looks_at_runs_that_ended_read_nothing(experiment, attached):
    for index in range(20):
        run = make_run(experiment, f"run{index}")
        write_steps(run, [0.5] * 4)
        run.set_state("succeeded")
    shown = attached(experiment, poll_s=60)
    with files_opened(experiment) as opened:
        for _ in range(100):
            shown.look()
    assert opened == []
    assert shown._trouble.value == ""


def test_an_update_of_running_runs_reads_only_state_and_new_records(experiment, attached):
    run = make_run(experiment, "a", steps=3000)
    run.set_state("running")
    write_steps(run, [0.5] * 200)
    shown = attached(experiment, poll_s=60)
    before = bytes_read_here()
    for _ in range(50):
        shown.look()
    read = bytes_read_here() - before
    assert 50 * (run.path / "state.json").stat().st_size <= read < 10 * (run.path / "metrics.jsonl").stat().st_size
    write_steps(run, [0.25], begin=200)
    shown.look()
    assert shown.trials[0].loss[-1] == 0.25


# ---- troubles ---------------------------------------------------------------------------------------------


def test_hostile_names_notes_and_logs_are_only_text(experiment, attached):
    run = make_run(experiment, "a")
    rename(run, HOSTILE)
    run.write_exit(0, {}, ValueError(HOSTILE))
    run.set_state("failed")
    run.log_path(0).write_text(f"{HOSTILE}\n</pre>{HOSTILE}\n")
    shown = attached(experiment)
    shown._chosen.value = 0
    markup = all_markup(shown) + shown.as_html()
    assert "&lt;script&gt;" in markup
    assert "<script" not in markup
    assert "<img" not in markup
    assert shown._ranks.children[0].value.count("</pre>") == 1


def test_a_folder_that_disappears_breaks_nothing(experiment, attached):
    a, _ = make_run(experiment, "a"), make_run(experiment, "b")
    shown = attached(experiment)
    shutil.rmtree(a.path)
    assert wait_for(lambda: [t.state for t in shown.trials] == ["gone", "pending"])
    assert shown.live


def test_an_error_is_shown_in_the_panel_and_clears(experiment, attached, monkeypatch):
    make_run(experiment, "a")
    shown = attached(experiment, poll_s=60)

    def fail(*_):
        raise RuntimeError(f"no {HOSTILE}")

    with monkeypatch.context() as broken:
        broken.setattr(module, "row", fail)
        broken.setattr(module, "heading", fail)
        shown.look()
    assert "RuntimeError" in shown._trouble.value
    assert "<script" not in shown._trouble.value
    shown.look()
    assert shown._trouble.value == ""


# ---- logs -------------------------------------------------------------------------------------------------


def test_logs_are_read_when_a_trial_is_chosen_and_only_then(experiment, attached, monkeypatch):
    run = make_run(experiment, "a", cp=2)
    run.log_path(0).write_text("zero\n")
    run.log_path(1).write_text("one\n")
    shown = attached(experiment, poll_s=60)
    assert (shown._logs, shown._ranks.children) == ([], ())
    shown._chosen.value = 0
    assert shown._ranks.titles == ("rank 0", "rank 1")
    assert [shown._ranks.children[rank].value for rank in (0, 1)] == ["<pre>zero</pre>", "<pre>one</pre>"]
    shown._chosen.value = None
    assert (shown._logs, shown._ranks.children) == ([], ())


def test_the_rank_in_view_is_followed_at_every_look_and_the_others_now_and_then(experiment, attached):
    run = make_run(experiment, "a", cp=2)
    shown = attached(experiment, poll_s=60)
    shown._chosen.value = 0
    shown._ranks.selected_index = 1
    for rank in (0, 1):
        run.log_path(rank).write_text("words\n")
    shown.look()
    assert ["words" in each.value for each in shown._ranks.children] == [False, True]
    for _ in range(module._EVERY_RANK):
        shown.look()
    assert ["words" in each.value for each in shown._ranks.children] == [True, True]


def test_a_log_that_is_not_followed_stands_still(experiment, attached):
    run = make_run(experiment, "a")
    shown = attached(experiment, poll_s=60)
    shown._chosen.value = 0
    shown._follow.value = False
    run.log_path(0).write_text("words\n")
    for _ in range(2 * module._EVERY_RANK):
        shown.look()
    assert "words" not in shown._ranks.children[0].value
    shown._follow.value = True
    assert "words" in shown._ranks.children[0].value


# ---- cancelling -------------------------------------------------------------------------------------------


def test_one_click_asks_for_confirmation_and_expires(experiment, attached, monkeypatch):
    monkeypatch.setattr(module, "CONFIRM_S", 0.3)
    run = make_run(experiment, "a")
    shown = attached(experiment)
    button(shown, "a").click()
    assert button(shown, "a").description == "Really? Again"
    assert not run.cancel_requested
    assert wait_for(lambda: button(shown, "a").description == "Cancel")
    button(shown, "a").click()
    assert not run.cancel_requested


def test_a_double_click_is_one_click(experiment, attached):
    run = make_run(experiment, "a")
    shown = attached(experiment)
    button(shown, "a").click()
    button(shown, "a").click()
    assert not run.cancel_requested


def test_a_confirmed_click_cancels_that_trial_and_no_other(experiment, attached):
    writers = [Writer(make_run(experiment, name, steps=1000)) for name in "ab"]
    for writer in writers:
        writer.start()
    shown = attached(experiment)
    assert wait_for(lambda: [t.state for t in shown.trials] == ["running", "running"])
    confirm(button(shown, "b"))
    assert wait_for(lambda: [t.state for t in shown.trials] == ["running", "cancelled"])
    assert wait_for(lambda: button(shown, "b").disabled)
    assert not button(shown, "a").disabled
    assert not writers[0].run_directory.cancel_requested
    writers[0].leave.set()


def test_cancel_all_ends_all_running_runs(experiment, attached):
    writers = [Writer(make_run(experiment, name, steps=1000)) for name in "ab"]
    ended = make_run(experiment, "c")
    ended.set_state("succeeded")
    for writer in writers:
        writer.start()
    shown = attached(experiment)
    assert wait_for(lambda: [t.state for t in shown.trials] == ["running", "running", "succeeded"])
    confirm(shown._cancel_all.button)
    assert wait_for(lambda: [t.state for t in shown.trials] == ["cancelled", "cancelled", "succeeded"])
    assert not ended.cancel_requested
    assert wait_for(lambda: shown._cancel_all.button.disabled)


def test_a_failed_cancel_is_reported(experiment, attached, monkeypatch):
    def fail(*_, **__):
        raise OSError(HOSTILE)

    monkeypatch.setattr(module, "cancel_run", fail)
    make_run(experiment, "a")
    shown = attached(experiment)
    confirm(button(shown, "a"))
    assert wait_for(lambda: "could not be cancelled. OSError" in shown._trouble.value)
    assert "<script" not in shown._trouble.value


def test_a_failing_callback_raises_nothing_and_is_reported(experiment, attached, monkeypatch):
    make_run(experiment, "a")
    shown = attached(experiment, poll_s=60)

    def fail(*_):
        raise RuntimeError("no logs today")

    with monkeypatch.context() as broken:
        broken.setattr(module, "LogTail", fail)
        shown._chosen.value = 0
    shown.look()
    assert "RuntimeError: no logs today" in shown._trouble.value
    shown._chosen.value = None
    assert shown._trouble.value == ""


def test_an_unresponsive_run_does_not_block_the_others(experiment, attached, monkeypatch):
    gone, there = make_run(experiment, "a"), make_run(experiment, "b")
    shown = attached(experiment, poll_s=60)
    shutil.rmtree(gone.path)
    confirm(shown._cancel_all.button)
    assert wait_for(lambda: there.cancel_requested)
    there.set_state("cancelled")
    assert wait_for(lambda: gone.path.name in shown._trouble.value)
    assert there.path.name not in shown._trouble.value


def test_buttons_have_labels_and_states(experiment, attached):
    make_run(experiment, "a")
    assert button(attached(experiment), "a").tooltip == (
        "Cancel a: click, and click again within 3 s. A busy kernel answers when its cell has ended."
    )


# ---- nothing left behind ----------------------------------------------------------------------------------


def test_closing_ends_the_thread_and_every_widget(experiment):
    make_run(experiment, "a", cp=2)
    before = set(registry._instances)
    shown = attach(experiment, poll_s=FAST_S)
    shown._chosen.value = 0
    shown._repr_mimebundle_()
    thread = shown._thread
    shown.close()
    assert not thread.is_alive()
    assert set(registry._instances) == before
    shown.close()
    assert set(shown._repr_mimebundle_()) == {"text/plain", "text/html"}
    assert repr(shown).startswith("exp: 1 pending")


def test_an_unreferenced_hidden_panel_ends(experiment):
    make_run(experiment, "a")
    before = set(registry._instances)
    shown = attach(experiment, poll_s=FAST_S)
    thread, ghost = shown._thread, weakref.ref(shown)
    del shown
    gc.collect()
    assert wait_for(lambda: ghost() is None and not thread.is_alive())
    assert set(registry._instances) == before


def test_a_panel_on_a_page_lives_without_a_name(experiment):
    make_run(experiment, "a")
    shown = attach(experiment, poll_s=FAST_S)
    shown._repr_mimebundle_()
    thread, ghost = shown._thread, weakref.ref(shown)
    del shown
    gc.collect()
    assert ghost() is not None
    assert thread.is_alive()
    ghost().close()
    assert wait_for(lambda: not thread.is_alive())


def test_its_thread_does_not_block_interpreter_exit(experiment, attached):
    make_run(experiment, "a")
    assert attached(experiment)._thread.daemon


# ---- helpers ----------------------------------------------------------------------------------------------


def every_widget(panel: Panel):
    left = [panel._box]
    while left:
        each = left.pop()
        left += getattr(each, "children", ())
        yield each


def all_markup(panel: Panel) -> str:
    return "".join(str(each.value) for each in every_widget(panel) if isinstance(getattr(each, "value", None), str))


def bytes_read_here():
    """By this thread since it began, from whatever file."""
    return int(Path("/proc/thread-self/io").read_text().split()[1])
