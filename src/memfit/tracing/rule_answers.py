"""What a rule answers to a call that was noted, with other numbers in it: the rule itself is run, on empty tensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

from memfit.events import Trace
from memfit.extrapolation.streams import CALLER, Ask, Outline, RuleAnswer
from memfit.platform import Platform
from memfit.tracing.answers import Answers
from memfit.tracing.kernels.products import Workspaces
from memfit.tracing.kernels.tables import HIDDEN, REPLACED
from memfit.tracing.rule_calls import Fixed, Form, ListForm, TensorForm, WholeNumber
from memfit.tracing.tracer import Tracer

_CALLER = "caller"
_ARGUMENT = "argument "


@lru_cache(maxsize=4)
def answers_on(platform: Platform) -> Ask:
    """What rules answer on a platform, remembered; raises whatever a rule raises."""
    rules = RuleAnswers(platform)
    return lru_cache(maxsize=8192)(rules.ask)


class RuleAnswers(Tracer):
    def __init__(self, platform: Platform) -> None:
        super().__init__(torch.device("meta"), platform, Answers())
        self.workspaces = _HeldWorkspaces(platform)
        self._form: Form | None = None
        self._arguments = 0

    @property
    def in_backward(self) -> bool:
        return self._form is not None and self._form.in_backward

    def surroundings(self) -> tuple[str, str, bool]:
        assert self._form is not None
        return _CALLER, "", self._form.outside

    def ask(self, form: Form, numbers: tuple[int, ...]) -> RuleAnswer:
        """With numbers that no tensor could have, torch raises."""
        self.trace, self._form, self._arguments = Trace(), form, 0
        self.modules._stack = [_CALLER] if form.inside_modules else []
        self.modules._base = [len(self.modules._stack) - form.above_backward]
        left = iter(numbers)
        arguments, named = self._made(form.arguments, left), dict(self._made(form.named, left))
        start, born = len(self.trace), len(self.trace.requested)
        with torch._C._AutoDispatchBelowAutograd():  # where a dispatch mode runs
            if form.hidden:
                result = HIDDEN[form.op](self, *arguments, **named)
            else:
                with self:
                    result = REPLACED[form.op](self, *arguments, **named)
        end = len(self.trace)
        self.forget()
        del result
        return self._answer(start, end, born)

    def _made(self, form: Any, numbers: Iterator[int]) -> Any:
        if isinstance(form, TensorForm):
            shape, stride = [next(numbers) for _ in range(form.rank)], [next(numbers) for _ in range(form.rank)]
            return self._tensor(shape, stride, next(numbers), form)
        if isinstance(form, WholeNumber):
            return next(numbers)
        if isinstance(form, ListForm):
            return form.kind(self._made(entry, numbers) for entry in form.entries)
        assert isinstance(form, Fixed)
        return form.value

    def _tensor(self, shape: list[int], stride: list[int], offset: int, form: TensorForm) -> torch.Tensor:
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else 0
        if form.device != self.device.type and extent > 1:
            raise ValueError("a rule looks at a tensor in host memory")
        made = torch.empty(offset + extent, dtype=form.dtype, device=form.device).as_strided(shape, stride, offset)
        self.track(made, "argument")
        block = self.block_of(made)
        if block is not None:
            self.trace.module_of[block] = self.trace.name_id(f"{_ARGUMENT}{self._arguments}")
        self._arguments += 1
        return made

    def _answer(self, start: int, end: int, born: int) -> RuleAnswer:
        trace, blocks = self.trace, range(born, len(self.trace.requested))
        outline = Outline(
            actions=tuple(trace.actions[start:end]),
            subjects=tuple(s - born for s in trace.subjects[start:end]),
            ops=tuple(trace.op(block) for block in blocks),
            modules=tuple(_whose(trace.module(block)) for block in blocks),
        )
        return RuleAnswer(outline, tuple(trace.requested[born:]))


class _HeldWorkspaces(Workspaces):
    """All are there already: what makes them is left in a trace as it was made."""

    def _hold(self, tracer: Tracer, kind: str, thread: str, size: int, stream: int | None = None) -> None:
        return


def _whose(module: str) -> int:
    return CALLER if module == _CALLER else int(module.removeprefix(_ARGUMENT))
