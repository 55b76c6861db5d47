"""Files that nobody should open: `hostile.py` makes and judges them; here a few hundred, there as many as one likes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import hostile
import pytest
from made import DATA, frame, save, training
from support.quick import quick

from memfit.analysis import observed as observed_module
from memfit.analysis.report import report_file
from memfit.analysis.run import runs_of_snapshot
from memfit.errors import InputError
from memfit.render.html import page
from memfit.snapshots.read import snapshot_of


@pytest.mark.parametrize("first", quick([0], range(0, 300, 100)))
def test_a_hundred_hostile_files_do_no_harm(first: int) -> None:
    outcomes = hostile.run(100, seed=20, first=first, limit=10.0)  # ten seconds: other tests run beside this one

    assert outcomes["FAILED"] == 0
    assert outcomes.total() == 100


def test_the_judge_would_notice_markup_that_got_through() -> None:
    html = page(report_file(DATA / "snap-oom.pickle"))

    with pytest.raises(AssertionError, match="other elements"):
        hostile.check_page(html.replace("</body>", "<img src=x></body>"))
    with pytest.raises(AssertionError, match="unescaped"):
        hostile.check_page(html.replace('"report":', '"x":"<","report":', 1))


def test_no_text_of_a_file_is_taken_for_a_part_of_the_page(tmp_path: Path) -> None:
    raw = training(150, layers=1, depth=1).snapshot()
    for event in raw["device_traces"][0]:
        event["frames"] = [frame("{{SCRIPT}}.py", 1, "{{DATA}}</script>")]

    html = page(report_file(save(raw, tmp_path / "named.pickle")))

    hostile.check_page(html)
    assert html.count('"use strict";') == 1


def test_sizes_that_would_overflow_a_sum_are_refused() -> None:
    events = [{"action": "alloc", "addr": 512 * i, "size": (1 << 60) - 1, "stream": 0} for i in range(40)]

    with pytest.raises(InputError, match="add up to more than 4 EiB"):
        runs_of_snapshot(snapshot_of({"segments": [], "device_traces": [events]}))


def test_a_hundred_thousand_unmaps_in_the_middle_of_things_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each asks which free piece it lies in; the search is given up after a while, and doubted."""
    monkeypatch.setattr(observed_module, "MAX_SEARCHED", 100_000)
    size = 2 << 20
    maps = [{"action": "segment_map", "addr": i * 3 * size, "size": size, "stream": 0} for i in range(20_000)]
    unmaps = [{"action": "segment_unmap", "addr": i * 3 * size + 512, "size": 512, "stream": 0} for i in range(20_000)]
    start = time.process_time()

    (run,) = runs_of_snapshot(snapshot_of({"segments": [], "device_traces": [maps + unmaps]}))

    assert run.timeline.doubts > 0
    assert time.process_time() - start < 5


def test_every_event_on_a_device_of_its_own_is_bounded() -> None:
    def traces(count: int) -> dict[str, Any]:
        return {"segments": [], "device_traces": [[{"action": "alloc", "addr": 0, "size": 1}] for _ in range(count)]}

    assert len(runs_of_snapshot(snapshot_of(traces(256)))) == 256
