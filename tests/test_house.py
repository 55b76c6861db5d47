"""docs/house.md is the house as it stands, and CONTRIBUTING.md names what is there."""

from __future__ import annotations

import re

import pytest
from support.house import BEGIN, PACKAGE, PAGE, ROOT, first_sentence, page

FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__main__.py"]


def test_the_map_shows_the_rooms_and_files_as_they_are() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "make house"


def test_a_file_says_in_one_sentence_what_it_is_about() -> None:
    sentences = {str(path): first_sentence(path) for path in FILES}
    assert {path: said for path, said in sentences.items() if not 10 < len(said) <= 160} == {}


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "docs/house.md"])
def test_what_the_text_names_is_there(document: str) -> None:
    said = [word for word in re.findall(r"`([^`\n]+)`", _written(document)) if word != "n/a"]
    pattern = r"(?!\.venv)[\w.-]*(/|\.(py|md|toml|txt))[\w./-]*"
    paths = [word.rstrip("/") for word in said if re.fullmatch(pattern, word)]
    words = [word.removesuffix("()") for word in said if re.fullmatch(r"[A-Za-z_]\w*(\(\))?", word)]
    assert paths
    assert words
    known = _files_and_folders()
    assert [path for path in paths if not any(f"/{each}".endswith(f"/{path}") for each in known)] == []
    assert sorted(set(words) - _words_of_the_code()) == []


def _written(document: str) -> str:
    """By people: without the rooms, which another test holds to the docstrings."""
    return (ROOT / document).read_text(encoding="utf-8").partition(BEGIN)[0]


def _files_and_folders() -> list[str]:
    inside = [path for folder in ("src", "tests", "accuracy", "docs") for path in (ROOT / folder).rglob("*")]
    return [path.relative_to(ROOT).as_posix() for path in [*ROOT.iterdir(), *inside]]


def _words_of_the_code() -> set[str]:
    files = [path for folder in ("src", "tests", "accuracy") for path in (ROOT / folder).rglob("*.py")]
    return {word for path in files for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
