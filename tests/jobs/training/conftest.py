"""What is told here comes after the trace of a plan: each tiny job is traced once for all tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _traced_once(shared_traces: None) -> None: ...
