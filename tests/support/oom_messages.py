"""One message out of a text, for tests that ask for no more."""

from __future__ import annotations

from memfit.explaining.message import Oom, find_ooms


def find_oom(text: str) -> Oom | None:
    """The last message in the text, for what came before it was survived. A plain one goes before a disguised one."""
    found = find_ooms(text)
    return found.last.oom if found else None
