"""A run is placed before it starts, and records if it did not get the requested device."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
import warnings

import psutil
import pytest

from tests.helpers.stand_in import stand_in
from workbench.errors import LaunchError
from workbench.launch import devices
from workbench.launch.devices import Placement, gpu_uuid, place, runtime_folder, take, visible_gpus
from workbench.records.provenance import process_alive, project_root
from workbench.specs.run import RunSpec


def spec(device, ranks):
    return RunSpec(device=device, layout={"cp": ranks})


@pytest.mark.parametrize(
    ("device", "ranks", "gpus", "expected"),
    [
        ("auto", 4, "", Placement("cpu", note="no GPU here")),
        ("auto", 4, "01", Placement("cpu", note="asked for 4 GPUs, 2 here")),
        ("auto", 1, "", Placement("cpu", note="no GPU here")),
        ("auto", 2, "37", Placement("cuda", gpus=("3", "7"))),
        ("auto", 1, "37", Placement("cuda", gpus=("3",))),
        ("cuda", 2, "01", Placement("cuda", gpus=("0", "1"))),
        ("cpu", 2, "01", Placement("cpu")),
    ],
)
def test_placement(device, ranks, gpus, expected):
    assert place("x", spec(device, ranks), list(gpus)) == expected


@pytest.mark.parametrize("gpus", ["", "0"])
def test_requiring_cuda_without_gpus_is_refused(gpus):
    with pytest.raises(LaunchError) as caught:
        place("cp2-float32", spec("cuda", 2), list(gpus))
    assert "run cp2-float32 on cuda" in str(caught.value)
    assert f"{len(gpus)} of 2 GPUs here" in str(caught.value)
    assert "set device: auto" in str(caught.value)


class TestCounting:
    @pytest.fixture
    def machine(self, tmp_path, monkeypatch):
        """A machine whose nvidia-smi prints the given lines; None is a machine without one."""

        def make(lines, allowed=None):
            if lines is not None:
                tool = tmp_path / "nvidia-smi"
                tool.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
                tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
            monkeypatch.setenv("PATH", str(tmp_path))
            if allowed is None:
                monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            else:
                monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)

        return make

    LINES = ("GPU 0: NVIDIA X (UUID: GPU-1)", "  MIG 1g: no GPU of its own", "GPU 1: NVIDIA X (UUID: GPU-2)")

    def test_no_driver_is_no_gpus(self, machine):
        machine(None)
        assert visible_gpus() == []

    def test_counts_gpus(self, machine):
        machine(self.LINES)
        assert visible_gpus() == ["0", "1"]

    @pytest.mark.parametrize(
        ("allowed", "expected"),
        [("1", ["1"]), ("1,0", ["1", "0"]), ("", []), ("-1", []), ("0,-1,1", ["0"]), ("GPU-2", ["GPU-2"])],
    )
    def test_stays_within_the_allowed_devices(self, machine, allowed, expected):
        machine(self.LINES, allowed)
        assert visible_gpus() == expected

    @pytest.mark.parametrize(
        ("device", "uuid"),
        [
            ("0", "GPU-1"),
            ("1", "GPU-21"),
            ("GPU-1", "GPU-1"),
            ("GPU-2", "GPU-21"),
            ("GPU-21", "GPU-21"),
            ("GPU-", "GPU-"),
            ("2", "2"),
            ("MIG-7", "MIG-7"),
            ("", ""),
        ],
    )
    def test_a_gpu_has_one_name(self, machine, device, uuid):
        machine(("GPU 0: NVIDIA X (UUID: GPU-1)", "GPU 1: NVIDIA X (UUID: GPU-21)"))
        assert gpu_uuid(device) == uuid

    def test_allowing_gpus_makes_none(self, machine):
        machine([], "0,1")
        assert visible_gpus() == []


# ---- Leases of GPUs and cores between real processes: no device twice, none lost, no starvation ----


CORES = ["0", "1", "2", "3"]


@pytest.fixture(autouse=True)
def a_machine_of_our_own(tmp_path, monkeypatch):
    """Slots of this test only."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def other():
    """Starts a process that takes slots, reports what it got, and keeps them until released."""
    started = []

    def other(wanted, kind="core", of=tuple(CORES), then="time.sleep(60)"):
        script = (
            f"import sys, time\nsys.path.insert(0, {str(project_root())!r})\n"
            f"from workbench.launch.devices import take\n"
            f"lease = take({kind!r}, {wanted}, {list(of)!r})\n"
            f"print(','.join(lease.ids) if lease else 'none', flush=True)\n{then}\n"
        )
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        started.append((process, psutil.Process(process.pid).create_time()))
        return process, process.stdout.readline().strip()

    yield other
    for process, born in started:
        process.kill()
        process.communicate()
        assert not process_alive(process.pid, born)


