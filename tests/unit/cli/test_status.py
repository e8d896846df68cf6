"""`workbench status`: what differs, how far, how each rank does, who is waited for, and why it failed."""

from __future__ import annotations

import contextlib
import json

import pytest

from tests.helpers.hand_made import make_run, step_record
from workbench.cli import main, status
from workbench.cli.status import describe
from workbench.errors import ShapeError
from workbench.records.directory import RunDirectory, to_json, write_whole
from workbench.sharding import flight

ABLATION = """
question: Same?
base: {steps: 4}
axes: {precision: [float64, float32]}
reference: one_rank
truth: one_rank-float64
configurations: {first: {layout: {tp: 2}}, one_rank: {}, cp2: {layout: {cp: 2}}}
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def parity(project):
    return project / "experiments" / "parity"


def one(name):
    [found] = describe(name)
    return found


class TestOneRun:
    def test_says_how_far_it_is_and_what_it_last_recorded(self, parity):
        make_run(parity, "cp2", state="running", done=3, layout={"cp": 2}, fields={"device_note": "no GPU here"})
        found = one("cp2")
        assert (found.state, found.steps_done, found.steps) == ("running", 3, 4)
        assert found.last["loss/total/sum"] == pytest.approx(0.35)
        assert found.step_ms == 41.5  # of 41 and 42: the first took 1000 and is left out
        assert (found.world_size, found.device, found.backend) == (2, "cpu", "processes")
        assert found.device_note == "no GPU here"

    def test_in_words(self, parity, capsys):
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
    def test_says_what_a_comparison_with_it_could_see(self, parity, capsys, counts, lines):
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
        [read] = json.loads(capsys.readouterr().out)
        assert read["evidence"]["trained_tokens"] == 2 * counted["evidence/trained_tokens/sum"]

    def test_a_record_of_an_earlier_version_has_no_evidence(self, parity, capsys):
        make_run(parity, "cp2")
        assert one("cp2").evidence is None
        main(["status", "cp2"])
        assert "evidence" not in capsys.readouterr().out

    def test_as_json(self, parity, capsys):
        make_run(parity, "cp2", steps=1, records=[{"step": 0, "loss/total/sum": float("nan")}])
        assert main(["status", "cp2", "--json"]) == 0
        [read] = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        assert (read["name"], read["steps_done"], read["last"]["loss/total/sum"]) == ("cp2", 1, {"float": "nan"})

    def test_where_it_runs(self, parity, capsys):
        make_run(parity, "a", fields={"backend": "slurm", "handle": "slurm://x/77"}, layout={"cp": 2})
        make_run(parity, "b", fields={"handle": "processes://77"})  # of no use to anybody
        main(["status", "a"])
        main(["status", "b"])
        out = capsys.readouterr().out
        assert "  where      2 ranks on cpu, slurm, slurm://x/77\n" in out
        assert "  where      1 rank on cpu, processes\n" in out

    def test_what_it_goes_on_with(self, parity, capsys):
        records = [{"step": number} | ({"run/continues": "cp2-0badcafe"} if number == 2 else {}) for number in range(4)]
        make_run(parity, "cp2", fields={"continues": "cp2-0badcafe"}, records=records)
        make_run(parity, "dp2", fields={"continues": "dp2-0badcafe"}, done=0, state="pending")
        main(["status", "cp2"])
        main(["status", "dp2"])
        said = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if "  continues " in line]
        assert said == ["with cp2-0badcafe from step 2", "with dp2-0badcafe"]

    def test_time_left_and_reward_of_a_run_that_goes_on(self, parity, capsys):
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

    def test_a_cancel_that_was_asked_for_is_said_until_it_ends(self, parity, capsys):
        make_run(parity, "cp2", state="running").request_cancel("test")
        main(["status", "cp2"])
        assert "running, cancellation requested" in capsys.readouterr().out

    def test_a_lost_run_says_what_to_do(self, parity, capsys):
        make_run(parity, "cp2", state="lost")
        main(["status", "cp2"])
        assert "no process is left that could end it; run it again to finish what is missing" in capsys.readouterr().out

    def test_damaged_records_are_said_and_the_rest_is_shown(self, parity, capsys):
        run = make_run(parity, "cp2")
        metrics = run.path / "metrics.jsonl"
        metrics.write_bytes(metrics.read_bytes().replace(b'"step": 1', b'"step": 9'))
        found = one("cp2")
        assert (found.problem, found.steps_done, found.last) == ("line 2 of 4 is damaged", 4, {})
        main(["status", "cp2"])
        assert "damaged  line 2 of 4 is damaged" in capsys.readouterr().out

    def test_a_damaged_exit_record_is_said(self, parity):
        run = make_run(parity, "cp2", state="failed")
        (run.path / "ranks" / "rank00000.exit.json").write_text("{")
        assert "rank00000.exit.json" in one("cp2").problem

    def test_without_steps(self, parity):
        make_run(parity, "cp2", state="pending", done=0)
        found = one("cp2")
        assert (found.step_ms, found.last, found.seconds, found.started_ns) == (None, {}, None, None)


class TestSettings:
    def test_are_held_against_the_first_run(self, parity):
        make_run(parity, "b_first", at_s=0, seed=3)
        make_run(parity, "a_second", at_s=1, seed=4, loss={"surrogate": {"clip_low": 0.1}})
        found = one("a_second")
        assert found.compared_with == "b_first"
        assert found.settings == {"loss.surrogate.clip_low": [0.2, 0.1], "seed": [3, 4]}
        assert (one("b_first").compared_with, one("b_first").settings) == ("", {})

    def test_against_the_reference_where_the_ablation_names_one(self, parity):
        parity.mkdir(parents=True)
        (parity / "ablation.yaml").write_text(ABLATION)
        make_run(parity, "first-float32", at_s=0, layout={"tp": 2})
        make_run(parity, "one_rank-float32", at_s=1)
        make_run(parity, "cp2-float32", at_s=2, layout={"cp": 2})
        assert one("cp2-float32").compared_with == "one_rank-float32"
        assert one("cp2-float32").settings == {"layout.cp": [1, 2]}
        assert one("one_rank-float32").compared_with == ""

    def test_an_ablation_that_cannot_be_read_leaves_the_first(self, parity):
        parity.mkdir(parents=True)
        (parity / "ablation.yaml").write_text("configurations: [")
        make_run(parity, "first", at_s=0)
        make_run(parity, "cp2", at_s=1, layout={"cp": 2})
        assert one("cp2").compared_with == "first"


class TestRanks:
    def test_size_and_last_line_of_each_log_and_how_it_ended(self, parity):
        make_run(
            parity,
            "cp4",
            state="failed",
            layout={"cp": 4},
            rank=1,
            error=ShapeError("split"),
            logs={0: "one\ntwo\n\n", 1: "x" * 40_000 + "\nlast", 2: ""},
        )
        ranks = one("cp4").ranks
        assert [(rank.rank, rank.log_bytes, rank.last_line, rank.ended) for rank in ranks] == [
            (0, 9, "two", ""),
            (1, 40_005, "last", "exception"),
            (2, 0, "", ""),
            (3, None, "", ""),
        ]

    def test_one_that_succeeded_says_so(self, parity):
        make_run(parity, "a", logs={0: "done\n"})
        assert [rank.ended for rank in one("a").ranks] == ["well"]

    def test_the_collective_that_it_is_in(self, parity, monkeypatch):
        run = make_run(parity, "cp2", state="running", layout={"cp": 2})
        with _one_waits(run):
            monkeypatch.setattr(status, "_PATIENCE_S", 0.0)
            found = one("cp2")
        assert found.ranks[0].inside.startswith("all_reduce over cp [#2")
        assert found.ranks[1].inside == ""
        [wait] = found.waiting
        assert (wait.rank, wait.stack) == (1, "")
        assert wait.message.startswith("rank 1 has not come to all_reduce over cp [#2")

    def test_a_short_wait_is_none(self, parity):
        run = make_run(parity, "cp2", state="running", layout={"cp": 2})
        with _one_waits(run):
            assert one("cp2").waiting == []

    def test_the_stack_that_the_watchdog_took_is_shown(self, parity, monkeypatch, capsys):
        run = make_run(parity, "cp2", state="running", layout={"cp": 2})
        monkeypatch.setattr(status, "_PATIENCE_S", 0.0)
        noted = {"waiting": [{"rank": 1, "stack": "in sleep\x1b[2J"}]}
        write_whole(run.path / "ranks" / "waiting.json", to_json(noted))
        with _one_waits(run):
            main(["status", "cp2"])
        out = capsys.readouterr().out
        assert "  waiting    rank 1 has not come to all_reduce" in out
        assert out.endswith("where rank 1 is:\n  in sleep\\x1b[2J\n")

    def test_nobody_is_waited_for_after_the_end(self, parity, monkeypatch):
        monkeypatch.setattr(status, "_PATIENCE_S", 0.0)
        run = make_run(parity, "cp2", state="cancelled", layout={"cp": 2})
        with _one_waits(run):
            assert one("cp2").waiting == []


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
        assert one("cp2").failure["rank"] == 1
        main(["status", "cp2"])
        out = capsys.readouterr().out
        assert "failed: rank 1 ShapeError (hang): split 7 tokens; found: an odd\n" in out
        assert "  cause: hang\n  place: dp=0, cp=1\n  in:    all_reduce over cp [#17]\n  after it: 0\n" in out
        assert "where it hung:\n  File step.py, line 3\n" in out
        assert "  Traceback (most recent call last):\n" in out
        assert r"row\x1b[2J" in out
        assert "\x1b" not in out


class TestExperiment:
    def test_counts_runs_and_says_where_to_read_on(self, parity, capsys):
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
        assert [read["name"] for read in json.loads(capsys.readouterr().out)] == ["a", "b"]

    def test_who_is_waited_for_in_it(self, parity, capsys, monkeypatch):
        monkeypatch.setattr(status, "_PATIENCE_S", 0.0)
        run = make_run(parity, "cp2", state="running", layout={"cp": 2})
        with _one_waits(run):
            main(["status", "parity"])
        assert "\ncp2: rank 1 has not come to all_reduce" in capsys.readouterr().out

    def test_a_run_that_cannot_be_read_does_not_hide_the_others(self, parity, capsys):
        make_run(parity, "a", at_s=0)
        broken = make_run(parity, "b", at_s=1)
        (broken.path / "config.json").write_text("{")
        assert main(["status", "parity"]) == 0
        assert capsys.readouterr().out.startswith("parity: 2 runs, 1 succeeded, 1 unreadable\n")


@contextlib.contextmanager
def _one_waits(run: RunDirectory):
    """Rank 0 stands in a second all_reduce, to which rank 1 has not come."""
    with contextlib.ExitStack() as inside:
        for rank in (1, 0):
            flight.start(run.path / "ranks" / f"rank{rank:05d}.flight", rank)
            with flight.entering("all_reduce", "cp", range(2), "cp", (4,), "float32"):
                pass
            if rank == 0:
                inside.enter_context(flight.entering("all_reduce", "cp", range(2), "cp", (4,), "float32"))
        yield
    flight.stop()
