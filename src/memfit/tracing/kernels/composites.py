"""Ops that torch writes in terms of others, in another way on CUDA than elsewhere; gradients summed in place.

`F.dropout` is one fused op on CUDA and three plain ones elsewhere; attention is one of four kernels; softmax of fp16
into fp32 needs no fp32 copy of its input. These are put in place at autograd's level of the dispatcher, so that they
hold inside checkpointed blocks run again by backward as well, where Python's own overriding modes are off. Inference
mode skips that level: there the tracer makes the same replacements (`REPLACED`).

Gradients that meet: the engine adds in place on a GPU, and out of place while a dispatch mode is watching.

Where a tensor was used twice, autograd's engine sums the two gradients. It writes into the first one if nobody else
holds it (`InputBuffer::accumulate` in torch/csrc/autograd/input_buffer.cpp), but never under a mode, where it takes
every tensor for a subclass. A trace would show one tensor too many at each residual connection. So the engine's own
condition is asked here: is it the engine that adds, and is it the only holder?
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from types import FrameType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.platform import Platform
from memfit.tracing.kernels.attention import attention
from memfit.tracing.kernels.layouts import added, is_dense
from memfit.tracing.kernels.losses import COMPOSITES as LOSSES
from memfit.tracing.kernels.recurrent import COMPOSITES as RECURRENT

if TYPE_CHECKING:
    from memfit.tracing.tracer import Tracer


aten = torch.ops.aten
Tensor = torch.Tensor


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """native/Dropout.cpp: a fused kernel with a bool mask for 0 < p < 1; p = 1 multiplies by zeros."""
    if not train or p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype, device=x.device)
    out: Tensor = aten.native_dropout(x, p, train)[0]
    return out


def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """native/SoftMax.cpp: half to float inside the kernel, for fp16 only."""
    if x.dtype == torch.float16 and dtype == torch.float32:
        return aten._softmax(x, dim, True)  # type: ignore[no-any-return]
    return aten._softmax(x if dtype is None else x.to(dtype), dim, False)  # type: ignore[no-any-return]


def _log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    if x.dtype == torch.float16 and dtype == torch.float32:
        return aten._log_softmax(x, dim, True)  # type: ignore[no-any-return]
    return aten._log_softmax(x if dtype is None else x.to(dtype), dim, False)  # type: ignore[no-any-return]


class FusedRmsNorm(torch.autograd.Function):
    """CUDA's fused op with its own backward; elsewhere torch has only the composite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None) -> Tensor:
        rows = x.contiguous()
        out = torch.empty_like(rows)
        rstd = torch.empty(*x.shape[: -len(shape)], *(1 for _ in shape), dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, rstd)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        dx, dw = aten._fused_rms_norm_backward(grad, x, ctx.shape, rstd, weight, wanted)
        return dx, None, dw


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """native/layer_norm.cpp: fused, unless a weight has another dtype."""
    if weight is None or weight.dtype == x.dtype:
        return FusedRmsNorm.apply(x, shape, weight)  # type: ignore[no-any-return]
    return aten.rms_norm.default.decompose(x, shape, weight, eps)  # type: ignore[no-any-return]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """native/Linear.cpp: where rows do not lie one after the other, the bias is added afterwards."""
    if bias is None or x.dim() < 3 or x.is_contiguous():
        return aten.linear.default.decompose(x, weight, bias)  # type: ignore[no-any-return]
    return added(torch.matmul(x, weight.t()), bias)


