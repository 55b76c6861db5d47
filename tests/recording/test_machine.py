"""What is seen of a machine: with no GPU in it that is said, never shown as zero."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memfit.cli.main import main
from memfit.errors import MemfitError
from memfit.recording import machine
from memfit.recording import machine as nvml
from memfit.recording.sampler import Sampler


class DriverError(Exception):
    pass


def driver(**answers: Any) -> Any:
    """The calls of nvidia-ml-py that are used, with the answers of a machine with two cards."""

    def processes(handle: int) -> list[Any]:
        if handle == 1:
            raise DriverError("not supported")
        return [SimpleNamespace(pid=os.getpid(), usedGpuMemory=3 << 30), SimpleNamespace(pid=2**22, usedGpuMemory=None)]

    return SimpleNamespace(
        NVMLError=DriverError, nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index, nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=24 << 30, used=5 << 30),
        nvmlDeviceGetUUID=lambda handle: b"GPU-1234", nvmlDeviceGetName=lambda handle: 'A "card"',
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=37),
        nvmlDeviceGetComputeRunningProcesses=processes, **answers,
    )  # fmt: skip


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver())


@pytest.fixture
def no_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise DriverError("driver not loaded")

    broken = driver()
    broken.nvmlInit = refuse
    monkeypatch.setitem(sys.modules, "pynvml", broken)


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.mark.usefixtures("two_cards")
def test_a_process_of_another_container_has_no_name_and_an_unknown_size_is_not_zero() -> None:
    first, second = nvml.read_gpus()
    mine, other = first.processes
    assert mine.used_bytes == 3 << 30 and "python" in str(mine.name)
    assert other.used_bytes is None and other.name is None
    assert second.processes == () and first.free_bytes == 19 << 30


@pytest.mark.usefixtures("no_cards")
def test_a_machine_without_a_driver_says_so() -> None:
    seen = machine.look()
    assert seen["gpus"] == [] and "driver not loaded" in seen["no_gpus"]


def test_torchs_device_is_found_through_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    library = driver()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-abc")
    assert nvml.gpu_of_torch_device(library, 0) == 3
    assert nvml.gpu_of_torch_device(library, 1) == "GPU-abc"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert nvml.gpu_of_torch_device(library, 1) == 1


@pytest.mark.usefixtures("two_cards")
def test_a_sampler_sees_the_driver_and_the_host_and_does_not_start_cuda(tmp_path: Path) -> None:
    with Sampler(interval=0.01) as sampler:
        time.sleep(0.05)
    assert len(sampler.samples) >= 2
    last = sampler.samples[-1]
    assert last.device_used_bytes == 5 << 30 and last.allocated_bytes is None and last.host_bytes > 1 << 20
    sampler.save_csv(tmp_path / "samples.csv")
    rows = list(csv.DictReader((tmp_path / "samples.csv").read_text().splitlines()))
    assert len(rows) == len(sampler.samples) and rows[0]["allocated_bytes"] == ""


def test_a_job_is_seen_while_it_runs_and_not_after_it_was_killed() -> None:
    code = "import time; from memfit.recording.machine import publish; publish('prune', '03_before_pruning', done=2, total=16, peak_bytes=7); print('up', flush=True); time.sleep(60)"  # noqa: E501
    job = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout is not None and job.stdout.readline() == "up\n"
        (seen,) = machine.running_jobs()
        assert (seen.command, seen.at, seen.done, seen.total, seen.peak_bytes) == (
            "prune",
            "03_before_pruning",
            2,
            16,
            7,
        )
    finally:
        job.kill()
        job.wait()
        if job.stdout:
            job.stdout.close()
    assert machine.running_jobs() == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"pid": "1"}', '{"pid": true, "started": 1, "command": "x", "at": "y"}', "[" * 100_000]
)
def test_a_damaged_status_file_is_passed_over(text: str) -> None:
    machine.folder().mkdir()
    (machine.folder() / "1.json").write_text(text)
    assert machine.running_jobs() == []


def test_a_status_cannot_move_the_cursor() -> None:
    machine.publish("prune\x1b[2J", "at\nb")
    (seen,) = machine.running_jobs()
    assert seen.command == "prune [2J" and seen.at == "at b"


@pytest.mark.usefixtures("two_cards")
def test_watch_appends_a_line_for_each_gpu_and_rewrites_the_file_for_prometheus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, scraped = tmp_path / "log.csv", tmp_path / "memfit.prom"
    argv = ["watch", "--count", "2", "--interval", "0.05", "--csv", str(log), "--prometheus", str(scraped), "--json"]
    assert main(argv) == 0
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(document["gpus"]) for document in documents] == [2, 2]
    rows = list(csv.DictReader(log.read_text().splitlines()))
    assert [row["gpu"] for row in rows] == ["0", "1", "0", "1"] and rows[0]["used_bytes"] == str(5 << 30)
    text = scraped.read_text()
    assert 'memfit_gpu_memory_used_bytes{gpu="0",uuid="GPU-1234",name="A \\"card\\""} 5368709120' in text


@pytest.mark.usefixtures("two_cards")
def test_watch_in_a_pipe_prints_bars_and_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "--count", "1"]) == 0
    out = capsys.readouterr().out
    assert "5.00 GiB of 24.00 GiB" in out and "n/a" in out and "no memfit job runs" in out


@pytest.mark.parametrize("argv", [["--interval", "0"], ["--count", "0"], ["--csv", "/nowhere/x.csv", "--count", "1"]])
def test_watch_refuses_what_makes_no_sense(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", *argv]) == 2
    assert capsys.readouterr().err.startswith("error: --")


def test_a_recording_without_a_gpu_says_what_to_do_instead(tmp_path: Path) -> None:
    from memfit.recording.recorder import record

    with pytest.raises(MemfitError, match="a recording needs a CUDA GPU") as error, record(tmp_path / "x.pickle"):
        pass
    assert "memfit.trace" in str(error.value.hint)
