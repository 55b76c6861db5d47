"""Numbers that nobody knows before a job runs, such as a loss: they can be printed and reckoned with, not decided by.

`loss.item()` is asked for a log far more often than for a decision. So the answer is a number without a value: sums and
means of it are unknown too, texts show it as "?", and only where the code branches by it is a question asked, which the
table of answers knows, or the person answers, or stops the trace with the line.
"""

from __future__ import annotations

import dis
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from numbers import Number
from types import CodeType, FrameType
from typing import Any
from unittest import mock

SHOWN = "?"
_WIDTH = re.compile(r"(?:.?[<>=^])?[-+ ]?z?#?0?(\d*)")
_FINITE = {"isfinite": True, "isnan": False, "isinf": False}
_COMPARES = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "logical_not")
FINITE_NOTE = "losses, norms and gradients are finite wherever the code looks"

Decide = Callable[[], bool]
_REMAINDERS = (6, 19)
"""Of BINARY_OP, `%` and `%=`."""


def _formats_text(asker: FrameType) -> bool:
    """Whether it is at `"%d" % number`, which asks for a whole number from C: one on the left would not ask here."""
    code, at = asker.f_code.co_code, asker.f_lasti
    name = dis.opname[code[at]]
    return name == "BINARY_MODULO" or (name == "BINARY_OP" and code[at + 1] in _REMAINDERS)


_JUMPS = {"POP_JUMP_IF_TRUE": True, "POP_JUMP_IF_FALSE": False}
_ASKS = ("COMPARE_OP", "CALL", "TO_BOOL", "UNARY_NOT", "CALL_METHOD", "CALL_FUNCTION")
_BETWEEN = ("TO_BOOL", "CACHE", "EXTENDED_ARG", "NOT_TAKEN", "NOP")


def answer_without_error(asker: FrameType) -> bool | None:
    """Where a line only checks (`assert x.all()`, `if bad: raise ValueError`), what lets the program go on."""
    code = asker.f_code
    instructions = _instructions(code)
    at = {each.offset: number for number, each in enumerate(instructions)}.get(asker.f_lasti)
    if at is None or _is_tried(code, asker.f_lasti):
        return None
    answer = True
    while (name := instructions[at].opname.replace("_FORWARD", "").replace("_BACKWARD", "")) not in _JUMPS:
        if name not in (_ASKS if instructions[at].offset == asker.f_lasti else (*_BETWEEN, "UNARY_NOT")):
            return None
        answer ^= name == "UNARY_NOT"
        at += 1
    jumps_if = _JUMPS[name] is answer
    target = next(number for number, each in enumerate(instructions) if each.offset == instructions[at].argval)
    fails = _only_raises(instructions, target), _only_raises(instructions, at + 1)
    return None if fails[0] == fails[1] else jumps_if is not fails[0]


@cache
def _instructions(code: CodeType) -> list[dis.Instruction]:
    return list(dis.get_instructions(code))


def _only_raises(instructions: list[dis.Instruction], at: int) -> bool:
    for each in instructions[at:]:
        if each.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in each.opname or each.opname.startswith(("RETURN", "STORE", "YIELD", "FOR_ITER")):
            return False
    return False


def _is_tried(code: CodeType, offset: int) -> bool:
    """Whether the same function may catch what is raised there."""
    instructions = _instructions(code)
    if not hasattr(code, "co_exceptiontable"):  # Python 3.10
        return any(each.opname == "SETUP_FINALLY" for each in instructions)
    names = {each.offset: number for number, each in enumerate(instructions)}
    for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        if entry.start <= offset < entry.end:
            handler = [each.opname for each in instructions[names[entry.target] :][:2]]
            if handler[0] == "PUSH_EXC_INFO" and handler[1] != "WITH_EXCEPT_START":
                return True
    return False


