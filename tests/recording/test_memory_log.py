"""The memory log, byte by byte as the guide to it shows, and what it does when a run breaks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from scripted_memory import Clock, ScriptedGpu, ScriptedHost, gb

from memfit import InputError, MemoryLog, print_gpu_memory_summary
from memfit.recording import memory_log as log_text
from memfit.recording.sampler import CudaMemory, GpuReading

HEADER = "Timestamp,Checkpoint,GPU_Allocated_GB,GPU_Reserved_GB,GPU_Peak_GB,CPU_Used_GB,CPU_Percent\n"

BLOCK = """
================================================================================
Memory Checkpoint: 02_model_loaded
================================================================================
GPU Memory:
  Allocated: 2.30 GB
  Reserved:  2.50 GB
  Peak:      2.30 GB
  Free:      13.17 GB
  Total:     15.47 GB
CPU Memory:
  Used:      2.45 GB (6.1%)
================================================================================
"""

BLOCK_WITHOUT_GPU = """
================================================================================
Memory Checkpoint: 01_start
================================================================================
GPU Memory:
  Allocated: n/a
  Reserved:  n/a
  Peak:      n/a
  Free:      n/a
  Total:     n/a
CPU Memory:
  Used:      2.15 GB (5.4%)
================================================================================
"""

SUMMARY = """\
================================================================================
MEMORY USAGE SUMMARY
================================================================================
Checkpoint                     GPU Alloc    GPU Peak     CPU Used
--------------------------------------------------------------------------------
01_start                            0.00 GB       0.00 GB       2.15 GB
02_model_loaded                     2.30 GB       2.30 GB       2.45 GB
03_before_pruning                   2.30 GB       2.30 GB       2.45 GB
04_after_pruning                    4.85 GB       5.20 GB       2.60 GB
05_before_eval                      4.85 GB       5.20 GB       2.60 GB
06_after_eval                       4.85 GB       5.50 GB       2.65 GB
09_end                              4.85 GB       5.50 GB       2.65 GB
================================================================================

