"""Growth exponents of made-up times, and of the record; the numbers of a run directory."""

from __future__ import annotations

import json

import pytest

from experiments.growth import page
from experiments.growth.engine import LOGPROB, engine
from experiments.growth.inputs import COMMANDS, make_runs
from experiments.growth.measure import (
    disk,
    exponent,
    many_configurations,
    measure_estimators,
    measure_long,
    write_dump,
)
from workbench.check import check_step
from workbench.cli import VERBS
from workbench.records.directory import RunDirectory
from workbench.records.provenance import project_root
from workbench.rollouts.advantages.registry import ESTIMATORS
from workbench.rollouts.engine_client import EngineClient
from workbench.sharding import flight

RECORD = project_root() / "experiments/growth/growth.json"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({0: 1.0, 500: 2.0, 1000: 3.0}, 1.0),
        ({0: 1.0, 500: 2.0, 1000: 5.0}, 2.0),
        ({0: 1.0, 500: 1.02, 1000: 1.04}, None),
    ],
)
def test_start_up_does_not_count_and_noise_has_no_exponent(seconds, expected):
    assert exponent(seconds) == expected


def test_runs_are_whole(tmp_path):
    make_runs(tmp_path, 2)
    runs = [RunDirectory.open(path.parent) for path in tmp_path.glob("runs/*/config.json")]
    assert [len(run.steps()) for run in runs] == [4, 4]
    assert all(run.ranks_done for run in runs)
    assert disk(tmp_path)["files"] == 5, "config, state and its lock, metrics, an exit record"


def test_every_rank_has_a_record_and_the_last_one_failed(tmp_path):
    make_runs(tmp_path, 1, ranks=3, failed=True)
    [run] = [RunDirectory.open(path.parent) for path in tmp_path.glob("runs/*/config.json")]
    assert sorted(run.exits()) == sorted(flight.read_all(run.path / "ranks")) == [0, 1, 2]
    assert run.failure()["rank"] == 2
    assert [path.name for path in sorted(run.path.glob("ranks/*.log"))] == [f"rank0000{at}.log" for at in range(3)]


def test_the_engine_scores_the_tokens_that_it_is_sent():
    with engine() as address:
        assert EngineClient(address, "sglang").prompt_logprobs([5, 6, 7]) == [0.0, LOGPROB, LOGPROB]


def test_each_estimator_is_measured():
    measured = measure_estimators((0, 40, 80))["estimators"]
    assert set(measured) == {*ESTIMATORS, "preference pairs"}


def test_what_was_measured_grows_linearly_but_for_what_has_a_reason():
    record = json.loads(RECORD.read_text())
    grown = {**record["verbs"], **record["reading"]["verbs"], **record["computing"]}
    grown["preparation"] = record["preparation of a step"]
    assert len(grown) == 12 + len(COMMANDS)
    assert set(record["advantages of a step"]["estimators"]) == {*ESTIMATORS, "preference pairs"}
    for each in grown.values():
        assert each["exponent"] == exponent({int(size): value for size, value in each["cpu_s"].items()})
    assert {name for name, each in grown.items() if (each["exponent"] or 0) > 1.25} == set(page.FASTER)
    estimators = record["advantages of a step"]["estimators"].values()
    seen = [each for each in estimators if max(each["cpu_s"].values()) >= page.SEEN_S]
    assert len(seen) >= 8
    assert max(each["exponent"] for each in seen) <= 1.25


def test_every_verb_was_measured_or_has_nothing_that_grows():
    record = json.loads(RECORD.read_text())
    measured = {name.split(",")[0].split()[0] for part in (record["verbs"], record["computing"]) for name in part}
    measured |= {name.split(",")[0] for name in record["reading"]["verbs"]}
    assert sorted([*measured, *page.CONSTANT]) == sorted(VERBS)
    assert set(record["computing"]) == set(COMMANDS)


@pytest.mark.parametrize("entry", COMMANDS)
def test_the_command_of_each_measurement_is_one_of_the_cli(entry, tmp_path):
    sizes, command = COMMANDS[entry]
    verb, *_ = command(tmp_path, sizes[0])
    assert verb in (entry.split(",")[0].split()[0], "-c")
    assert list(sizes) == sorted(set(sizes))


def test_a_list_and_a_status_of_a_thousand_runs_take_less_than_a_second_above_start_up():
    verbs = json.loads(RECORD.read_text())["verbs"]
    assert {verb for verb, each in verbs.items() if each["cpu_s"]["1000"] - each["cpu_s"]["0"] >= 1} == set()


def test_the_report_of_200_configurations_is_within_its_limits():
    report = json.loads(RECORD.read_text())["report"]
    assert report["cpu_s"]["200"] < 20
    assert report["megabytes"]["200"] < 5


def test_repeated_configurations_have_names_of_their_own():
    names = [c.name for c in many_configurations(80).configurations]
    assert len(set(names)) == 80


def test_the_dump_that_is_checked_holds_what_a_trainer_computes(tmp_path):
    write_dump(tmp_path / "right", 3, tokens=4)
    assert check_step(tmp_path / "right").verdict == "agrees"


def test_a_long_comparison_is_read_back_and_its_json_is_small():
    assert measure_long(3, 8)["rows"] >= 3 * 8
    record = json.loads(RECORD.read_text())["long comparison"]
    assert record["columns"]["json_mb"] < 0.1 * record["one JSON"]["json_mb"]
    assert record["one JSON"]["columns_mb"] == 0
    assert record["columns"]["load_s"] < record["one JSON"]["load_s"]
