"""`workbench ls` and `status`: what differs, how far, how each rank does, who is waited for, and why it failed."""

from __future__ import annotations

import json
import os

import pytest

from tests.helpers.hand_made import make_project, make_run, step_record
from tests.helpers.waiting_ranks import one_waits
from workbench.atomic import to_json, write_whole
from workbench.cli import main
from workbench.cli.status import list_lines
from workbench.errors import ShapeError
from workbench.launch import status
from workbench.launch.detached import recorded
from workbench.launch.status import Listed, list_runs, status_of


@pytest.fixture
def project(tmp_path, monkeypatch):
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def parity(project):
    return project / "experiments" / "parity"


class TestOneRun:
    def test_describes_the_run(self, parity, capsys):
        make_run(parity, "one_rank")
        make_run(parity, "cp2", at_s=1, done=3, state="cancelled", layout={"cp": 2})
        assert main(["status", "cp2"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("parity/cp2-")
        assert "  state      cancelled, 3 of 4 steps, 3 s\n" in out
        assert "  step 2     loss 0.350000, gradient norm 0.200000\n" in out
        assert "  step time  41.5 ms (median without the first)\n" in out
        assert "  settings   as one_rank, but\n             layout.cp: 1 -> 2\n" in out

    @pytest.mark.parametrize(
        ("counts", "lines"),
        [
            (
                {},
                [
                    "  evidence   gradient on 12 of 16 documents (75.0%), 80 of 100 trained tokens (80.0%); "
                    "clipped 20.0%; counted over 2 steps"
                ],
            ),
            (
                {"evidence/gradient_documents/sum": 1},
                [
                    "  evidence   gradient on 2 of 16 documents (12.5%), 80 of 100 trained tokens (80.0%); "
                    "clipped 20.0%; counted over 2 steps",
                    "             warning: only 2 of 16 documents (12.5%) have a gradient",
                ],
            ),
            (
                {"evidence/trained_tokens/sum": 0, "evidence/gradient_tokens/sum": 0, "evidence/clipped_tokens/sum": 0},
                [
                    "  evidence   gradient on 12 of 16 documents (75.0%), 0 of 0 trained tokens; counted over 2 steps",
                    "             vacuous: no token is trained: the loss mask is empty in every step",
                ],
            ),
        ],
    )
    def test_reports_the_evidence_of_a_comparison(self, parity, capsys, counts, lines):
        counted = {
            "evidence/documents/sum": 8,
            "evidence/gradient_documents/sum": 6,
            "evidence/trained_tokens/sum": 50,
            "evidence/gradient_tokens/sum": 40,
            "evidence/clipped_tokens/sum": 10,
        } | counts
        make_run(parity, "cp2", steps=2, records=[step_record(number) | counted for number in range(2)])
        assert main(["status", "cp2"]) == 0
        out = capsys.readouterr().out
        assert "\n".join(lines) in out
        assert main(["status", "cp2", "--json"]) == 0
        [read] = json.loads(capsys.readouterr().out)["result"]
        assert read["evidence"]["trained_tokens"] == 2 * counted["evidence/trained_tokens/sum"]

    def test_a_record_of_an_earlier_version_has_no_evidence(self, parity, capsys):
        assert status_of(make_run(parity, "cp2")).evidence is None
        main(["status", "cp2"])
        assert "evidence" not in capsys.readouterr().out

    def test_as_json(self, parity, capsys):
        make_run(parity, "cp2", steps=1, records=[{"step": 0, "loss/total/sum": float("nan")}])
        assert main(["status", "cp2", "--json"]) == 0
        [read] = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))[
            "result"
        ]
        assert (read["name"], read["steps_done"], read["last"]["loss/total/sum"]) == ("cp2", 1, {"float": "nan"})

    def test_where_it_runs(self, parity, capsys):
        make_run(parity, "a", fields={"backend": "slurm", "handle": "slurm://x/77"}, layout={"cp": 2})
        make_run(parity, "b", fields={"handle": "processes://77"})  # unusable
        main(["status", "a"])
        main(["status", "b"])
        out = capsys.readouterr().out
        assert "  where      2 ranks on cpu, slurm, slurm://x/77\n" in out
        assert "  where      1 rank on cpu, processes\n" in out

    def test_why_it_waits_on_a_cluster(self, parity, capsys):
        fields = {"backend": "slurm", "handle": "slurm://x/77", "scheduler": "PENDING (Resources)"}
        make_run(parity, "a", state="pending", fields=fields)
        main(["status", "a"])
        assert "  scheduler  PENDING (Resources)\n" in capsys.readouterr().out
        main(["ls", str(parity)])
        assert "PENDING (Resources)" in capsys.readouterr().out

    def test_reports_the_run_that_it_continues(self, parity, capsys):
        records = [{"step": number} | ({"run/continues": "cp2-0badcafe"} if number == 2 else {}) for number in range(4)]
        make_run(parity, "cp2", fields={"continues": "cp2-0badcafe"}, records=records)
        make_run(parity, "dp2", fields={"continues": "dp2-0badcafe"}, done=0, state="pending")
        main(["status", "cp2"])
        main(["status", "dp2"])
        texts = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if "  continues " in line]
        assert texts == ["with cp2-0badcafe from step 2", "with dp2-0badcafe"]

    def test_time_left_and_reward_of_a_resumed_run(self, parity, capsys):
        records = [
            {
                "step": number,
                "loss/total/sum": 0.5,
                "gradient/norm/global": 1.0,
                "reward/all/mean": 0.25,
                "time/ended_ns": 30 * 10**9 * number,
            }
            for number in range(2)
        ]
        make_run(parity, "cp2", state="running", records=records, steps=4)
        main(["status", "cp2"])
        out = capsys.readouterr().out
        assert "2 of 4 steps" in out
        assert "about 1 min 0 s left\n" in out
        assert "gradient norm 1.00000, reward 0.250\n" in out

    def test_a_requested_cancel_is_shown_until_the_end(self, parity, capsys):
        make_run(parity, "cp2", state="running").request_cancel("test")
        main(["status", "cp2"])
        assert "running, cancellation requested" in capsys.readouterr().out

    def test_a_lost_run_has_a_fix(self, parity, capsys):
        make_run(parity, "cp2", state="lost")
        main(["status", "cp2"])
        assert "no process is left that could end it; run it again to finish what is missing" in capsys.readouterr().out

    def test_damaged_records_are_reported_and_the_rest_is_shown(self, parity, capsys):
        run = make_run(parity, "cp2")
        metrics = run.path / "metrics.jsonl"
        metrics.write_bytes(metrics.read_bytes().replace(b'"step": 1', b'"step": 9'))
        result = status_of(run)
        assert (result.problem, result.steps_done, result.last) == ("line 2 of 4 is damaged", 4, {})
        main(["status", "cp2"])
        assert "damaged  line 2 of 4 is damaged" in capsys.readouterr().out


