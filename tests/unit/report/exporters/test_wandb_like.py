"""W&B's offline files and trackio's database hold every number at its step and time.

W&B brings no reader of its files in Python. They are LevelDB's log format, 32 KiB blocks of records with checksums,
and W&B's own protobuf messages inside.
"""

from __future__ import annotations

import functools
import json
import math
import os
import struct
import subprocess
import sys
import zlib

import pytest

from tests.helpers.hand_made import BEGAN_NS, make_run
from workbench.report.exporters.tracked import TrackedRun, TrackedStep, tracked
from workbench.report.exporters.wandb_like import Trackio, Wandb

BLOCK, HEADER = 32768, 7


def messages(path):
    """The records of a W&B file."""
    from wandb.proto import wandb_internal_pb2

    content, place, parts = path.read_bytes(), HEADER, b""
    assert content[:4] == b":W&B"
    while place + HEADER <= len(content):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        checksum, size, kind = struct.unpack_from("<IHB", content, place)
        data = content[place + HEADER : place + HEADER + size]
        assert zlib.crc32(data, zlib.crc32(bytes([kind]))) == checksum
        parts += data
        place += HEADER + size
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


class TestWandb:
    @pytest.fixture
    def records(self, exported, runs):
        """The messages about the run with that number."""

        def read(number):
            [path] = (exported("wandb")[0] / "wandb").glob(f"offline-run-*-parity-{runs[number].path.name}/*.wandb")
            return list(messages(path))

        return read

    def test_every_number_at_its_step_and_time(self, records):
        rows = [_values(record.history.item) for record in records(0) if record.HasField("history")]
        assert [row["_step"] for row in rows] == [0, 5, 6]
        assert [row["_timestamp"] for row in rows] == [BEGAN_NS / 1e9 + 1] * 3  # these steps have no durations
        assert [row["loss/total/sum"] for row in rows] == [0.1 + 0.2, -1e300, 2.0]
        assert math.isnan(rows[0]["odd/one/max"])
        assert [row["odd/one/max"] for row in rows[1:]] == [math.inf, -math.inf]
        assert [row.get("gradient_norms/a.weight") for row in rows] == [1e-300, 2.0, None]

    def test_settings_names_and_failure(self, records, runs):
        [run] = [record.run for record in records(1) if record.HasField("run")][:1]
        assert (run.run_id, run.display_name, run.project, run.run_group) == (
            f"parity-{runs[1].path.name}",
            "tp2",
            "bench",
            "parity",
        )
        config = _values(run.config.update)
        assert (config["layout.tp"], config["run.state"], config["faults"]) == (2, "failed", [])
        assert list(run.tags) == ["failed"]
        assert run.notes == "rank 1 ValueError: no <b>good</b>"
        assert (config["run.began"], run.host) == ("2023-11-14T22:13:21.000+00:00", "")

    def test_unsupported_values_are_reported(self, exported):
        assert all(any("relative times" in note for note in run.notes) for run in exported("wandb")[1])

    def test_the_outcome_is_exported(self, records):
        assert [
            [record.exit.exit_code for record in records(number) if record.HasField("exit")] for number in range(3)
        ] == [[0], [1], [1]]

    def test_an_unfinished_run_is_not_taken_for_one(self, tmp_path):
        run = tracked(make_run(tmp_path / "parity", "a"))
        wandb = Wandb(tmp_path, "bench")
        folder = tmp_path / ".unfinished-1-x" / "wandb" / f"offline-run-20260101_000000-{run.key}"
        folder.mkdir(parents=True)
        (folder / f"run-{run.key}.wandb").touch()
        assert not wandb.has(run)
        (tmp_path / "wandb").mkdir()
        folder.rename(tmp_path / "wandb" / folder.name)
        assert wandb.has(run)


class _Service:
    """What an export calls of W&B."""

    class Settings:
        model_fields = ()

    def __init__(self):
        self.ended = 0

    def init(self, **_):
        return None

    def teardown(self):
        self.ended += 1


