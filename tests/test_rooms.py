"""The rooms of the house: imports go down only, and through a room's door. Read off the syntax tree, so that an import
inside a function counts too."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TypeVar

PACKAGE = Path(__file__).parents[1] / "src" / "memfit"

ORDER = (
    "errors", "units", "files", "versions", "environment", "gpus", "platform", "events", "replay", "snapshots",
    "analysis", "extrapolation", "tracing", "models", "recording", "jobs", "jobfiles", "render", "guides", "planning",
    "scripts", "fitting", "explaining", "checking", "running", "serving", "cli",
)  # fmt: skip
"""From the ground up. A room may use those before it, but for these:"""
NOT_USED: dict[str, tuple[str, ...]] = {
    "analysis": ("gpus",),
    "models": ("replay", "snapshots", "analysis", "extrapolation", "tracing"),
    "recording": ("analysis", "extrapolation", "tracing", "models"),
    "jobs": ("analysis", "extrapolation", "tracing"),
    "render": ("extrapolation", "tracing", "models", "recording", "jobs"),
}
"""Jobs run on a GPU and must not know the traced one; what is rendered is a document."""
LIBRARY = "memfit"
"""The public names. Only the commands use them."""

LATE = {"transformers", "peft", "accelerate"}
TORCH = {"torch", *LATE}
THIRD_PARTY: dict[str, set[str]] = {
    "events": {"numpy"},
    "replay": {"numpy", "mypy_extensions"},  # the latter only for the type checker and mypyc
    "snapshots": {"numpy"},
    "analysis": {"numpy"},
    "extrapolation": {"numpy"},
    "tracing": {"torch"},
    "models": {"torch", "transformers", "huggingface_hub", "gguf", "tokenizers"},
    "recording": {"torch", "pynvml", "psutil", "transformers", "lightning", "pytorch_lightning"},
    "jobs": {*TORCH, "safetensors", "bitsandbytes", "triton", "huggingface_hub", "pyarrow", "lm_eval", "yaml"},
    "jobfiles": {"yaml"},
    "render": {"rich"},
    "planning": {*TORCH, "numpy"},
    "scripts": {*TORCH, "tokenizers", "numpy", "PIL"},
    "fitting": TORCH,
    "explaining": TORCH,
    "checking": {*TORCH, "packaging"},
    "running": {"torch"},
    "serving": {"fastapi", "starlette", "uvicorn", "mcp"},
    "cli": {"typer", "rich"},
}
"""Other packages that a room may import. planning has those with which it runs the Trainer on the traced device."""

FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem in ORDER)
FOLDERS = sorted({path.parent for path in FILES} - {PACKAGE})


T = TypeVar("T")


def found_in(files: Iterable[Path], wrong: Callable[[Path], T]) -> dict[str, T]:
    """By file, what should not be there."""
    looked = {str(path.relative_to(PACKAGE)): wrong(path) for path in files}
    return {name: found for name, found in looked.items() if found}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path, *, at_once: bool = False) -> Iterator[tuple[str, str]]:
    """Module and name; `at_once`: not of what is imported inside a function, or for the type checker only."""
    tree = parsed(path)
    nodes: Iterable[ast.AST] = tree.body if at_once else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{path}: relative import"
            yield from ((node.module, alias.name) for alias in node.names)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def own_imports(path: Path) -> list[tuple[str, str]]:
    return [each for each in imports(path) if each[0].split(".")[0] == "memfit"]


def file_of(module: str) -> Path | None:
    """None: a name, no module."""
    inside = PACKAGE.joinpath(*module.split(".")[1:])
    found = [path for path in (inside.with_suffix(".py"), inside / "__init__.py") if path.is_file()]
    return found[0] if found else None


def used_rooms(path: Path) -> set[str]:
    return {(f"{module}.{name}".split(".")[1]) if module != LIBRARY or name in ORDER else LIBRARY
            for module, name in own_imports(path)}  # fmt: skip


def test_a_file_imports_only_rooms_below_its_own() -> None:
    def above(path: Path) -> set[str]:
        room = room_of(path)
        below = {*ORDER[: ORDER.index(room) + 1]} - {*NOT_USED.get(room, ())}
        return used_rooms(path) - below - ({LIBRARY} if room == "cli" else set())

    assert found_in(FILES, above) == {}


def test_a_file_imports_only_the_packages_that_its_room_may() -> None:
    def others(path: Path) -> set[str]:
        known = {"memfit", *sys.stdlib_module_names, *THIRD_PARTY.get(room_of(path), ())}
        return {module.split(".")[0] for module, _ in imports(path)} - known

    assert found_in(FILES, others) == {}


def test_what_is_slow_to_import_is_imported_where_it_is_used() -> None:
    # Models and settings of transformers' own kind, and its Trainer's subclass: imported only where one is built.
    built = {PACKAGE / name for name in ("models/gsa.py", "models/basics.py", "jobs/training/engine.py")}

    def slow(path: Path) -> set[str]:
        return {module.split(".")[0] for module, _ in imports(path, at_once=True)} & LATE

    assert found_in((path for path in FILES if path not in built), slow) == {}


def test_a_file_comes_into_another_room_through_its_door() -> None:
    def windows(path: Path) -> list[str]:
        return [
            f"{module}.{name}" for module, name in own_imports(path)
            if (there := entered(path, module, name)) is not None and not is_open(there, module, name)
        ]  # fmt: skip

    assert found_in(FILES, windows) == {}, "not named in the DOOR of that room's __init__.py"


def entered(path: Path, module: str, name: str) -> Path | None:
    """The folder into which an import comes past its `__init__.py`; None for its own, and for files that stand in no
    room. A room inside another is one of its own."""
    file = file_of(f"{module}.{name}") or file_of(module)
    if file is None or file.name == "__init__.py" or file.parent in (PACKAGE, path.parent):
        return None
    return file.parent


def is_open(folder: Path, module: str, name: str) -> bool:
    room = ".".join(("memfit", *folder.relative_to(PACKAGE).parts))
    door: dict[str, str] = getattr(import_module(room), "DOOR", {})
    return name in door.get(module.removeprefix(room).lstrip("."), "").split()  # "": files that are used whole


def test_a_door_names_only_what_is_there_and_what_others_use() -> None:
    used = {path: own_imports(path) for path in PACKAGE.rglob("*.py")}

    def unused(folder: Path) -> list[tuple[str, str]]:
        room = ".".join(("memfit", *folder.relative_to(PACKAGE).parts))
        door: dict[str, str] = getattr(import_module(room), "DOOR", {})
        named = [(f"{room}.{file}".rstrip("."), name) for file, names in door.items() for name in names.split()]
        others = {each for path, imported in used.items() if path.parent != folder for each in imported}
        return [each for each in named if each not in others or named.count(each) > 1]

    assert found_in(FOLDERS, unused) == {}, "or named twice"


def test_what_is_below_tracing_and_what_renders_have_no_torch() -> None:
    for room in ("replay", "snapshots", "analysis", "extrapolation", "render"):
        assert not THIRD_PARTY[room] & TORCH


def test_every_folder_is_a_room_of_the_table() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if any(path.glob("*.py"))}
    assert folders <= set(ORDER)
    assert set(THIRD_PARTY) <= set(ORDER)


def test_no_room_has_more_than_twenty_files() -> None:
    assert found_in(FOLDERS, lambda folder: len(list(folder.glob("*.py"))) > 20) == {}


def test_a_class_name_occurs_once() -> None:
    found: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(str(path.relative_to(PACKAGE)))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
