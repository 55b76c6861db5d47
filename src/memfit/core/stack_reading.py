"""What a recorded stack says about the allocation it belongs to: the line of code, and which kind of work it was.

Nothing is guessed from sizes. A stack without a Python frame was made by autograd's own thread, which runs the backward
pass in C++; frames of `torch/optim` are an optimizer's; and so on. What says nothing is `OTHER`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from memfit.core.snapshot_schema import Frame

_TORCH = re.compile(r"(?:^|[/\\])torch[/\\]")
_OPTIMIZER = re.compile(r"(?:^|[/\\])(?:torch[/\\]optim|bitsandbytes[/\\]optim|apex[/\\]optimizers)[/\\]")
_AUTOGRAD = re.compile(r"(?:^|[/\\])torch[/\\](?:autograd|utils[/\\]checkpoint\.py)")
_LOSS = re.compile(r"(?:^|[/\\])(?:torch[/\\]nn[/\\]modules[/\\]loss\.py|transformers[/\\]loss[/\\])")
_LOSS_FUNCTIONS = {"cross_entropy", "nll_loss", "mse_loss", "l1_loss", "binary_cross_entropy_with_logits", "kl_div"}
_FUNCTIONAL = re.compile(r"(?:^|[/\\])torch[/\\]nn[/\\]functional\.py$")
_MODULE = re.compile(r"(?:^|[/\\])torch[/\\]nn[/\\](?:modules[/\\]|parameter\.py)")
_MAKING_WEIGHTS = {"__init__", "_apply", "reset_parameters", "load_state_dict", "__new__"}
_LOADING = {"from_pretrained", "_load_pretrained_model", "_load_state_dict_into_meta_model"}
_PYTHON = (".py", ".pyx", ".pyi")


class Work(IntEnum):
    """Which part of a training step asked for memory, as far as its stack tells."""

    OTHER = 0
    BACKWARD = 1
    OPTIMIZER = 2
    LOADING = 3
    LOSS = 4


def is_python(frame: Frame) -> bool:
    return frame.filename.endswith(_PYTHON) or frame.filename.startswith("<")


def code_line(frames: Sequence[Frame]) -> str:
    """Where a person would look: the innermost Python line outside torch, or else the innermost one.

    >>> code_line([Frame("site-packages/torch/nn/functional.py", 9, "linear"), Frame("/home/me/gpt/model.py", 3, "up")])
    'me/gpt/model.py:3 up'
    """
    found = None
    for frame in frames:
        if is_python(frame):
            found = found or frame
            if not _TORCH.search(frame.filename):
                return line_text(frame)
    return line_text(found) if found else ""


def line_text(frame: Frame) -> str:
    return f"{short_path(frame.filename)}:{frame.line} {frame.name}".rstrip()


def short_path(path: str) -> str:
    """From the package on, or the last three parts."""
    path = path.replace("\\", "/")
    for home in ("site-packages/", "dist-packages/"):
        if home in path:
            return path.rpartition(home)[2]
    return "/".join(path.rsplit("/", 3)[-3:]) if path.count("/") > 2 else path


def work_of(frames: Sequence[Frame], *, other_thread: bool = False) -> Work:
    """`other_thread`: the stack does not begin where the program's own stacks begin."""
    python = [frame for frame in frames if is_python(frame)]
    if not python:
        return Work.BACKWARD
    if any(_OPTIMIZER.search(frame.filename) for frame in python):
        return Work.OPTIMIZER
    if other_thread or any(_AUTOGRAD.search(f.filename) and f.name in ("backward", "grad", "apply") for f in python):
        return Work.BACKWARD
    if any(_makes_weights(frame) for frame in python):
        return Work.LOADING
    return Work.LOSS if any(_makes_loss(frame) for frame in python) else Work.OTHER


def _makes_weights(frame: Frame) -> bool:
    return frame.name in _LOADING or (frame.name in _MAKING_WEIGHTS and bool(_MODULE.search(frame.filename)))


def _makes_loss(frame: Frame) -> bool:
    if _LOSS.search(frame.filename):
        return True
    return frame.name in _LOSS_FUNCTIONS and bool(_FUNCTIONAL.search(frame.filename))


def works(
    stacks: Sequence[Sequence[int]], table: Sequence[Frame], count: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Of each stack its `Work`. `count` is how many allocations it has: where most of those stacks end in the
    program's `<module>`, one that does not was made in another thread, by a hook of the backward pass."""
    frames = [[table[i] for i in stack] for stack in stacks]
    rooted = np.array([any(frame.name == "<module>" for frame in each) for each in frames], dtype=bool)
    python = np.array([any(map(is_python, each)) for each in frames], dtype=bool)
    ends_in_module = 2 * int(count[rooted].sum()) > int(count[python].sum())
    return np.array(
        [
            work_of(each, other_thread=ends_in_module and not rooted[i] and bool(python[i]))
            for i, each in enumerate(frames)
        ],
        dtype=np.int64,
    )
