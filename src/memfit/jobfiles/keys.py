"""What a key of a job file is: a setting of memfit, of no influence on memory, not to be planned, or unknown.

A format is a table. `keys` are those that decide memory, each with the value that the tool itself takes where the key
is absent; `idle` are those that do not; `refused` those that memfit has no plan for, unless their value says "off".
`settle` makes settings of the values; `written` says which keys a changed setting is written to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal

from memfit.errors import InputError, UsageError
from memfit.jobs.settings import flag

Kind = Literal["whole", "number", "yes", "text", "names", "any"]
MOST_WHOLE = 1 << 40
NOT_MODELLED = "not modelled:"
"""How a note begins that a reader must see beside the verdict."""


@dataclass(frozen=True)
class FileKey:
    """A key that decides memory."""

    default: Any
    """What the tool takes where the key is absent or empty."""
    kind: Kind = "any"


@dataclass(frozen=True)
class Refused:
    """A key that memfit has no plan for."""

    why: str
    harmless: tuple[object, ...] = (False, 0, "")
    """KeyValues with which it does nothing."""
    instead: tuple[str, ...] = ()
    """Flags that say what to plan in its place."""


def file_keys(by_kind: Mapping[Kind, Mapping[str, Any]]) -> dict[str, FileKey]:
    """By kind, each with what the tool takes where it is absent or empty."""
    return {name: FileKey(default, kind) for kind, named in by_kind.items() for name, default in named.items()}


Edits = Mapping[str, Any]
"""FileKey, and the value that it is to have."""


@dataclass(frozen=True, kw_only=True)
class JobFormat:
    name: str
    title: str
    """As the tool calls itself."""
    keys: Mapping[str, FileKey]
    idle: str
    """Names, or patterns with a star, of keys without influence on memory."""
    refused: Mapping[str, Refused]
    settle: Callable[[KeyValues], dict[str, Any]]
    written: Mapping[str, str | Callable[[Any], Edits]] = field(default_factory=dict)
    """By setting: the key to write a new value to, or what to write for it."""
    nested: bool = False
    """Whether keys stand in sections: `optimizer: {fused: true}` is then the key optimizer.fused."""
    newer: Mapping[str, str] = field(default_factory=dict)
    """Keys that newer versions of the tool call otherwise; where a file has both, the newer name counts."""

    def edits(self, setting: str, value: Any) -> Edits:
        how = self.written[setting]
        return {how: value} if isinstance(how, str) else how(value)

    def is_idle(self, key: str) -> bool:
        names, patterns = self._idle
        return key in names or any(fnmatchcase(key, each) for each in patterns)

    @cached_property
    def _idle(self) -> tuple[set[str], list[str]]:
        names = self.idle.split()
        return {each for each in names if "*" not in each}, [each for each in names if "*" in each]


@dataclass
class KeyValues:
    """The values of one file, and what was found out about its keys while they were read."""

    format: JobFormat
    where: str
    document: Mapping[str, Any]
    given: Mapping[str, Any]
    """Settings by flags, which replace the file's."""
    folder: str
    without: Collection[str] = ()
    """Keys that are taken as if they were not there."""
    used: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: dict[str, Refused] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plain = {str(key): value for key, value in self.document.items()}
        self._all = dict(_flat(plain)) if self.format.nested else plain
        names = {*self.format.keys, *self.format.newer.values()}
        found = {each: [k for k in self._all if k == each or k.startswith(f"{each}.")] for each in self.without}
        for missing in (each for each, keys in found.items() if not keys):
            raise UsageError(f"--without {missing}: there is no such key in {self.where}")
        for key, value in self._all.items():
            if any(key in keys for keys in found.values()):
                self.left_out.append(key)
            elif key in names:
                continue
            elif (refused := self.format.refused.get(key)) is not None:
                if value is None or value in refused.harmless:
                    self.idle.append(key)
                else:
                    self.refuse(key, refused)
            elif self.format.is_idle(key):
                self.idle.append(key)
            else:
                self.unknown.append(key)

    def name_of(self, key: str) -> str:
        """As this file calls it."""
        newer = self.format.newer.get(key, key)
        return newer if self._all.get(newer) is not None and newer not in self.left_out else key

    def has(self, key: str) -> bool:
        key = self.name_of(key)
        return self._all.get(key) is not None and key not in self.left_out

    def __getitem__(self, key: str) -> Any:
        """As the file says, or as the tool takes it by itself."""
        known, key = self.format.keys[key], self.name_of(key)
        if not self.has(key):
            self.defaults[key] = known.default
            return known.default
        self.used[key] = made = self._typed(key, self._all[key], known.kind)
        return made

    def refuse(self, key: str, refused: Refused | str) -> None:
        """Unless a flag says what to plan in its place."""
        refused = Refused(refused) if isinstance(refused, str) else refused
        if any(name in self.given for name in refused.instead):
            said = " ".join(f"{flag(name)} {self.given[name]}" for name in refused.instead if name in self.given)
            self.notes.append(f"{NOT_MODELLED} {key}: {refused.why}; planned with {said} in its place")
            self.used[key] = self._all.get(key)
        else:
            self.problems[key] = refused

    def check(self) -> None:
        """Everything that cannot be planned, in one error."""
        if not self.problems:
            return
        names = list(self.problems)
        lines = [f"{key}: {each.why}" for key, each in self.problems.items()]
        ways = sorted({flag(name) for each in self.problems.values() for name in each.instead})
        instead = f"{' or '.join(ways)} says what to plan in its place, or " if ways else ""
        raise UsageError(
            f"{self.where}: memfit has no plan for {', '.join(names)}",
            hint="\n".join([*lines, f"{instead}--without {','.join(names)} plans the job as if that were not there"]),
        )

    def _typed(self, key: str, value: Any, kind: Kind) -> Any:
        made = _READ[kind](value)
        if made is None:
            as_text = kind == "yes" and isinstance(value, str)
            wrong = f"is text; {_WORDS[kind]} is wanted" if as_text else f"is not {_WORDS[kind]}"
            raise InputError(f"{self.where}: {key} {_short(value)} {wrong}")
        return made


def _flat(document: Mapping[Any, Any], inside: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{inside}{key}.")
        else:
            yield f"{inside}{key}", value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _whole(value: object) -> int | None:
    number = _number(value)
    return int(number) if number is not None and number == int(number) and abs(number) < MOST_WHOLE else None


def _number(value: object) -> float | None:
    """YAML 1.1 takes 1e-4 for text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        made = float(value)
    except (ValueError, OverflowError):
        return None
    return made if abs(made) < float("inf") else None


def _yes(value: object) -> bool | None:
    """In JSON that people write, also as a word."""
    if isinstance(value, (bool, int)):
        return bool(value) if value in (0, 1) else None
    return {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value.isprintable() and value else None


def _names(value: object) -> tuple[str, ...] | None:
    """A list, or one text with commas."""
    said = value.split(",") if isinstance(value, str) else value
    if not isinstance(said, (list, tuple)) or not said:
        return None
    names = tuple(each.strip() for each in said if isinstance(each, str) and each.strip())
    return names if len(names) == len(said) else None


_READ: dict[Kind, Callable[[Any], Any]] = {
    "whole": _whole, "number": _number, "yes": _yes, "text": _text, "names": _names, "any": lambda value: value,
}  # fmt: skip
_WORDS = {"whole": "a whole number", "number": "a number", "yes": "true or false", "text": "a text", "names": "names"}
