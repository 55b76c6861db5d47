"""A trace as text, to be compared with literals: `+bytes`, `-number of the allocation`, `[phase]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memfit.events import Action, Trace
from memfit.tracing.tracer import Tracer, trace


def cases(argument: str, **named: Any) -> pytest.MarkDecorator:
    """Parametrise by name, where a value does not tell its own."""
    return pytest.mark.parametrize(argument, named.values(), ids=list(named))


def story(job: Callable[[Tracer], object], **options: Any) -> str:
    return as_story(trace(job, **options))


def as_story(made: Trace) -> str:
    words = {
        Action.ALLOC: lambda block: f"+{made.requested[block]}",
        Action.FREE: lambda block: f"-{block}",
        Action.MARK: lambda mark: f"[{made.marks[mark].phase}]",
        Action.EMPTY_CACHE: lambda _: "(empty cache)",
    }
    return " ".join(words[Action(action)](subject) for action, subject in made.events())


def born_in(made: Trace, phase: str) -> list[int]:
    """The blocks allocated while a phase ran, in order."""
    current, born = "", []
    for action, subject in made.events():
        if action == Action.MARK:
            current = made.marks[subject].phase
        elif action == Action.ALLOC and current == phase:
            born.append(subject)
    return born


def sizes_in(made: Trace, phase: str) -> list[int]:
    return [made.requested[block] for block in born_in(made, phase)]


def by_op(made: Trace, word: str) -> list[int]:
    """The blocks whose op has a word in its name."""
    return [block for block in range(len(made.requested)) if word in made.op(block)]
