"""Settings of every test: fixed seeds, GPUs on request only, no silent skips in CI."""

from __future__ import annotations

import atexit
import gc
import os
import random
import shutil
import sys
import tempfile

import pytest

from tests.helpers import memory, warm
from tests.helpers.interpreted_triton import interpret_where_no_gpu_is
from workbench.launch import processes

os.environ["OMP_NUM_THREADS"] = "1"  # of threads and of programs that tests start, too: see `pytest_collection_finish`
os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports the hub's client: no test waits for a network

# Runs write their records through to the disk, and tests would wait for it. Temporary files are in memory where there
# is enough of it, unless TMPDIR says where; they are gone afterwards.
if "TMPDIR" not in os.environ and (made := memory.folder_for_temporary_files()) is not None:
    os.environ["TMPDIR"] = tempfile.tempdir = made[0]
    atexit.register(shutil.rmtree, made[0], ignore_errors=True)

# the leases of devices lie here: two test runs on one machine do not queue for each other's cores
os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="workbench-tests-")
os.environ["IPYTHONDIR"] = os.environ["XDG_RUNTIME_DIR"]  # no test writes a history file into the user's home
atexit.register(shutil.rmtree, os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)

interpret_where_no_gpu_is()

pytest_plugins = [f"tests.helpers.{name}" for name in ("late_grammar", "no_skips", "left_open", "long_first")]


def pytest_configure(config):
    """Leave the seeds to this file: pytest-randomly, where it is installed, shuffles and does nothing else."""
    config.option.randomly_reset_seed = False


def pytest_terminal_summary(terminalreporter, config):
    """Repeat the command for this random order next to the failures."""
    if config.pluginmanager.hasplugin("randomly") and config.option.randomly_reorganize:
        terminalreporter.write_line(
            f"in random order; --randomly-seed={config.option.randomly_seed} repeats it, "
            "-p no:randomly takes that of the files"
        )


@pytest.fixture(scope="session", autouse=True)
def _ranks_are_ready():
    """The launcher's fork servers are forks, too: each would load torch and transformers again, 4.5 s."""
    with pytest.MonkeyPatch.context() as patch:
        warm.start_from(patch, processes)
        yield


@pytest.fixture(autouse=True)
def _fixed_seeds():
    """The same random numbers whatever ran before."""
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        seed_torch(torch)


def seed_torch(torch):
    """As `torch.manual_seed`, which formats a stack for each kind of device that this machine lacks: 0.6 ms a test.

    It is kept for an error that never comes (torch.cuda._lazy_call of torch 2.11).
    """
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available() or torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


def pytest_collection_modifyitems(items):
    """Skip tests that need more GPUs than there are."""
    asking = [(item, gpus) for item in items if (gpus := _gpus_needed(item))]
    if not asking:
        return
    import torch

    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item, gpus in asking:
        if gpus > here:
            item.add_marker(pytest.mark.skip(reason=f"needs {gpus} GPUs, {here} here"))


def _gpus_needed(item):
    if (marker := item.get_closest_marker("gpus")) is not None:
        return marker.args[0]
    return 1 if item.get_closest_marker("gpu") else 0


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect without the garbage collector, and keep what was collected out of its sight.

    Its 25 full passes over the growing tests and modules took a quarter of the time of collection; afterwards each full
    pass, also `gc.collect` of a test, would go through all of them again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)  # by default 5 % of the time of the tests that start no process


def pytest_collection_finish():
    """One thread, as ranks have: the models are tiny, and threads of several processes fight for the cores."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
