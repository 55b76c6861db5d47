"""Tests look at what is traced, so nothing is taken from a cache, least of all from the user's own.

Where a test asks about what comes after the trace, as whether a job fits, it may say so and share the traces of others:
`pytestmark = pytest.mark.usefixtures("shared_traces")`.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from support import quick
from support.warm_python import FOLDER, freeze_all, warm_python

from memfit.environment import exported

os.environ["MEMFIT_CACHE"] = "off"  # here and not in a fixture: what runs at collection, and subprocesses, see it too
os.environ.setdefault("MEMFIT_CUDNN_OF_TESTS", os.environ.get("MEMFIT_CUDNN", ""))
os.environ["MEMFIT_CUDNN"] = "off"  # rules are the same everywhere; tests that ask cuDNN say so
# Several test processes share the cores. Threads that spin while they wait for each other then make a pass of a small
# model take 50 s instead of 2.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

if transformers := sys.modules.get("transformers"):  # of the process that was forked: as silent as on the command line
    transformers.logging.set_verbosity_warning()

if FOLDER not in os.environ:  # in the first of the test processes, whose environment the others inherit
    os.environ[FOLDER] = tempfile.mkdtemp(prefix="memfit-tests-")
    atexit.register(shutil.rmtree, os.environ[FOLDER], ignore_errors=True)


settings.register_profile("anew", deadline=None)  # a machine that is busy is not a wrong answer
settings.register_profile("the same", deadline=None, derandomize=True)

DEAR = (
    "test_every_setting", "test_guides", "test_check_command", "test_fit", "test_from_the_hub", "test_planner_page",
    "test_repetition", "test_families", "test_parallel_plans", "test_readme", "test_lost_work", "test_memory_table",
    "test_durations", "test_profile", "test_train_command", "test_check_failures", "test_explain_as_pasted",
    "test_stopping", "test_serve_command", "test_trace_script", "test_viewer_page", "test_torch_compile",
    "test_workers", "test_killed_and_resumed", "test_two_processes", "test_security",
)  # fmt: skip
"""Files that take longest, or that wait, are begun first: no process is left alone with one of them in the end."""

gc.disable()  # until all tests are known: there is no garbage among them


def pytest_configure(config: pytest.Config) -> None:
    """What is made up is made up anew by `make test-all`; each change is held to the same examples."""
    quick.ALL = not config.getoption("markexpr")
    settings.load_profile("anew" if quick.ALL else "the same")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: while a test waits for a process or for a clock, another one works."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """The imports are done once for all of them, in the process from which `warm_python` forks too."""
    for spec in specs:
        spec.python = warm_python()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in DEAR)


def pytest_collection_finish() -> None:
    """All that was imported, and every test there is, is not looked through again: that took more than half of the time
    of many tests, for the Trainer collects garbage at the end of each run."""
    freeze_all()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def what_earlier_files_left_is_not_looked_through_again() -> None:
    """What they imported and keep grows to millions of objects: a collection then took a second, a training several."""
    freeze_all()


@pytest.fixture(scope="module")
def shared_traces() -> Iterator[None]:
    """One cache for all tests of this run that want it: a job that several of them ask about is traced once. Of a whole
    file, so that what its fixtures trace is found there too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMFIT_CACHE", f"{os.environ[FOLDER]}/traces")
        yield


@pytest.fixture(autouse=True)
def warm_checks(nothing_exported_for_the_next_test: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes in which `memfit check` imports bitsandbytes and loads a model have torch imported before."""
    for name in ("memfit.checking.machine", "memfit.checking.model"):
        if (module := sys.modules.get(name)) is not None:
            monkeypatch.setattr(module, "sys", SimpleNamespace(executable=warm_python(), modules=sys.modules))


@pytest.fixture
def nothing_exported_for_the_next_test() -> Iterator[None]:
    """A plan reads the allocator's settings in the environment, so one that a test leaves there changes later tests."""
    before = exported(os.environ)
    yield
    assert exported(os.environ) == before
