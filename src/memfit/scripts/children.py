"""Processes that a program starts by itself: of those that do the same, the first runs here; others are refused.

A pool that prepares data may run beside: it has no part in what the GPU holds.
"""

from __future__ import annotations

import multiprocessing.process
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from memfit.analysis.stacks import is_own
from memfit.errors import TraceError
from memfit.tracing.answers import asking_line

LIBRARIES = ("multiprocessing", "concurrent")


class EndedAtOnce:
    """What `spawn(join=False)` gives: its processes have run."""

    def join(self, *_: Any, **__: Any) -> bool:
        return True


@contextmanager
def processes_at_home(assume: Callable[[str], None]) -> Iterator[None]:
    import torch.multiprocessing

    package: Any = torch.multiprocessing
    module: Any = sys.modules["torch.multiprocessing.spawn"]
    start, fork, leave, here = multiprocessing.process.BaseProcess.start, os.fork, os._exit, os.getpid()

    def spawn(fn: Callable[..., Any], args: Any = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any) -> Any:
        if nprocs > 1:
            assume(f"of the {nprocs} processes that the code spawns, the first is planned")
        fn(0, *args)
        return None if join else EndedAtOnce()

    def start_known(process: Any) -> None:
        made_by = getattr(process._target, "__module__", None) or type(process).__module__
        if str(made_by).partition(".")[0] not in LIBRARIES:
            raise _refusal("starts a process of its own", "what it does on a GPU would not be seen: call its function")
        start(process)

    def only_libraries(real: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if os.getpid() == here and is_own(sys._getframe(1).f_code.co_filename):
                raise _refusal(what, "leave that line out of what is planned")
            return real(*args)

        return call

    def never_here(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if os.getpid() == here:
                raise _refusal("puts another program in its place", f"plan that program: {args[0]}")
            return real(*args)

        return call

    with ExitStack() as stack:
        for owner in (package, module):
            stack.enter_context(mock.patch.object(owner, "spawn", spawn))
            stack.enter_context(mock.patch.object(owner, "start_processes", spawn))
        stack.enter_context(mock.patch.object(multiprocessing.process.BaseProcess, "start", start_known))
        stack.enter_context(mock.patch.object(os, "fork", only_libraries(fork, "forks")))
        for name in ("execl", "execle", "execlp", "execlpe", "execv", "execve", "execvp", "execvpe"):
            stack.enter_context(mock.patch.object(os, name, never_here(getattr(os, name))))
        stack.enter_context(mock.patch.object(os, "_exit", only_libraries(leave, "ends the whole process")))
        yield


def _refusal(what: str, hint: str) -> TraceError:
    return TraceError(f"{asking_line()}the code {what}, and memfit runs it in one process", hint=hint)
