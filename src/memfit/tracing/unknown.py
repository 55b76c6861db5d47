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
from types import FrameType
from typing import Any
from unittest import mock

SHOWN = "?"
_WIDTH = re.compile(r"(?:.?[<>=^])?[-+ ]?z?#?0?(\d*)")
_FINITE = {"isfinite": True, "isnan": False, "isinf": False}
FINITE_NOTE = "losses, norms and gradients are finite wherever the code looks"

Decide = Callable[[], bool]
_REMAINDERS = (6, 19)
"""Of BINARY_OP, `%` and `%=`."""


def _formats_text(asker: FrameType) -> bool:
    """Whether it is at `"%d" % number`, which asks for a whole number from C: one on the left would not ask here."""
    code, at = asker.f_code.co_code, asker.f_lasti
    name = dis.opname[code[at]]
    return name == "BINARY_MODULO" or (name == "BINARY_OP" and code[at + 1] in _REMAINDERS)


class UnknownNumber(float):
    """NaN to whatever reads it as a plain float, numpy for one."""

    _decide: Decide

    def __new__(cls, decide: Decide) -> UnknownNumber:
        made = super().__new__(cls, math.nan)
        made._decide = decide
        return made

    def _same(self, *_: Any) -> UnknownNumber:
        return UnknownNumber(self._decide)

    def _pair(self, *_: Any) -> tuple[UnknownNumber, UnknownNumber]:
        return self._same(), self._same()

    def _compare(self, _: Any) -> bool:
        return self._decide()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _same
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _same
    __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = _same
    __divmod__ = __rdivmod__ = _pair
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _compare

    def __bool__(self) -> bool:
        return self._decide()

    def __int__(self) -> int:
        return 0 if _formats_text(sys._getframe(1)) else int(self._decide())

    def __index__(self) -> int:
        return int(self._decide())

    # Asked about once it is an index or a count.
    __trunc__ = __ceil__ = __floor__ = __round__ = _same  # type: ignore[assignment]

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

    def _made_with(self, other: Any = 1) -> UnknownNumber:
        above = isinstance(other, UnknownAboveZero) or (not isinstance(other, UnknownNumber) and other > 0)
        return (UnknownAboveZero if above else UnknownNumber)(self._decide)

    def _sum(self, other: Any) -> UnknownNumber:
        return self._made_with(1 if not isinstance(other, UnknownNumber) and other == 0 else other)

    __add__ = __radd__ = _sum
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __abs__ = __pos__ = _made_with

    def _is_above(self, other: Any) -> bool:
        return isinstance(other, (int, float)) and not isinstance(other, UnknownNumber) and other <= 0

    def _is_more(self, other: Any) -> bool:
        return self._is_above(other) or self._decide()

    def _is_no_more(self, other: Any) -> bool:
        return not self._is_above(other) and self._decide()

    __gt__ = __ge__ = __ne__ = _is_more  # type: ignore[assignment]
    __lt__ = __le__ = __eq__ = _is_no_more  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return True

    __hash__ = UnknownNumber.__hash__


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
    compile_script = torch.jit.script

    def script(*args: Any, **kwargs: Any) -> Any:
        """It knows Python's own functions, and compiles others."""
        with mock.patch.multiple(math, **found):
            return compile_script(*args, **kwargs)

    instead: dict[str, Any] = {name: either(name, real) for name, real in found.items()}
    with (
        mock.patch.multiple(math, **instead),
        mock.patch.object(torch.jit, "script", script),
    ):
        yield
