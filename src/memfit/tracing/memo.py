"""What an op gives back, remembered by the shapes of what it was given.

Without memory an op is its shapes: the same ones in, the same ones out. torch works most of them out in Python, for a
tenth of a millisecond and more, and a trace asks the same again in each block and in each step, and the next trace
too. So the answer is kept, for ops that make new tensors or write into those they are given. Views are left to
torch, and so is all that is not plain: tensors of other devices or layouts, arguments that are no numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import cache
from typing import Any

import torch
from torch.nn import Parameter

from memfit.platform import Platform

Tensor = torch.Tensor
Key = tuple[Any, ...]
PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
MOST = 50_000
"""Answers that are kept, some 50 MiB: beyond that, all are forgotten."""


class Gives(Enum):
    """What an op gives back, told from its schema."""

    NEW = auto()
    FIRST = auto()  # its first argument, written into
    NOTHING = auto()  # lists of tensors are written into
    OTHER = auto()


def what_is_given(op: Any) -> Gives:
    """People's own ops may look at anything, so nothing is taken for known of them."""
    if getattr(op, "namespace", None) != "aten":
        return Gives.OTHER
    arguments, results = op._schema.arguments, op._schema.returns
    aliased = [argument for argument in arguments if argument.alias_info is not None]
    if not aliased and all(result.alias_info is None for result in results):
        return Gives.NEW
    if torch.Tag.inplace_view in op.tags or not all(argument.alias_info.is_write for argument in aliased):
        return Gives.OTHER
    if not results:
        return Gives.NOTHING
    first = len(aliased) == 1 and arguments[0].alias_info is not None and len(results) == 1
    return Gives.FIRST if first else Gives.OTHER


class Made:
    """New tensors, to be made again: the layout of one, or of each of several."""

    __slots__ = ("_alone", "_layouts", "_sequence")

    def __init__(self, layouts: Sequence[Any], sequence: Callable[[Any], Any] | None) -> None:
        self._alone = layouts[0] if sequence is None else None
        self._layouts = layouts
        self._sequence = sequence

    def again(self, device: torch.device) -> Any:
        if self._alone is not None:
            size, stride, dtype = self._alone
            return torch.empty_strided(size, stride, dtype=dtype, device=device)
        assert self._sequence is not None
        return self._sequence(
            None if each is None else torch.empty_strided(each[0], each[1], dtype=each[2], device=device)
            for each in self._layouts
        )


@cache
def remembered_on(device: torch.device, platform: Platform) -> Remembered:
    return Remembered(device)


class Remembered:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[Key, Made | None] = {}
        self._written: set[Key] = set()

    def call(self, op: Any, kind: Gives, args: Any, kwargs: Any) -> Any:
        key = _key(op, args, kwargs, kind is Gives.NEW)
        if key is None:
            return op(*args, **kwargs)
        if kind is not Gives.NEW:
            if key not in self._written:
                op(*(args if kind is Gives.FIRST else _without_repetition(args)), **kwargs)
                _make_room(self._written)
                self._written.add(key)
            return args[0] if kind is Gives.FIRST else None
        known = self._known.get(key)
        if known is not None:
            return known.again(self._device)
        out = op(*args, **kwargs)
        if key not in self._known:
            _make_room(self._known)
            self._known[key] = _how_to_make(out, args, kwargs)
        return out


def _make_room(kept: dict[Key, Made | None] | set[Key]) -> None:
    if len(kept) >= MOST:
        kept.clear()


def _key(op: Any, args: Any, kwargs: Any, with_values: bool) -> Key | None:
    """None where something is not plain. What is written into keeps its shape, whatever the numbers."""
    parts: list[Any] = [id(op), torch.get_default_dtype()]  # to hash an op goes through Python; those of aten stay
    if not _describe(args, parts, with_values):
        return None
    if kwargs:
        parts.extend(kwargs)
        if not _describe(kwargs.values(), parts, with_values):
            return None
    return tuple(parts)


def _describe(values: Any, parts: list[Any], with_values: bool) -> bool:
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            if not value.is_meta or value.layout is not torch.strided:
                return False
            parts += (value.shape, value.stride(), value.dtype)
        elif kind in PLAIN:
            parts += (kind, value) if with_values or kind is not float else (kind,)  # 1 is not 1.0
        elif kind is list or kind is tuple:
            parts += (kind, len(value))
            if not _describe(value, parts, with_values):
                return False
        else:
            return False
    return True


def _without_repetition(args: Any) -> Any:
    """Ops that write into lists take the entries one by one: of those that look the same, one will do."""
    lists = [value for value in args if _is_filled_list(value)]
    if len({len(value) for value in lists}) != 1:
        return args
    kept: dict[Key, int] = {}
    for at, entries in enumerate(zip(*lists, strict=True)):
        parts: list[Any] = []
        _describe(entries, parts, False)
        kept.setdefault(tuple(parts), at)
    return [[value[at] for at in kept.values()] if _is_filled_list(value) else value for value in args]


def _is_filled_list(value: Any) -> bool:
    return type(value) in (list, tuple) and len(value) > 0


def _how_to_make(out: Any, args: Any, kwargs: Any) -> Made | None:
    """None where something given back is not new and plain: `_unsafe_view` does not say that it is a view."""
    kind = type(out)
    if kind is not Tensor and kind is not tuple and kind is not list:
        return None
    results = (out,) if kind is Tensor else out
    seen = {storage for value in (*args, *kwargs.values()) for storage in _storages(value)}
    layouts: list[Any] = []
    for each in results:
        if each is None:
            layouts.append(None)
            continue
        if type(each) is not Tensor or not each.is_meta or each.layout is not torch.strided:
            return None
        storage = each.untyped_storage()
        size, stride = tuple(each.shape), each.stride()
        needed = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if each.numel() else 0
        if storage._cdata in seen or storage.nbytes() != needed * each.element_size() or each.storage_offset():
            return None
        seen.add(storage._cdata)
        layouts.append((size, stride, each.dtype))
    return Made(layouts, None if kind is Tensor else kind)


def _storages(value: Any) -> list[int]:
    if isinstance(value, Tensor):
        return [value.untyped_storage()._cdata]
    if isinstance(value, (list, tuple)):
        return [storage for entry in value for storage in _storages(entry)]
    return []
