"""Files that commands write: -f replaces files and nothing else, and never what the command reads."""

from __future__ import annotations

import os
import pickle
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.warm_python import warm_python

Memfit = Callable[..., Any]
DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return Path(shutil.copy(DATA / "snap-oom.pickle", tmp_path / "s.pickle"))


def test_an_export_never_destroys_the_recording_that_it_reads(memfit: Memfit, recording: Path) -> None:
    before = recording.read_bytes()
    link = recording.with_name("hard.pickle")
    os.link(recording, link)
    for out in (recording, link, recording.parent / "." / ".." / recording.parent.name / "s.pickle"):
        ended = memfit("export", recording, "--to", "memory-viz", "-o", out, "-f")
        assert (ended.code, ended.out) == (2, "")
        assert f"is what is being read ({str(recording)!r})" in ended.err
    assert recording.read_bytes() == before


def test_a_page_never_replaces_a_file_of_the_folder_that_it_reports_on(memfit: Memfit, recording: Path) -> None:
    before = recording.read_bytes()
    ended = memfit("report", recording.parent, "--html", recording, "-f")
    assert (ended.code, recording.read_bytes()) == (2, before)
    assert memfit("report", recording.parent, "--html", recording.parent / "page.html").code == 0
    assert memfit("report", recording.parent, "--html", recording.parent / "page.html", "-f").code == 0


@pytest.mark.parametrize("command", ["plan", "profile"])
def test_neither_a_trace_nor_a_snapshot_replaces_the_models_own_files(memfit: Memfit, tiny: str, command: str) -> None:
    config = Path(tiny) / "config.json"
    before = config.read_bytes()
    flags = {
        "plan": ("plan", "forward", "--seq-len", 16, "--save-trace", config),
        "profile": ("profile", "--context-length", 16, "--device", "predict", "--output", config),
    }
    for model in (tiny, config):
        ended = memfit(*flags[command], "--model", model, "-f")
        assert (ended.code, config.read_bytes()) == (2, before)
        assert "is what is being read" in ended.err


def test_an_export_can_be_read_from_a_pipe_and_the_pipe_stays(memfit: Memfit, recording: Path) -> None:
    pipe = recording.with_name("pipe")
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    ended = memfit("export", recording, "--to", "memory-viz", "-o", pipe, "-f")
    reader.join(timeout=120)
    assert ended.code == 0
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert pickle.loads(got[0])["segments"]


def test_an_export_to_stdout_is_the_export_and_nothing_else(recording: Path) -> None:
    command = [warm_python(), "-m", "memfit", "export", recording, "--to", "csv", "-o", "/dev/stdout"]
    piped = subprocess.run(command, capture_output=True, check=True).stdout
    assert subprocess.run([*command[:-1], recording.with_name("a.csv")], capture_output=True).returncode == 0
    assert piped == recording.with_name("a.csv").read_bytes()


def test_a_page_to_a_device_leaves_the_device(memfit: Memfit, recording: Path) -> None:
    device = recording.with_name("null")  # a twin: the machine's own is not put at risk
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        device.open("wb").close()
    except PermissionError:
        pytest.skip("only root may make device nodes")
    assert memfit("report", recording, "--html", device, "-f").code == 0
    assert stat.S_ISCHR(device.lstat().st_mode)
    device.unlink()


def test_a_page_through_a_link_keeps_the_link(memfit: Memfit, recording: Path) -> None:
    page, link = recording.with_name("page.html"), recording.with_name("latest.html")
    page.write_text("old")
    link.symlink_to(page)
    assert memfit("report", recording, "--html", link).code == 2
    assert memfit("report", recording, "--html", link, "-f").code == 0
    assert link.is_symlink()
    assert page.read_text().startswith("<!")


@pytest.mark.parametrize("flag", ["--csv", "--prometheus"])
def test_watch_touches_no_file_that_is_not_its_own(memfit: Memfit, tmp_path: Path, flag: str) -> None:
    mine = tmp_path / "notes.csv"
    mine.write_text("mine\n")
    ended = memfit("watch", flag, mine, "--count", 1)
    assert (ended.code, mine.read_text()) == (2, "mine\n")
    assert "exists and is not a" in ended.err
    log = tmp_path / "log"
    for _ in range(2):
        assert memfit("watch", flag, log, "--count", 1).code == 0


def test_a_pipe_that_nobody_reads_is_told(memfit: Memfit, recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.files.SECONDS_FOR_A_READER", 0.1)
    pipe = recording.with_name("pipe")
    os.mkfifo(pipe)
    for asked in (
        ("export", recording, "--to", "csv", "-o", pipe, "-f"), ("report", recording, "--html", pipe, "-f"),
        ("watch", "--csv", pipe, "--count", 1),
    ):  # fmt: skip
        ended = memfit(*asked)
        assert (ended.code, "is a pipe, and nobody reads it" in ended.err) == (2, True)


def test_what_watch_appends_can_be_read_from_a_pipe(memfit: Memfit, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    assert memfit("watch", "--csv", pipe, "--count", 2, "--interval", 0.05).code == 0
    reader.join(timeout=120)
    assert got[0].startswith("time,gpu,used_bytes")
