"""`%load_ext memfit`: `%memfit` and `%%memfit` in a notebook measure code on a GPU, or predict it without one.

    %%memfit --gpu 24GB
    loss = model(batch).loss
    loss.backward()

On a GPU the cell runs as it would, and its recording is reported. Without one, or with `--predict`, it runs on the
pretended GPU in a copy of the notebook's names: nothing that it makes is left behind.
"""

from __future__ import annotations

import ast
import shlex
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from memfit.errors import MemfitError, UsageError
from memfit.gpus import find_gpu
from memfit.planning.own_code import trace_own_code
from memfit.planning.predict import Plan
from memfit.recording.recorder import record
from memfit.render.recorded import FileReport, report

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

    if predicts or gpu is not None or not torch.cuda.is_available():
        return _predict(shell, code, gpu)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cell.pickle"
        with record(path):
            shell.run_cell(code).raise_error()
        return report(path)


def _read(line: str, cell: str | None) -> tuple[str | None, bool, str]:
    """(the card, whether to predict in any case, the code)."""
    flags, code = (line, cell) if cell is not None else _parted(line)
    words, gpu, predicts = shlex.split(flags), None, False
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
    flags, _, code = f"{line} ".partition(" -- ")
    return flags, code


def _predict(shell: Any, code: str, gpu: str | None) -> Plan:
    made = compile(ast.parse(shell.transform_cell(code), "<cell>"), "<cell>", "exec")

    def cell() -> None:
        exec(made, dict(shell.user_ns))

    return trace_own_code(cell, gpu=gpu, name="cell")
