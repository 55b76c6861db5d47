"""Commands and names that the pages show exist: every flag, every import, every function."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer.main

import memfit
from memfit.cli.app import app_of

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page for page in PAGES if page.name not in ("log.md", "accuracy.md")]
"""The lab book tells of what was; the table of runs has no commands."""
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
ROOT_COMMAND: Any = typer.main.get_command(app_of())


def command_lines(page: Path) -> Iterator[list[str]]:
    """In blocks, and in a line of words where they have flags."""
    for typed in re.findall(r"`memfit ([a-z]+ [^`|]*--[^`|]*)`", page.read_text(encoding="utf-8")):
        yield shlex.split(typed.replace("...", ""))
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines() if language in ("", "console", "bash") else ():
            words = line.removeprefix("$ ").partition("torchrun")
            found = re.search(r"-m (memfit .*)", words[2]) if words[1] else re.match(r"(memfit [a-z-].*)", words[0])
            if found:
                yield shlex.split(re.split(r" [|<>] ", found[1])[0], comments=True)[1:]


def flags(command: Any) -> Iterator[str]:
    """`memfit plan KIND --json` stands for all of its kinds."""
    for each in command.params:
        yield from (*each.opts, *each.secondary_opts)
    for inner in getattr(command, "commands", {}).values():
        yield from flags(inner)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_on_a_page_is_one_with_flags_that_it_has(page: Path) -> None:
    for words in command_lines(page):
        command, rest = ROOT_COMMAND, list(words)
        while rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]
        rest = rest[: rest.index("--")] if "--" in rest else rest  # what follows is another program's
        known = {"--help", *flags(command)}
        typed = {word.partition("=")[0].replace("_", "-") for word in rest if re.match(r"--?[a-z]", word)}
        assert command is not ROOT_COMMAND or not rest or rest[0].startswith("-"), words
        assert typed <= known, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_of_memfit_on_a_page_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for language, block in BLOCK.findall(text):
        if language == "python" and ">>>" not in block:
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("memfit"):
                    module = import_module(node.module)
                    assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
    called = set(re.findall(r"`memfit\.(\w+)\(", text))
    assert called <= {*memfit.__all__}
