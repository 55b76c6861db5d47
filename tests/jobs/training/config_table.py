"""The table of config keys in docs/training.md, from the dataclasses themselves.

`python tests/jobs/training/config_table.py` writes it anew.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memfit.jobs.training import config
from memfit.jobs.training.config import TrainConfig

PAGE = Path(__file__).parents[3] / "docs" / "training.md"
BEGIN, END = "<!-- keys -->\n", "<!-- end of keys -->\n"
NOT_KEYS = ("name", "remarks")


def said_of() -> dict[tuple[str, str], str]:
    """What stands below each field in the source."""
    found = {}
    for made in ast.parse(inspect.getsource(config)).body:
        if isinstance(made, ast.ClassDef):
            for field, below in zip(made.body, made.body[1:], strict=False):
                is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                    text = str(below.value.value)  # type: ignore[attr-defined]
                    found[made.name, field.target.id] = " ".join(text.split())
    return found


def rows() -> Iterator[str]:
    said = said_of()
    for section in dataclasses.fields(TrainConfig):
        inner = getattr(config, f"{section.name.title()}Config", None)
        if section.name in NOT_KEYS:
            continue
        if inner is None:
            yield row(section.name, section, said.get(("TrainConfig", section.name), ""))
            continue
        for field in dataclasses.fields(inner):
            yield row(f"{section.name}.{field.name}", field, said.get((inner.__name__, field.name), ""))


def row(key: str, field: dataclasses.Field[Any], text: str) -> str:
    kind = str(field.type)
    choices = getattr(config, kind, None)
    words = "" if choices is None else ", ".join(f"`{each}`" for each in choices.__args__)
    what = "; ".join(part for part in (words, text.replace("None: ", "If not given: ")) if part)
    return f"| `{key}` | {shown(field)} | {what} |"


def shown(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if value is dataclasses.MISSING or value in (None, "", ()):
        return ""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else f"`{value}`"


def table() -> str:
    return "\n".join(["| key | default | |", "|---|---|---|", *rows()]) + "\n"


def written(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
