"""Versions of packages, compared: as much of PEP 440 as requirements of real packages use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

Version = tuple[int, ...]
_NUMBERS = re.compile(r"\d+(?:\.\d+)*")
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?")
_BOUND = re.compile(r"(===|==|~=|!=|<=|>=|<|>)\s*([0-9][^,\s]*)")
EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")


def numbers_of(text: str) -> Version:
    """`2.13.0+cpu` is (2, 13, 0): what follows the numbers does not count here."""
    match = _NUMBERS.match(text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


@dataclass(frozen=True)
class Requirement:
    """That another package be there in some versions."""

    package: str
    bounds: tuple[tuple[str, str], ...]
    extra: str | None
    """Only where this extra is asked for."""
    conditional: bool
    """On the Python version or the system."""

    def __str__(self) -> str:
        return f"{self.package} {','.join(sign + said for sign, said in self.bounds)}"

    def unmet_by(self, version: str) -> bool:
        have = numbers_of(version)
        return not all(_holds(have, sign, said) for sign, said in self.bounds)


def requirements(lines: list[str]) -> Iterator[Requirement]:
    for line in lines:
        match = _REQUIREMENT.fullmatch(line)
        if match is None:
            continue
        marker = match[3] or ""
        extra = EXTRA.search(marker)
        rest = EXTRA.sub("", marker).replace("and", "").strip(" ()")
        yield Requirement(
            package=match[1].lower().replace("_", "-"), bounds=tuple(_BOUND.findall(match[2])),
            extra=extra[1] if extra else None, conditional=bool(rest),
        )  # fmt: skip


def _holds(have: Version, sign: str, said: str) -> bool:
    want = numbers_of(said)
    if said.endswith(".*") or sign == "~=":
        stem = want[:-1] if sign == "~=" else want
        alike = have[: len(stem)] == stem
        return not alike if sign == "!=" else alike and (sign != "~=" or have >= want)
    length = max(len(have), len(want))
    left, right = (each + (0,) * (length - len(each)) for each in (have, want))
    return {
        "==": left == right, "===": left == right, "!=": left != right, ">=": left >= right, "<=": left <= right,
        ">": left > right, "<": left < right,
    }[sign]  # fmt: skip
