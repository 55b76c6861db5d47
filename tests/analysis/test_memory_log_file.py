"""A memory log as the guide has it, whole and damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.analysis.report import report_file, report_log
from memfit.analysis.run_folder import looks_like_a_log, read_memory_log
from memfit.errors import InputError
from memfit.render.plan import as_text
from memfit.render.report import show_report
from memfit.units import GiB

HEAD = "Timestamp,Checkpoint,GPU_Allocated_GB,GPU_Reserved_GB,GPU_Peak_GB,CPU_Used_GB,CPU_Percent\n"
RUN = HEAD + (
    "2025-12-28T00:15:40,01_start,0.000,0.000,0.000,2.150,5.40\n"
    "2025-12-28T00:15:45,02_model_loaded,2.300,2.500,2.300,2.450,6.10\n"
    "2025-12-28T00:15:46,03_before_pruning,2.300,2.500,2.300,2.460,6.10\n"
    "2025-12-28T00:18:46,04_after_pruning,2.400,5.750,5.500,2.650,6.60\n"
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "memory_log.csv"
    path.write_text(RUN)
    return path


def kinds(path: Path) -> list[str]:
    return [warning.kind for warning in read_memory_log(path).warnings]


def test_gb_in_a_log_is_gib(log: Path) -> None:
    points = read_memory_log(log).checkpoints

    assert [point.name for point in points][:2] == ["01_start", "02_model_loaded"]
    assert points[1].allocated_bytes == round(2.3 * GiB)
    assert kinds(log) == []


def test_the_peak_is_placed_between_the_checkpoints_where_it_came(log: Path) -> None:
    document = report_log(read_memory_log(log))

    assert document["peak"]["allocated_bytes"] == round(5.5 * GiB)
    assert document["log"]["peak_between"] == "between 03_before_pruning and 04_after_pruning"
    assert document["log"]["seconds"] == 186.0


def test_a_peak_that_is_held_at_a_checkpoint_is_at_it(log: Path) -> None:
    log.write_text("".join(RUN.splitlines(keepends=True)[:3]))

    assert report_log(read_memory_log(log))["log"]["peak_between"] == "at 02_model_loaded"


def test_a_log_reads_as_a_report(log: Path) -> None:
    text = as_text(show_report, report_file(log).document)

    assert text.splitlines()[0] == "peak: 5.50 GiB allocated, at least 5.75 GiB reserved (measured)"
    assert "  reached between 03_before_pruning and 04_after_pruning" in text
    assert "04_after_pruning 2.40 GiB 5.75 GiB 5.50 GiB 2.65 GiB ◀ peak" in " ".join(text.split())


def test_the_peak_of_reserved_memory_is_not_in_a_log_and_never_below_what_was_allocated(log: Path) -> None:
    log.write_text(RUN.replace("5.750", "5.000"))
    document = report_file(log).document

    assert document["peak"]["reserved_bytes"] is None
    assert document["peak"]["reserved_at_least_bytes"] == document["peak"]["allocated_bytes"] == round(5.5 * GiB)
    text = as_text(show_report, document)
    assert text.splitlines()[0] == "peak: 5.50 GiB allocated, at least 5.50 GiB reserved (measured)"
    assert "reserved is known at checkpoints only" in text


def test_on_a_machine_without_a_gpu_figures_are_not_known_rather_than_0(log: Path) -> None:
    log.write_text(HEAD + "2025-12-28T00:15:40,01_start,,,,2.150,5.40\n")
    document = report_file(log).document

    assert document["peak"]["allocated_bytes"] is None
    assert kinds(log) == ["no_gpu"]
    assert as_text(show_report, document).splitlines()[0].startswith("note: no GPU figures in it")
    both = report_log(read_memory_log(log), read_memory_log(log))
    assert [message["kind"] for message in both["messages"]] == ["no_gpu"]


def test_a_run_that_broke_says_where(log: Path) -> None:
    log.write_text(RUN + "2025-12-28T00:19:00,05_before_eval ERROR!,2.400,5.750,5.500,2.650,6.60\n")
    (message,) = report_file(log).document["messages"]

    assert message["text"].startswith("the run broke before it reached 05_before_eval")
    assert read_memory_log(log).checkpoints[-1].failed


def test_a_row_that_was_cut_off_is_passed_over_with_a_word(log: Path) -> None:
    log.write_text(RUN[:-30])

    assert len(read_memory_log(log).checkpoints) == 4
    assert kinds(log) == ["truncated"]


def test_rows_that_are_no_numbers_are_passed_over_with_a_word(log: Path) -> None:
    log.write_text(RUN + "2025-12-28T00:19:00,05_x,nan,1,1,1,1\n,,,\n2025-12-28T00:19:00,06_x,-1,1,1,1,1\n")

    assert len(read_memory_log(log).checkpoints) == 4
    assert kinds(log) == ["truncated"]


def test_an_empty_log_says_so(log: Path) -> None:
    log.write_text(HEAD)

    assert kinds(log) == ["empty"]


def test_columns_that_are_not_known_and_columns_that_are_missing_do_no_harm(log: Path) -> None:
    log.write_text("Checkpoint,News,GPU_Allocated_GB\nstart,7,1.5\n")
    (point,) = read_memory_log(log).checkpoints

    assert (point.allocated_bytes, point.peak_bytes, point.at) == (round(1.5 * GiB), None, None)


@pytest.mark.parametrize("text", ["", "hello\n", "a,b,c\n1,2,3\n", "\0\0\0"])
def test_what_is_no_log_is_refused(log: Path, text: str) -> None:
    log.write_text(text)

    with pytest.raises(InputError, match="does not name the columns"):
        read_memory_log(log)


def test_a_log_is_known_by_its_first_line_whatever_it_is_called(log: Path) -> None:
    assert looks_like_a_log(RUN.encode())
    assert not looks_like_a_log(b"\x80\x04]")
    other = log.rename(log.with_name("log.txt"))
    assert report_file(other).document["source"]["kind"] == "memory_log"


def test_names_that_would_steer_a_terminal_do_not(log: Path) -> None:
    log.write_bytes(HEAD.encode() + b"2025-12-28T00:15:40,\x1b[2Jstart,1,1,1,1,1\n")

    assert "\x1b" not in as_text(show_report, report_file(log).document)