class TestRanks:
    def test_the_stack_that_the_watchdog_took_is_shown(self, parity, monkeypatch, capsys):
        run = make_run(parity, "cp2", state="running", layout={"cp": 2})
        monkeypatch.setattr(status, "_PATIENCE_S", 0.0)
        noted = {"waiting": [{"rank": 1, "stack": "in sleep\x1b[2J"}]}
        write_whole(run.path / "ranks" / "waiting.json", to_json(noted))
        with one_waits(run):
            main(["status", "cp2"])
        out = capsys.readouterr().out
        assert "  waiting    rank 1 has not come to all_reduce" in out
        assert out.endswith("where rank 1 is:\n  in sleep\\x1b[2J\n")


class TestFailure:
    def test_with_cause_traceback_and_collective(self, parity, capsys):
        run = make_run(parity, "cp2", state="failed", layout={"cp": 2})
        try:
            raise ShapeError("split 7 tokens", found="an odd\nrow\x1b[2J")
        except ShapeError as error:
            run.write_exit(
                1,
                {"dp": 0, "cp": 1},
                error,
                cause="hang",
                waited_in="all_reduce over cp [#17]",
                stack="File step.py, line 3",
            )
        run.write_exit(0, {"cp": 0}, ConnectionError("closed"))
        assert status_of(run).failure["rank"] == 1
        main(["status", "cp2"])
        out = capsys.readouterr().out
        assert "failed: rank 1 ShapeError (hang): split 7 tokens; found: an odd\n" in out
        assert "  cause: hang\n  place: dp=0, cp=1\n  in:    all_reduce over cp [#17]\n  after it: 0\n" in out
        assert "where it hung:\n  File step.py, line 3\n" in out
        assert "  Traceback (most recent call last):\n" in out
        assert r"row\x1b[2J" in out
        assert "\x1b" not in out


