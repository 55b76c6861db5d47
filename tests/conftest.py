"""Tests look at what is traced, so nothing is taken from a cache, least of all from the user's own."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ["MEMFIT_CACHE"] = "off"  # here and not in a fixture: what runs at collection, and subprocesses, see it too
# Several test processes share the cores. Threads that spin while they wait for each other then make a pass of a small
# model take 50 s instead of 2.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile("no deadline", deadline=None)  # a machine that is busy is not a wrong answer
settings.load_profile("no deadline")