class TestALease:
    def test_takes_the_first_free_slots_exclusively(self):
        with take("core", 2, CORES) as first, take("core", 1, CORES) as second:
            assert (first.ids, second.ids) == (("0", "1"), ("2",))
            assert take("core", 2, CORES) is None
            second.release()
            with take("core", 2, CORES, requester="") as third:
                assert third.ids == ("2", "3")

    def test_a_second_release_has_no_effect(self):
        first = take("core", 4, CORES)
        first.release()
        second = take("core", 4, CORES)
        first.release()
        assert take("core", 1, CORES) is None
        second.release()

    def test_more_cores_than_available_means_all(self):
        with take("core", 64, CORES) as lease:
            assert lease.ids == tuple(CORES)
            assert take("core", 1, CORES) is None

    def test_kinds_do_not_share(self):
        with take("core", 4, CORES), take("gpu", 4, CORES) as gpus:
            assert gpus.ids == tuple(CORES)

    @pytest.mark.parametrize(("kind", "wanted", "of"), [("gpu", 3, ["0", "1"]), ("core", 1, []), ("core", 0, CORES)])
    def test_an_impossible_request_is_refused(self, kind, wanted, of):
        with pytest.raises(LaunchError, match=f"take {wanted} of {len(of)} slots"):
            take(kind, wanted, of)

    def test_a_gpu_has_one_name_under_all_its_aliases(self, monkeypatch):
        monkeypatch.setattr(devices, "_uuids", lambda: ["GPU-aaa", "GPU-bbb"])
        with take("gpu", 1, ["1"]) as by_index:
            assert by_index.ids == ("1",)
            assert take("gpu", 1, ["GPU-bbb"]) is None
            with take("gpu", 1, ["GPU-aaa"]) as other:
                assert other.ids == ("GPU-aaa",)


class TestBetweenProcesses:
    def test_slots_of_another_process_are_not_free(self, other):
        _, got = other(3)
        assert got == "0,1,2"
        with take("core", 1, CORES) as lease:
            assert lease.ids == ("3",)
        assert take("core", 2, CORES) is None

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    def test_a_holder_that_dies_gives_everything_back(self, other, number):
        process, _ = other(4)
        assert take("core", 4, CORES) is None
        process.send_signal(number)
        process.wait()
        with take("core", 4, CORES) as lease:
            assert lease.ids == tuple(CORES)

    def test_a_slot_is_not_free_before_the_process_noted_in_it_is_gone(self, other):
        """A job may outlive the launcher that was killed."""
        note = (
            "import subprocess, psutil\n"
            "job = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'], stdout=-3)\n"
            "lease.note(job.pid, psutil.Process(job.pid).create_time())\n"
            "print(job.pid, flush=True)\ntime.sleep(60)"
        )
        process, got = other(2, then=note)
        job = psutil.Process(int(process.stdout.readline()))
        try:
            assert got == "0,1"
            process.kill()
            process.wait()
            with take("core", 2, CORES) as lease:
                assert lease.ids == ("2", "3")
            assert take("core", 3, CORES) is None
        finally:
            job.kill()
        psutil.wait_procs([job], timeout=120)
        until = time.monotonic() + 120
        while (lease := take("core", 3, CORES)) is None:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert lease.ids == ("0", "1", "2")
        lease.release()

    def test_a_slot_of_an_ended_process_stays_taken_until_released(self):
        job = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
        with take("core", 4, CORES) as lease:
            lease.note(job.pid, psutil.Process(job.pid).create_time())
            job.wait()
            assert take("core", 1, CORES) is None

    def test_a_child_that_inherited_a_lease_does_not_keep_it(self):
        lease = take("core", 4, CORES)
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # Python 3.12 warns where
            child = os.fork()  # there are threads; this child only waits for its end
        if child == 0:
            signal.pause()
            os._exit(0)
        try:
            lease.release()
            with take("core", 4, CORES) as again:
                assert again.ids == tuple(CORES)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def test_many_processes_at_once_never_share_a_slot(self, tmp_path, other):
        """Each holder marks its slots with a file that must not be there already."""
        script = f"""
import random, sys, time
from pathlib import Path
sys.path.insert(0, {str(project_root())!r})
from workbench.launch.devices import take
done = 0
while done < 15:
    lease = take("core", random.choice((1, 2, 3)), {CORES!r})
    if lease is None:
        time.sleep(0.002)
        continue
    for core in lease.ids:
        Path({str(tmp_path)!r}, f"held{{core}}").touch(exist_ok=False)
    time.sleep(0.005)
    for core in lease.ids:
        Path({str(tmp_path)!r}, f"held{{core}}").unlink()
    lease.release()
    done += 1
"""
        family = [subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) for _ in range(4)]
        try:
            texts = [process.communicate(timeout=240)[1] for process in family]
        finally:
            for process in family:
                process.kill()
        assert [process.returncode for process in family] == [0] * 4, texts


