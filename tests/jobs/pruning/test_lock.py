"""Who writes to a folder: one process at a time, known by its number; and a process that is gone holds nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.warm_python import warm_python
from tiny_folder import english, model_folder

from memfit.cli.main import main

STOPS = """
import os, signal, sys
from pathlib import Path
from memfit.jobs.pruning.output import OutputFolder

plain = OutputFolder.write
def write(self, block, *rest):
    if block == 2:
        self.settle()  # so that there is something to resume
        Path(os.environ["NUMBER"]).write_text(f"{os.getpid()}\\n")
        os.kill(os.getpid(), signal.SIGSTOP)
    return plain(self, block, *rest)

OutputFolder.write = write
from memfit.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Stopped:
    pid: int
    run: subprocess.Popen[str]

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.run.wait(timeout=300)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "text.txt").write_text(english(60))
    model = model_folder(folder, num_hidden_layers=4)
    return [
        "prune", "--model", str(model), "--dataset", str(folder / "text.txt"), "--nsamples", "4", "--seqlen", "64",
        "--no-eval", "--device", "cpu",
    ]  # fmt: skip


@pytest.fixture
def stopped(asked: list[str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stopped]:
    """A run in the middle of its work, alive and not moving."""
    number = tmp_path_factory.mktemp("number") / "pid"
    command = [warm_python(), "-c", STOPS, *asked, "--save", str(tmp_path / "out")]
    with subprocess.Popen(
        command, env={**os.environ, "NUMBER": str(number)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as run:
        while not (number.exists() and is_stopped(number.read_text())):
            assert run.poll() is None, run.communicate()[1]
            time.sleep(0.02)
        stopped = Stopped(int(number.read_text()), run)
        yield stopped
        if run.poll() is None:
            stopped.kill()


def is_stopped(number: str) -> bool:
    return number.endswith("\n") and Path(f"/proc/{number.strip()}/stat").read_text().rpartition(") ")[2][0] == "T"


@pytest.mark.parametrize("how", [[], ["--resume"], ["--force"]])
def test_a_second_run_is_told_who_has_the_folder_and_touches_nothing(
    asked: list[str], stopped: Stopped, tmp_path: Path, how: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert main([*asked, "--save", str(tmp_path / "out"), *how]) == 2
    said = capfd.readouterr().err
    assert f"--save '{tmp_path / 'out'}' is being written by process {stopped.pid} on " in said
    assert "delete" not in said
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    if how == ["--force"]:  # and it is unharmed
        os.kill(stopped.pid, signal.SIGCONT)
        assert stopped.run.wait(timeout=300) == 0
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_results_folder_beside_save_model_is_held_too(
    asked: list[str], stopped: Stopped, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*asked, "--save", str(tmp_path / "out"), "--save-model", str(tmp_path / "other")]) == 2
    assert f"is being written by process {stopped.pid}" in capfd.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_killed_process_holds_nothing(asked: list[str], stopped: Stopped, tmp_path: Path) -> None:
    stopped.kill()
    assert (tmp_path / "out.partial.lock").is_file()
    assert main([*asked, "--save", str(tmp_path / "out"), "--resume"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_of_two_that_resume_at_once_one_works_and_one_is_told(
    asked: list[str], stopped: Stopped, tmp_path: Path
) -> None:
    stopped.kill()
    command = [warm_python(), "-m", "memfit", *asked, "--save", str(tmp_path / "out"), "--resume"]
    both = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in both]
    codes = [process.returncode for process in both]
    assert 0 in codes and {*codes} <= {0, 2}, said
    told = said[codes.index(2)] if 2 in codes else "\n".join(said)  # the second may begin when the first has ended
    # Its owner may have the folder and not have written its number there yet: "by another process".
    assert "is being written by" in told or "is complete already" in told
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_names_of_one_folder_are_one_folder(asked: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main([*asked, "--save", f"{out}/", "--save-model", str(out)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_folders_made_for_a_run_that_is_refused_are_gone(asked: list[str], tmp_path: Path) -> None:
    assert main([*asked, "--dataset", "nowhere.txt", "--save", str(tmp_path / "a" / "b" / "out")]) == 2
    assert list(tmp_path.iterdir()) == []


# -- what may be replaced ----------------------------------------------------------------------------------------------


def test_the_same_run_again_replaces_its_result_and_another_one_does_not(
    asked: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([*asked, "--save", str(out)]) == 0
    first = (out / "result.json").read_bytes()
    assert main([*asked, "--save", str(out), "--log-memory"]) == 0
    assert "holds the result of this very run" in capfd.readouterr().err
    assert (out / "memory_log.csv").is_file() and (out / "result.json").read_bytes() != first
    assert main([*asked, "--save", str(out)]) == 2
    assert "holds a memory log, which this run would not write" in capfd.readouterr().err
    for other in (["--seed", "1"], ["--sparsity-ratio", "0.4"], ["--prune-method", "ria"]):
        assert main([*asked, "--save", str(out), *other]) == 2
        assert "already exists" in capfd.readouterr().err


@pytest.mark.parametrize("change", ["a file added", "weights changed"])
def test_a_result_that_someone_has_worked_on_is_not_replaced(
    asked: list[str], tmp_path: Path, change: str, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([*asked, "--save", str(out)]) == 0
    if change == "a file added":
        (out / "notes.md").write_text("seven hours of work")
        os.utime(out / "notes.md", ns=(1, 1))
    else:
        later = (out / "result.json").stat().st_mtime_ns + 1_000_000  # a file system's clock may tick in milliseconds
        os.utime(out / "model.safetensors", ns=(later, later))
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert main([*asked, "--save", str(out)]) == 2
    assert "already exists" in capfd.readouterr().err
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_force_keeps_the_old_result_until_the_new_one_is_whole(asked: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main([*asked, "--save", str(out)]) == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert main([*asked, "--save", str(out), "--force", "--dataset", "nowhere.txt"]) == 2
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_the_model_is_never_the_folder_to_save_to(
    asked: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([*asked, "--save", str(out)]) == 0
    again = [str(out) if word == asked[2] else word for word in asked]
    assert main([*again, "--save", str(out), "--force"]) == 2
    assert "is the model itself" in capfd.readouterr().err
    assert (out / "model.safetensors").is_file()
