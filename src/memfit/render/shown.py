"""What every answer of the library can do: be printed as its command shows it, be a document for programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

Renderer: TypeAlias = "Callable[[Mapping[str, Any], Console], None]"
"""Writes a document for a person."""
NOT_MODELLED, NO_BF16, STORED = "not modelled:", "no bf16 on", "the checkpoint is quantised"


def stands_in_front(note: str) -> bool:
    """What a reader must see beside the verdict."""
    return note.startswith((NOT_MODELLED, NO_BF16, STORED))


class Shown:
    """An answer. `print` shows it as its command does; `to_json()` is the document of `--json`."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        raise NotImplementedError

    def renderer(self) -> Renderer:
        """Imported only where somebody reads it."""
        raise NotImplementedError

    def _repr_html_(self) -> str | None:
        """As a notebook shows it; None where there is only text."""
        from memfit.render.notebook import as_html

        return as_html(self.to_json())

    def __str__(self) -> str:
        from memfit.render.plan import as_text

        return as_text(self.renderer(), self.to_json())
