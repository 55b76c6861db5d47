"""The map of the house, docs/house.md, made of the docstrings: `make house` writes it, tests/test_house.py compares."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "memfit"
PAGE = ROOT / "docs" / "house.md"
BEGIN, END = "<!-- rooms: written by `make house` from the docstrings -->", "<!-- end of the rooms -->"


def first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.?!])\s", paragraph + " ")[0].strip()


def folders() -> Iterator[Path]:
    """In the order of the layers, a room's inner rooms after it."""
    from test_rooms import ORDER

    for room in ORDER:
        if (PACKAGE / room).is_dir():
            yield from sorted(path.parent for path in (PACKAGE / room).rglob("__init__.py"))


def room_lines(folder: Path) -> Iterator[str]:
    yield f"### {folder.relative_to(PACKAGE).as_posix()}"
    yield ""
    yield first_sentence(folder / "__init__.py")
    yield ""
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            yield f"- `{path.name}`: {first_sentence(path)}"
    yield ""


def rooms() -> str:
    ground = [
        f"- `{path.name}`: {first_sentence(path)}" for path in sorted(PACKAGE.glob("*.py")) if path.stem[0] != "_"
    ]
    lines = ["### On the ground", "", *ground, ""]
    for folder in folders():
        lines += room_lines(folder)
    return "\n".join(lines)


def page() -> str:
    """As it should be: what people wrote, and the rooms as they are."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{rooms()}\n{END}{after}"


if __name__ == "__main__":
    import sys

    sys.path.insert(0, str(ROOT / "tests"))
    PAGE.write_text(page(), encoding="utf-8")
