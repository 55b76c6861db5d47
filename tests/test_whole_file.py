"""The one door for files: regular files are replaced whole, all else is written into, what is read stays."""

from __future__ import annotations

import ast
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from memfit import files
from memfit.errors import InputError
from memfit.files import check_free, written_whole

SOURCE = Path(__file__).parents[1] / "src" / "memfit"


def write(path: Path, text: str) -> None:
    with written_whole(path) as beside:
        beside.write_text(text)


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    with written_whole(path) as beside:
        beside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_what_was_there_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), written_whole(path) as beside:
        beside.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_replaced_keeps_who_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "private.csv"
    path.write_text("old")
    path.chmod(0o600)
    write(path, "new")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o600)


def test_a_link_stays_and_what_it_points_at_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    target, link, second = tmp_path / "disk" / "old.html", tmp_path / "latest.html", tmp_path / "second.html"
    target.write_text("old")
    link.symlink_to(target)
    second.symlink_to("latest.html")

    write(second, "new")

    assert (second.is_symlink(), link.is_symlink(), target.is_symlink()) == (True, True, False)
    assert target.read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


def test_a_link_to_nothing_makes_what_it_names(tmp_path: Path) -> None:
    link = tmp_path / "latest.html"
    link.symlink_to("first.html")
    check_free(link, "--html", force=False)
    write(link, "new")
    assert (link.is_symlink(), (tmp_path / "first.html").read_text()) == (True, "new")


def test_a_link_into_a_folder_that_is_not_there_is_told_before_the_work(tmp_path: Path) -> None:
    link = tmp_path / "latest.html"
    link.symlink_to(tmp_path / "gone" / "x.html")
    with pytest.raises(InputError, match=r"there is no folder .*gone"):
        check_free(link, "--html", force=True)


def test_a_link_that_leads_back_to_itself_is_refused_and_stays(tmp_path: Path) -> None:
    link = tmp_path / "a.html"
    link.symlink_to(link)
    with pytest.raises(InputError, match="cannot be written: Too many levels of symbolic links"):
        check_free(link, "--html", force=True)
    with pytest.raises(OSError, match="Too many levels"):
        write(link, "new")
    assert link.is_symlink()


@pytest.mark.parametrize("force", [False, True])
def test_what_is_written_to_a_pipe_comes_out_of_it_and_it_stays_a_pipe(tmp_path: Path, force: bool) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()

    check_free(pipe, "--output", force)
    write(pipe, "x" * 200_000)

    reader.join(timeout=120)
    assert got == [b"x" * 200_000]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_pipe_that_nobody_reads_is_told_and_one_whose_reader_comes_late_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Timer(0.3, lambda: got.append(pipe.read_bytes()))
    reader.start()
    write(pipe, "late")
    reader.join(timeout=120)
    assert got == [b"late"]

    monkeypatch.setattr(files, "SECONDS_FOR_A_READER", 0.1)
    with pytest.raises(InputError, match="pipe' is a pipe, and nobody reads it"):
        write(pipe, "never")
    assert list(tmp_path.iterdir()) == [pipe]


def test_nothing_of_a_write_that_fails_goes_into_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(KeyboardInterrupt), written_whole(pipe) as beside:
        beside.write_text("half")
        raise KeyboardInterrupt
    assert os.read(descriptor, 100) == b""
    os.close(descriptor)


@pytest.fixture
def devices(tmp_path: Path) -> Iterator[Path]:
    """Twins of /dev/null and /dev/full, and a disk that is not there: the machine's own are not put at risk."""
    if os.geteuid() != 0:
        pytest.skip("only root may make device nodes")
    try:
        for name, kind, major, minor in (
            ("null", stat.S_IFCHR, 1, 3), ("full", stat.S_IFCHR, 1, 7), ("disk", stat.S_IFBLK, 240, 255),
        ):  # fmt: skip
            os.mknod(tmp_path / name, kind | 0o666, os.makedev(major, minor))
        (tmp_path / "null").open("wb").close()
    except PermissionError as error:
        pytest.skip(f"device nodes cannot be made or opened here: {error}")
    yield tmp_path
    for name in ("null", "full", "disk"):
        (tmp_path / name).unlink()


def test_a_device_is_written_into_and_stays_a_device(devices: Path) -> None:
    check_free(devices / "null", "--html", force=True)
    write(devices / "null", "new")
    link = devices / "link"
    link.symlink_to("null")
    write(link, "new")
    assert stat.S_ISCHR((devices / "null").lstat().st_mode)
    assert link.is_symlink()
    with pytest.raises(OSError, match="No space left"):
        write(devices / "full", "new")
    assert stat.S_ISCHR((devices / "full").lstat().st_mode)


def test_a_disk_is_refused_even_with_force(devices: Path) -> None:
    with pytest.raises(InputError, match=r"--html '.*disk' is a disk"):
        check_free(devices / "disk", "--html", force=True)