class TestExperiment:
    def test_counts_runs_and_names_the_next_command(self, parity, capsys):
        make_run(parity, "a", at_s=0)
        make_run(parity, "b", at_s=1)
        failed = make_run(parity, "c", at_s=2, state="failed", done=1, error=ValueError("no"))
        assert main(["status", "parity"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("parity: 3 runs, 2 succeeded, 1 failed\n")
        assert "rank 0 ValueError: no" in out
        assert f"`workbench status parity/{failed.path.name}` shows a failure with its traceback" in out

    def test_as_json_everything_of_each_run(self, parity, capsys):
        make_run(parity, "a", at_s=0)
        make_run(parity, "b", at_s=1)
        main(["status", "parity", "--json"])
        assert [read["name"] for read in json.loads(capsys.readouterr().out)["result"]] == ["a", "b"]

    def test_names_the_rank_that_is_waited_for(self, parity, capsys, monkeypatch):
        monkeypatch.setattr(status, "_PATIENCE_S", 0.0)
        run = make_run(parity, "cp2", state="running", layout={"cp": 2})
        with one_waits(run):
            main(["status", "parity"])
        assert "\ncp2: rank 1 has not come to all_reduce" in capsys.readouterr().out

    def test_a_run_that_cannot_be_read_does_not_hide_the_others(self, parity, capsys):
        make_run(parity, "a", at_s=0)
        broken = make_run(parity, "b", at_s=1)
        (broken.path / "config.json").write_text("{")
        assert main(["status", "parity"]) == 0
        assert capsys.readouterr().out.startswith("parity: 2 runs, 1 succeeded, 1 unreadable\n")


def test_a_detached_launcher_is_shown_with_its_log(parity, capsys):
    make_run(parity, "one_rank")
    with recorded(parity / "runs"):
        assert main(["status", "parity"]) == 0
        assert f"process {os.getpid()} launches parity, detached; its log: " in capsys.readouterr().out
        assert main(["ls"]) == 0
        assert f"process {os.getpid()} launches parity, detached; its log: " in capsys.readouterr().out
    for verb in (["status", "parity"], ["ls"], ["ls", "parity"]):
        assert main(verb) == 0
        assert "detached" not in capsys.readouterr().out


@pytest.fixture
def listed(project):
    parity, other = project / "experiments" / "parity", project / "experiments" / "other"
    make_run(parity, "cp2", at_s=5, state="failed", done=2, layout={"cp": 2}, rank=1, error=ValueError("an\nodd row"))
    make_run(parity, "one_rank", at_s=0, took_s=75.25)
    make_run(other, "tp2", at_s=3, state="lost", done=1, layout={"tp": 2})
    make_run(parity, "cp4", at_s=9, state="pending", done=0, layout={"cp": 4})
    return project


def test_as_a_table(listed, capsys):
    assert main(["ls"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["EXPERIMENT", "RUN", "STATE", "STEPS", "WHEN", "TOOK", "WHERE", "WHY"]
    assert rows[0].split()[:4] == ["parity", "one_rank", "succeeded", "4/4"]
    assert "1 min 15 s" in rows[0]
    assert rows[2].endswith("2 x cpu, processes  rank 1 ValueError: an")


def test_of_one_experiment_its_name_is_not_repeated(listed, capsys):
    main(["ls", "parity"])
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "RUN"
    assert len(rows) == 3


def test_older_attempts_need_a_flag(listed, capsys):
    again = make_run(listed / "experiments" / "parity", "cp2", at_s=7, layout={"cp": 2})
    assert [run.state for run in list_runs("parity", project=listed) if run.name == "cp2"] == ["succeeded"]
    main(["ls", "experiments/parity", "--all"])
    out = capsys.readouterr().out
    assert again.path.name in out
    assert f"{again.path.name.removesuffix('-2')} " in out  # two of one name are distinguished by their folders


def test_a_run_that_cannot_be_read_is_listed(listed, capsys):
    [run] = [run for run in list_runs("parity", project=listed) if run.name == "one_rank"]
    (listed / "experiments" / "parity" / "runs" / run.folder / "config.json").write_text("{")
    main(["ls", "parity"])
    [line] = [line for line in capsys.readouterr().out.splitlines() if "one_rank" in line]
    assert "unreadable" in line
    assert "JSONDecodeError" in line


def test_as_json(listed, capsys):
    assert main(["ls", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)["result"]
    assert [Listed(**run) for run in read] == list_runs(project=listed)


def test_an_empty_list_explains_the_first_step(tmp_path, monkeypatch, capsys):
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["ls"]) == 0
    assert "begin with: workbench run" in capsys.readouterr().out


def test_no_such_experiment(listed, capsys):
    assert main(["ls", "nothing"]) == 2
    assert "no run or experiment of that name" in capsys.readouterr().err


def test_control_sequences_are_escaped(listed, capsys):
    make_run(
        listed / "experiments" / "parity",
        "tp4",
        at_s=20,
        state="failed",
        fields={"name": "tp4\x1b[31m"},
        error=ValueError("\x1b]0;owned\x07"),
    )
    main(["ls"])
    out = capsys.readouterr().out
    assert r"tp4\x1b[31m" in out
    assert r"\x1b]0;owned\x07" in out
    assert "\x1b" not in out


def test_lines_are_folded_to_the_terminal_and_whole_elsewhere():
    run = Listed("e", "n", "n-1", "failed", 1, 2, 10**18, 1.0, 1, "cpu", "here", "because " * 40)
    lines = list_lines([run], letters=80)
    assert max(map(len, lines)) <= 80
    assert sum(line.count("because") for line in lines) == 40
    assert max(map(len, list_lines([run]))) > 300


@pytest.mark.parametrize(
    ("key", "value"), [("time/step_ms", None), ("loss/total/sum", []), ("gradient/norm/global", "1")]
)
@pytest.mark.parametrize("state", ["failed", "succeeded"])
def test_a_step_record_whose_number_is_none_is_named(parity, capsys, key, value, state):
    """Its checksum is right: another program has written it."""
    records = [step_record(number) for number in range(4)]
    records[2][key] = value
    make_run(parity, "cp2", records=records, state=state)
    assert main(["status", "cp2"]) in (0, 2)
    captured = capsys.readouterr()
    text = " ".join((captured.out + captured.err).split())
    assert f"line 3: {key} is {value!r}" in text
    assert "Traceback" not in text