class UnknownNumber(float):
    """NaN to whatever reads it as a plain float, numpy for one."""

    _decide: Decide
    _assume: Callable[[str], None] = staticmethod(lambda what: None)
    """Of the trace that runs."""

    def __new__(cls, decide: Decide) -> UnknownNumber:
        made = super().__new__(cls, math.nan)
        made._decide = decide
        return made

    def _same(self) -> UnknownNumber:
        return UnknownNumber(self._decide)

    def _with(self, other: Any, *_: Any) -> UnknownNumber:
        return UnknownNumber(self._decide) if isinstance(other, Number) else NotImplemented

    def _pair(self, other: Any) -> tuple[UnknownNumber, UnknownNumber]:
        return (self._same(), self._same()) if isinstance(other, Number) else NotImplemented

    def _compare(self, other: Any) -> bool:
        return NotImplemented if _is_array(other) else self._decide()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __pow__ = __rpow__ = _with
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _with
    __neg__ = __pos__ = __abs__ = _same
    __divmod__ = __rdivmod__ = _pair
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _compare

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """`np.sqrt(loss)` of a number is as unknown as the loss; among numbers of an array it is NaN."""
        if method != "__call__" or kwargs or function.nout > 1 or any(map(_is_array, inputs)):
            plain = (math.nan if isinstance(each, UnknownNumber) else each for each in inputs)
            return getattr(function, method)(*plain, **kwargs)
        if (name := function.__name__) in _FINITE:
            self._assume(FINITE_NOTE)
            return _FINITE[name]
        return self._decide() if name in _COMPARES else UnknownNumber(self._decide)

    def __bool__(self) -> bool:
        return self._decide()

    def __int__(self) -> int:
        return 0 if _formats_text(sys._getframe(1)) else int(self._decide())

    def __index__(self) -> int:
        return int(self._decide())

    # Asked about once it is an index or a count.
    __trunc__ = __ceil__ = __floor__ = _same  # type: ignore[assignment]

    def __round__(self, digits: Any = None) -> Any:
        return self._same()

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return SHOWN

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        found = _WIDTH.match(spec)
        return SHOWN.rjust(int(found[1] or 0) if found else 0)

    def __reduce__(self) -> Any:
        return float, (math.nan,)


class UnknownWhole(UnknownNumber):
    """What a tensor of whole numbers has: a count, mostly."""


class UnknownAboveZero(UnknownNumber):
    """A time, a temperature: nobody knows it, but that it is above zero, as are its sums and shares."""

    def _made_with(self, other: Any = 1) -> Any:
        if _is_array(other):
            return NotImplemented
        above = isinstance(other, UnknownAboveZero) or (not isinstance(other, UnknownNumber) and other > 0)
        return (UnknownAboveZero if above else UnknownNumber)(self._decide)

    def _sum(self, other: Any) -> Any:
        if _is_array(other):
            return NotImplemented
        return self._made_with(1 if not isinstance(other, UnknownNumber) and other == 0 else other)

    __add__ = __radd__ = _sum
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __abs__ = __pos__ = _made_with

    def _is_above(self, other: Any) -> bool:
        return isinstance(other, (int, float)) and not isinstance(other, UnknownNumber) and other <= 0

    def _is_more(self, other: Any) -> bool:
        return NotImplemented if _is_array(other) else self._is_above(other) or self._decide()

    def _is_no_more(self, other: Any) -> bool:
        return NotImplemented if _is_array(other) else not self._is_above(other) and self._decide()

    __gt__ = __ge__ = __ne__ = _is_more
    __lt__ = __le__ = __eq__ = _is_no_more

    def __bool__(self) -> bool:
        return True

    __hash__ = UnknownNumber.__hash__


def _is_array(value: Any) -> bool:
    """A tensor or an array of numpy, which answers for each of its numbers."""
    return hasattr(value, "__array__") and not isinstance(value, Number)


def is_unknown(value: object) -> bool:
    return isinstance(value, UnknownNumber)


@contextmanager
def mathematics_of_unknown_numbers(assume: Callable[[str], None]) -> Iterator[None]:
    """`math.exp(loss)` is as unknown as the loss; whether it is finite is the one thing that is taken for granted."""

    def either(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*args: Any, **kwargs: Any) -> Any:
            unknown = next((value for value in args if isinstance(value, UnknownNumber)), None)
            if unknown is None:
                return real(*args, **kwargs)
            if name in _FINITE:
                assume(FINITE_NOTE)
                return _FINITE[name]
            return unknown + 0

        return compute

    import torch

    found: dict[str, Any] = {
        name: real for name, real in vars(math).items() if callable(real) and not name.startswith("_")
    }
    compile_script: Any = torch.jit.script

    def script(*args: Any, _frames_up: int = 0, **kwargs: Any) -> Any:
        """It knows Python's own functions, and compiles others; names of a class it looks up where it was called."""
        with mock.patch.multiple(math, **found):
            return compile_script(*args, _frames_up=_frames_up + 1, **kwargs)

    instead: dict[str, Any] = {name: either(name, real) for name, real in found.items()}
    with (
        mock.patch.object(UnknownNumber, "_assume", staticmethod(assume)),
        mock.patch.multiple(math, **instead),
        mock.patch.object(torch.jit, "script", script),
    ):
        yield
