"""Where calls of a model are told instead of run: for modules that are called by no other one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from memfit.tracing.repeated.calls import RepeatedCalls
from memfit.tracing.repeated.passes import RepeatedPasses, Unlike

__all__ = ["Unlike", "repeated_calls_skipped"]


@contextmanager
def repeated_calls_skipped(names: Any, is_own: Callable[[str], bool]) -> Iterator[None]:
    """`is_own`: whether a file is the person's own: what its hooks may do nobody knows."""
    calls, passes, tracer = RepeatedCalls(names), RepeatedPasses(names, is_own), names.tracer
    call, around = torch.nn.Module.__call__, tracer.on_backward

    def call_or_repeat(module: Any, *args: Any, **kwargs: Any) -> Any:
        if tracer.modules.depth or tracer.in_backward or (module.training and not torch.is_grad_enabled()):
            return call(module, *args, **kwargs)
        repeated = passes if torch.is_grad_enabled() else calls
        return repeated.run(module, lambda: call(module, *args, **kwargs), args, kwargs)

    def around_backward(begins: bool) -> None:
        passes.around_backward(begins)
        around(begins)

    tracer.on_backward = around_backward
    with mock.patch.object(torch.nn.Module, "__call__", call_or_repeat):
        yield
    tracer.on_backward = around
