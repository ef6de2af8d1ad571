"""What all tests share: threads, the server that ranks are forked from, processes, skipped GPUs."""

from __future__ import annotations

import os

# Read by Triton when it is first imported, which torch or transformers may do at any time: its own
# library functions must be interpreted too. Nothing but the interpreter tests runs Triton here.
os.environ["TRITON_INTERPRET"] = "1"
# Tiny models: a second thread costs more than it does, and rank tests start many processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import multiprocessing
from multiprocessing import forkserver

import pytest
import torch
from hypothesis import HealthCheck, settings

from dflash_ext import launch

# One server forks the processes of all tests: warm with what ranks import, or each would import it.
multiprocessing.set_forkserver_preload(launch.PRELOAD)


# The same examples in every run, however slow it is: no run of the tests fails by chance.
settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _seeded():
    """Whatever ran before, and in which process: a test draws the same numbers in every run."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _warm_server():
    """It starts while pytest captures, so that what ranks say is captured too."""
    forkserver.ensure_running()


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_disks():
    """No test cuts the power: what a killed process wrote is there without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes for the whole suite on a CPU. Tests on a GPU measure its memory and its time;
    and for a few tests a second process costs more than it saves."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return 0 if torch.cuda.is_available() or not whole else min(2, len(os.sched_getaffinity(0)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no NVIDIA GPU on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
