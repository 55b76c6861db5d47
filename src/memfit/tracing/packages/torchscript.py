"""TorchScript in a trace: torch.jit.trace writes down what runs, as memfit does itself; scripted code runs op by op."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from memfit.errors import TraceError
from memfit.tracing.answers import asking_line
from memfit.tracing.own_code import OwnCodeTracer

WRITERS = ("torch.utils.tensorboard.writer", "tensorboardX.writer")
NO_GRAPH = "the graph of a model for TensorBoard (add_graph) is not written: the model ran once, as for it"
OP_BY_OP = (
    "not modelled: what torch.jit.script makes of code on a GPU from its third call on: it is planned op by op, and"
    " there ops become one, which keeps other tensors for backward"
)


@contextmanager
def torchscript_traced(tracer: OwnCodeTracer, is_own: Callable[[str], bool]) -> Iterator[None]:
    trace: Any = torch.jit.trace
    script: Any = torch.jit.script

    def script_noted(code: Any, *args: Any, _frames_up: int = 0, **kwargs: Any) -> Any:
        if is_own(sys._getframe(1).f_code.co_filename):
            tracer.assume(OP_BY_OP)
        return script(code, *args, _frames_up=_frames_up + 1, **kwargs)

    def trace_on_host(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, torch.Tensor) and tracer.owns(each) for each in tree_leaves((args, kwargs))):
            tracer.answers.refuse(
                TraceError(
                    f"{asking_line()}the code uses torch.jit.trace, which memfit does not cover",
                    hint="leave it out of the traced code: the model itself takes the same memory, or more",
                )
            )
        return trace(*args, **kwargs)

    def run_once(_: Any, model: torch.nn.Module, input_to_model: Any = None, *args: Any, **kwargs: Any) -> None:
        given = input_to_model if isinstance(input_to_model, (tuple, list)) else (input_to_model,)
        trains = model.training
        try:
            model.eval()(*given)
        finally:
            model.train(trains)
        tracer.assume(NO_GRAPH)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.jit, "trace", trace_on_host))
        stack.enter_context(mock.patch.object(torch.jit, "script", script_noted))
        settled: set[str] = set()

        def settle() -> None:
            for name in set(WRITERS) - settled:
                writer = getattr(sys.modules.get(name), "SummaryWriter", None)
                if writer is not None:
                    settled.add(name)
                    stack.enter_context(mock.patch.object(writer, "add_graph", run_once))

        with tracer.after_each_import(settle):
            yield
