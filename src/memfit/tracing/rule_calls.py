"""Which rules a trace has asked, and about what: so that they can be asked again about tensors of other sizes.

What a kernel allocates beyond its results has thresholds: a reduction is split over thread blocks or not, indices are
sorted or not. The rule knows them, and nobody else has to. All that a rule looks at is noted when it is asked: the
shapes and layouts of its arguments as a list of numbers, the rest as a `Form`. With other numbers in the same form it
tells what the same call would allocate there (`RuleAnswers`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from memfit.extrapolation.streams import RuleCall

if TYPE_CHECKING:
    from memfit.tracing.tracer import Tracer


class Form(NamedTuple):
    """A call without its numbers, and as much of its surroundings as a rule may ask for."""

    op: Any
    hidden: bool
    """Buffers that come after the op's results; else the rule makes the results too."""
    arguments: Any
    named: Any
    in_backward: bool
    inside_modules: bool
    above_backward: bool
    outside: bool
    """What is made here belongs to the module of what it is made from."""


class TensorForm(NamedTuple):
    dtype: torch.dtype
    rank: int
    device: str


class ListForm(NamedTuple):
    kind: type
    entries: tuple[Any, ...]


class Fixed(NamedTuple):
    """Anything but a tensor or a whole number. Its type stands beside it, because True == 1.0."""

    kind: type
    value: Any


class WholeNumber(NamedTuple):
    pass


class RuleCalls:
    """The calls of one trace in their order. What rules ask of each other belongs to the outermost."""

    def __init__(self) -> None:
        self.made: list[RuleCall] = []
        self._inside = False
        self._as_traced = False

    def as_traced(self) -> None:
        """The rule that runs now is about a list of weights: what it makes is the same for every batch and length."""
        self._as_traced = True

    @contextmanager
    def noted(self, tracer: Tracer, op: Any, hidden: bool, arguments: tuple[Any, ...], named: Any) -> Iterator[None]:
        if self._inside:
            yield
            return
        module, category, outside = tracer.surroundings()
        modules, taken = tracer.modules, _FormWriter(tracer, module)
        form = Form(
            op,
            hidden,
            taken.form(arguments),
            taken.form(tuple(named.items())),
            tracer.in_backward,
            modules.depth > 0,
            modules.depth_above_backward > 0,
            outside,
        )
        start, self._inside, self._as_traced = len(tracer.trace), True, False
        try:
            yield
        finally:
            self._inside = False
        if not self._as_traced:
            argument_modules = tuple(taken.modules) if outside else ()
            end = len(tracer.trace)
            self.made.append(RuleCall(form, tuple(taken.numbers), start, end, module, category, argument_modules))


@dataclass(slots=True)
class _FormWriter:
    tracer: Tracer
    caller: str
    numbers: list[int] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)

    def form(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            shape = value.shape
            self.numbers += (*shape, *value.stride(), int(value.storage_offset()))
            block = self.tracer.block_of(value)
            self.modules.append(self.caller if block is None else self.tracer.trace.module(block))
            return TensorForm(value.dtype, len(shape), value.device.type)
        kind = type(value)
        if kind is int:
            self.numbers.append(value)
            return WholeNumber()
        if isinstance(value, (tuple, list)):
            return ListForm(tuple if isinstance(value, tuple) else list, tuple([self.form(entry) for entry in value]))
        return Fixed(kind, value)
