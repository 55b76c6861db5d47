"""The command that a person would run, as a program and its arguments: `python -m trainer --lr 1e-4`."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path

from memfit.environment import exported
from memfit.errors import InputError, UsageError
from memfit.scripts.launchers import launcher_of, read_launch

PYTHON = re.compile(r"python(\d+(\.\d+)?)?(\.exe)?")
SWITCHES = ("-u", "-B", "-O", "-OO", "-s", "-S", "-E", "-I", "-b", "-q", "-v")
WITH_VALUE = ("-X", "-W")
OF_PYTHON = re.compile(rb"#![^\n]*python|#!/bin/sh\n'''exec' [^\n]*python")
"""How a console script begins; the second form is pip's, where the path of its Python is long or has a space."""
SHELLS = ("env", "bash", "sh", "zsh")
HINT = "memfit plan script --gpu 24GB -- train.py --batch_size 8"


@dataclass(frozen=True)
class Program:
    target: str
    """A file, or the name of a module."""
    is_module: bool
    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    """What stands before the command, as in `WANDB_MODE=offline python train.py`, and what a launcher sets."""
    processes: int = 1
    """Of which this is the first."""
    notes: tuple[str, ...] = ()
    """What the command leaves open."""

    @property
    def name(self) -> str:
        return self.target if self.is_module else Path(self.target).name

    @property
    def alloc_conf(self) -> str:
        """Settings of torch's allocator that it is started with."""
        return next(iter(exported({**os.environ, **dict(self.environment)}).values()), "")

    @property
    def search_path(self) -> list[str]:
        """Folders of a PYTHONPATH before the command, as Python takes them: an empty one is the working folder."""
        said = dict(self.environment).get("PYTHONPATH", "")
        return list(dict.fromkeys(os.path.abspath(each) for each in said.split(os.pathsep))) if said else []

    @property
    def words(self) -> list[str]:
        return [*(["-m"] if self.is_module else []), self.target, *self.arguments]


def read_command(command: str | Sequence[str]) -> Program:
    words = _words(command)
    environment = tuple(_variables(words))
    words = words[len(environment) :]
    if not words:
        raise UsageError("which script?", hint=HINT)
    names_python = PYTHON.fullmatch(Path(words[0]).name) is not None
    if names_python:
        words = _without_switches(words[1:])
    if not words:
        raise UsageError("python alone runs no script", hint=HINT)
    if words[0] == "-c":
        raise UsageError("-c is no script", hint="put the lines into a file")
    if (found := launcher_of(words)) is not None:
        launch = read_launch(*found)
        program = _program(launch.words, (*launch.environment, *environment))
        return replace(program, processes=launch.processes, notes=launch.notes)
    return _program(words if names_python else _found_on_path(words, environment), environment)


def _words(command: object) -> list[str]:
    try:
        if isinstance(command, str):
            return shlex.split(command)
    except ValueError as error:
        raise UsageError(f"{command!r} cannot be read as a shell would: {error}", hint=HINT) from None
    if not isinstance(command, Sequence) or isinstance(command, bytes):
        raise UsageError(f"{command!r} is no command", hint='"train.py --batch_size 8", or a list of words')
    return [str(word) for word in command]


def _program(words: list[str], environment: tuple[tuple[str, str], ...]) -> Program:
    if words[0] == "-m":
        return _module(words[1:], environment)
    if not words[0]:
        raise UsageError("which script?", hint=HINT)
    if words[0].startswith("-"):
        raise UsageError(
            f"{words[0]} is no flag of plan script", hint=f"what belongs to the script follows its name: {HINT}"
        )
    return _file(words, environment)


def _variables(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier() or Path(word).is_file():
            return
        yield name, value


def _without_switches(words: Sequence[str]) -> list[str]:
    left = list(words)
    while left and (left[0] in SWITCHES or left[0] in WITH_VALUE):
        del left[: 2 if left[0] in WITH_VALUE else 1]
    return left


def _module(words: Sequence[str], environment: tuple[tuple[str, str], ...]) -> Program:
    if not words or not words[0]:
        raise UsageError("-m: which module?", hint="memfit plan script -- -m package.train --lr 1e-4")
    if words[0] == "memfit":
        raise _of_memfit(words[1:])
    return Program(words[0], True, tuple(words[1:]), environment)


def _of_memfit(words: Sequence[str]) -> UsageError:
    """Its own commands are planned by themselves: a plan within a plan says nothing more."""
    ways = {"train": "memfit train --config FILE --dry-run", "prune": "memfit plan prune --model NAME"}
    command = next(iter(words), "")
    return UsageError(
        f"memfit {command} is planned without plan script".replace("  ", " "),
        hint=ways.get(command, "memfit plan forward|train|lora|generate|prune"),
    )


def _file(words: Sequence[str], environment: tuple[tuple[str, str], ...]) -> Program:
    path = Path(words[0])
    if path.is_dir() and (path / "__main__.py").is_file():
        path = path / "__main__.py"
    if path.name in SHELLS and not path.is_file():
        raise UsageError(f"{path.name} is no Python program", hint=f"name the one that it runs: {HINT}")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InputError(f"'{words[0]}' is not a file", hint="put the lines into one: it may be run more than once")
    if not path.is_file():
        raise InputError(
            f"there is no script '{words[0]}'",
            hint="a folder, not a file" if path.is_dir() else f"looked in '{os.getcwd()}'; a module is given with -m",
        )
    return Program(str(path), False, tuple(words[1:]), environment)


def _found_on_path(words: list[str], environment: tuple[tuple[str, str], ...]) -> list[str]:
    """As a shell finds a command that is a bare name. What is here under that name goes first."""
    name = words[0]
    path = Path(name)
    is_here = path.is_file() or (path / "__main__.py").is_file()
    if is_here or name in SHELLS or name.startswith("-") or path.name != name:
        return words
    found = shutil.which(name, path=dict(environment).get("PATH"))
    if name == "memfit":
        raise _of_memfit(words[1:])
    if found is None:
        return words
    try:
        with open(found, "rb") as file:
            begins = file.read(512)
    except OSError as error:
        raise InputError(f"cannot read '{found}', which '{name}' is: {error.strerror}") from error
    if not OF_PYTHON.match(begins):
        raise InputError(f"'{name}' is no file here, and {found} is no Python program", hint=HINT)
    return [found, *words[1:]]


def find_module(name: str) -> ModuleSpec:
    """With the working folder on the path; of a package, what `python -m` runs."""
    try:
        found = importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError, AttributeError):
        found = None
    if found is None or not hasattr(found.loader, "get_code"):
        raise InputError(f"there is no module '{name}'", hint=f"looked in '{os.getcwd()}' and in what is installed")
    return found
