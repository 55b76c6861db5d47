"""Imports go down only: read off the syntax tree, so that one inside a function counts too."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "memfit"

WORDS = {"errors", "units", "gpus"}
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "units": {"errors"},
    "gpus": {"errors", "units"},
    "core": WORDS,
    "tracing": WORDS | {"core"},
    "models": WORDS | {"core"},
    "recording": WORDS | {"core"},
    "jobs": WORDS | {"core", "models", "recording"},
    "render": WORDS | {"core"},
    "planning": WORDS | {"core", "tracing", "models", "recording", "jobs", "render"},
    "advice": WORDS | {"core", "tracing", "models", "recording", "jobs", "render", "planning"},
    "web": WORDS | {"core", "tracing", "models", "recording", "jobs", "render", "planning", "advice"},
    "cli": WORDS | {"core", "tracing", "models", "recording", "jobs", "render", "planning", "advice", "web", "memfit"},
}
"""What each room may import of memfit, itself aside. render knows only core, so that planning may print itself."""

LATE = {"transformers", "peft", "accelerate"}
TORCH = {"torch", *LATE}
THIRD_PARTY: dict[str, set[str]] = {
    "errors": set(),
    "units": set(),
    "gpus": set(),
    "core": {"numpy", "mypy_extensions"},  # the latter only for the type checker and mypyc
    "tracing": {"torch"},
    "models": {"torch", "transformers", "huggingface_hub", "gguf", "tokenizers"},
    "recording": {"torch", "pynvml", "psutil", "transformers", "lightning", "pytorch_lightning"},
    "jobs": {*TORCH, "safetensors", "bitsandbytes", "triton", "huggingface_hub", "pyarrow", "lm_eval", "yaml"},
    "render": {"rich", "jinja2"},
    "planning": TORCH,
    "advice": TORCH,
    "web": {"fastapi", "uvicorn", "jinja2"},
    "cli": {"typer", "rich"},
}
"""Other packages that a room may import. planning has those with which it runs the Trainer on the traced device."""

FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem in ROOMS)


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    yield from named(ast.walk(ast.parse(path.read_text(encoding="utf-8"))), path)


def imports_at_once(path: Path) -> Iterator[str]:
    """Those of the file itself: neither inside a function nor for the type checker only."""
    yield from named(ast.parse(path.read_text(encoding="utf-8")).body, path)


def named(nodes: Iterable[ast.AST], path: Path) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own(path: Path) -> set[str]:
    """Rooms of memfit that a file imports; `memfit` itself is the public package."""
    names = [name.split(".") for name in imports(path) if name.split(".")[0] == "memfit"]
    return {parts[1] if len(parts) > 1 and parts[1] in ROOMS else "memfit" for parts in names}


def others(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)} - {"memfit"} - set(sys.stdlib_module_names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_rooms_below_its_own(path: Path) -> None:
    room = room_of(path)
    assert own(path) <= ROOMS[room] | {room}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_the_packages_that_its_room_may(path: Path) -> None:
    assert others(path) <= THIRD_PARTY[room_of(path)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_is_slow_to_import_is_imported_where_it_is_used(path: Path) -> None:
    # Models and settings of transformers' own kind, and its Trainer's subclass: imported only where one is built.
    own = ("models/gsa.py", "models/basics_settings.py", "jobs/training/trainer_engine.py")
    if path not in [PACKAGE / name for name in own]:
        assert not {name.split(".")[0] for name in imports_at_once(path)} & LATE


def test_every_room_says_which_packages_it_may_import() -> None:
    assert list(THIRD_PARTY) == list(ROOMS)


def test_core_and_render_have_no_torch() -> None:
    for room in ("core", "render", "errors", "units", "gpus"):
        assert not THIRD_PARTY[room] & TORCH


def test_every_folder_is_a_room_of_the_table() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if any(path.glob("*.py"))}
    assert folders <= set(ROOMS)


def test_the_table_itself_has_no_circle() -> None:
    order = list(ROOMS)
    for room, below in ROOMS.items():
        assert all(order.index(each) < order.index(room) for each in below if each in ROOMS)
