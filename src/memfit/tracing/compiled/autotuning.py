"""Generated kernels do nothing here, but those with several configurations are timed at their first launch.

Inductor's own heuristics say how many there are (torch/_inductor/runtime/triton_heuristics.py). Each is timed
(runtime/benchmarking.py, `benchmark_gpu`) beside a buffer as large as the card's L2 cache, with copies of what the
kernel changes in place. Recorded on an H200: exactly these buffers, in this order. What earlier runs left on disk
spares all of it.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memfit.events import Action, Trace
from memfit.extrapolation.reused import FLUSH, say
from memfit.tracing.compiled.pretended_gpu import flush_bytes
from memfit.tracing.compiled.torch_names import is_triton_here

DECORATED = re.compile(r"^@triton_heuristics\.(\w+\(.*?)^@triton\.jit\s+def \w+\((.*?)\):", re.MULTILINE | re.DOTALL)
TIMED = (
    "generated kernels are timed at their first launch, as in a first run: what earlier runs left in torch's cache on"
    " disk spares that, and some of what is reserved"
)
COPY = "autotuning: a copy of what a kernel changes"


@dataclass(frozen=True)
class KernelTiming:
    """How a kernel is timed."""

    configurations: int
    arguments: tuple[str, ...]
    changed: frozenset[str]
    within_peak: bool
    """Copies that would raise the peak are made on the host."""


def tuning_of(source: str) -> KernelTiming:
    found = DECORATED.search(source)
    if found is None:
        return KernelTiming(1, (), frozenset(), False)
    asked: dict[str, Any] = {}
    heuristics = import_module("torch._inductor.runtime.triton_heuristics")
    hints = import_module("torch._inductor.runtime.hints")

    def noted(_: Any, configs: list[Any], *__: Any, inductor_meta: dict[str, Any] | None = None, **___: Any) -> Any:
        asked.update(inductor_meta or {}, configs=heuristics.unique_configs(configs))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(heuristics, "cached_autotune", noted))
        if heuristics.Config is object:  # triton is not here
            for owner, name in ((heuristics, "Config"), (heuristics, "InductorConfig"), (heuristics.triton, "Config")):
                stack.enter_context(mock.patch.object(owner, name, _Config, create=True))
        stubs = dict.fromkeys(("AttrsDescriptor", "instance_descriptor"), lambda *_, **__: None)
        scope = {**stubs, **vars(hints), "torch": torch, "h": heuristics, "__file__": "kernel.py"}
        eval("h." + found[1].rstrip(), scope)
    arguments = tuple(each.split(":")[0].strip() for each in found[2].split(","))
    changed = frozenset(asked.get("mutated_arg_names", ()))
    return KernelTiming(len(asked.get("configs", [0])), arguments, changed, bool(asked.get("optimize_mem", True)))


class _Config:
    """triton's, where it is not installed."""

    def __init__(self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 3, **others: Any) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages
        vars(self).update(others)


