"""What a person would type, as a program and its arguments."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from memfit.errors import MemfitError, UsageError
from memfit.scripts.command import Program, read_command

Put = Callable[[str, str], str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "__main__.py").write_text("")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("typed", "program"),
    [
        ("train.py --lr 1e-4", Program("train.py", False, ("--lr", "1e-4"))),
        ("python train.py", Program("train.py", False, ())),
        ("python3.11 -u -X dev train.py -c x", Program("train.py", False, ("-c", "x"))),
        ("/usr/bin/python -m pkg.train --a 'b c'", Program("pkg.train", True, ("--a", "b c"))),
        ("-m pkg.train", Program("pkg.train", True, ())),
        ("X=off A=1 python train.py B=2", Program("train.py", False, ("B=2",), (("X", "off"), ("A", "1")))),
        ("tool 7", Program("tool/__main__.py", False, ("7",))),
    ],
)  # fmt: skip
def test_a_command_is_read_as_a_shell_and_python_would(typed: str, program: Program) -> None:
    assert read_command(typed) == program


def test_words_are_taken_as_they_are() -> None:
    assert read_command(["train.py", "a b"]).arguments == ("a b",)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("", "which script"),
        ("''", "which script"),
        ("FOO=1 ''", "which script"),
        ("torchrun ''", "which script"),
        ("python -m ''", "which module"),
        ("python", "runs no script"),
        ("python -c 'print(1)'", "-c is no script"),
        ("python -m", "which module"),
        ("--bogus train.py", "--bogus is no flag of plan script"),
        ("trian.py", "there is no script 'trian.py'"),
    ],
)
def test_what_is_no_program_is_said_with_what_to_do(typed: str, said: str) -> None:
    with pytest.raises(MemfitError, match=said) as caught:
        read_command(typed)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (None, "None is no command"),
        (5, "5 is no command"),
        (b"train.py", "is no command"),
        ("train.py --x 'unclosed", "cannot be read as a shell would"),
        ("env FOO=1 python train.py", "env is no Python program"),
        ("bash x.sh", "bash is no Python program"),
        ("/dev/null", "'/dev/null' is not a file"),
    ],
)
def test_what_is_no_command_is_told_in_words(typed: object, said: str) -> None:
    with pytest.raises(MemfitError, match=said):
        read_command(typed)  # type: ignore[arg-type]


def test_a_file_s_name_may_hold_an_equals_sign(tmp_path: Path) -> None:
    (tmp_path / "we=ird.py").write_text("")
    assert read_command("we=ird.py 3") == Program("we=ird.py", False, ("3",))


def test_folders_of_pythonpath_are_told_as_python_takes_them(tmp_path: Path) -> None:
    assert read_command("PYTHONPATH=src::/opt/x:src python train.py").search_path == [
        str(tmp_path / "src"), str(tmp_path), "/opt/x",
    ]  # fmt: skip
    assert read_command("PYTHONPATH= python train.py").search_path == read_command("train.py").search_path == []


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def put(name: str, text: str) -> str:
        path = tmp_path / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
        return str(path)

    return put


@pytest.mark.parametrize(
    "begins",
    ["#!/opt/venv/bin/python3.12", "#!/usr/bin/env python3", '#!/bin/sh\n\'\'\'exec\' "/a b/python" "$0" "$@"'],
)
def test_a_console_script_is_found_on_the_path_as_a_shell_finds_it(command: Put, begins: str) -> None:
    path = command("my-train", f"{begins}\nimport sys\n")
    assert read_command("my-train --lr 1") == Program(path, False, ("--lr", "1"))
    with pytest.raises(MemfitError, match="there is no script 'my-train'"):
        read_command("python my-train")


def test_a_console_script_is_looked_for_in_the_path_that_stands_before_it(command: Put, tmp_path: Path) -> None:
    path, given = command("my-train", "#!/usr/bin/python\n"), ("PATH", str(tmp_path / "bin"))
    os.environ["PATH"] = "/nowhere"
    assert read_command(f"PATH={given[1]} my-train") == Program(path, False, (), (given,))


def test_what_is_here_goes_before_what_is_on_the_path(command: Put) -> None:
    command("train.py", "#!/usr/bin/python\n")
    command("tool", "#!/bin/sh\n")
    assert (read_command("train.py").target, read_command("tool").target) == ("train.py", "tool/__main__.py")


def test_a_command_on_the_path_that_is_not_python_is_told_as_such(command: Put) -> None:
    path = command("my-train", "#!/bin/sh\nexec train\n")
    with pytest.raises(MemfitError, match=f"'my-train' is no file here, and {path} is no Python program"):
        read_command("my-train")


@pytest.mark.parametrize("words", [["-m", "memfit", "train"], ["memfit", "train"], ["python", "-m", "memfit", "train"]])
def test_a_command_of_memfit_is_planned_by_itself(words: list[str]) -> None:
    with pytest.raises(UsageError, match="memfit train is planned without plan script") as told:
        read_command([*words, "--config", "c.yaml"])
    assert told.value.hint == "memfit train --config FILE --dry-run"
