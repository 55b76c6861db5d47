"""What `--emit` can write."""

from __future__ import annotations

from typing import Literal, get_args

Form = Literal["yaml", "args", "python"]
FORMS: tuple[str, ...] = get_args(Form)
