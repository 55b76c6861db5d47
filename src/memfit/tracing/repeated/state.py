"""What a call of a model may depend on: its arguments, the model as it is then, and torch's settings."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from inspect import unwrap
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

Tensor = torch.Tensor
FEW_ENTRIES = 16
PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.Size)


def key_of_call(
    names: Any,
    module: torch.nn.Module,
    args: Any,
    kwargs: Any,
    is_harmless: Callable[[Any], bool],
    signs_of_code: Callable[[torch.nn.Module], Iterable[Any]],
) -> Any:
    """None where nobody can tell. `is_harmless`: whether a hook is left to what it is seen to do. `signs_of_code`: of
    what the code of a module reads elsewhere."""
    tracer, autocast = names.tracer, names.autocast
    leaves, form = tree_flatten((args, kwargs))
    signs: list[Any] = []
    for leaf in leaves:
        if type(leaf) is Tensor and tracer.place(leaf) == "cuda":
            signs.append((leaf.dtype, leaf.shape, leaf.stride(), leaf.requires_grad))
        elif isinstance(leaf, PLAIN):
            signs.append(leaf)
        else:
            return None
    state = state_of(module, is_harmless, signs_of_code)
    if state is None:
        return None
    cast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), len(autocast._cache)
    phase = [mark.phase for mark in tracer.trace.marks[-1:]]  # the first call of a phase begins it
    return weakref.ref(module), state, str(form), tuple(signs), cast, _settings(), len(tracer.tuned), *phase


def known_ones(values: Any, leaves: list[Any]) -> tuple[int, ...]:
    """Which of these arguments are tensors whose values are known."""
    with _disable_current_modes():
        return tuple(i for i, each in enumerate(leaves) if isinstance(each, Tensor) and values.read(each) is not None)


def bytes_of(values: Any, tensor: Tensor) -> bytes:
    """Of one whose values are known."""
    with _disable_current_modes():
        known: Tensor = values.read(tensor)
        return bytes(known.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def code_of(hook: Any) -> Any:
    return getattr(getattr(unwrap(hook), "__func__", unwrap(hook)), "__code__", None)


def _settings() -> tuple[Any, ...]:
    """Of torch, which choose kernels."""
    cuda = torch.backends.cuda
    kernels = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled, cuda.cudnn_sdp_enabled)
    return (
        *(enabled() for enabled in kernels), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.enabled,
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32,
    )  # fmt: skip


def state_of(
    module: torch.nn.Module,
    is_harmless: Callable[[Any], bool],
    signs_of_code: Callable[[torch.nn.Module], Iterable[Any]],
) -> tuple[Any, ...] | None:
    """What a call may depend on beside its arguments; None where a hook could do anything."""
    found: list[Any] = []
    met: set[int] = set()
    left: list[torch.nn.Module | None] = [module]
    while left:  # `modules()` hands each on through all that hold it
        each = left.pop()
        if each is None or id(each) in met:
            continue
        met.add(id(each))
        left.extend(each._modules.values())
        for kind in (each._forward_hooks, each._forward_pre_hooks, each._backward_hooks, each._backward_pre_hooks):
            if kind:
                if not all(map(is_harmless, kind.values())):
                    return None
                found.extend(map(id, kind.values()))
        found.append(id(each))
        found.extend(signs_of_code(each))
        for name, value in vars(each).items():
            if name not in HOOKS:
                found += (name, sign_of(value))
    return tuple(found)


HOOKS = frozenset(name for name in vars(torch.nn.Module()) if name not in ("training", "_parameters", "_buffers"))


def sign_of(value: Any, depth: int = 0) -> Any:
    """Of a plain value itself, of a tensor what it is like, of a container or an object what is in it."""
    kind = type(value)
    if kind is bool or kind is int or kind is str:
        return value
    if isinstance(value, Tensor):
        return id(value), value.dtype, value.shape
    if isinstance(value, PLAIN):
        return value if value == value else "nan"
    if depth < 2 and (kind is dict or isinstance(value, Mapping)):
        return id(value), len(value), *(sign_of(each, depth + 1) for each in value.values())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        few = len(value) <= FEW_ENTRIES and all(isinstance(each, PLAIN) for each in value)
        return (id(value), *value) if few else (id(value), len(value))
    if depth < 1 and hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)):
        return id(value), *(sign_of(each, 2) for each in vars(value).values())
    return id(value)