Peak GPU Memory: 5.50 GB
Peak CPU Memory: 2.65 GB
================================================================================"""

STATUS = """\
================================================================================
GPU MEMORY STATUS
================================================================================
Allocated: 4.25 GB
Reserved:  4.50 GB
Peak:      5.10 GB
Free:      11.22 GB
Total:     15.47 GB
Usage:     27.5%
================================================================================"""

STATUS_WITHOUT_GPU = """
================================================================================
GPU MEMORY STATUS
================================================================================
Allocated: n/a
Reserved:  n/a
Peak:      n/a
Free:      n/a
Total:     n/a
Usage:     n/a
================================================================================
"""


def test_a_checkpoint_prints_this_block(capsys: pytest.CaptureFixture[str]) -> None:
    log = MemoryLog(gpu=ScriptedGpu((2.30, 2.50, 2.30)), host=ScriptedHost(2.45))
    log.checkpoint("02_model_loaded")
    assert capsys.readouterr().out == BLOCK


def test_without_a_gpu_its_values_are_unknown_and_not_nought(capsys: pytest.CaptureFixture[str]) -> None:
    log = MemoryLog(gpu=None, host=ScriptedHost(2.15))
    log.checkpoint("01_start")
    assert capsys.readouterr().out == BLOCK_WITHOUT_GPU
    assert log.peak_gpu_bytes is None


def test_the_summary_of_a_run_is_this_table() -> None:
    gpu = ScriptedGpu(
        (0, 0, 0), (2.3, 2.5, 2.3), (2.3, 2.5, 2.3), (4.85, 5, 5.2), (4.85, 5, 4.85), (4.85, 5.6, 5.5), (4.85, 5, 4.85)
    )
    host = ScriptedHost(2.15, 2.15, 2.45, 2.45, 2.60, 2.60, 2.65, 2.65)
    log = MemoryLog(quiet=True, gpu=gpu, host=host)
    for name in (
        "01_start", "02_model_loaded", "03_before_pruning", "04_after_pruning", "05_before_eval", "06_after_eval",
        "09_end",
    ):  # fmt: skip
        log.checkpoint(name)
    assert log.summary() == SUMMARY


def test_unknown_cells_of_the_summary_end_where_known_ones_do() -> None:
    log = MemoryLog(quiet=True, gpu=None, host=ScriptedHost(2.15))
    log.checkpoint("01_start")
    row, *_, peak_gpu, _, _ = log.summary().splitlines()[5:]
    assert row == "01_start                                n/a           n/a       2.15 GB"
    assert peak_gpu == "Peak GPU Memory: n/a"


def test_the_file_has_this_header_and_these_rows(tmp_path: Path) -> None:
    path = tmp_path / "memory_log.csv"
    gpu, host = ScriptedGpu((0, 0, 0), (2.3, 2.5, 2.3)), ScriptedHost(2.15, 2.15, 2.45)
    log = MemoryLog(path, quiet=True, gpu=gpu, host=host, now=Clock(30, 45))
    log.checkpoint("01_start")
    log.checkpoint("02_model_loaded")
    assert path.read_bytes().decode() == HEADER + (
        "2025-12-28T00:15:30,01_start,0.000,0.000,0.000,2.150,5.38\n"
        "2025-12-28T00:15:45,02_model_loaded,2.300,2.500,2.300,2.450,6.13\n"
    )


def test_without_a_gpu_its_cells_are_empty(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    MemoryLog(path, quiet=True, gpu=None, host=ScriptedHost(2.0), now=Clock(1)).checkpoint("01_start")
    assert path.read_text() == HEADER + "2025-12-28T00:15:01,01_start,,,,2.000,5.00\n"


def test_a_name_with_a_comma_stays_one_cell(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    log = MemoryLog(path, quiet=True, gpu=None, host=ScriptedHost(2.0), now=Clock(1))
    log.checkpoint('a, "b"\nc')
    assert path.read_text() == HEADER + '2025-12-28T00:15:01,"a, ""b"" c",,,,2.000,5.00\n'


def test_the_rows_of_a_killed_process_are_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    code = (
        "import os, signal, sys; from memfit import MemoryLog; log = MemoryLog(sys.argv[1], gpu=None);"
        "log.checkpoint('01_start'); log.part('block 0'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, timeout=300)
    assert killed.returncode == -9
    assert path.read_text().splitlines()[1].split(",")[1:5] == ["01_start", "", "", ""]
    assert (tmp_path / "log_parts.csv").read_text().splitlines()[1].split(",")[1:3] == ["01_start", "block 0"]
    assert b"Memory Checkpoint: 01_start" in killed.stdout


def test_the_gpus_status_is_this_block() -> None:
    reading = GpuReading(
        allocated_bytes=gb(4.25), reserved_bytes=gb(4.5), peak_bytes=gb(5.1), stretch_peak_bytes=None,
        total_bytes=gb(15.47),
    )  # fmt: skip
    assert log_text.gpu_status(reading) == STATUS


def test_the_status_of_a_machine_without_a_gpu_is_unknown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    print_gpu_memory_summary()
    assert capsys.readouterr().out == STATUS_WITHOUT_GPU


# -- peaks -------------------------------------------------------------------------------------------------------------


def test_a_stretch_has_a_peak_of_its_own_and_the_peak_of_the_run_stays() -> None:
    log = MemoryLog(quiet=True, gpu=ScriptedGpu((0, 0, 0), (2, 3, 7), (2, 3, 4)), host=ScriptedHost(1))
    points = [log.checkpoint(name) for name in ("a", "b", "c")]
    assert [point.stretch_peak_bytes for point in points] == [0, gb(7), gb(4)]
    assert [point.gpu.peak_bytes for point in points if point.gpu] == [0, gb(7), gb(7)]
    assert log.peak_gpu_bytes == gb(7)


def test_parts_within_a_stretch_do_not_hide_its_peak() -> None:
    log = MemoryLog(quiet=True, gpu=ScriptedGpu((1, 1, 1), (1, 1, 5), (1, 1, 3), (1, 1, 1)), host=ScriptedHost(1))
    log.checkpoint("before")
    with log.until("after"):
        first, second = log.part("block 0"), log.part("block 1")
    assert [part.gpu.stretch_peak_bytes for part in (first, second) if part.gpu] == [gb(5), gb(3)]
    assert [part.stage for part in log.parts] == ["after", "after"]
    assert log.points[-1].stretch_peak_bytes == gb(5)


def test_memory_of_the_host_between_two_readings_is_seen_if_the_high_water_mark_rose() -> None:
    log = MemoryLog(quiet=True, gpu=None, host=ScriptedHost(2, 3, 2, high_water=(6, 6, 9)))
    log.checkpoint("a")
    assert log.peak_host_bytes == gb(3), "what the process held before the log began is not the log's"
    log.checkpoint("b")
    assert log.peak_host_bytes == gb(9)


class FakeCuda:
    """torch's counters, of which the peak falls to what is allocated when it is reset."""

    def __init__(self) -> None:
        self.allocated = self.peak = 0
        self.resets = 0

    def use(self, *sizes: int) -> None:
        for size in sizes:
            self.allocated = size
            self.peak = max(self.peak, size)

    def memory_stats(self, index: int) -> dict[str, dict[str, dict[str, int]]]:
        allocated = {"current": self.allocated, "peak": self.peak}
        return {"allocated_bytes": {"all": allocated}, "reserved_bytes": {"all": {"current": self.allocated}}}

    def reset_peak_memory_stats(self, index: int) -> None:
        self.peak = self.allocated
        self.resets += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr("memfit.recording.sampler._wiped", {})
    monkeypatch.setattr("torch.cuda.memory_stats_as_nested_dict", fake.memory_stats)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", fake.reset_peak_memory_stats)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: type("P", (), {"total_memory": 1000})())
    return fake