class TestTheWaitingList:
    def test_a_stream_of_small_runs_does_not_starve_a_large_one(self, other):
        small = take("core", 1, CORES)
        _, got = other(
            4,
            then="while lease is None: lease = take('core', 4, ['0', '1', '2', '3']); time.sleep(0.05)\n"
            "print('at last', flush=True); time.sleep(60)",
        )
        assert got == "none"
        for _ in range(3):  # three cores are free, and the large run came first
            assert take("core", 1, CORES) is None
            time.sleep(0.05)
        small.release()

    def test_it_is_served_in_the_order_of_coming(self):
        lease = take("core", 4, CORES)
        assert take("core", 3, CORES, requester="first") is None
        assert take("core", 1, CORES, requester="second") is None
        lease.release()
        assert take("core", 1, CORES, requester="second") is None
        with take("core", 3, CORES, requester="first"), take("core", 1, CORES, requester="second") as second:
            assert second.ids == ("3",)

    def test_a_requester_that_now_wants_less_does_not_wait_for_itself(self):
        with take("core", 3, CORES):
            assert take("core", 2, CORES, requester="sweep") is None
            with take("core", 1, CORES, requester="sweep") as lease:
                assert lease.ids == ("3",)

    def test_a_waiter_for_other_devices_does_not_block(self):
        with take("gpu", 1, ["0"]):
            assert take("gpu", 1, ["0"], requester="of the first") is None
            with take("gpu", 1, ["1"], requester="of the second") as lease:
                assert lease.ids == ("1",)

    def test_a_waiter_that_stops_polling_is_dropped(self, monkeypatch):
        held = take("core", 1, CORES)
        assert take("core", 4, CORES, requester="gives up") is None
        assert take("core", 1, CORES, requester="later") is None
        monkeypatch.setattr(devices, "FORGET_AFTER_S", 0.0)
        with take("core", 1, CORES, requester="later") as lease:
            assert lease.ids == ("1",)
        held.release()

    def test_a_dead_waiter_is_dropped(self, other):
        held = take("core", 1, CORES)
        process, got = other(4)
        assert got == "none"
        assert take("core", 1, CORES) is None
        process.kill()
        process.wait()
        with take("core", 1, CORES) as lease:
            assert lease.ids == ("1",)
        held.release()


class TestTheRuntimeFolder:
    def test_is_ours_alone(self, tmp_path, monkeypatch):
        assert runtime_folder() == tmp_path / "workbench"
        assert stat.S_IMODE(runtime_folder().stat().st_mode) == 0o700
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
        monkeypatch.setattr(devices, "tempfile", stand_in(tempfile, gettempdir=lambda: str(tmp_path)))
        assert runtime_folder() == tmp_path / f"workbench-{os.getuid()}"

    @pytest.mark.parametrize("trap", ["open to all", "a link", "a file"])
    def test_one_that_others_may_write_to_is_refused(self, tmp_path, trap):
        folder = tmp_path / "workbench"
        if trap == "open to all":
            folder.mkdir()
            folder.chmod(0o777)
        elif trap == "a link":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            folder.symlink_to(tmp_path / "elsewhere")
        else:
            folder.touch()
        with pytest.raises(LaunchError, match="a folder of user"):
            take("core", 1, CORES)

    def test_a_damaged_queue_file_is_reset(self):
        take("core", 1, CORES).release()
        (runtime_folder() / "slots" / "core.waiting").write_text('{"waiting": [{"pi')
        with take("core", 1, CORES) as lease:
            assert lease.ids == ("0",)