@pytest.mark.parametrize("how", ["pipe", "file", "appended"])
def test_a_file_named_dev_stdout_goes_where_stdout_goes(tmp_path: Path, how: str) -> None:
    program = (
        "from pathlib import Path; from memfit.files import check_free, written_whole\n"
        "print('before')\n"
        "check_free(Path('/dev/stdout'), '--html', False)\n"
        "with written_whole('/dev/stdout') as beside: beside.write_text('page\\n')\n"
        "print('after')\n"
    )
    command = [sys.executable, "-c", program]
    if how == "pipe":
        assert subprocess.run(command, capture_output=True, check=True).stdout == b"before\npage\nafter\n"
        return
    place = tmp_path / "out.txt"
    place.write_text("earlier\n")
    with place.open("ab" if how == "appended" else "wb") as out:
        subprocess.run(command, stdout=out, check=True)
    assert place.read_text() == ("earlier\n" if how == "appended" else "") + "before\npage\nafter\n"


@pytest.mark.parametrize("how", ["itself", "spelling", "symlink", "hard link", "a link to both"])
def test_what_is_read_is_never_the_output_whatever_it_is_called(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "s.pickle"
    source.write_bytes(b"recording")
    out = tmp_path / "out.pickle"
    if how == "itself":
        out = source
    elif how == "spelling":
        out = Path("../") / tmp_path.name / "./s.pickle"
    elif how == "symlink":
        out.symlink_to(source)
    elif how == "hard link":
        os.link(source, out)
    else:
        (tmp_path / "first").symlink_to("s.pickle")
        out.symlink_to("first")
    with pytest.raises(InputError, match="is what is being read"):
        check_free(out, "--output", force=True, inputs=[Path("s.pickle")])


WRITERS = {
    "files.py": "the door",
    "recording/memory_log.py": "appends row by row to a log that the door has looked at",
    "cli/machine.py": "appends row by row to a log that the door has looked at",
    "jobs/training/result.py": "appends line by line to the run's own log",
    "jobs/training/checkpoints.py": "into a folder of its own, which is renamed when whole",
    "jobs/pruning/output.py": "into a folder of its own, which is renamed when whole",
    "jobs/pruning/saved_runs.py": "lines of its own journal; an old folder may come back under its name",
    "models/gguf.py": "into a folder of its own, which is renamed when whole",
    "planning/cache.py": "a link of the entry's name is replaced, not followed",
    "fitting/claims.py": "into a temporary folder",
    "models/pipelines.py": "configs of a pipeline, into a temporary folder",
    "serving/viewer.py": "what is dropped onto the page, into a temporary file",
    "scripts/made_up_columns.py": "a made-up picture, into a temporary folder",
    "scripts/made_up_files.py": "made-up names of classes, into a temporary folder",
    "scripts/watched.py": "whether there is room, into a temporary folder of its own",
    "tracing/compiled/autotuning.py": "a kernel that another program is asked about, into a temporary folder",
}
"""Who writes without the door, and why it may."""


def writes(path: Path) -> Iterator[str]:
    """Calls that make or replace files, other than on what the door has given (`beside`)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = getattr(getattr(node.func, "value", None), "id", "")
        texts = [a.value for a in [*node.args[:2], *(k.value for k in node.keywords)] if isinstance(a, ast.Constant)]
        opens_to_write = name == "open" and any(isinstance(t, str) and re.fullmatch(r"[wax]b?\+?", t) for t in texts)
        given = owner == "beside" or any(getattr(a, "id", "") == "beside" for a in node.args)
        if not given and (opens_to_write or name in ("write_text", "write_bytes", "rename", "copyfile")):
            yield f"{name} in line {node.lineno}"


def test_nobody_else_writes_files() -> None:
    found = {str(path.relative_to(SOURCE)): list(writes(path)) for path in SOURCE.rglob("*.py")}
    assert {name: calls for name, calls in found.items() if calls and name not in WRITERS} == {}
    assert [name for name in WRITERS if name not in found] == []


def _ended_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        return process.pid


def test_what_a_killed_process_left_beside_a_file_goes_when_that_file_is_written_again(tmp_path: Path) -> None:
    path, gone = tmp_path / "report.html", _ended_process()
    left = tmp_path / f".report.html.{gone}"
    kept = [
        tmp_path / f".report.html.{os.getppid()}", tmp_path / f".other.html.{gone}", tmp_path / f".report.html.{gone}x",
        tmp_path / f"report.html.{gone}",
    ]  # fmt: skip
    for each in (left, *kept):
        each.write_text("half")
        os.utime(each, (0, 0))
    write(path, "new")
    assert sorted(tmp_path.iterdir()) == sorted([path, *kept])


def test_what_was_left_just_now_may_be_another_machines_and_stays(tmp_path: Path) -> None:
    young = tmp_path / f".report.html.{_ended_process()}"
    young.write_text("half")
    write(tmp_path / "report.html", "new")
    assert young.exists()
