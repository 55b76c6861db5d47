"""The list of small faults (`make faults`) fits the source as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_fault_s_piece_of_source_is_there_exactly_once() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "faults.py"), "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
