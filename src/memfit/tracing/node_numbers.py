"""In which order autograd's engine runs nodes that a backward pass has made, as with `create_graph=True`.

The engine takes the node with the highest number first, and numbers count in each thread by themselves. On a GPU a
backward pass runs in a thread of its own, so what it makes is numbered apart; a trace runs it in the thread that asks.
Where such nodes are differentiated in turn, all get the numbers that they would have there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any

import torch

HERE = "memfit's number"


class NodeNumbers:
    def __init__(self) -> None:
        self._ends, self._not_there = [0], [self._next()]
        """From which number on how many of those before it are none of the thread that asks, on a GPU."""
        self._of_autograd = 0
        """How many nodes the thread of autograd would have made."""
        self._differs = False
        """Whether some of these may be differentiated."""

    def begin(self, roots: Iterable[Any]) -> int:
        """A backward pass from here."""
        if self._differs:
            for node in _reached(roots):
                if hasattr(node, "_set_sequence_nr") and HERE not in node.metadata and not _is_leaf(node):
                    number = node._sequence_nr()
                    _renumber(node, number - self._not_there[bisect_right(self._ends, number) - 1])
        return self._next()

    def end(self, began: int, given: Iterable[Any], roots: Iterable[Any]) -> None:
        """A pass that `began` there has given these, and to the leaves below `roots` their gradients."""
        made = self._next() - began
        if made == 0:
            return
        gradients = (*given, *(node.variable.grad for node in _reached(roots) if _is_leaf(node)))
        for node in _reached(gradients, lambda node: began <= node._sequence_nr() < began + made):
            if hasattr(node, "_set_sequence_nr"):
                self._differs = True
                _renumber(node, node._sequence_nr() - began + self._of_autograd)
        self._of_autograd += made
        self._ends.append(began + made)
        self._not_there.append(self._not_there[-1] + made)

    def as_made(self, node: Any) -> int:
        """Its number in this thread."""
        number: int = node._sequence_nr()
        return int(node.metadata.get(HERE, number)) if self._differs else number

    def _next(self) -> int:
        number: int = torch._C._autograd._get_sequence_nr()
        return number


def _renumber(node: Any, number: int) -> None:
    node.metadata[HERE] = node._sequence_nr()
    node._set_sequence_nr(number)


def _is_leaf(node: Any) -> bool:
    """Of a leaf's gradient, which is added first of all, whatever its number."""
    return hasattr(node, "variable")


def _reached(tensors: Iterable[Any], goes_on: Callable[[Any], bool] = lambda _: True) -> list[Any]:
    """The nodes that made these tensors, and those behind them for as long as it goes on."""
    nodes = (getattr(tensor, "grad_fn", None) or getattr(tensor, "node", None) for tensor in tensors)
    waiting: list[Any] = list({node: None for node in nodes if node is not None})
    seen, reached = set(waiting), []
    while waiting:
        node = waiting.pop()
        if not goes_on(node):
            continue
        reached.append(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return reached