def _sdpa(platform: Platform) -> Callable[..., Tensor]:
    def sdpa(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        return attention(platform, q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    return sdpa


def _replacements(platform: Platform) -> dict[str, Callable[..., Any]]:
    return {
        "scaled_dot_product_attention": _sdpa(platform),
        "dropout": _dropout,
        "softmax.int": _softmax,
        "log_softmax.int": _log_softmax,
        "rms_norm": _rms_norm,
        "linear": _linear,
        **RECURRENT,
        **LOSSES,
        "mish_backward": _mish_backward,
    }


def _mish_backward(grad: Tensor, x: Tensor) -> Tensor:
    """native/cuda/ActivationMishKernel.cu: one kernel; elsewhere it is made of others."""
    if torch.is_grad_enabled() and (grad.requires_grad or x.requires_grad):
        return aten.mish_backward.default.decompose(grad, x)  # type: ignore[no-any-return]
    return grad * x


def _overload(name: str) -> Any:
    op, _, overload = name.partition(".")
    return getattr(getattr(aten, op), overload or "default")


def _without_tracer(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *args, **kwargs: function(*args, **kwargs)


def _sdpa_in_inference_mode(tracer: Tracer, *args: Any, **kwargs: Any) -> Any:
    return _sdpa(tracer.platform)(*args, **kwargs)


REPLACED: dict[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: _sdpa_in_inference_mode,
    aten.softmax.int: lambda _, *args, **kwargs: _softmax(*args, **kwargs),
    aten.log_softmax.int: lambda _, *args, **kwargs: _log_softmax(*args, **kwargs),
    aten.rms_norm.default: lambda _, *args, **kwargs: _rms_norm(*args, **kwargs),
    aten.linear.default: lambda _, *args, **kwargs: _linear(*args, **kwargs),
    aten.dropout.default: lambda _, *args, **kwargs: _dropout(*args, **kwargs),
    **{_overload(name): _without_tracer(function) for name, function in {**RECURRENT, **LOSSES}.items()},
}
"""Inference mode leaves autograd's level out, and the dispatch mode is shown the composites themselves."""


@contextmanager
def composites_of_cuda(platform: Platform, device: torch.device) -> Iterator[None]:
    key = {"meta": "Meta", "cpu": "CPU"}[device.type]
    library = Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, function in _replacements(platform).items():
                library.impl(name, function, f"Autograd{key}")
        yield
    finally:
        library._destroy()


def _for_compiler(platform: Platform) -> dict[str, Callable[..., Any]]:
    """As above, but what is made of other ops stays so: the compiler writes kernels for these."""

    def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        if weight is None or weight.dtype == x.dtype:
            return aten._fused_rms_norm(x, shape, weight, eps)[0]  # type: ignore[no-any-return]
        return _taken_apart("rms_norm")(x, shape, weight, eps)  # type: ignore[no-any-return]

    return {
        "scaled_dot_product_attention": _sdpa(platform),
        "dropout": _dropout,
        "softmax.int": _softmax,
        "log_softmax.int": _log_softmax,
        "rms_norm": rms_norm,
        "linear": _taken_apart("linear"),
        **{name: _taken_apart(name) for name in LOSSES},
    }


def _taken_apart(name: str) -> Callable[..., Any]:
    """As C++ has it, whatever Python says."""
    return partial(_overload(name)._op_dk, _COMPOSITE)


NOT_SHOWN = ("linear", "dropout")
"""torch itself takes these apart in inference mode, as it does for CUDA."""


@contextmanager
def composites_of_compiler(platform: Platform, key: str, only: Container[str] | None = None) -> Iterator[None]:
    """For the graphs that torch.compile makes. In inference mode nothing goes by autograd's level, and torch's Python
    dispatcher is asked; that has kernels of Python for composites on meta, which would hide what they are made of."""
    chosen = {name: f for name, f in _for_compiler(platform).items() if only is None or name in only}
    library = Library("aten", "IMPL")
    with ExitStack() as stack:
        stack.callback(library._destroy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, function in chosen.items():
                library.impl(name, function, key, allow_override=True)
        if key == "AutogradMeta":
            for name, function in chosen.items():
                if name not in NOT_SHOWN:
                    stack.enter_context(_dispatched(_overload(name), {_COMPOSITE: function}))
            for op in _hidden_composites():
                stack.enter_context(_dispatched(op, {}, without=_META))
        yield


_COMPOSITE, _META = torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Meta


@contextmanager
def _dispatched(op: Any, kernels: dict[Any, Callable[..., Any]], without: Any = None) -> Iterator[None]:
    with mock.patch.dict(op.py_kernels, kernels):
        op.py_kernels.pop(without, None)
        op._dispatch_cache.clear()
        try:
            yield
        finally:
            op._dispatch_cache.clear()
    op._dispatch_cache.clear()


@cache
def _hidden_composites() -> list[Any]:
    """Composites with a kernel of Python for meta: autograd would lose its way there (aten.nll_loss)."""
    from torch._decomp import global_decomposition_table

    ops = {op for table in global_decomposition_table.values() for op in table if isinstance(op, torch._ops.OpOverload)}
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [op for op in ops if _META in op.py_kernels and has(op.name(), "CompositeImplicitAutograd")]


Holders = tuple[int, int, int]


class EngineSums:
    """Knows what the reference counts of a tensor look like, in this torch, when only the engine holds it."""

    def __init__(self, device: torch.device) -> None:
        run_frames_as_before()
        self._alone = _holders_when_alone(device)

    def in_place(self, args: Any, kwargs: Any) -> bool:
        if len(args) != 2 or kwargs or torch.is_grad_enabled():
            return False
        first, second = args
        if not isinstance(second, torch.Tensor) or first.shape != second.shape or first.dtype != second.dtype:
            return False
        if not called_by_engine() or not is_dense(first):
            return False
        return all(found <= alone for found, alone in zip(_holders(first), self._alone, strict=True))


def called_by_engine() -> bool:
    """No Python lies between the engine and this op: neither a custom function nor a block run again."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (
        "/torch/_" in frame.f_code.co_filename or "/memfit/tracing/" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _holders(tensor: torch.Tensor) -> Holders:
    """Of the tensor and of its storage in C++, and of the tensor in Python."""
    storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined,unused-ignore]
    return tensor._use_count(), storage, sys.getrefcount(tensor)  # type: ignore[attr-defined,unused-ignore]


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Holders] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.add.Tensor and torch._C._current_autograd_node() is not None:
            first, _ = args
            self.seen.append(_holders(first))
        return func(*args, **(kwargs or {}))


def run_frames_as_before() -> None:
    """An error inside Dynamo leaves its evaluator in the interpreter, where calls hold their arguments longer: tensors
    of later traces would die later."""
    frames, python = sys.modules.get("torch._C._dynamo.eval_frame"), ctypes.pythonapi
    if frames is None:
        return
    if (callback := frames.set_eval_frame(None)) is not None:  # the caller is compiled itself
        frames.set_eval_frame(callback)
        return
    with suppress(AttributeError):
        here, evaluate = python.PyInterpreterState_Get, python._PyInterpreterState_SetEvalFrameFunc
        here.restype, evaluate.argtypes, evaluate.restype = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p], None
        evaluate(here(), ctypes.cast(python._PyEval_EvalFrameDefault, ctypes.c_void_p))


def _holders_when_alone(device: torch.device) -> Holders:
    """Anew for every trace: where the caller is compiled itself, calls hold their arguments twice. It may have switched
    gradients off."""
    watch = _Watch()
    with torch.inference_mode(False), torch.enable_grad(), watch:
        x = torch.empty(2, device=device, requires_grad=True)
        h = x * 2
        loss = (h * 3).sum() + (h * 4).sum()
        torch.autograd.backward(loss)
    return watch.seen[0]
