"""Numbers that nobody knows, in compiled code: `.item()` breaks the graph, and the code after it is given the number.

A run compiles that code for the first number, and for any number when a second one comes. Here it is compiled for any
number at once. What is decided by such a number, and what torch makes a constant of, is refused with the line.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch

from memfit.errors import TraceError
from memfit.tracing.compiled.torch_names import compiler
from memfit.tracing.unknown import UnknownWhole, is_unknown

MEMFIT = str(Path(__file__).parents[2])
STANDS_FOR_ANY, STANDS_FOR_ANY_WHOLE = 0.7310585786300049, 1543
"""Only Dynamo sees it, and nothing may depend on it."""
ONCE = (
    "compiled code goes on with a number that nobody knows, as .item() gives it: it is compiled for any number at once,"
    " in a run for the first one and then for any"
)
DECIDES = "compiled code decides by a number, or makes a size of it, that .item() gives and that nobody knows"
CONSTANT = "compiled code makes a constant of a number that .item() gives and that nobody knows: each is compiled anew"
OUT_OF_IT = (
    "take .item(), and what the code does with its number, out of the compiled function, or give a number for the line"
    " of .item(): --answer of plan script, answers of memfit.trace"
)


@contextmanager
def any_number(tell: Callable[[str], None], refuse: Callable[[TraceError], NoReturn]) -> Iterator[None]:
    """Dynamo reads an unknown number as it reads a float that was another one the last time."""
    torchs = compiler()
    builder, shapes = torchs.builder.VariableBuilder, torchs.symbolic_shapes.ShapeEnv
    wrap, evaluate = builder._wrap, shapes.evaluate_expr
    unknown: weakref.WeakKeyDictionary[Any, dict[Any, str]] = weakref.WeakKeyDictionary()
    """The symbols of numbers, and where each was first read."""

    def no_constant(*_: Any) -> NoReturn:
        refuse(TraceError(_place() + CONSTANT, hint=OUT_OF_IT))

    def wrapped(self: Any, value: Any) -> Any:
        if not is_unknown(value):
            return wrap(self, value)
        tell(ONCE)
        with (
            torchs.dynamo_config.patch({"assume_static_by_default": False}),
            mock.patch.object(self, "install_guards", no_constant),
        ):
            whole = isinstance(value, UnknownWhole)
            made = self.wrap_symint(STANDS_FOR_ANY_WHOLE) if whole else self.wrap_symfloat(STANDS_FOR_ANY)
        if (number := getattr(made, "sym_num", None)) is not None:
            places = unknown.setdefault(number.node.shape_env, {})
            places.update(dict.fromkeys(number.node.expr.free_symbols, _place()))
        return made

    def evaluated(self: Any, expression: Any, *args: Any, **kwargs: Any) -> Any:
        if found := [place for symbol, place in unknown.get(self, {}).items() if symbol in expression.free_symbols]:
            what = CONSTANT if expression.is_real and not expression.is_integer else DECIDES
            refuse(TraceError((_place() or found[0]) + what, hint=OUT_OF_IT))
        return evaluate(self, expression, *args, **kwargs)

    with mock.patch.object(builder, "_wrap", wrapped), mock.patch.object(shapes, "evaluate_expr", evaluated):
        yield


def _place() -> str:
    """The line of the code that Dynamo reads."""
    others = str(Path(torch.__file__).parent), MEMFIT
    stack = reversed(torch._guards.TracingContext.extract_stack())
    return next((f"{at.filename}:{at.lineno}: " for at in stack if not at.filename.startswith(others)), "")
