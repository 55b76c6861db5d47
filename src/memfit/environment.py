"""Variables of the environment that set torch's allocator and compiler, and values that torch does not survive.

torch ends the process at `expandable_segments=True` (torch 2.11 for CUDA) without a word, and makes the folder of its
compiler's files as soon as transformers is imported, compiled or not: told before it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from memfit.errors import UsageError

CUDA_VARIABLE, NEW_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
VARIABLES = (CUDA_VARIABLE, "PYTORCH_HIP_ALLOC_CONF", NEW_VARIABLE)
"""In the order in which torch looks for them: the first that is there wins."""
COMPILER_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
COMPILER_READS = ("TORCH_COMPILE", "TORCHDYNAMO", "TORCHINDUCTOR", "AOT_")
"""How variables begin by which torch's compiler is told what to do, when it is imported."""


def exported(environment: Mapping[str, str]) -> dict[str, str]:
    """Each variable that is set; torch reads the first."""
    return {name: environment[name] for name in VARIABLES if environment.get(name)}


def refuse_what_torch_dies_of(environment: Mapping[str, str]) -> None:
    for name, text in exported(environment).items():
        if any("=" in setting and ":" not in setting for setting in text.split(",")):
            raise UsageError(
                f"{name}={text}: a setting is written key:value", hint=f"export {name}={text.replace('=', ':')}"
            )
    if folder := environment.get(COMPILER_FOLDER):
        _refuse_folder(Path(folder).absolute())


def _refuse_folder(folder: Path) -> None:
    there = next((each for each in (folder, *folder.parents) if os.path.lexists(each)), folder)
    if not there.is_dir() or (there != folder and not os.access(there, os.W_OK | os.X_OK)):
        raise UsageError(
            f"{COMPILER_FOLDER}={folder}: torch cannot make that folder, as {there} is "
            + ("not writable" if there.is_dir() else "no folder"),
            hint=f"unset {COMPILER_FOLDER}, or export it with a folder that can be written",
        )
