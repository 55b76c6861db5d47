"""Kernels that a program compiles for itself: where CUDA would lie it finds a path, and what it compiles is refused.

A program may only import what compiles kernels, and never ask for one: it then runs as on a machine with CUDA.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from memfit.errors import TraceError
from memfit.tracing.answers import asking_line
from memfit.tracing.own_code import OwnCodeTracer

CUDA_HOME = "/usr/local/cuda"


@contextmanager
def kernels_not_compiled(tracer: OwnCodeTracer) -> Iterator[None]:
    with ExitStack() as stack:
        settled: list[Any] = []

        def settle() -> None:
            extensions: Any = sys.modules.get("torch.utils.cpp_extension")
            if settled or not hasattr(extensions, "_jit_compile"):
                return
            settled.append(extensions)
            if extensions.CUDA_HOME is None:
                stack.enter_context(mock.patch.object(extensions, "CUDA_HOME", CUDA_HOME))
            compiled = _refused_for_cuda(extensions._jit_compile, extensions._is_cuda_file, tracer)
            stack.enter_context(mock.patch.object(extensions, "_jit_compile", compiled))

        settle()
        with tracer.after_each_import(settle):
            yield


def _refused_for_cuda(
    compile_it: Callable[..., Any], is_of_cuda: Callable[[str], bool], tracer: OwnCodeTracer
) -> Callable[..., Any]:
    def compiled(name: str, sources: list[str], *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("with_cuda") or any(map(is_of_cuda, sources)):
            tracer.answers.refuse(
                TraceError(
                    f"{asking_line()}the code compiles CUDA kernels of its own ({name}), and what they allocate nobody"
                    " can tell without a GPU",
                    hint="many programs have the same in plain torch beside it, and a setting that chooses it",
                )
            )
        return compile_it(name, sources, *args, **kwargs)

    return compiled