@pytest.mark.parametrize("begins", [False, True])
def test_the_service_of_the_process_ends_only_with_an_export_that_began_a_run(begins, tmp_path, monkeypatch):
    """With it would end a run of the caller's own."""
    service = _Service()
    monkeypatch.setitem(sys.modules, "wandb", service)
    writer = Wandb(tmp_path, "mine")
    if begins:
        writer.begin(tracked(make_run(tmp_path / "parity", "a")), {})
    writer.close()
    assert service.ended == begins


@pytest.fixture(scope="module")
def database(exported):
    """The result of trackio's own functions, in a process with our folder."""
    return _trackio_reads(exported("trackio")[0])


class TestTrackio:
    def test_every_number_at_its_step_and_time(self, database, runs):
        _, _, rows = database[f"parity-{runs[0].path.name}"]
        assert [row["step"] for row in rows] == [0, 5, 6]
        assert {row["timestamp"] for row in rows} == {"2023-11-14T22:13:21+00:00"}
        assert [row["loss/total/sum"] for row in rows] == [0.1 + 0.2, -1e300, 2.0]
        assert math.isnan(rows[0]["odd/one/max"])
        assert [row["odd/one/max"] for row in rows[1:]] == [math.inf, -math.inf]
        assert [row.get("gradient_norms/a.weight") for row in rows] == [1e-300, 2.0, None]

    def test_settings_names_and_failure(self, database, runs):
        name, config, _ = database[f"parity-{runs[1].path.name}"]
        assert name == runs[1].path.name
        assert (config["layout.tp"], config["run.state"], config["run.tags"]) == (2, "failed", ["failed"])
        assert (config["_Group"], config["_Username"]) == ("parity", None)
        assert config["run.failure"] == "rank 1 ValueError: no <b>good</b>"

    def test_a_run_without_steps_is_seen(self, database, runs):
        _, config, rows = database[f"parity-{runs[2].path.name}"]
        assert config["run.state"] == "cancelled"
        assert rows == [{"step": 0, "timestamp": "2023-11-14T22:13:21+00:00"}]


@pytest.mark.parametrize(("tracker", "reserved"), [(Wandb, ["_step"]), (Trackio, ["_x", "time", "step"])])
def test_reserved_keys_are_renamed_and_reported(tracker, reserved, tmp_path, monkeypatch):
    rows = []

    class Session:
        def log(self, data, step):
            rows.append(data)

        def finish(self, exit_code):
            pass

    monkeypatch.setattr(tracker, "begin", lambda *_: Session())
    monkeypatch.setattr(tracker, "keep", lambda *_: None)
    values = dict.fromkeys(reserved, 1.0) | {"loss/total/sum": 2.0}
    run = TrackedRun("a-1", "a", "parity", "succeeded", 1.0, 2.0, {}, {}, [TrackedStep(n, 9.0, values) for n in (0, 1)])
    notes = tracker(tmp_path, "bench").write(run)
    assert notes == [*(f"metric {key} is called metric/{key} there" for key in reserved), *tracker.lost]
    assert rows == [{f"metric/{key}": 1.0 for key in reserved} | {"loss/total/sum": 2.0, "_timestamp": 9.0}] * 2


@functools.cache
def _trackio_reads(folder):
    program = (
        "import json\nimport trackio\nfrom trackio.sqlite_storage import SQLiteStorage as storage\n"
        "def read(run): return [run.name, run.config, storage.get_logs('bench', run.name, run_id=run.id)]\n"
        "print(json.dumps({run.id: read(run) for run in trackio.Api().runs('bench')}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
        env=os.environ | {"TRACKIO_DIR": str(folder), "HF_HUB_OFFLINE": "1"},
    )
    return json.loads(done.stdout.splitlines()[-1])


def _values(items):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
