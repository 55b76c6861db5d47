"""Autocast as CUDA does it, on a device for which torch has none.

Three lists decide what a function's floating-point inputs are cast to (ATen/autocast_mode.h, 2.13): the lower
precision, fp32, or the widest of them. A cast of an fp32 parameter is kept and used again until the outermost region
of the thread ends; `no_grad` does not change that, inference mode does (pytorch#165068). torch's own context managers
stay as they are: what they set and ask is kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.amp import autocast_mode

Tensor = torch.Tensor


def _names(*lines: str) -> frozenset[str]:
    return frozenset(name for line in lines for name in line.split())


LOWER = _names(
    "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu addmm addmv",
    "addr matmul __matmul__ __rmatmul__ einsum mm mv linear addbmm baddbmm bmm chain_matmul multi_dot vecdot",
    "scaled_dot_product_attention",
)
FP32 = _names(
    "acos __rpow__ asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ softplus",
    "layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss",
    "cosine_embedding_loss nll_loss hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss",
    "margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss",
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp",
)
FP32_BY_DTYPE = _names("prod softmax log_softmax cumprod cumsum vector_norm matrix_norm sum")
WIDEST = _names("addcdiv addcmul atan2 bilinear cross dot grid_sample index_put tensordot scatter_add vdot")
KNOWN = LOWER | FP32 | FP32_BY_DTYPE | WIDEST | {"cross_entropy"}


class Autocast:
    """The state of a thread's autocast for the traced device, and the casts it makes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.enabled = False
        self.dtype = torch.float16
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What `func` comes to inside a region."""
        name = getattr(func, "__name__", "").removeprefix("linalg_")
        if name not in KNOWN:
            return func(*args, **kwargs)
        if name == "cross_entropy":
            return self._cross_entropy(func, args, kwargs)
        if name in FP32_BY_DTYPE:
            first = args[0] if args else kwargs.get("input")
            if self._eligible(first) and kwargs.get("dtype") is None and not _positional_dtype(args):
                kwargs = {**kwargs, "dtype": torch.float32}
            return func(*args, **kwargs)
        target = self.dtype if name in LOWER else torch.float32 if name in FP32 else self._widest(args)
        named = {key: self._cast_all(value, target) for key, value in reversed(kwargs.items())}
        placed = [self._cast_all(value, target) for value in reversed(args)]  # the order in which gcc evaluates them
        return func(*reversed(placed), **named)

    def clear(self) -> None:
        self._cache.clear()

    def _cross_entropy(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A composite of log-softmax, which is told its dtype, and of nll_loss, which is on the fp32 list."""
        logits = args[0]
        plain = not kwargs.get("label_smoothing") and not args[1].is_floating_point()
        if logits.dtype == torch.float32 or not plain:
            return func(*args, **kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key != "label_smoothing"}
        return torch.nn.functional.nll_loss(
            torch.log_softmax(logits, 1, dtype=logits.dtype).float(), *args[1:], **kwargs
        )

    def _eligible(self, value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.dtype != torch.float64
            and value.device.type == self.device.type
        )

    def _widest(self, args: Any) -> torch.dtype:
        kinds = {t.dtype for t in args if self._eligible(t)}
        return torch.float32 if torch.float32 in kinds or len(kinds) > 1 else next(iter(kinds), torch.float32)

    def _cast_all(self, value: Any, target: torch.dtype) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
            return type(value)(self._cast_all(v, target) for v in value)
        if not self._eligible(value) or value.dtype == target:
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
                self.enabled = bool(device_type)
            elif device_type in names:
                self.enabled = enabled
            else:
                set_enabled(device_type, enabled)

        def use_dtype(device_type: str, dtype: torch.dtype) -> None:
            if device_type in names:
                self.dtype = dtype
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
            stack.enter_context(_transformers_regions())
            yield


def _positional_dtype(args: Any) -> bool:
    return any(isinstance(value, torch.dtype) for value in args)


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
