"""A run is placed before it starts, and says so when it did not get what it asked for."""

from __future__ import annotations

import stat

import pytest

from workbench.errors import LaunchError
from workbench.launch.devices import Placement, gpu_uuid, place, visible_gpus
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
def test_insisting_on_cuda_without_gpus_is_refused_in_words(gpus):
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
    def test_keeps_to_what_is_allowed(self, machine, allowed, expected):
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
