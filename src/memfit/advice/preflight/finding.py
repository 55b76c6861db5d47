"""One line of a pre-flight: what was looked at, what was found, and what to do next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from memfit.errors import MemfitError

Status = Literal["ok", "warning", "failed", "skipped"]
Subject = Literal["machine", "settings", "config", "model", "plan"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    subject: Subject
    name: str
    status: Status
    found: str
    next: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    """The figures behind `found`."""

    def to_json(self) -> dict[str, Any]:
        return {
            "subject": self.subject, "name": self.name, "status": self.status, "found": self.found, "next": self.next,
            "details": dict(self.details),
        }  # fmt: skip


class CannotTell(Exception):
    """Why a check cannot be made here, in words for a person."""


@dataclass(frozen=True)
class Line:
    """The name of a check, from which its findings are made."""

    subject: Subject
    name: str

    def ok(self, found: str, next: str | None = None, **details: Any) -> Finding:
        return self._made("ok", found, next, details)

    def warning(self, found: str, next: str | None = None, **details: Any) -> Finding:
        return self._made("warning", found, next, details)

    def failed(self, found: str, next: str | None = None, **details: Any) -> Finding:
        return self._made("failed", found, next, details)

    def skipped(self, why: str, next: str | None = None, **details: Any) -> Finding:
        return self._made("skipped", why, next, details)

    def _made(self, status: Status, found: str, next: str | None, details: Mapping[str, Any]) -> Finding:
        step = None if next is None else " ".join(next.splitlines())  # errors may say it on two lines
        return Finding(subject=self.subject, name=self.name, status=status, found=found, next=step, details=details)


def guarded(line: Line, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """What `look` finds; where it stops with an error, that is the finding."""
    try:
        yield from look()
    except CannotTell as why:
        yield line.skipped(str(why))
    except MemfitError as error:
        yield line.failed(error.message, error.hint)
    except ImportError as error:
        missing = error.name or str(error)
        yield line.skipped(f"needs {missing}, which is not installed", f"pip install {missing.split('.')[0]}")
