"""Compiles the hot part of `memfit.replay` with mypyc: at installation, and by `make` whenever its source has changed.

    python hatch_build.py      # needs mypy, setuptools and a C compiler; does nothing if there is nothing to do

Nothing depends on it. Without a C compiler, or if anything goes wrong, memfit is the same in Python, only slower.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand
    BuildHookInterface = object

ROOT = Path(__file__).parent
CORE = Path("src/memfit/replay")
SUFFIX = EXTENSION_SUFFIXES[0]


class CustomBuildHook(BuildHookInterface):  # type: ignore[misc]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        try:
            compiled = compile_core(Path(self.root))
        except (Exception, SystemExit) as why:
            self.app.display_warning(f"memfit was not compiled, and will be slower for it: {why!r}")
            return
        if version != "editable":
            build_data["artifacts"].append(f"/{compiled.as_posix()}/*{SUFFIX}*")
            build_data["pure_python"] = False
            build_data["infer_tag"] = True


def compile_core(root: Path) -> Path:
    """Where the compiled modules lie, below `root`. Raises anything, also SystemExit, if it cannot be done."""
    core = _module(root / CORE / "__init__.py")
    folder = root / CORE / core.FOLDER
    digest = core.source_digest(str(root / CORE))
    kept = folder / core.DIGEST
    if kept.is_file() and kept.read_text(encoding="ascii") == digest:
        return CORE / core.FOLDER
    _require_compiler()
    with TemporaryDirectory() as work:
        built = _built(root / "src", [f"memfit/replay/{name}.py" for name in core.COMPILED], Path(work))
        if core.source_digest(str(root / CORE)) != digest:
            raise RuntimeError("the source has changed meanwhile")
        folder.mkdir(exist_ok=True)
        kept.unlink(missing_ok=True)
        for old in folder.glob(f"*{SUFFIX}"):
            old.unlink()  # a process that has it loaded keeps it
        for made in built:
            _put(folder / made.name, made.read_bytes())
        _put(kept, digest.encode("ascii"))
    return CORE / core.FOLDER


def _require_compiler() -> None:
    """mypyc would take seconds before it found out."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "").split()
    if compiler and shutil.which(compiler[0]) is None:
        raise RuntimeError(f"there is no C compiler {compiler[0]!r}")
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        raise RuntimeError("Python's header files are not installed")


def _module(path: Path) -> ModuleType:
    """The package's own file, without the rest of the package, whose dependencies are not here."""
    spec = importlib.util.spec_from_file_location("memfit_replay", path, submodule_search_locations=[str(path.parent)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _built(source: Path, files: list[str], work: Path) -> list[Path]:
    """`skip`: other modules are looked up when the compiled ones run, as Python does."""
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    here = Path.cwd()
    os.chdir(source)
    try:
        options = ["--config-file=", f"--cache-dir={work / 'cache'}", "--follow-imports=skip", "--no-error-summary"]
        modules = mypycify(
            [*options, *files], group_name="memfit.replay.compiled", debug_level="0", target_dir=str(work / "c")
        )
        command = build_ext(Distribution({"name": "memfit", "ext_modules": modules}))
        command.build_lib, command.build_temp = str(work / "lib"), str(work / "objects")
        command.ensure_finalized()
        command.run()
    finally:
        os.chdir(here)
    return sorted((work / "lib" / "memfit" / "replay").glob(f"*{SUFFIX}"))


def _put(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(content)
    beside.chmod(0o755 if path.suffix == Path(SUFFIX).suffix else 0o644)
    beside.replace(path)


if __name__ == "__main__":
    try:
        compile_core(ROOT)
    except (Exception, SystemExit) as why:
        print(f"memfit was not compiled, and will be slower for it: {why!r}", file=sys.stderr)
