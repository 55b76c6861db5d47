"""What has no end, or may not be looked at, is told and not waited for."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import InputError
from memfit.explaining import input as explaining_input
from memfit.explaining.input import read_input
from memfit.jobs.training.config_file import load_config
from memfit.jobs.workload import adapter_config_of

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
SOON = 300.0


def refused(read: Any, *arguments: Any) -> str:
    """The message, if it comes at all: what is false here would wait for ever."""
    said: list[str] = []

    def ask() -> None:
        try:
            read(*arguments)
        except InputError as error:
            said.append(error.message)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(SOON)
    assert said, "there was no answer, or no error"
    return said[0]


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe.log")
    return tmp_path / "pipe.log"


def test_a_pipe_that_nobody_writes_into_is_not_waited_for(pipe: Path) -> None:
    assert refused(read_input, pipe) == f"'{pipe}' is a pipe, which may have no end"


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
def test_a_device_is_not_read(device: str) -> None:
    assert refused(read_input, Path(device)) == f"'{device}' is a device, which may have no end"


def test_a_config_and_an_adapter_config_are_files_too(pipe: Path) -> None:
    assert "is a pipe" in refused(load_config, str(pipe))
    assert "--adapter-config" in refused(adapter_config_of, str(pipe), "ia3")


def test_a_pipe_that_the_shell_has_opened_is_read_to_its_end() -> None:
    reads, writes = os.pipe()
    os.write(writes, OOM.encode())
    os.close(writes)
    try:
        assert read_input(Path(f"/dev/fd/{reads}")).text == OOM
    finally:
        os.close(reads)


def closed_to_us(monkeypatch: pytest.MonkeyPatch, *closed: Path) -> None:
    """Root may look anywhere: who is not root cannot."""
    real = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path) in closed:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)


def test_a_folder_inside_that_may_not_be_read_is_told_and_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("closed", "open"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.log").write_text(OOM)
    closed_to_us(monkeypatch, tmp_path / "closed")

    found = read_input(tmp_path)
    assert (found.text_from, found.notes) == ("open/train.log", ("may not be read: closed",))


def test_a_link_to_where_nobody_may_look_is_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.log").write_text(OOM)
    (tmp_path / "cwd.log").symlink_to(tmp_path / "cwd.log")  # a stat of it fails, as of /proc/1/cwd
    assert read_input(tmp_path).text_from == "train.log"


def test_a_folder_that_may_not_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed_to_us(monkeypatch, tmp_path)
    assert refused(read_input, tmp_path) == f"cannot read the folder '{tmp_path}': Permission denied"


def test_of_a_tree_without_end_a_part_is_looked_at_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explaining_input, "MAX_ENTRIES", 10)
    for number in range(20):
        (tmp_path / f"{number:02}").mkdir()
        (tmp_path / f"{number:02}" / "train.log").write_text(OOM)
    with pytest.raises(InputError, match=r"only the first 10 files and folders in .* were looked at"):
        read_input(tmp_path)

    (tmp_path / "00.log").write_text(OOM)
    found = read_input(tmp_path)
    assert found.text_from == "00.log"
    assert f"only the first 10 files and folders in {str(tmp_path)!r} were looked at" in found.notes
