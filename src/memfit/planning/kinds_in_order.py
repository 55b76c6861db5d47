"""Kinds of layers are gone through in their order, so that a plan is the same in every process.

transformers makes masks and rotary tables for each kind of layer that a model has, in the order of a Python set of
their names, and that changes from process to process. On a GPU it does so too: of two runs one may then peak a little
higher than the other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import nn


class InOrder(set[Any]):
    """A set that gives its members in the order in which they first came."""

    def __init__(self, members: Iterable[Any] = ()) -> None:
        self._came = tuple(dict.fromkeys(members))
        super().__init__(self._came)

    def __iter__(self) -> Iterator[Any]:
        return (each for each in self._came if each in self)


@contextmanager
def kinds_in_order(model: nn.Module) -> Iterator[None]:
    """In the code of transformers that `model` runs."""
    base = getattr(model, "get_base_model", lambda: model)()
    names = {"transformers.masking_utils", type(base).__module__}
    with ExitStack() as stack:
        for name in names & set(sys.modules):
            if name.startswith("transformers."):
                stack.enter_context(mock.patch.object(sys.modules[name], "set", InOrder, create=True))
        yield
