"""`workbench run`: flags change the base, a part never replaces the whole, a failed run is exit code 1."""

from __future__ import annotations

import pytest

from workbench.cli import run as verb
from workbench.compare.comparison import Comparison, Configuration
from workbench.errors import SpecError
from workbench.launch.ablation import load_ablation
from workbench.launch.run import RunEvent
from workbench.specs.run import RunSpec

TEXT = """
question: Same?
base: {steps: 4, loss: {surrogate: {clip_high: 0.28}}}
axes: {precision: [float64, float32]}
reference: a
truth: a-float64
configurations: {a: {}, b: {loss: {surrogate: {clip_low: 0.1}}}}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ablation.yaml"
    path.write_text(TEXT)
    return path


@pytest.fixture
def comparison():
    settings = RunSpec().model_dump(mode="json")
    return Comparison(
        "x",
        "Same?",
        [
            Configuration("a", settings),
            Configuration("b", settings, verdict="different", factor=0.5, factor_meaning="1 / cp", why="small"),
        ],
    )


@pytest.fixture
def called(monkeypatch, tmp_path, comparison):
    """What `main` hands to `run_ablation`, which does nothing here."""
    seen = {}

    def run_ablation(path, **options):
        seen.update(options, path=path)
        return comparison, tmp_path / "report.html"

    monkeypatch.setattr(verb, "run_ablation", run_ablation)
    return seen


class TestArguments:
    def test_flags_are_changes_against_the_file(self, file, called):
        assert verb.main([str(file), "--steps", "2", "--loss.surrogate.clip-low", "0.3", "--where", "here"]) == 1
        assert called["changes"] == {"steps": 2, "loss": {"surrogate": {"clip_low": 0.3}}}
        assert (called["path"], called["where"], called["fresh"], called["force"]) == (file, "here", False, False)
        assert called["notebook"]

    def test_without_flags_nothing_changes(self, file, called):
        verb.main([str(file), "--only", "b", "a-float32"])
        assert called["changes"] == {}
        assert called["only"] == ("b", "a-float32")

    def test_a_flag_that_says_what_the_file_says_is_a_change_too(self, file, called):
        """Else a flag that an axis overrules would be dropped without a word where it names the default."""
        verb.main([str(file), "--steps", "4", "--loss.surrogate.clip_high=0.28", "--precision", "float32"])
        assert called["changes"] == {"steps": 4, "loss": {"surrogate": {"clip_high": 0.28}}, "precision": "float32"}

    @pytest.mark.parametrize("name", [["--loss.name", "sapo"], ["--loss.name=sapo"]])
    def test_another_loss_brings_its_own_flags(self, tmp_path, called, name):
        file = tmp_path / "ablation.yaml"
        file.write_text("question: '?'\nreference: a\nconfigurations: {a: {}}\n")
        verb.main([str(file), *name, "--loss.surrogate.tau-positive", "2.0"])
        assert called["changes"] == {"loss": {"name": "sapo", "surrogate": {"tau_positive": 2.0}}}

    def test_a_switch_is_a_change(self, file, called):
        verb.main([str(file), "--record.no-tokens"])
        assert called["changes"] == {"record": {"tokens": False}}

    def test_a_flag_may_give_back_a_default(self, file, called):
        verb.main([str(file), "--steps", "1"])
        assert called["changes"] == {"steps": 1}

    def test_words_of_the_launcher_are_no_settings(self, file, called):
        verb.main([str(file), "--fresh", "--force", "--no-notebook", "--scheduler", "queue=a", "partition=b=c"])
        assert called["changes"] == {}
        assert (called["fresh"], called["force"], called["notebook"]) == (True, True, False)
        assert called["options"] == {"queue": "a", "partition": "b=c"}

    def test_an_option_without_a_value_is_refused(self, file, called):
        with pytest.raises(SpecError, match="--scheduler queue"):
            verb.main([str(file), "--scheduler", "queue"])

    def test_a_dry_run_prints_every_request_and_runs_nothing(self, file, called, capsys):
        assert verb.main([str(file), "--where", "slurm", "--dry-run", "--only", "a"]) == 0
        out = capsys.readouterr().out
        assert "# a-float32" in out
        assert out.count("--nproc-per-node=1") == out.count("# a-float") == 2
        assert called == {}
        assert not (file.parent / "runs").exists()

    def test_another_kind_of_file_is_refused(self, called):
        with pytest.raises(SpecError, match=r"ends in \.yaml"):
            verb.main(["notes.txt"])

    def test_help_lists_every_setting(self, capsys):
        with pytest.raises(SystemExit):
            verb.main(["--help"])
        text = capsys.readouterr().out
        for flag in ("--layout.cp", "--loss.surrogate.clip-low", "--precision", "--optimizer.learning-rate", "--only"):
            assert flag in text
        assert "Context-parallel ranks" in text  # the docstring of the field

    def test_a_failed_run_is_exit_code_1(self, file, called, comparison):
        comparison.configurations.append(Configuration("c", comparison["a"].settings, verdict="failed"))
        assert verb.main([str(file)]) == 1

    def test_a_failed_run_is_printed_with_its_reason(self, file, called, comparison, capsys):
        comparison.configurations.append(
            Configuration(
                "c",
                comparison["a"].settings,
                verdict="failed",
                why="rank 1 ShapeError: split 7 tokens; found: an odd row",
            )
        )
        verb.main([str(file)])
        assert "c  failed            rank 1 ShapeError: split 7 tokens; found: an odd row\n" in capsys.readouterr().out

    def test_the_verdicts_and_the_path_are_printed(self, file, called, capsys):
        verb.main([str(file)])
        out = capsys.readouterr().out
        assert "b  different         x 0.5  = 1 / cp  small" in out
        assert out.rstrip().endswith("report.html")


class TestChanges:
    def test_are_laid_over_the_base(self, file):
        ablation = verb._changed(load_ablation(file), {"steps": 2, "loss": {"surrogate": {"clip_low": 0.3}}}, where="x")
        runs = {run.name: run.spec for run in ablation.expand()}
        changed = runs["a-float32"]
        assert (changed.steps, changed.loss.surrogate.clip_low, changed.loss.surrogate.clip_high) == (2, 0.3, 0.28)
        assert runs["b-float32"].loss.surrogate.clip_low == 0.1  # a configuration has the last word

    def test_an_axis_cannot_be_set(self, file):
        with pytest.raises(SpecError, match="precision is an axis"):
            verb.main([str(file), "--precision", "float32"])


class Ended:
    """A sweep whose runs have all ended; names stand for the run directories."""

    def __init__(self, planned, experiment_dir):
        self.planned, self.runs, self.experiment_dir = planned, [plan.name for plan in planned], experiment_dir
        self.cancelled = False

    def follow(self, on_event):
        on_event("ended")

    def cancel(self):
        self.cancelled = True

    def wait(self):
        assert self.cancelled


class TestRunAblation:
    @pytest.fixture
    def saved(self, monkeypatch, comparison):
        """Nothing runs and nothing is drawn; what would be compared is noted."""
        import workbench.compare.align
        import workbench.report.page

        seen = {}

        def launch(chosen, folder, **options):
            (folder / "runs").mkdir(parents=True, exist_ok=True)
            seen["trial"] = options["trial"]
            return Ended(chosen, folder)

        def compare_runs(subjects, **named):
            assert all(subject.run == subject.name for subject in subjects)
            seen.update(named, subjects=[(subject.name, subject.reference) for subject in subjects])
            return comparison

        monkeypatch.setattr(verb, "launch", launch)
        monkeypatch.setattr(workbench.compare.align, "compare_runs", compare_runs)
        monkeypatch.setattr(workbench.report.page, "write_report", lambda comparison, path: path)
        return seen

    def test_saves_beside_the_ablation(self, file, saved):
        _, page = verb.run_ablation(file)
        assert page == file.parent / "report.html"
        assert (file.parent / "comparison.json").exists()
        assert len(saved["subjects"]) == 4
        assert (saved["question"], saved["experiment"]) == ("Same?", file.parent.name)

    def test_a_part_never_replaces_the_whole(self, file, saved):
        _, page = verb.run_ablation(file, only=["b-float64"])
        assert page == file.parent / "runs" / "report.html"
        assert not (file.parent / "comparison.json").exists()
        assert not saved["trial"]  # its runs answer for the experiment's
        assert saved["subjects"] == [("a-float64", ""), ("b-float64", "a-float64")]

    def test_a_variation_never_replaces_the_whole(self, file, saved):
        _, page = verb.run_ablation(file, changes={"steps": 2})
        assert page == file.parent / "runs" / "report.html"
        assert not (file.parent / "comparison.json").exists()
        assert saved["trial"]

    def test_what_the_file_says_anyway_is_no_variation(self, file, saved):
        _, page = verb.run_ablation(file, changes={"steps": 4}, only=["a", "b"])
        assert page == file.parent / "report.html"
        assert not saved["trial"]

    def test_launching_is_back_before_anything_is_compared_and_concluding_waits(self, file, saved):
        sweep, told = verb.launch_ablation(file), []
        assert "subjects" not in saved
        _, page = verb.conclude(sweep, on_event=told.append)
        assert (told, len(saved["subjects"]), page) == (["ended"], 4, file.parent / "report.html")

    def test_an_interrupt_cancels_what_runs(self, file, saved, monkeypatch):
        sweeps = []

        def interrupted(sweep, on_event):
            sweeps.append(sweep)
            raise KeyboardInterrupt

        monkeypatch.setattr(Ended, "follow", interrupted)
        with pytest.raises(KeyboardInterrupt):
            verb.run_ablation(file)
        assert sweeps[0].cancelled

    def test_who_interrupts_is_told_how_to_go_on(self, file, saved, monkeypatch, capsys):
        def interrupted(sweep, on_event):
            raise KeyboardInterrupt

        monkeypatch.setattr(Ended, "follow", interrupted)
        with pytest.raises(KeyboardInterrupt):
            verb.main([str(file)])
        assert "runs with a checkpoint resume from it" in capsys.readouterr().err

    def test_the_notebook_is_executed_if_asked(self, file, saved, monkeypatch):
        written = []
        monkeypatch.setattr("workbench.report.notebook.write_notebook", written.append)
        verb.run_ablation(file)
        assert written == []
        verb.run_ablation(file, notebook=True)
        assert written == [file.parent / "comparison.json"]

    def test_a_spec_of_one_run_gets_a_folder_of_its_name(self, tmp_path, saved):
        path = tmp_path / "mine.yaml"
        path.write_text("steps: 2")
        _, page = verb.run_ablation(path)
        assert page == tmp_path / "mine" / "report.html"


class TestProgress:
    EVENT = RunEvent(3, 15, "cp2", "succeeded", 2, "cpu", "", 4, 4, 9.13)

    def test_a_file_gets_a_line_for_each_end_only(self, capsys):
        progress = verb._Progress()
        progress(RunEvent(0, 15, "cp2", "running", 2, "cpu", "", 1, 4, 2.0))
        progress(self.EVENT)
        progress.clear()
        assert capsys.readouterr().out == f"{self.EVENT}\n"
        assert str(self.EVENT).startswith("[ 3/15] cp2 ")
        assert str(self.EVENT).endswith("2 ranks cpu  4/4 steps  succeeded 9.1 s")
