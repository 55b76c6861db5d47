"""docs/house.md is the house as it stands."""

from __future__ import annotations

import re

from support.house import PACKAGE, PAGE, first_sentence, page

FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__main__.py"]


def test_the_map_shows_the_rooms_and_files_as_they_are() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "make house"


def test_a_file_says_in_one_sentence_what_it_is_about() -> None:
    sentences = {str(path): first_sentence(path) for path in FILES}
    assert {path: said for path, said in sentences.items() if not 10 < len(said) <= 160} == {}


def test_files_that_the_text_names_are_there() -> None:
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", PAGE.read_text(encoding="utf-8"))
    assert named
    assert [
        name for name in named if not (PACKAGE / name).is_file() and not (PACKAGE.parents[1] / name).is_file()
    ] == []
