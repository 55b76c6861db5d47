"""What can go wrong because of what a person asked for, in their words.

    MemfitError
    ├── UsageError        a flag, a parameter or a key is wrong (also a ValueError)
    │   └── UnknownName   a name that is not in a list; carries the nearest ones
    ├── InputError        a file cannot be read or does not hold what it should (also a ValueError)
    ├── TraceError        the job's code cannot be traced: an op, a value or a device it asks for
    ├── RanOut            a job that ran needed more memory than there is; the hint says what helps
    └── Stopped           somebody asked a training to stop; what was trained is in a checkpoint

A traceback means a bug in memfit; these never print one.
"""

from __future__ import annotations

TYPE_CHECKING = False  # a command starts faster without typing, and without difflib
if TYPE_CHECKING:
    from collections.abc import Iterable


LONGEST_WORD, LONGEST_TEXT = 300, 3000
"""Characters. What is longer was not written for a person: it came in, as a name or a value."""


class MemfitError(Exception):
    """A message for a person, and what to do next."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        message, hint = _readable(message), None if hint is None else _readable(hint)
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint is not None:
            self.__notes__ = [hint]  # a traceback shows it below the message, from Python 3.11 on


class UsageError(MemfitError, ValueError):
    pass


class InputError(MemfitError, ValueError):
    pass


class TraceError(MemfitError):
    pass


class RanOut(MemfitError):
    """Memory did not suffice for a job that ran. The hint says what helps."""


class Stopped(MemfitError):
    """As somebody asked for. What was trained is in a checkpoint, which the hint names."""


class UnknownName(UsageError):
    def __init__(self, what: str, name: str, known: Iterable[str], *, more: str = "") -> None:
        from difflib import get_close_matches

        self.nearest = get_close_matches(name[:LONGEST_WORD].lower(), list(known), n=3, cutoff=0.6)
        guess = f"did you mean {' or '.join(repr(n) for n in self.nearest)}?" if self.nearest else ""
        super().__init__(f"no {what} called {name!r}", hint=" ".join(part for part in (guess, more) if part) or None)


def _readable(text: str) -> str:
    """Words and texts without end are cut in their middle: how they begin and end tells what they are."""
    if len(text) <= LONGEST_WORD:
        return text
    lines = (" ".join(_cut(word, LONGEST_WORD) for word in line.split(" ")) for line in text.split("\n"))
    return _cut("\n".join(lines), LONGEST_TEXT)


def _cut(text: str, longest: int) -> str:
    kept = longest // 2
    return text if len(text) <= longest else f"{text[:kept]}...{text[-kept:]}"
