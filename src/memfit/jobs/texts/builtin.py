"""The reference that Python itself carries: 0.7 MB of English on every machine, a quarter of it kept for tests."""

from __future__ import annotations

import platform
from collections.abc import Iterator

from memfit.errors import InputError

HELD_OUT = 4
"""One topic of so many is for evaluation."""


def builtin_documents(*, held_out: bool = False) -> list[str]:
    """The topics, or those of them that are kept for tests."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise InputError(
            "this Python comes without pydoc_data, which is the text called builtin",
            hint="give the path of a text file",
        ) from error
    whole = list(_without_repetition([topics[name] for name in sorted(topics)]))
    return [text for i, text in enumerate(whole) if (i % HELD_OUT == 0) == held_out]


def builtin_origin() -> str:
    return f"pydoc_data.topics of Python {platform.python_version()}"


def _without_repetition(documents: list[str]) -> Iterator[str]:
    """Topics contain one another: a paragraph stays where it stands first, so that none is in both parts."""
    seen: set[str] = set()
    for document in documents:
        fresh = [paragraph for paragraph in document.split("\n\n") if paragraph not in seen]
        seen.update(fresh)
        if fresh:
            yield "\n\n".join(fresh)
