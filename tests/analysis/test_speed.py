"""How long reports of large recordings take, in time of the processor: other tests run beside these."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from made import save, training

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read off /proc")

SCRIPT = """
import sys, time
from memfit.cli.main import main

code = main(["report", sys.argv[1], *sys.argv[2:]])
(peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]  # ru_maxrss is inherited
print(code, time.process_time(), int(peak) / 1024, file=sys.stderr)
"""


def measured(path: Path, *more: str) -> tuple[float, float]:
    """Seconds of CPU and MiB of memory of the whole command, Python's own start included."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), *more], capture_output=True, text=True, check=True, timeout=300
    )
    code, seconds, memory = done.stderr.split()[-3:]
    assert code == "0"
    return float(seconds), float(memory)


def test_a_hundred_thousand_events_take_a_second_or_so(tmp_path: Path) -> None:
    path = save(training(100_000).snapshot(), tmp_path / "large.pickle")

    seconds, memory = measured(path)

    assert seconds < 6  # 0.7 s on an idle machine; a busy one counts more
    assert memory < 300


@pytest.mark.slow
def test_a_million_events_take_at_most_6_seconds_and_1_gib_and_their_page_15_mb(tmp_path: Path) -> None:
    path = save(training(1_000_000).snapshot(), tmp_path / "million.pickle")
    page = tmp_path / "million.html"

    for more in ((), ("--html", str(page))):
        seconds, memory = measured(path, *more)
        print(f"{' '.join(more)[:6]:6} {seconds:.2f} s of CPU, {memory:.0f} MiB")
        assert seconds < 6
        assert memory < 1024
    assert page.stat().st_size < 15_000_000
