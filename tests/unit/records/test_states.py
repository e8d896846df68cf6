"""The state of a run as data: what its file must have, and which state its processes leave possible."""

from __future__ import annotations

import pytest

from tests.helpers.hand_made import NOBODY, make_run
from workbench.atomic import from_json, to_json, write_whole
from workbench.cli import main
from workbench.errors import RecordError
from workbench.records.provenance import this_process
from workbench.records.states import STATES, read_state, status_in


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"state": "succeeded", "rank0": NOBODY}, "succeeded"),
        ({"state": "running", "rank0": NOBODY}, "lost"),
        ({"state": "running", "rank0": NOBODY, "launcher": this_process()}, "running"),
        ({"state": "pending"}, "pending"),
        ({"state": "pending", "launcher": NOBODY}, "lost"),
        ({"state": "pending", "launcher": NOBODY, "handle": "7", "backend": "sbatch"}, "pending"),
        ({"state": "running", "rank0": NOBODY, "handle": "7", "backend": "sbatch"}, "lost"),
    ],
)
def test_a_run_without_a_process_is_lost_unless_it_waits_in_a_queue(state, expected):
    assert status_in(state) == expected


def test_status_of_a_directory_is_that_of_its_file(tmp_path):
    run = make_run(tmp_path, "cp2", state="lost")
    assert read_state(run.path) == run.state
    assert run.status == status_in(run.state) == "lost"


def test_a_file_without_a_state_is_an_error_that_lists_them(tmp_path):
    (tmp_path / "state.json").write_text('{"name": "cp2", "state": "sleeping"}')
    with pytest.raises(RecordError) as error:
        read_state(tmp_path)
    assert all(state in error.value.parts["rule"] for state in STATES)


@pytest.mark.parametrize("moment", [-1, 2**63, 170000001700000000000000000])
def test_a_moment_that_no_clock_tells_is_damage_and_no_command_trips_over_it(tmp_path, moment, capsys):
    run = make_run(tmp_path, "cp2", state="failed")
    write_whole(run.path / "state.json", to_json(run.state | {"created_ns": moment}))
    with pytest.raises(RecordError, match="nanoseconds since 1970"):
        read_state(run.path)
    assert main(["ls", str(tmp_path)]) == 0
    assert "cp2" in capsys.readouterr().out
    assert main(["status", str(run.path)]) == 2


@pytest.mark.parametrize("ranks", [0, -2, 10**12])
def test_a_number_of_ranks_that_no_job_has_is_damage(tmp_path, ranks, capsys):
    run = make_run(tmp_path, "cp2", state="failed")
    write_whole(run.path / "state.json", to_json(run.state | {"world_size": ranks}))
    with pytest.raises(RecordError, match="at least 1 and at most 16384"):
        read_state(run.path)
    assert main(["status", str(run.path)]) == 2


def test_nor_does_a_layout_in_damaged_settings_make_status_list_them(tmp_path, capsys):
    run = make_run(tmp_path, "cp2", state="failed")
    settings = from_json((run.path / "config.json").read_bytes())
    write_whole(run.path / "config.json", to_json(settings | {"layout": {"dp": 10**12}}))
    write_whole(run.path / "state.json", to_json({k: v for k, v in run.state.items() if k != "world_size"}))
    assert main(["status", str(run.path)]) == 2
    assert "at most 16384" in capsys.readouterr().err
