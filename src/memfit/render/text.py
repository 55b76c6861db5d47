"""The same reports as plain text, for logs and for `print`."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from memfit.render.terminal import show_plan

WIDTH = 100


def plan_text(plan: Mapping[str, Any], *, width: int = WIDTH) -> str:
    """A memfit.plan/1 document without colour."""
    return as_text(show_plan, plan, width=width)


def as_text(
    show: Callable[[Mapping[str, Any], Console], None], document: Mapping[str, Any], *, width: int = WIDTH,
    encoding: str = "utf-8",
) -> str:  # fmt: skip
    """What `show` writes to an output of that encoding, without the blanks that rich pads lines with."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
    console = Console(file=out, width=width, color_system=None, force_terminal=False, highlight=False, markup=False)
    show(document, console)
    out.seek(0)
    return "\n".join(line.rstrip() for line in out.read().splitlines())
