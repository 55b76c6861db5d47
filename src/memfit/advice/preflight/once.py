"""Something that several checks need and that is looked for once: the one whose subject it is reports what went wrong,
the others say that they cannot tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from memfit.advice.preflight.finding import CannotTell
from memfit.errors import MemfitError

Found = TypeVar("Found")


class Once(Generic[Found]):
    def __init__(self, make: Callable[[], Found], *, without: str) -> None:
        """`without` is what a check that needs it says where there is none."""
        self._make, self._without = make, without
        self._found: list[Found] = []
        self._wrong: Exception | None = None

    def get(self) -> Found:
        """Or the error, as it was."""
        if self._wrong is not None:
            raise self._wrong
        if not self._found:
            try:
                self._found.append(self._make())
            except (MemfitError, CannotTell, ImportError) as error:
                self._wrong = error
                raise
        return self._found[0]

    def needed(self) -> Found:
        """For a check that is about something else."""
        try:
            return self.get()
        except (MemfitError, ImportError) as error:
            raise CannotTell(self._without) from error
