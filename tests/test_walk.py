"""How often somebody who reads along with a command goes to another room (`python -m benchmarks.walk`)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "most"), [("plan", 12), ("train", 18)])
def test_a_command_walks_straight_and_looks_for_its_model_once(command: str, most: int) -> None:
    ran = [sys.executable, "-m", "benchmarks.walk", command]
    done = subprocess.run(ran, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)

    changes = re.search(r"(\d+) changes of room", done.stdout)
    assert changes is not None and int(changes[1]) <= most
    assert re.search(r"^ +1 x  resolve\(\)", done.stdout, re.MULTILINE)
