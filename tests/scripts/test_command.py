"""What a person would type, as a program and its arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.errors import MemfitError
from memfit.scripts.command import Program, read_command


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