def test_a_reading_resets_torchs_peak_and_remembers_it(cuda: FakeCuda) -> None:
    source = CudaMemory(0)
    cuda.use(100, 900, 200)
    first = source.read()
    cuda.use(300, 250)
    second = source.read()
    assert (first.peak_bytes, first.stretch_peak_bytes, first.free_bytes) == (900, 900, 800)
    assert (second.peak_bytes, second.stretch_peak_bytes, second.allocated_bytes) == (900, 300, 250)


def test_torchs_peak_can_be_left_alone_and_then_a_stretch_is_known_only_if_it_rose(cuda: FakeCuda) -> None:
    source = CudaMemory(0, reset=False)
    cuda.use(900, 200)
    risen = source.read()
    cuda.use(300)
    hidden = source.read()
    assert (risen.stretch_peak_bytes, hidden.stretch_peak_bytes) == (900, None)
    assert (hidden.peak_bytes, cuda.peak, cuda.resets) == (900, 900, 0)


def test_who_only_looks_still_sees_a_peak_that_a_log_has_reset(cuda: FakeCuda) -> None:
    cuda.use(900, 200)
    CudaMemory(0).read()
    assert cuda.peak == 200
    assert CudaMemory(0, reset=False).read().peak_bytes == 900


# -- a run that breaks -------------------------------------------------------------------------------------------------


def test_a_stage_that_breaks_is_marked_and_everything_is_in_the_file(tmp_path: Path) -> None:
    path, said = tmp_path / "log.csv", []
    gpu = ScriptedGpu((2.3, 2.5, 2.3), (2.3, 2.5, 2.3), (14.2, 15.0, 15.1))
    with pytest.raises(MemoryError), MemoryLog(path, say=said.append, gpu=gpu, host=ScriptedHost(2)) as log:
        log.checkpoint("02_model_loaded")
        log.checkpoint("03_before_pruning")
        with log.until("04_after_pruning"):
            raise MemoryError
    *_, table, marked = said
    assert marked == "\n02_model_loaded:   2.30 GB\n03_before_pruning: 2.30 GB\n04_after_pruning:  ERROR!"
    assert "04_after_pruning                     ERROR!      15.10 GB       2.00 GB\n" in table
    last = path.read_text().splitlines()[-1].split(",")
    assert last[1:5] == ["04_after_pruning ERROR!", "14.200", "15.000", "15.100"]


def test_what_was_wrong_with_the_question_is_no_stage_that_broke(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError), MemoryLog(gpu=None, host=ScriptedHost(2)) as log, log.until("02_model_loaded"):
        raise InputError("no such model")
    assert (log.points, capsys.readouterr().out) == ([], "")


