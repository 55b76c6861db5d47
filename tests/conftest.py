"""Tests look at what is traced, so nothing is taken from a cache, least of all from the user's own.

Where a test asks about what comes after the trace, as whether a job fits, it may say so and share the traces of others:
`pytestmark = pytest.mark.usefixtures("shared_traces")`.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

import pytest
from hypothesis import settings
from support.warm_python import FOLDER

os.environ["MEMFIT_CACHE"] = "off"  # here and not in a fixture: what runs at collection, and subprocesses, see it too
# Several test processes share the cores. Threads that spin while they wait for each other then make a pass of a small
# model take 50 s instead of 2.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

if FOLDER not in os.environ:  # in the first of the test processes, whose environment the others inherit
    os.environ[FOLDER] = tempfile.mkdtemp(prefix="memfit-tests-")
    atexit.register(shutil.rmtree, os.environ[FOLDER], ignore_errors=True)

settings.register_profile("no deadline", deadline=None)  # a machine that is busy is not a wrong answer
settings.load_profile("no deadline")


@pytest.fixture
def shared_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache for all tests of this run that want it: a job that several of them ask about is traced once."""
    monkeypatch.setenv("MEMFIT_CACHE", f"{os.environ[FOLDER]}/traces")
