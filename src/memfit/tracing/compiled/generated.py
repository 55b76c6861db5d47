"""The code that Inductor has generated, run on the traced device with kernels that do nothing.

It is the plan of memory itself: which buffers are made and when, which are used again, when each is dropped, which
kernels of libraries are called and on what. Nothing of it has to be read; it is run. What only a kernel's result would
need is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from memfit.analysis.stacks import BACKWARD_OF
from memfit.events import FrameRow
from memfit.extrapolation.reused import COMPILED
from memfit.tracing.answers import GENERATED
from memfit.tracing.compiled.autotuning import GeneratedKernels
from memfit.tracing.compiled.torch_names import compiler, is_triton_here

REUSED = re.compile(r"^( +)(buf\d+) = (?:reinterpret_tensor\()?(\w+).*; del \3  # reuse$", re.MULTILINE)
"""A line that uses a buffer again that nobody needs any more."""
MADE = re.compile(r"^( +)(buf\d+) = (?!buf\d+|reinterpret_tensor)", re.MULTILINE)
"""A line that makes a buffer, or asks a library's kernel for one."""
OF_TRITON = ("import triton", "from torch._inductor.runtime.triton_heuristics")
LINE = re.compile(r'File "(.+)", line (\d+), in (.+)')
"""As torch keeps the place in the code for which it has made a node of a graph."""
BETWEEN = ("data", "zero")
"""Phases that end where a model is called."""


@dataclass(frozen=True)
class Origin:
    """For whose sake a buffer of compiled code is made."""

    module: str = ""
    lines: tuple[FrameRow, ...] = ()
    """Of the code that was compiled, the innermost first."""


class GeneratedCode:
    """In place of the module that Inductor would write to a file and import."""

    __file__ = GENERATED

    def __init__(
        self, text: str, constants: Mapping[str, Any], kernels: GeneratedKernels, whose: Mapping[str, Origin]
    ) -> None:
        """`whose`: where a buffer comes from, by its name in the text."""
        tracer = kernels.tracer
        self._tracer, self._caller = tracer, ""
        scope: dict[str, Any] = {"__name__": "inductor_generated", "__file__": GENERATED}
        with _kernels_left_out(kernels, self._empty):
            exec(compile(_prepared(text), GENERATED, "exec"), scope)

        def at(buffer: str) -> None:
            origin = whose.get(buffer, Origin())
            tracer.maker, tracer.lines = called_by(self._caller, origin.module), origin.lines

        def reuse(buffer: str, old: torch.Tensor) -> None:
            at(buffer)
            tracer.passed_on(old)

        scope |= constants
        scope |= {"at_buffer": at, "reuse_buffer": reuse, "torch": _TorchOfGraph(), "device": self._device}
        for name in ("assert_size_stride", "assert_alignment"):
            scope[name] = lambda *_: None
        self._call = scope["call"]
        self.runner = scope.get("runner")

    def call(self, args: Any) -> Any:
        trace = self._tracer.trace
        if not self._tracer.in_backward and trace.marks and trace.marks[-1].phase in BETWEEN:
            self._tracer.on_call()  # a compiled function calls none of its modules
        began = len(trace)
        before = self._tracer.maker, self._tracer.lines
        self._caller = self._tracer.surroundings()[0]
        self._tracer.maker = self._caller
        try:
            with (
                torch.no_grad(),
                torch._C.DisableTorchFunction(),
                mock.patch.object(torch.cuda, "_DeviceGuard", lambda _: nullcontext()),
                mock.patch.object(torch.cuda, "set_device", lambda _: None),
            ):
                return self._call(args)
        finally:
            self._tracer.maker, self._tracer.lines = before
            trace.facts.setdefault(COMPILED, []).append([began, len(trace)])

    def _empty(self, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=self._tracer.device)

    def _device(self, type: str, index: int = 0) -> torch.device:
        device: torch.device = self._tracer.device
        return device if type == "cuda" else torch.device(type, index)


def _prepared(text: str) -> str:
    if not is_triton_here():
        text = "\n".join(line for line in text.splitlines() if not line.startswith(OF_TRITON))
    text = REUSED.sub(r"\1reuse_buffer('\2', \3)\n\g<0>", text)
    return MADE.sub(r"\1at_buffer('\2')\n\g<0>", text)


@contextmanager
def _replaced(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


@contextmanager
def _kernels_left_out(kernels: GeneratedKernels, empty: Callable[..., torch.Tensor]) -> Iterator[None]:
    asynchronous = compiler().async_compile.AsyncCompile
    by_triton = {"triton": lambda _, name, source, *__, **___: kernels.kernel(source)}
    others = {name: lambda *_, **__: kernels.kernel("") for name in ("cpp_pybinding", "cpp", "multi_kernel")}
    with (
        _replaced(asynchronous, by_triton | others),
        mock.patch.object(asynchronous, "wait", lambda *_, **__: None),
        mock.patch.object(torch._C._dynamo.guards, "_empty_strided_cuda", empty, create=True),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda *_: 0, create=True),
    ):
        yield


class _TorchOfGraph:
    """`torch` as the generated code sees it: an op that is run again with the same random numbers is just run."""

    def __init__(self) -> None:
        self.ops = _OpsOfGraph()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _OpsOfGraph:
    higher_order = SimpleNamespace(
        graphsafe_run_with_rng_state=lambda op, *args, rng_state=None, **kwargs: op(*args, **kwargs)
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops, name)


def called_by(caller: str, module: str) -> str:
    """What was compiled for one block runs for others too: the same part of the block that is called."""
    parts, found = caller.split("."), module.split(".")
    same = len(parts) <= len(found) and all(
        a == b or (a.isdigit() and b.isdigit()) for a, b in zip(parts, found, strict=False)
    )
    return ".".join([*parts, *found[len(parts) :]]) if caller and same else module or caller


def whose_buffers(graph: Any, name_of: Callable[[str], str]) -> dict[str, Origin]:
    """Of the buffers of a lowered graph: what made each, or whose gradient it is a part of. `name_of` knows the modules
    by their `id`, as text."""
    found: dict[str, Origin] = {}
    for buffer in graph.buffers:
        origins = getattr(buffer, "origins", ())
        node = getattr(buffer, "origin_node", None) or next(iter(origins), None)
        if node is not None:
            found[buffer.get_name()] = Origin(_module_of(node, name_of), _lines_of(node, backward=graph.is_backward))
    return found


def _lines_of(node: Any, *, backward: bool) -> tuple[FrameRow, ...]:
    found = [(file, int(line), name) for file, line, name in LINE.findall(node.meta.get("stack_trace") or "")]
    if found and backward:
        file, line, name = found[-1]
        found[-1] = file, line, f"{BACKWARD_OF}{name}"
    return tuple(reversed(found))


def _module_of(node: Any, name_of: Callable[[str], str]) -> str:
    for key in ("nn_module_stack", "fwd_nn_module_stack"):
        for ident in reversed(node.meta.get(key) or {}):
            if name := name_of(str(ident)):
                return name
    return ""
