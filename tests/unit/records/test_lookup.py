"""A user's text selects one run or one experiment, or is refused with the candidates."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers.hand_made import make_run
from workbench.atomic import to_json, write_whole
from workbench.errors import RecordError
from workbench.records import lookup
from workbench.records.lookup import (
    compared_at,
    experiment_at,
    experiment_folder,
    experiments,
    look_up,
    runs_of,
    shell_name,
)
from workbench.records.progress import steps_recorded


@pytest.fixture
def project(tmp_path):
    """Two experiments: parity with two attempts of cp2, and other with a run of the same name as one of parity."""
    parity, other = tmp_path / "experiments" / "parity", tmp_path / "experiments" / "other"
    make_run(parity, "one_rank", at_s=0)
    make_run(parity, "cp2", at_s=1, state="failed", layout={"cp": 2})
    make_run(parity, "cp2", at_s=2, layout={"cp": 2})
    make_run(parity, "cp2_zigzag", at_s=3, layout={"cp": 2, "order": "zigzag"})
    make_run(other, "one_rank", at_s=4, steps=2)
    (tmp_path / "experiments" / "empty").mkdir()
    (tmp_path / "experiments" / "empty" / "ablation.yaml").write_text("{}")
    return tmp_path


@pytest.fixture
def parity(project):
    return project / "experiments" / "parity"


def folders(runs):
    return [result.path.name for result in runs]


class TestRunsOf:
    def test_the_newest_of_each_name_oldest_first(self, parity):
        names = [(result.name, result.run.status) for result in runs_of(parity)]
        assert names == [("one_rank", "succeeded"), ("cp2", "succeeded"), ("cp2_zigzag", "succeeded")]

    def test_every_attempt(self, parity):
        assert [result.name for result in runs_of(parity, every=True)] == ["one_rank", "cp2", "cp2", "cp2_zigzag"]

    def test_an_older_attempt_used_by_the_experiment_is_listed_too(self, parity):
        old, new = (result.path.name for result in runs_of(parity, every=True) if result.name == "cp2")
        write_whole(parity / "runs" / "sweep.json", to_json({"runs": {"cp2": old}, "latest": {"cp2": new}}))
        assert [folder for folder in folders(runs_of(parity)) if folder.startswith("cp2-")] == [old, new]

    def test_a_damaged_sweep_record_hides_nothing(self, parity):
        (parity / "runs" / "sweep.json").write_text("[")
        assert len(runs_of(parity)) == 3

    def test_an_unreadable_run_is_reported_and_not_hidden(self, parity):
        [_, cp2, _] = runs_of(parity)
        (cp2.path / "config.json").write_text('{"layuot": {}}')
        [_, broken, _] = runs_of(parity)
        assert (broken.run, broken.name, broken.path) == (None, "cp2", cp2.path)
        assert "layuot" in broken.problem

    @pytest.mark.parametrize("content", ["[]", "{", '{"state": "failed"}', '{"state": "failed", "name": "x"}', ""])
    def test_a_damaged_state_is_reported_too(self, parity, content):
        [one_rank, *_] = runs_of(parity)
        (one_rank.path / "state.json").write_text(content)
        [broken] = [result for result in runs_of(parity, every=True) if result.path == one_rank.path]
        assert broken.run is None
        assert broken.problem


class TestLookUp:
    def test_the_folder_of_a_run(self, project, parity):
        path = parity / "runs" / folders(runs_of(parity))[0]
        target = look_up(path, project)
        assert (folders(target.runs), target.experiment) == ([path.name], None)

    @pytest.mark.parametrize("asked", ["experiments/parity", "parity", "experiments/parity/runs"])
    def test_an_experiment_by_path_or_name(self, project, parity, asked, monkeypatch):
        monkeypatch.chdir(project)
        target = look_up(asked, project)
        assert target.experiment == parity
        assert len(target.runs) == 3
        assert len(look_up(asked, project, every=True).runs) == 4

    def test_an_ablation_file_stands_for_its_experiment(self, project, parity):
        (parity / "ablation.yaml").write_text("{}")
        assert look_up(parity / "ablation.yaml", project).experiment == parity
        make_run(project / "mine", "mine")
        (project / "mine.yaml").write_text("steps: 4")
        assert look_up(project / "mine.yaml", project).experiment == project / "mine"
        assert experiment_folder(project / "mine.yaml") == project / "mine"

    def test_a_name_selects_its_newest_attempt_despite_longer_names(self, project, parity):
        [result] = look_up("cp2", project).runs
        assert (result.name, result.run.status) == ("cp2", "succeeded")
        assert result.path.name.endswith("-2")

    def test_a_folder_name_selects_just_that_attempt(self, project, parity):
        old = next(result.path.name for result in runs_of(parity, every=True) if result.name == "cp2")
        [result] = look_up(old, project).runs
        assert result.run.status == "failed"

    def test_the_beginning_of_a_name_is_enough(self, project):
        [result] = look_up("cp2_z", project).runs
        assert result.name == "cp2_zigzag"

    def test_several_are_listed(self, project):
        with pytest.raises(RecordError, match=r"2 runs: other/one_rank-\w{8}, parity/one_rank-\w{8}"):
            look_up("one_rank", project)

    def test_experiment_and_run_together_mean_one(self, project):
        [result] = look_up("other/one_rank", project).runs
        assert result.experiment_dir.name == "other"

    def test_a_long_list_is_truncated_with_a_mark(self, project, parity):
        for number in range(12):
            make_run(parity, f"seed{number}", seed=number)
        with pytest.raises(RecordError, match=r"and 4 more") as caught:
            look_up("", project)
        assert caught.value.parts["found"].count("parity/") == 11

    def test_a_typo_suggests_the_nearest_name(self, project):
        with pytest.raises(RecordError, match="did you mean cp2_zigzag"):
            look_up("cp2_zagzig", project)

    def test_nothing_like_it(self, project):
        with pytest.raises(RecordError, match="workbench ls"):
            look_up("quite something else", project)

    def test_an_experiment_without_runs_advises_a_file_that_is_there(self, project, monkeypatch):
        monkeypatch.chdir(project / "experiments" / "parity")
        with pytest.raises(
            RecordError, match=r"none yet[\s\S]*workbench run \S*experiments/empty/ablation\.yaml"
        ) as caught:
            look_up("empty", project)
        assert Path(caught.value.parts["fix"].rpartition(" ")[2]).is_file()
        monkeypatch.chdir(project)
        with pytest.raises(RecordError, match=r"workbench run experiments/empty/ablation\.yaml"):
            look_up("empty", project)

    def test_a_file_that_has_not_run_is_the_advice(self, project, monkeypatch):
        monkeypatch.chdir(project)
        (project / "my.yaml").write_text("steps: 4")
        with pytest.raises(RecordError, match=r"none yet[\s\S]*workbench run my\.yaml"):
            look_up("my.yaml")
        with pytest.raises(RecordError, match="no run or experiment of that name"):
            look_up("my")

    def test_a_name_from_the_disk_cannot_command_the_terminal(self, project, parity):
        hostile = parity / "runs" / "cp2\x1b[2J-0badcafe"
        shutil.copytree(runs_of(parity)[0].path, hostile)
        (hostile / "config.json").write_text("{")
        with pytest.raises(RecordError) as caught:
            look_up(parity, project, every=True).opened()
        assert "\x1b" not in str(caught.value)
        assert r"cp2\x1b[2J-0badcafe" in str(caught.value)

    def test_opening_refuses_an_unreadable_run(self, project, parity):
        [_, cp2, _] = runs_of(parity)
        (cp2.path / "config.json").write_text("{")
        with pytest.raises(RecordError, match=cp2.path.name):
            look_up("parity", project).opened()


class TestExperiments:
    def test_experiments_are_folders_with_runs(self, project):
        assert [path.name for path in experiments(project)] == ["other", "parity"]
        assert experiments(project / "nowhere") == []

    def test_a_run_is_none(self, project):
        assert experiment_at("parity", project).name == "parity"
        with pytest.raises(RecordError, match="give parity"):
            experiment_at("cp2_zigzag", project)


class TestElsewhere:
    """Runs of files in the current folder, which is not the project."""

    @pytest.fixture
    def here(self, project, tmp_path_factory, monkeypatch):
        here = tmp_path_factory.mktemp("desk")
        (here / "my.yaml").write_text("steps: 4")
        make_run(here / "my", "mine")
        make_run(here / "folder" / "deep", "deeper")
        monkeypatch.chdir(here)
        monkeypatch.setattr(lookup, "project_root", lambda: project)
        return here

    def test_they_are_listed_after_those_of_the_project(self, here, project):
        assert {path.name for path in experiments()} == {"other", "parity", "my", "deep"}
        assert {path.name for path in experiments(project)} == {"other", "parity"}

    @pytest.mark.parametrize("asked", ["my.yaml", "my", "my/runs"])
    def test_an_experiment(self, here, asked):
        assert look_up(asked).experiment == here / "my"

    @pytest.mark.parametrize("asked", ["mine", "my/min"])
    def test_a_run(self, here, asked):
        assert [run.experiment_dir for run in look_up(asked).runs] == [here / "my"]

    def test_an_experiment_in_a_folder_by_its_name(self, here):
        assert experiment_at("deep") == here / "folder" / "deep"

    def test_the_folder_itself(self, here, monkeypatch):
        monkeypatch.chdir(here / "my")
        assert [run.name for run in look_up("mine").runs] == ["mine"]

    def test_two_of_one_name_are_refused(self, here):
        make_run(here / "other_folder" / "deep", "deeper")
        with pytest.raises(RecordError, match="2 experiments: folder/deep, other_folder/deep"):
            look_up("deep")

    @pytest.mark.parametrize("asked", ["my.yaml", "my"])
    def test_a_comparison(self, here, asked):
        (here / "my" / "comparison.json").write_text("{}")
        assert compared_at(asked).resolve() == here / "my"

    def test_a_comparison_without_runs(self, here, project):
        (project / "experiments" / "empty" / "comparison.json").write_text("{}")
        assert compared_at("empty") == project / "experiments" / "empty"
        assert compared_at("parity") == project / "experiments" / "parity"
        with pytest.raises(RecordError, match="no run or experiment of that name"):
            compared_at("nothing_of_the_kind")


class TestSpelled:
    def test_a_printed_name_selects_that_run(self, project, parity):
        for result in (result for folder in experiments(project) for result in runs_of(folder, every=True)):
            text = shell_name(result.path, project)
            assert text == f"{result.experiment_dir.name}/{result.path.name}"
            assert [same.path for same in look_up(text, project).runs] == [result.path]

    def test_elsewhere_it_is_a_path_for_the_shell(self, project, monkeypatch):
        run = make_run(project / "my own", "a")
        monkeypatch.chdir(project)
        assert shell_name(run.path, project) == f"'my own/runs/{run.path.name}'"
        monkeypatch.chdir(project / "experiments")
        assert shell_name(run.path, project) == f"'{run.path}'"


@pytest.mark.parametrize(("content", "count"), [(b"", 0), (b"{}\n{}\n", 2), (b'{}\n{"torn', 1)])
def test_steps_are_counted_without_reading_them(tmp_path, content, count):
    run = make_run(tmp_path, "a", done=0)
    assert steps_recorded(run) == 0
    (run.path / "metrics.jsonl").write_bytes(content)
    assert steps_recorded(run) == count
