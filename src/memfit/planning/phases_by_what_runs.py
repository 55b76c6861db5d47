"""Phases told from what runs, for code that does not say them: forward, but inside `backward()` and an optimizer's
`step()`. A step ends when the optimizer has stepped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def phases_by_what_runs(tracer: Any) -> Iterator[None]:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    mark, step, depth = tracer.trace.mark, 1, 0

    def stepping(*_: Any) -> None:
        nonlocal depth
        depth += 1
        if depth == 1:  # an optimizer may have another one inside
            mark("step", step)

    def stepped(*_: Any) -> None:
        nonlocal step, depth
        depth -= 1
        if depth == 0:
            mark("zero", step)
            step += 1

    def around_backward(begins: bool) -> None:
        mark("backward" if begins else "data", step)

    def entering(module: Any, _: Any) -> None:
        if tracer.modules.depth <= 1 and tracer.trace.marks[-1].phase not in ("forward", "backward"):
            mark("forward", step)

    from torch.nn.modules.module import register_module_forward_pre_hook

    mark("data", step)
    tracer.on_backward = around_backward
    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(stepping).remove)
        stack.callback(register_optimizer_step_post_hook(stepped).remove)
        stack.callback(register_module_forward_pre_hook(entering).remove)
        yield
    tracer.on_backward = lambda begins: None