class GeneratedKernels:
    """Those of one trace."""

    def __init__(self, tracer: Any) -> None:
        self.tracer = tracer
        self._tuned: set[str] = set()
        self._seen, self._now, self._most = 0, 0, 0

    def kernel(self, source: str) -> GeneratedKernel:
        return GeneratedKernel(source, self)

    def launch(self, source: str, args: Sequence[Any]) -> None:
        if source in self._tuned:
            return
        self._tuned.add(source)
        try:
            how = tuning_of(source)
        except Exception:  # a heuristic that asks for what is not here
            self.tracer.unmodelled["autotuning of a generated kernel"] = None
            return
        tracer = self.tracer
        configurations = self._compiled(source) or how.configurations
        if configurations < 2:
            return
        say(tracer.trace, TIMED)
        copies = [
            _stored(arg)
            for name, arg in zip(how.arguments, args, strict=False)
            if name in how.changed and isinstance(arg, torch.Tensor)
        ]
        for _ in range(configurations):
            kept = self._within_peak(copies) if how.within_peak else copies
            with tracer.making("workspaces"):
                self._copied(kept)
                with tracer.temporaries() as hold:
                    hold(flush_bytes(tracer.platform), FLUSH)
                    self._copied(kept)

    def _compiled(self, source: str) -> int | None:
        if REDUCTION not in source:
            return None
        if is_triton_here():
            with suppress(Exception):  # whatever triton says: then it is not known
                return configurations_compiled(source)
        say(self.tracer.trace, NO_TRITON)
        return None

    def _copied(self, sizes: list[int]) -> None:
        with self.tracer.temporaries() as hold:
            for size in sizes:
                hold(size, COPY)

    def _within_peak(self, copies: list[int]) -> list[int]:
        room, kept = self._room(self.tracer.trace), []
        for size in copies:
            if size <= room:
                room -= size
                kept.append(size)
        return kept

    def _room(self, trace: Trace) -> int:
        """How far what is allocated now lies below its peak so far."""
        for at in range(self._seen, len(trace)):
            action, block = trace.actions[at], trace.subjects[at]
            if action in (Action.ALLOC, Action.FREE):
                size = -(-max(trace.requested[block], 1) // 512) * 512
                self._now += size if action == Action.ALLOC else -size
                self._most = max(self._most, self._now)
        self._seen = len(trace)
        return self._most - self._now


def _stored(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


class GeneratedKernel:
    """What it would write lies in buffers that were made for it."""

    def __init__(self, source: str, kernels: GeneratedKernels) -> None:
        self._source, self._kernels = source, kernels

    def run(self, *args: Any, **_: Any) -> None:
        self._kernels.launch(self._source, args)

    __call__ = run

    def __getitem__(self, _: Any) -> Callable[..., None]:
        return self.run


# -- reductions that take many registers -------------------------------------------------------------------------------
# torch gives them one configuration more, with shorter rows at a time. It looks at the compiled kernel
# (triton_heuristics.py, `_dynamic_scale_rblock`). triton compiles without a card, so where it is installed the kernel
# is compiled here too, and torch's own rule is asked.


REDUCTION = "@triton_heuristics.reduction("
NO_TRITON = (
    "reductions that take many registers are timed on the card as well: which they are only triton tells, and it is not"
    " installed here"
)
DRIVER = "triton_helpers.set_driver_to_gpu()"
REGISTERS = re.compile(r"\bREG:(\d+)")


def configurations_compiled(source: str) -> int:
    """How many there are once the kernel is compiled. Nothing is left in torch's or triton's cache."""
    codecache = import_module("torch._inductor.codecache")
    helpers = import_module("torch._inductor.runtime.triton_helpers")
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
        with (
            _disable_current_modes(),
            mock.patch.dict(os.environ, caches),
            mock.patch.object(helpers, "set_driver_to_gpu", lambda *_: None),
        ):
            module = codecache.PyCodeCache.load(source.replace(DRIVER, ""))
            kernel = next(value for value in vars(module).values() if hasattr(value, "compile_results"))
            kernel.precompile(warm_cache_only=True)
            for made in kernel.compile_results:
                made.kernel.n_regs = _registers(made.kernel, Path(folder) / "kernel.cubin")
            with mock.patch.object(kernel, "_make_launchers", lambda: None):
                kernel._dynamic_scale_rblock()
            return len(kernel.compile_results)


def _registers(kernel: Any, file: Path) -> int:
    code = getattr(kernel, "cubin_raw", None) or kernel.asm["cubin"]
    file.write_bytes(code)
    triton = Path(str(import_module("triton").__file__)).parent
    said = subprocess.run(
        [str(triton / "backends" / "nvidia" / "bin" / "cuobjdump"), "--dump-resource-usage", str(file)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    found = REGISTERS.search(said)
    if found is None:
        raise ValueError("cuobjdump tells no registers")
    return int(found[1])
