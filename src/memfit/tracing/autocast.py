"""Autocast as CUDA does it, on a device for which torch has none.

Four lists decide what happens to an op's floating-point inputs (ATen/autocast_mode.h, 2.11): they are cast to the lower
precision, to fp32, or to the widest of them, or the op is told to compute in fp32. A cast of an fp32 parameter is kept
and used again until the outermost region of the thread ends; `no_grad` does not change that, inference mode does
(pytorch#165068).

On CUDA this is a layer of the dispatcher above autograd, so it also sees what functions written in Python, and ops
made of other ops, call inside. The dispatcher has such a layer for devices of other makers, and no tensor here is on
one: the lists are written there, and a region switches the layer on for its thread. torch's own context managers stay
as they are: what they set and ask is kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.amp import autocast_mode
from torch.library import Library, fallthrough_kernel

Tensor = torch.Tensor
Kernel = Callable[..., Any]

LAYER = "AutocastPrivateUse1"
_LAYER_KEYS = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, LAYER))


def _names(*lines: str) -> tuple[str, ...]:
    return tuple(name for line in lines for name in line.split())


LOWER = _names(
    "_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input",
    "conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm",
    "bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell",
    "rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention",
)
FP32 = _names(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar",
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim",
    "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d",
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss",
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits",
    "dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d",
    "_upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d",
    "_upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa",
)
TOLD_FP32 = _names(
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm",
    "linalg_matrix_norm.str_ord sum sum.dim_IntList",
)
TOLD_FP32_BY_OVERLOAD = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
WIDEST = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
REFUSED = _names("binary_cross_entropy")
SINCE = {"rms_norm": (2, 12)}
"""The torch from which on an op is on its list, if that is later than 2.11 (pytorch#174824)."""


def _op(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


class Autocast:
    """The state of a thread's autocast for the traced device, and the casts it makes."""

    running: Autocast | None = None
    """The one whose regions the layer belongs to: traces do not nest."""

    def __init__(self, device: torch.device, version: tuple[int, int]) -> None:
        self.device = device
        self.version = version
        self.enabled = False
        self.dtype = torch.float16
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.functions = SimpleNamespace()
        """What torch's functions of these names are, while this answers for them."""
        self._tells_torch = False

    def switch(self, enabled: bool) -> None:
        self.enabled = enabled
        if enabled:
            _lists_in_place()
        torch._C._dispatch_tls_set_dispatch_key_included(LAYER, enabled)
        torch._C._dispatch_tls_set_dispatch_key_excluded(LAYER, not enabled)
        self._tell_torch()

    @contextmanager
    def told_to_torch(self) -> Iterator[None]:
        """torch's own state for "cuda" follows: its compiler guards it, and no tensor here heeds it."""
        before = torch._C.is_autocast_enabled("cuda"), torch._C.get_autocast_dtype("cuda")
        self._tells_torch = True
        self._tell_torch()
        try:
            yield
        finally:
            self._tells_torch = False
            torch._C.set_autocast_enabled("cuda", before[0])
            torch._C.set_autocast_dtype("cuda", before[1])

    def _tell_torch(self) -> None:
        if self._tells_torch:
            torch._C.set_autocast_enabled("cuda", self.enabled)
            torch._C.set_autocast_dtype("cuda", self.dtype)

    def clear(self) -> None:
        self._cache.clear()

    def eligible(self, value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.dtype != torch.float64
            and value.device.type == self.device.type
        )

    def widest(self, args: Any) -> torch.dtype:
        kinds = {t.dtype for t in args if self.eligible(t)}
        return torch.float32 if torch.float32 in kinds or len(kinds) > 1 else next(iter(kinds), torch.float32)

    def cast_all(self, args: Any, kwargs: Any, target: torch.dtype) -> tuple[Any, Any]:
        """From the last to the first: the order in which gcc evaluates them."""
        named = {key: self._cast(value, target) for key, value in reversed(kwargs.items())}
        placed = [self._cast(value, target) for value in reversed(args)]
        return placed[::-1], named

    def _cast(self, value: Any, target: torch.dtype) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
            return [self._cast(v, target) for v in value]
        if not self.eligible(value) or value.dtype == target:
            return value
        return self._cached(value, target)

    def _cached(self, tensor: Tensor, target: torch.dtype) -> Tensor:
        keeps = (
            target == self.dtype
            and tensor.dtype == torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
            and torch.is_autocast_cache_enabled()
            and not torch.is_inference_mode_enabled()
        )
        if not keeps:
            return tensor.to(target)
        found = self._cache.get(id(tensor))
        if found is None:
            with torch.enable_grad():  # it serves passes with and without gradients
                found = self._cache[id(tensor)] = (tensor, tensor.to(target))
        return found[1]

    @contextmanager
    def answering(self) -> Iterator[None]:
        """What torch and libraries ask about autocast on "cuda", or on the traced device, is asked of this state."""
        names = {"cuda", self.device.type}
        real_enabled, real_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
        set_enabled, set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype
        clear, available = torch.clear_autocast_cache, autocast_mode.is_autocast_available

        def is_enabled(device_type: str | None = None) -> bool:
            return self.enabled if device_type is None or device_type in names else real_enabled(device_type)

        def get_dtype(device_type: str) -> torch.dtype:
            return self.dtype if device_type in names else real_dtype(device_type)

        def enable(device_type: Any, enabled: bool | None = None) -> None:
            if enabled is None:
                self.switch(bool(device_type))
            elif device_type in names:
                self.switch(enabled)
            else:
                set_enabled(device_type, enabled)

        def use_dtype(device_type: str, dtype: torch.dtype) -> None:
            if device_type in names:
                self.dtype = dtype
                self._tell_torch()
            else:
                set_dtype(device_type, dtype)

        def clear_all() -> None:
            self.clear()
            clear()

        def is_available(device_type: str) -> bool:
            return device_type in names or available(device_type)

        with ExitStack() as stack:
            for owner, name, replacement in (
                (torch, "is_autocast_enabled", is_enabled),
                (torch, "get_autocast_dtype", get_dtype),
                (torch, "get_autocast_gpu_dtype", lambda: self.dtype),
                (torch, "set_autocast_enabled", enable),
                (torch, "set_autocast_dtype", use_dtype),
                (torch, "clear_autocast_cache", clear_all),
                (autocast_mode, "is_autocast_available", is_available),
                (torch.amp, "is_autocast_available", is_available),
                (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
                (torch.cuda, "is_bf16_supported", lambda including_emulation=True: True),
            ):
                stack.enter_context(mock.patch.object(owner, name, replacement))
                setattr(self.functions, name, replacement)
            stack.enter_context(_transformers_regions())
            stack.enter_context(mock.patch.object(Autocast, "running", self))
            stack.callback(self.switch, False)
            yield


@cache
def _lists_in_place() -> tuple[Library, Library]:
    """Once a process, at the first region: nothing runs them unless a region has switched the layer on."""
    rest = Library("_", "IMPL", LAYER)
    rest.fallback(fallthrough_kernel)
    lists = Library("aten", "IMPL")
    for names, kernel in ((LOWER, _lowered), (FP32, _in_fp32), (TOLD_FP32, _told_fp32), (WIDEST, _widened)):
        for name in names:
            lists.impl(name, kernel(_op(name)) if name not in SINCE else _since(SINCE[name], _op(name), kernel), LAYER)
    for name, with_dtype in TOLD_FP32_BY_OVERLOAD.items():
        lists.impl(name, _told_fp32_by_overload(_op(with_dtype)), LAYER)
    for name in REFUSED:
        lists.impl(name, _refused, LAYER)
    return rest, lists


def _with_casts(op: Any, target: Callable[[Autocast, Any], torch.dtype]) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_LAYER_KEYS):
            if state := Autocast.running:
                args, kwargs = state.cast_all(args, kwargs, target(state, args))
            made = op(*args, **kwargs)
            for value in args:
                if isinstance(value, list):  # Python lets go of the last one first, a C++ vector of the first
                    value.reverse()
            return made

    return kernel


def _lowered(op: Any) -> Kernel:
    return _with_casts(op, lambda state, _: state.dtype)


def _in_fp32(op: Any) -> Kernel:
    return _with_casts(op, lambda _, __: torch.float32)


def _widened(op: Any) -> Kernel:
    return _with_casts(op, lambda state, args: state.widest(args))


def _since(version: tuple[int, int], op: Any, listed: Callable[[Any], Kernel]) -> Kernel:
    later = listed(op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if (state := Autocast.running) and state.version >= version:
            return later(*args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(_LAYER_KEYS):
            return op(*args, **kwargs)

    return kernel


def _told_fp32(op: Any) -> Kernel:
    place = next(i for i, argument in enumerate(op._schema.arguments) if argument.name == "dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        told = (args[place] if place < len(args) else kwargs.get("dtype")) is not None
        if not told and (state := Autocast.running) and state.eligible(args[0]):
            args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
        with torch._C._ExcludeDispatchKeyGuard(_LAYER_KEYS):
            return op(*args, **kwargs)

    return kernel


def _told_fp32_by_overload(op: Any) -> Kernel:
    def kernel(x: Tensor, *args: Any) -> Any:
        state = Autocast.running
        with torch._C._ExcludeDispatchKeyGuard(_LAYER_KEYS):
            return op(x, *args, dtype=torch.float32 if state and state.eligible(x) else x.dtype)

    return kernel


def _refused(*_: Any, **__: Any) -> Any:
    raise RuntimeError("torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast")


def _region(device_type, dtype=None, enabled=True, cache_enabled=None):  # type: ignore[no-untyped-def]
    import torch

    if torch.is_autocast_enabled(device_type) or enabled:
        return torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
    return nullcontext()  # type: ignore[name-defined]  # noqa: F821 - runs with the globals of transformers


@contextmanager
def _transformers_regions() -> Iterator[None]:
    """transformers skips its regions on meta, where real autocast does not exist; here it does. Its function has been
    imported by name all over, so its code is replaced rather than the name."""
    import sys

    generic: Any = sys.modules.get("transformers.utils.generic")
    function = getattr(generic, "maybe_autocast", None)
    if function is None:
        yield
        return
    before = function.__code__
    function.__code__ = _region.__code__
    try:
        yield
    finally:
        function.__code__ = before
