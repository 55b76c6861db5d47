"""How a job says where it is: `with phases("forward", step=2):`. A trace marks it, a GPU run measures it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class Phases(Protocol):
    def __call__(self, name: str, step: int = 0) -> AbstractContextManager[None]: ...
