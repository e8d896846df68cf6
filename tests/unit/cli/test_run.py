"""`workbench run`: flags change the base, a part never replaces the whole, a failed run is exit code 1."""

from __future__ import annotations

import importlib

import pytest

from workbench.cli.run import _Progress, run
from workbench.compare.comparison import Comparison, Configuration
from workbench.errors import SpecError
from workbench.experiment import Experiment
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
def called(monkeypatch, comparison):
    """The arguments of the experiment and of its run, which does nothing here."""
    seen = {}

    class Called(Experiment):
        def __init__(self, path, **settings):
            super().__init__(path, **settings)
            seen.update(settings, path=path)

        def run(self, **options):
            seen.update(options)
            return comparison

    monkeypatch.setattr(importlib.import_module("workbench.cli.run"), "Experiment", Called)
    return seen


class TestArguments:
    def test_flags_are_changes_against_the_file(self, file, called):
        assert run([str(file), "--steps", "2", "--loss.surrogate.clip-low", "0.3", "--where", "here"]) == 1
        assert called["changes"] == {"steps": 2, "loss": {"surrogate": {"clip_low": 0.3}}}
        assert (called["path"], called["where"], called["fresh"], called["force"]) == (file, "here", False, False)
        assert called["notebook"]

    def test_without_flags_nothing_changes(self, file, called):
        run([str(file), "--only", "b", "a-float32"])
        assert called["changes"] == {}
        assert called["only"] == ("b", "a-float32")

    def test_a_flag_that_repeats_the_file_counts_as_a_change(self, file, called):
        """Else a flag that an axis overrules would be dropped without a word where it names the default."""
        run([str(file), "--steps", "4", "--loss.surrogate.clip_high=0.28"])
        assert called["changes"] == {"steps": 4, "loss": {"surrogate": {"clip_high": 0.28}}}
        with pytest.raises(SpecError, match="precision is an axis"):
            run([str(file), "--precision", "float32"])

    @pytest.mark.parametrize("name", [["--loss.name", "sapo"], ["--loss.name=sapo"]])
    def test_another_loss_brings_its_own_flags(self, tmp_path, called, name):
        file = tmp_path / "ablation.yaml"
        file.write_text("question: '?'\nreference: a\nconfigurations: {a: {}}\n")
        run([str(file), *name, "--loss.surrogate.tau-positive", "2.0"])
        assert called["changes"] == {"loss": {"name": "sapo", "surrogate": {"tau_positive": 2.0}}}

    def test_a_switch_is_a_change(self, file, called):
        run([str(file), "--record.no-tokens"])
        assert called["changes"] == {"record": {"tokens": False}}

    def test_a_flag_may_give_back_a_default(self, file, called):
        run([str(file), "--steps", "1"])
        assert called["changes"] == {"steps": 1}

    def test_launcher_options_are_no_settings(self, file, called):
        run(
            [
                str(file),
                "--fresh",
                "--force",
                "--no-notebook",
                "--per-job",
                "3",
                "--scheduler",
                "queue=a",
                "partition=b=c",
            ]
        )
        assert called["changes"] == {}
        assert called["per_job"] == 3
        assert (called["fresh"], called["force"], called["notebook"]) == (True, True, False)
        assert called["options"] == {"queue": "a", "partition": "b=c"}

    def test_an_option_without_a_value_is_refused(self, file, called):
        with pytest.raises(SpecError, match="--scheduler queue"):
            run([str(file), "--scheduler", "queue"])

    def test_detached_returns_at_once_and_leaves_the_report_to_the_launcher(self, file, called, capsys, monkeypatch):
        launched = []
        monkeypatch.setattr(Experiment, "launch", lambda self, **how: launched.append(how))
        assert run([str(file), "--detached", "--fresh", "--where", "processes"]) == 0
        [how] = launched
        assert (how["detached"], how["report"], how["fresh"], how["where"]) == (True, True, True, "processes")
        assert "workbench attach" in capsys.readouterr().out
        assert "notebook" not in called, "nothing was run in this process"

    def test_a_dry_run_prints_every_request_and_runs_nothing(self, file, called, capsys):
        arguments = [str(file), "--where", "slurm", "--dry-run", "--only", "a"]
        assert run(arguments) == 0
        out = capsys.readouterr().out
        assert "# a-float64, a-float32\n" in out
        assert out.count("--nproc-per-node=1") == 1
        assert run([*arguments, "--per-job", "1"]) == 0
        out = capsys.readouterr().out
        assert "# a-float32\n" in out
        assert out.count("--nproc-per-node=1") == out.count("# a-float") == 2
        assert "where" not in called
        assert not (file.parent / "runs").exists()

    def test_another_kind_of_file_is_refused(self, called):
        with pytest.raises(SpecError, match=r"ends in \.yaml"):
            run(["notes.txt"])

    def test_help_fits_a_screen_and_names_every_group(self, capsys):
        assert run(["--help"]) == 0
        text = capsys.readouterr().out
        assert len(text.splitlines()) <= 64  # a terminal of 80 columns; 528 with every setting
        for name in ("--only", "--detached", "--layout.…", "--precision", "workbench describe layout", "--help-all"):
            assert name in text

    @pytest.mark.parametrize(
        ("flags", "found"),
        [
            (["--layout.tpp", "2"], "no such flag; did you mean --layout.tp or --layout.pp?"),
            (["--lr=1e-4"], "did you mean --optimizer.learning-rate?"),
            (["--detach"], "did you mean 'detached'?"),
            (["--loss.surrogate.beta", "2"], "this loss is ppo; loss.surrogate.beta is a setting of dro, dpo"),
            (["--layout", "2"], "a group of settings: --layout.dp, --layout.cp"),
        ],
        ids=lambda value: value[0] if isinstance(value, list) else "",
    )
    def test_an_unknown_flag_is_named_wherever_it_stands(self, file, called, flags, found):
        for arguments in ([*flags, str(file)], [str(file), *flags]):
            with pytest.raises(SpecError) as caught:
                run(arguments)
            assert caught.value.parts["requested"] == f"run {flags[0].partition('=')[0]}"
            assert found in caught.value.parts["found"]

    @pytest.mark.parametrize(
        "flags",
        [
            ["--no-notebook", "--layout.shard-parameters"],
            ["--layout.no-shard-parameters", "--per_job", "2"],
            ["--loss.name", "dapo", "--loss.surrogate.clip-low", "0.1"],
            ["--scheduler", "partition=gpu", "--faults", "local_denominator"],
            ["--data.advantages.name", "rloo", "--loss.correction.kind", "tis"],
        ],
        ids=" ".join,
    )
    def test_known_flags_in_all_their_forms_are_none(self, file, called, flags):
        assert run([str(file), *flags]) in (0, 1)

    def test_all_help_lists_every_setting(self, capsys):
        with pytest.raises(SystemExit):
            run(["--help-all"])
        text = capsys.readouterr().out
        for flag in ("--layout.cp", "--loss.surrogate.clip-low", "--precision", "--optimizer.learning-rate", "--only"):
            assert flag in text
        assert "Context-parallel ranks" in text  # the docstring of the field

    def test_a_failed_run_is_exit_code_1(self, file, called, comparison):
        comparison.configurations.append(Configuration("c", comparison["a"].settings, verdict="failed"))
        assert run([str(file)]) == 1

    def test_a_failed_run_is_printed_with_its_reason(self, file, called, comparison, capsys):
        comparison.configurations.append(
            Configuration(
                "c",
                comparison["a"].settings,
                verdict="failed",
                why="rank 1 ShapeError: split 7 tokens; found: an odd row",
            )
        )
        run([str(file)])
        assert "c  failed            rank 1 ShapeError: split 7 tokens; found: an odd row\n" in capsys.readouterr().out

    def test_the_verdicts_and_the_path_are_printed(self, file, called, capsys):
        run([str(file)])
        out = capsys.readouterr().out
        assert "b  different         x 0.5  = 1 / cp  small" in out
        assert out.rstrip().endswith("report.html")

    def test_an_interrupt_explains_how_to_resume(self, file, called, monkeypatch, capsys):
        def interrupted(self, **options):
            raise KeyboardInterrupt

        monkeypatch.setattr(Experiment, "run", interrupted)
        monkeypatch.setattr(importlib.import_module("workbench.cli.run"), "Experiment", Experiment)
        with pytest.raises(KeyboardInterrupt):
            run([str(file)])
        assert "runs with a checkpoint resume from it" in capsys.readouterr().err


class TestProgress:
    EVENT = RunEvent(3, 15, "cp2", "succeeded", 2, "cpu", "", 4, 4, 9.13)

    def test_a_file_gets_a_line_for_each_end_only(self, capsys):
        progress = _Progress()
        progress(RunEvent(0, 15, "cp2", "running", 2, "cpu", "", 1, 4, 2.0))
        progress(self.EVENT)
        progress.clear()
        assert capsys.readouterr().out == f"{self.EVENT}\n"
        assert str(self.EVENT).startswith("[ 3/15] cp2 ")
        assert str(self.EVENT).endswith("2 ranks cpu  4/4 steps  succeeded 9.1 s")
