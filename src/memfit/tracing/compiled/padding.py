"""Products with an odd side are timed while they are compiled, padded and not: what that takes, and both answers.

torch makes operands of its own for it (torch/_inductor/fx_passes/pad_mm.py, `_should_pad`) and runs both beside a
buffer as large as the L2 cache. torch's own code runs here too, on the traced device; which of the two is the faster
only the card would know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from memfit.extrapolation.reused import COPIES, FLUSH, say
from memfit.tracing.compiled.pretended_gpu import flush_bytes
from memfit.tracing.compiled.torch_names import compiler

PADS = (
    "some products have a side that is no multiple of 8 (4 in fp32): torch times them on the card, padded and not"
    " (pad_mm), and takes the faster. With TORCHINDUCTOR_SHAPE_PADDING=0, in the plan and in the run, none is padded:"
    " less is allocated at most places, and what is reserved may be more or less"
)
OPERAND = "timing of a product: an operand"
_padded: ContextVar[bool] = ContextVar("padded", default=False)


@contextmanager
def products_padded() -> Iterator[None]:
    """As if padding were the faster wherever torch asks."""
    token = _padded.set(True)
    try:
        yield
    finally:
        _padded.reset(token)


class TimedProducts:
    """Those of one trace: what was timed once is known."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._known: dict[str, Any] = {}
        self._copies = 0
        """Bytes that padding the product would take that is asked about."""

    @contextmanager
    def asked(self) -> Iterator[None]:
        pads, known = compiler().pad_mm, self._known
        with mock.patch.multiple(
            pads,
            _should_pad=self._timing(pads._should_pad),
            get_do_bench=lambda: self._timed,
            is_padded_faster=self._is_padded_faster,
            no_dispatch=nullcontext,
            get_cached_should_pad=known.get,
            get_cached_base_mm_benchmark_time=known.get,
            set_cached_should_pad=known.__setitem__,
            set_cached_base_mm_benchmark_time=known.__setitem__,
        ):
            yield

    def _timing(self, should_pad: Callable[..., bool]) -> Callable[..., bool]:
        def asked(*args: Any, **kwargs: Any) -> bool:
            self._copies = _copies(*args[1:3])
            before, self._tracer.maker = self._tracer.maker, ""
            with ExitStack() as stack:
                stack.callback(setattr, self._tracer, "maker", before)
                stack.enter_context(_disable_current_modes())
                stack.enter_context(mock.patch.multiple(torch, randn=self._empty, randn_like=self._like))
                stack.enter_context(torch.no_grad())
                stack.enter_context(self._tracer)
                stack.enter_context(self._tracer.making("workspaces"))
                stack.enter_context(_OnTheCard())
                return should_pad(*args, **kwargs)

        return asked

    def _empty(self, size: int, *, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        return self._named(torch.empty(size, dtype=dtype, device=self._tracer.device))

    def _like(self, operand: torch.Tensor) -> torch.Tensor:
        device = self._tracer.device
        return self._named(torch.empty_strided(operand.shape, operand.stride(), dtype=operand.dtype, device=device))

    def _named(self, operand: torch.Tensor) -> torch.Tensor:
        trace = self._tracer.trace
        if (block := self._tracer.block_of(operand)) is not None:
            trace.op_of[block] = trace.name_id(OPERAND)
        return operand

    def _timed(self, product: Callable[[], None]) -> float:
        product()
        with self._tracer.temporaries() as hold:
            hold(flush_bytes(self._tracer.platform), FLUSH)
            product()
        return 1.0

    def _is_padded_faster(self, key: str, *_: float) -> bool:
        trace = self._tracer.trace
        say(trace, PADS)
        most, in_all = trace.facts.get(COPIES, (0, 0))
        trace.facts[COPIES] = [max(most, self._copies), in_all + self._copies]
        self._known[key] = _padded.get()
        return _padded.get()


def _copies(left: torch.Tensor, right: torch.Tensor) -> int:
    """Bytes of the padded copies of a product's operands, and by how much its result is larger, as they are allocated.
    A dynamic length is only looked at: as a number it would be fixed."""
    pads, *sizes = compiler().pad_mm, left.shape[-2], left.shape[-1], right.shape[-1]
    m, k, n = (_number(size) for size in sizes)
    more = [int(pads.get_padded_length(size, pads.get_alignment_size(left))) for size in sizes]
    rows, inner, columns = (size + beside for size, beside in zip((m, k, n), more, strict=True))
    entry = math.prod(map(_number, left.shape[:-2])) * left.element_size()
    size = _allocated(rows * columns * entry) - _allocated(m * n * entry)
    size += _allocated(rows * inner * entry) if more[0] or more[1] else 0
    size += _allocated(inner * columns * entry) if more[1] or more[2] else 0
    return size


def _allocated(size: int) -> int:
    return -(-size // 512) * 512


def _number(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


class _OnTheCard(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func == torch.Tensor.is_cuda.__get__ or func(*args, **(kwargs or {}))  # type: ignore[attr-defined]
