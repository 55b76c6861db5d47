"""Which lines of Python ask for memory, as torch's recorder would have it, for traces that are to become snapshots.

    with keeping_stacks():
        made = trace(fn)            # made.stack_of, made.stacks and made.frames are filled

Frames of memfit's own that no run on a GPU would have are left out. A GPU runs the backward pass in a thread without
Python frames, so a recording shows nothing there. A trace knows more: the op of the forward pass whose gradient is
being made, and shows its stack as that of its backward.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FrameType

import torch

from memfit.analysis.stacks import BACKWARD_OF
from memfit.events import FrameRow, Trace
from memfit.tracing.node_numbers import NodeNumbers

_wanted: ContextVar[bool] = ContextVar("wanted", default=False)

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(_HERE)
OURS = tuple(os.path.join(_PACKAGE, room, "") for room in ("tracing", "planning", "scripts", "cli"))
_TORCH = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "")
_DISPATCH = tuple(
    os.path.join(_TORCH, *parts)
    for parts in (("_ops.py",), ("overrides.py",), ("utils", "_python_dispatch.py"), ("utils", "_device.py"))
)
"""Of torch, what Python runs only because a mode looks on."""
_ENGINE = os.path.join(_TORCH, "autograd", "graph.py"), "_engine_run_backward"
_TRACE = os.path.join(_HERE, "tracer.py"), "run_traced"
_MODULE = os.path.join(_TORCH, "nn", "modules", "module.py")


@contextmanager
def keeping_stacks() -> Iterator[None]:
    before = _wanted.set(True)
    try:
        yield
    finally:
        _wanted.reset(before)


def stacks_of(trace: Trace, numbers: NodeNumbers) -> PythonStacks | None:
    """None unless somebody wants them: reading a stack takes as long as tracing an op."""
    return PythonStacks(trace, numbers) if _wanted.get() else None


class PythonStacks:
    def __init__(self, trace: Trace, numbers: NodeNumbers) -> None:
        self.trace, self._numbers = trace, numbers
        self._codes: dict[int, CodeType] = {}
        """By their ids, which stay theirs for as long as they are here."""
        self._known: dict[tuple[int, ...], int] = {}
        self._backward_of: dict[int, int] = {}
        self._with_lines: dict[tuple[int, tuple[FrameRow, ...]], int] = {}
        self._forward: dict[int, int] = {}
        """Stacks of the forward pass, by the numbers of the nodes that autograd made there."""

    def passes(self) -> None:
        """An op begins: if it has a node, that has just been made, and others that run within it come later."""
        number, in_engine = self._python()
        if number or not in_engine:
            self._forward.setdefault(torch._C._autograd._get_sequence_nr() - 1, number)

    def note(self, lines: tuple[FrameRow, ...] = ()) -> None:
        """Where the block that is about to be made is asked for; `lines` were compiled to what asks."""
        column = self.trace.stack_of
        column.extend([0] * (len(self.trace.requested) - len(column)))  # what nobody asked for: a library's workspace
        number, in_engine = self._python()
        if lines:
            number = self._compiled_from(number, lines)
        column.append(self._of_forward() if in_engine and not number else number)

    def _compiled_from(self, stack: int, lines: tuple[FrameRow, ...]) -> int:
        if (stack, lines) not in self._with_lines:
            frames = [self.trace.frames[i] for i in self.trace.stacks[stack]]
            self._with_lines[stack, lines] = self.trace.stack_id([*lines, *frames])
        return self._with_lines[stack, lines]

    def _of_forward(self) -> int:
        """Of the op whose gradient is made now."""
        node = torch._C._current_autograd_node()
        stack = 0 if node is None else self._forward.get(self._numbers.as_made(node), 0)
        if not stack:
            return 0
        if stack not in self._backward_of:
            frames = [self.trace.frames[i] for i in self.trace.stacks[stack]]
            own = next((i for i, (file, _, _) in enumerate(frames) if not file.startswith(_TORCH)), 0)
            for i in {0, own}:  # the op, and where a person looks
                file, line, name = frames[i]
                frames[i] = file, line, f"{BACKWARD_OF}{name}"
            self._backward_of[stack] = self.trace.stack_id(frames)
        return self._backward_of[stack]

    def _python(self) -> tuple[int, bool]:
        """The stack of this thread up to where the traced code, or the backward pass, begins; and which of them."""
        places: list[int] = []
        in_engine = self._walk(sys._getframe(2), places)
        if in_engine is None and (waiting := _waiting_for_threads()) is not None:
            in_engine = self._walk(waiting, places)
        key = tuple(places)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self.trace.stack_id(self._frames(places))
        return found, bool(in_engine)

    def _walk(self, frame: FrameType | None, places: list[int]) -> bool | None:
        """Whether it ended in the backward pass; None where neither that nor the traced code is below the frame."""
        while frame is not None:
            code = frame.f_code
            if code.co_name in (_ENGINE[1], _TRACE[1]) and (code.co_filename, code.co_name) in (_ENGINE, _TRACE):
                return code.co_name == _ENGINE[1]
            places += (id(code), frame.f_lasti)
            self._codes.setdefault(id(code), code)
            frame = frame.f_back
        return None

    def _frames(self, places: list[int]) -> list[FrameRow]:
        named: list[FrameRow] = []
        inner: CodeType | None = None
        for code, at in zip((self._codes[number] for number in places[::2]), places[1::2], strict=True):
            if code.co_filename.startswith(OURS) or code.co_filename in _DISPATCH or _is_hook(code):
                continue
            if code is inner and code.co_filename.startswith(_TORCH):  # it has called itself for a mode's sake
                continue
            named.append((code.co_filename, _line(code, at), code.co_name))
            inner = code
        return named


def _waiting_for_threads() -> FrameType | None:
    """Where the main thread waits while another one works for it, as it does for the weights that threads load."""
    main = threading.main_thread().ident
    if main is None or main == threading.get_ident():
        return None
    frame = sys._current_frames().get(main)
    return frame if frame is not None and frame.f_code.co_filename == threading.__file__ else None


def _is_hook(code: CodeType) -> bool:
    """A module's call goes through this only where somebody looks on, as the tracer does."""
    return code.co_name == "inner" and code.co_filename == _MODULE


def _line(code: CodeType, at: int) -> int:
    line = code.co_firstlineno
    for start, _, number in code.co_lines():
        if start > at:
            break
        line = number or line
    return line