def test_an_interrupted_stage_is_no_error() -> None:
    log = MemoryLog(quiet=True, gpu=None, host=ScriptedHost(2))
    with pytest.raises(KeyboardInterrupt), log.until("04_after_pruning"):
        raise KeyboardInterrupt
    assert log.points == []


def test_a_block_of_code_that_breaks_outside_any_stage_is_marked_too() -> None:
    with pytest.raises(ValueError, match="oh"), MemoryLog(quiet=True, gpu=None, host=ScriptedHost(2)) as log:
        log.checkpoint("01_start")
        raise ValueError("oh")
    assert log.where_it_broke() == "01_start: n/a\nerror:    ERROR!"


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_log_of_an_earlier_run_is_replaced_or_continued(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    for append in (False, False, True):
        with MemoryLog(path, quiet=True, gpu=None, append=append) as log:
            log.checkpoint("01_start")
    assert [line.split(",")[1] for line in path.read_text().splitlines()] == ["Checkpoint", "01_start", "01_start"]


def test_a_log_can_get_its_file_later_and_follow_it_to_another_folder(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    log = MemoryLog(quiet=True, gpu=None)
    log.checkpoint("01_start")
    log.part("block 0")
    log.write_to(tmp_path / "out.partial" / "log.csv")
    log.checkpoint("02_model_loaded")
    (tmp_path / "out.partial").rename(tmp_path / "out")
    log.moved_to(tmp_path / "out" / "log.csv")
    log.checkpoint("09_end")
    rows = (tmp_path / "out" / "log.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in rows] == ["Checkpoint", "01_start", "02_model_loaded", "09_end"]
    assert len((tmp_path / "out" / "log_parts.csv").read_text().splitlines()) == 2


def test_a_file_that_is_no_log_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("chapter one")
    with pytest.raises(InputError, match=r"thesis.txt' exists and is not a memory log"):
        MemoryLog(path, quiet=True, gpu=None)
    assert path.read_text() == "chapter one"


def test_a_run_does_not_die_of_a_log_that_can_no_longer_be_written(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "out").mkdir()
    log = MemoryLog(tmp_path / "out" / "log.csv", say=said.append, gpu=None)
    (tmp_path / "out" / "log.csv").unlink()
    (tmp_path / "out").rmdir()
    log.checkpoint("01_start")
    log.checkpoint("02_model_loaded")
    assert [text for text in said if "ends here: No such file or directory" in text] == said[:1]
    assert len(said) == 3


def test_a_place_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written: No such file or directory"):
        MemoryLog(tmp_path / "nowhere" / "log.csv", quiet=True, gpu=None)


# -- beyond the guide --------------------------------------------------------------------------------------------------


def test_parts_that_read_the_same_are_one_line() -> None:
    readings = [(1, 1, 1.5)] * 3 + [(1, 1, 1.25)]
    log = MemoryLog(quiet=True, gpu=ScriptedGpu(*readings), host=ScriptedHost(2))
    for i in range(4):
        log.part(f"block {i}")
    rows = log_text.parts_table(log.parts).splitlines()[5:-1]
    assert rows == [
        "block 0 ... block 2                 1.00 GB       1.50 GB       2.00 GB",
        "block 3                             1.00 GB       1.25 GB       2.00 GB",
    ]


def test_predicted_stands_beside_measured() -> None:
    table = log_text.predicted_and_measured([("GPU allocated", gb(1.5), gb(1.6)), ("host", None, gb(2))])
    assert table.splitlines()[3:-1] == [
        "Peak                           Predicted    Measured     Difference",
        "-" * 80,
        "GPU allocated                       1.50 GB       1.60 GB         -6.2%",
        "host                                    n/a       2.00 GB           n/a",
    ]


def test_a_real_process_has_resident_memory(capsys: pytest.CaptureFixture[str]) -> None:
    with MemoryLog(gpu=None) as log:
        point = log.checkpoint("01_start")
    assert 2**20 < point.host.used_bytes < point.host.total_bytes
    assert point.host.high_water_bytes is not None
    assert point.host.high_water_bytes >= point.host.used_bytes
    assert "MEMORY USAGE SUMMARY" in capsys.readouterr().out
