"""What every answer of the library can do: be printed as its command shows it, be a document for programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

Renderer: TypeAlias = "Callable[[Mapping[str, Any], Console], None]"
"""Writes a document for a person."""
RENDERERS = {
    "memfit.plan/1": "plan.show_plan", "memfit.fit/1": "fit.show_fit", "memfit.ladder/1": "fit.show_ladder",
    "memfit.table/1": "table.show_table", "memfit.explain/1": "explain.show_explanation",
    "memfit.report/1": "report.show_report", "memfit.diff/1": "report.show_diff", "memfit.check/1": "small.show_check",
    "memfit.gate/1": "small.show_gate", "memfit.profile/1": "small.show_profile",
    "memfit.trials/1": "small.show_trials", "memfit.gpus/1": "small.show_gpus", "memfit.models/1": "small.show_models",
}  # fmt: skip
"""Of each document the file of this room that renders it, and the function: imported only where somebody reads it."""
NOT_MODELLED, NO_BF16, STORED = "not modelled:", "no bf16 on", "the checkpoint is quantised"
UNUSED_ANSWER = "--answer "


def stands_in_front(note: str) -> bool:
    """What a reader must see beside the verdict."""
    return note.startswith((NOT_MODELLED, NO_BF16, STORED, UNUSED_ANSWER))


def renderer_of(document: Mapping[str, Any]) -> Renderer:
    file, name = RENDERERS[document["schema"]].split(".")
    render: Renderer = getattr(import_module(f"memfit.render.{file}"), name)
    return render


class Shown:
    """An answer. `print` shows it as its command does; `to_json()` is the document of `--json`."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        raise NotImplementedError

    def _repr_html_(self) -> str | None:
        """As a notebook shows it; None where there is only text."""
        from memfit.render.notebook import as_html

        return as_html(self.to_json())

    def __str__(self) -> str:
        from memfit.render.plan import as_text

        document = self.to_json()
        return as_text(renderer_of(document), document)
