"""A run's folder as a document: finished, broken, silent, or still being written; whatever lies in it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from memfit.analysis.run_folder import MAX_POINTS, SILENT_SECONDS, read_run
from memfit.errors import InputError
from memfit.units import GiB

HEAD = "Timestamp,Checkpoint,GPU_Allocated_GB,GPU_Reserved_GB,GPU_Peak_GB,CPU_Used_GB,CPU_Percent\n"
ROWS = [f"2026-11-16T12:00:{i:02d},step_{i},{i}.000,{i}.500,{i}.250,2.000,6.10\n" for i in range(1, 6)]
STAMP = "2026-11-16 12:00:00  "
RESULT: dict[str, Any] = {
    "schema": "memfit.train-result/1", "steps": 3, "losses": {"1": 3.0, "2": 2.5, "3": 2.0}, "seconds": 12.5,
    "gpu_peak_bytes": 5 * GiB, "gpu_reserved_bytes": 6 * GiB, "host_peak_bytes": GiB,
    "predicted": {"peak_bytes": 5 * GiB + 512, "reserved_bytes": 6 * GiB},
    "growth": {"kind": "leak", "text": "leak: the floor rises by 2.00 MiB a step"},
    "phases": [{"phase": "forward", "predicted_allocated_bytes": 5, "measured_allocated_bytes": 4,
                "predicted_reserved_bytes": None, "measured_reserved_bytes": 8}],
}  # fmt: skip


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def seen(folder: Path) -> dict[str, Any]:
    return read_run(folder, max(path.stat().st_mtime for path in folder.iterdir()) + 1)


def test_a_result_is_told_beside_the_plan(tmp_path: Path) -> None:
    run = seen(written(tmp_path, result__json=json.dumps(RESULT), memory_log__csv=HEAD + "".join(ROWS)))

    assert (run["state"], run["kind"], run["steps"]["done"]) == ("ended", "train", 3)
    assert run["peaks"] == [
        {"name": "GPU allocated", "predicted_bytes": 5 * GiB + 512, "measured_bytes": 5 * GiB},
        {"name": "GPU reserved", "predicted_bytes": 6 * GiB, "measured_bytes": 6 * GiB},
        {"name": "host", "predicted_bytes": None, "measured_bytes": GiB},
    ]
    assert run["phases"][0]["measured_allocated_bytes"] == 4
    assert run["growth"]["kind"] == "leak"
    assert run["losses"] == [[1, 3.0], [2, 2.5], [3, 2.0]]
    assert ["seconds", 12.5] in run["facts"]


def test_without_a_result_the_peak_of_reserved_memory_is_not_known(tmp_path: Path) -> None:
    run = seen(written(tmp_path, memory_log__csv=HEAD + "2025-12-28T00:18:23,04_after,4.850,5.000,5.200,2.6,6.5\n"))

    assert [row["name"] for row in run["peaks"]] == ["GPU allocated", "host"]


def test_a_run_that_is_going_is_read_as_far_as_it_is_written(tmp_path: Path) -> None:
    log = f"{STAMP}model: x\n{STAMP}start: step 0/40\n{STAMP}step 1/40, loss 3.5, lr 1\n{STAMP}step 2/40, loss 3.2"
    run = seen(written(tmp_path, train__log=log, memory_log__csv=HEAD + ROWS[0] + ROWS[1][:-20]))

    assert run["state"] == "running"
    assert run["steps"] == {"done": 1, "total": 40}
    assert run["losses"] == [[1, 3.5]]
    assert [row["name"] for row in run["log"]["checkpoints"]] == ["step_1"]  # half a figure is no figure
    assert run["messages"] == []


def test_of_a_folder_that_is_used_again_the_run_that_began_last_is_told(tmp_path: Path) -> None:
    log = f"{STAMP}start: step 0/4\n{STAMP}step 4/4, loss 1.5\n{STAMP}end: step 4/4, trained\n"
    written(
        tmp_path, result__json=json.dumps(RESULT), train__log=f"{log}{STAMP}start: step 0/9\n{STAMP}step 1/9, loss 9\n"
    )
    os.utime(tmp_path / "result.json", (1, 1))
    run = seen(tmp_path)

    assert (run["state"], run["losses"], run["steps"]) == ("running", [[1, 9.0]], {"done": 1, "total": 9})


def test_a_run_that_broke_or_fell_silent_is_not_called_running(tmp_path: Path) -> None:
    written(tmp_path, memory_log__csv=HEAD + ROWS[0])
    last = (tmp_path / "memory_log.csv").stat().st_mtime
    assert read_run(tmp_path, last + SILENT_SECONDS + 1)["state"] == "silent"

    written(tmp_path, memory_log__csv=HEAD + ROWS[0] + ROWS[1].replace("step_2", "step_2 ERROR!"))
    assert seen(tmp_path)["state"] == "broke"


def test_a_long_log_is_thinned_and_its_end_kept(tmp_path: Path) -> None:
    rows = [f"2026-11-16T12:00:00,step_{i},1.0,1.0,1.0,1.0,1\n" for i in range(5 * MAX_POINTS + 3)]
    lines = [f"{STAMP}step {i}, loss {i}.5\n" for i in range(1, 3 * MAX_POINTS)]
    run = seen(written(tmp_path, memory_log__csv=HEAD + "".join(rows), train__log="".join(lines)))

    assert len(run["log"]["checkpoints"]) <= MAX_POINTS + 1
    assert run["log"]["checkpoints"][-1]["name"] == f"step_{5 * MAX_POINTS + 2}"
    assert run["losses"][-1] == [3 * MAX_POINTS - 1, 3 * MAX_POINTS - 0.5]
    assert len(run["losses"]) <= MAX_POINTS + 1


@pytest.mark.parametrize(
    "result",
    [
        "{", "[]", "[" * 100_000, '{"schema": "memfit.train-result/1", "losses": {"x": "y", "1": NaN}, "phases": 7}',
        '{"schema": "memfit.prune/1", "peaks": [], "predicted": "x", "growth": {"kind": 5}}',
    ],
)  # fmt: skip
def test_a_result_that_is_none_does_no_harm(tmp_path: Path, result: str) -> None:
    run = seen(written(tmp_path, result__json=result, memory_log__csv=HEAD + ROWS[0]))

    assert run["losses"] == [] and run["phases"] == [] and run["growth"] is None
    assert json.dumps(run, allow_nan=False)


def test_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run in"):
        read_run(tmp_path, 0)
    with pytest.raises(InputError, match="not of a run of memfit"):
        seen(written(tmp_path, result__json='{"score": 1}'))


def test_names_in_a_log_are_cleaned_of_what_a_terminal_obeys(tmp_path: Path) -> None:
    run = seen(written(tmp_path, train__log=f"{STAMP}note \x1b[31m<b>\n"))

    assert "\x1b" not in run["said"][0] and "<b>" in run["said"][0]
