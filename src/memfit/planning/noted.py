"""The traces of a job as they were made, with what they asked of rules: what families learn from."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from memfit.core.events import Trace
from memfit.core.holes import Call
from memfit.planning import categories

Part = Literal["all", "near", "far"]
"""All of the job's steps or tokens; the first tokens of a generation; its last ones."""


@dataclass(frozen=True)
class Noted:
    trace: Trace
    calls: list[Call]
    model: object
    """The built model that ran: traces of the same one belong together."""
    loss_modules: frozenset[str]
    tokens: int | None
    """After how many the generation was ended early."""
    seq_len: int


_listeners: list[list[Noted]] = []


@contextmanager
def noting() -> Iterator[list[Noted]]:
    """What is traced inside is listed, in its order."""
    heard: list[Noted] = []
    _listeners.append(heard)
    try:
        yield heard
    finally:
        _listeners.pop()


def note(trace: Trace, calls: list[Call], model: object, tokens: int | None, seq_len: int) -> None:
    """As it is now: labels are put on later, and in place."""
    if _listeners:
        kept = dataclasses.replace(trace, category_of=array("i", trace.category_of), facts=dict(trace.facts))
        noted = Noted(kept, calls, model, categories.loss_modules_of(model), tokens, seq_len)
        for heard in _listeners:
            heard.append(noted)


def parts_of(heard: list[Noted], seq_len: int) -> dict[Part, Noted]:
    """Those that the result rests on. The traces of few blocks do not count where all blocks were traced after them."""
    parts: dict[Part, Noted] = {}
    for noted in heard:
        if noted.model is heard[-1].model:
            part: Part = "near" if noted.tokens is not None else "all" if noted.seq_len == seq_len else "far"
            parts[part] = noted
    return parts
