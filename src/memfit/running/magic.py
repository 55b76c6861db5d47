"""`%load_ext memfit`: `%memfit` and `%%memfit` in a notebook measure code on a GPU, or predict it without one.

    %%memfit --gpu 24GB
    loss = model(batch).loss
    loss.backward()

On a GPU the cell runs as it would, and its recording is reported. Without one, or with `--predict`, it runs on the
pretended GPU in a copy of the notebook's names: nothing that it makes is left behind.
"""

from __future__ import annotations

import ast
import linecache
import shlex
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType
from typing import Any

from memfit.errors import MemfitError, UsageError
from memfit.gpus import find_gpu
from memfit.planning.own_code import trace_own_code
from memfit.planning.predict import Plan
from memfit.recording.recorder import record
from memfit.render.shown import FileReport, report

CELL = "<cell>"
FLAGS = "%%memfit [--gpu NAME|SIZE] [--predict], or %memfit [the same] -- one line of code"


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext memfit` calls."""

    def magic(line: str, cell: str | None = None) -> Plan | FileReport | None:
        try:
            return look_at(shell, line, cell)
        except MemfitError as error:  # a traceback means a bug in memfit
            sys.stderr.write("\n  ".join([f"error: {error.message}", *([error.hint] if error.hint else [])]) + "\n")
            return None

    shell.register_magic_function(magic, magic_kind="line_cell", magic_name="memfit")


def look_at(shell: Any, line: str, cell: str | None) -> Plan | FileReport:
    gpu, predicts, code = _read(line, cell)
    if gpu is not None:
        find_gpu(gpu)
    import torch

    made = _compiled(shell, code)
    if not predicts and gpu is None and torch.cuda.is_available():
        return _measured(shell, made)

    def cell_alone() -> None:
        exec(made, dict(shell.user_ns))

    cell_alone.__qualname__ = "of the cell"
    return trace_own_code(cell_alone, gpu=gpu, name="cell")


def _measured(shell: Any, made: CodeType) -> FileReport:
    """Where the cell fails, as for want of memory, its report stands above its error."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cell.pickle"
        try:
            with record(path):
                exec(made, shell.user_ns)
        except Exception:
            if path.is_file():
                import_module("IPython.display").display(report(path))
            raise
        return report(path)


def _compiled(shell: Any, code: str) -> CodeType:
    """Its lines are kept where tracebacks look for them."""
    source = shell.transform_cell(code)
    linecache.cache[CELL] = len(source), None, source.splitlines(keepends=True), CELL
    try:
        return compile(ast.parse(source, CELL), CELL, "exec")
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"the cell is not Python that can be read: {error}") from error


def _read(line: str, cell: str | None) -> tuple[str | None, bool, str]:
    """(the card, whether to predict in any case, the code)."""
    flags, code = (line, cell) if cell is not None else _parted(line)
    try:
        words = shlex.split(flags)
    except ValueError as error:
        raise UsageError(f"%memfit {flags}: {error}", hint=FLAGS) from error
    gpu, predicts = None, False
    while words:
        word = words.pop(0)
        if word == "--predict":
            predicts = True
        elif word == "--gpu" and words:
            gpu = words.pop(0)
        else:
            raise UsageError(f"%memfit {word}: no such flag", hint=FLAGS)
    if not code.strip():
        raise UsageError("%memfit: there is no code", hint=FLAGS)
    return gpu, predicts, code


def _parted(line: str) -> tuple[str, str]:
    """Flags stand before two dashes; a line without flags is all code."""
    if not line.lstrip().startswith("--"):
        return "", line
    flags, _, code = f" {line} ".partition(" -- ")
    return flags, code.strip()
