"""Which graph torch's compiler is at, for who waits: the compiler takes seconds for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_told: ContextVar[Callable[[int], None]] = ContextVar("told", default=lambda number: None)


@contextmanager
def graphs_told(tell: Callable[[int], None]) -> Iterator[None]:
    """`tell` is called with the number of each graph of a trace that is about to be compiled, from 1 on."""
    before = _told.set(tell)
    try:
        yield
    finally:
        _told.reset(before)


def tell_graph(number: int) -> None:
    _told.get()(number)
