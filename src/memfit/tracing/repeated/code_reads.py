"""What the code of a model reads outside of it: variables of closures, globals, attributes of classes.

People patch a `forward` by a closure that counts, or switch something on by a global. Read are plain values and
containers; code that is called is looked into where it is a person's own.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import partial
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from memfit.tracing.repeated.state import PLAIN, sign_of

MOST_ENTRIES = 64
"""Of a larger dictionary only the size is read: it is data."""
SWITCHED = (*PLAIN, list, tuple, set, frozenset, deque, torch.Tensor, Namespace, SimpleNamespace)
Read = Callable[[], Any]


class CodeReads:
    def __init__(self, is_own: Callable[[str], bool]) -> None:
        self._is_own = is_own
        self._known: dict[tuple[type, int], tuple[Any, list[Read]]] = {}
        """By the class and the id of what is called, which is kept so that the id stays its own."""

    def signs(self, module: torch.nn.Module) -> Iterator[Any]:
        patched = vars(module).get("forward")
        called = type(module).forward if patched is None else patched
        key = type(module), id(called)
        if key not in self._known:
            reads: list[Read] = []
            self._look_into(called, type(module), reads, set(), is_patched=patched is not None)
            self._known[key] = called, reads
        for read in self._known[key][1]:
            yield read()

    def _look_into(self, called: Any, owner: type, reads: list[Read], met: set[int], *, is_patched: bool) -> None:
        while isinstance(called, partial):
            called = called.func
        called = getattr(called, "__func__", called)
        if not isinstance(called, FunctionType) or id(called) in met:
            return
        met.add(id(called))
        for cell in called.__closure__ or ():
            reads.append(partial(_sign_of_cell, cell))
            self._look_into(_value_of(cell), owner, reads, met, is_patched=is_patched)
        if not is_patched and not self._is_own(called.__code__.co_filename):
            return
        for name in sorted(_names_of(called.__code__)):
            self._look_up(name, called.__globals__, owner, reads, met)

    def _look_up(self, name: str, known: dict[str, Any], owner: type, reads: list[Read], met: set[int]) -> None:
        value = known.get(name)
        if isinstance(value, FunctionType):
            self._look_into(value, owner, reads, met, is_patched=False)
        elif isinstance(value, ModuleType):
            if self._is_own(getattr(value, "__file__", None) or ""):
                reads.append(partial(_sign_of_all, vars(value)))
        elif name in known:
            reads.append(lambda: _sign_of_outer(known.get(name)))
        attribute = inspect.getattr_static(owner, name, None)
        if isinstance(attribute, FunctionType):
            self._look_into(attribute, owner, reads, met, is_patched=False)
        elif attribute is not None:
            reads.append(lambda: _sign_of_outer(inspect.getattr_static(owner, name, None)))


def _names_of(code: CodeType) -> set[str]:
    """That it reads, and functions within it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_of(constant)
    return names


def _value_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet given one
        return None


def _sign_of_cell(cell: Any) -> Any:
    return _sign_of_outer(_value_of(cell))


def _sign_of_all(known: dict[str, Any]) -> Any:
    return tuple([_sign_of_outer(value) for value in known.values() if isinstance(value, (*SWITCHED, dict))])


def _sign_of_outer(value: Any) -> Any:
    """Of what can be switched, in objects and classes of settings too; a model or a table of words is what it is."""
    if isinstance(value, dict):
        return sign_of(value) if len(value) <= MOST_ENTRIES else (id(value), len(value))
    is_record = is_dataclass(value) and not isinstance(value, type)
    if is_record or isinstance(value, SWITCHED):
        return sign_of(value)
    inside = getattr(value, "__dict__", {})
    if len(inside) > MOST_ENTRIES or isinstance(value, (torch.nn.Module, ModuleType, FunctionType)):
        return id(value)
    return id(value), *(sign_of(each) for each in inside.values() if isinstance(each, PLAIN))
