"""`memfit.replay._compiled`: machine code of the same source, used only while it is the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import memfit.replay

ROOT = Path(__file__).parents[2]
PACKAGE = Path(memfit.replay.__file__).parents[1]
COMPILED = PACKAGE / "replay" / memfit.replay.FOLDER

compiled = pytest.mark.skipif(
    not memfit.replay._is_of_this_source(str(COMPILED)),
    reason="not compiled: `make setup` does so",
)


def run(*command: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], env={**os.environ, "MEMFIT_PURE": "", **env}, capture_output=True, text=True,
        check=True, timeout=300,
    )  # fmt: skip
    return done.stdout


def copy(folder: Path) -> Path:
    """The package without what needs torch, where it can be edited."""
    kept = folder / "memfit"
    kept.mkdir()
    for name in ("__init__.py", "environment.py", "errors.py", "events.py", "files.py", "units.py"):
        shutil.copy(PACKAGE / name, kept)
    shutil.copytree(PACKAGE / "replay", kept / "replay", ignore=shutil.ignore_patterns("__pycache__"))
    return kept / "replay"


def file_of_allocator(folder: Path, **env: str) -> Path:
    line = "import memfit.replay.allocator as a; print(a.__file__)"
    return Path(run("-c", line, PYTHONPATH=str(folder), **env).strip())


@compiled
def test_compiled_code_and_the_python_it_was_made_of_come_to_the_same() -> None:
    script = str(Path(__file__).with_name("replayed.py"))
    file, *lines = run(script).splitlines()
    python_file, *python_lines = run(script, MEMFIT_PURE="1").splitlines()
    assert (Path(file).parent, Path(python_file).name) == (COMPILED, "allocator.py")
    assert len(lines) == 600
    assert lines == python_lines


@compiled
def test_an_edited_file_is_not_shadowed_by_what_was_compiled_before(tmp_path: Path) -> None:
    replay = copy(tmp_path)
    assert file_of_allocator(tmp_path).parent == replay / memfit.replay.FOLDER
    with (replay / "blocks.py").open("a") as source:
        source.write("# edited\n")
    assert file_of_allocator(tmp_path) == replay / "allocator.py"


def test_a_variable_does_without_what_was_compiled(tmp_path: Path) -> None:
    replay = copy(tmp_path)
    assert file_of_allocator(tmp_path, MEMFIT_PURE="1") == replay / "allocator.py"


def test_nothing_compiled_is_needed(tmp_path: Path) -> None:
    replay = copy(tmp_path)
    shutil.rmtree(replay / memfit.replay.FOLDER, ignore_errors=True)
    assert file_of_allocator(tmp_path) == replay / "allocator.py"


def test_without_a_compiler_nothing_is_compiled_and_that_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    replay = copy(tmp_path / "src")
    shutil.rmtree(replay / memfit.replay.FOLDER, ignore_errors=True)
    shutil.copy(ROOT / "hatch_build.py", tmp_path)
    run(str(tmp_path / "hatch_build.py"), CC=str(tmp_path / "no-compiler"))
    assert not (replay / memfit.replay.FOLDER).exists()
