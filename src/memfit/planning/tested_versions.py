"""The versions that memfit's tests have run with, and those of an environment that lie outside."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

TESTED: dict[str, tuple[str, str]] = {
    "torch": ("2.11", "2.13"),
    "transformers": ("5.6", "5.22"),
    "peft": ("0.19", "0.21"),
    "accelerate": ("1.10", "1.15"),
}
"""Oldest and newest release, both included. The oldest are those of pyproject.toml (`make test-oldest`), the newest
those of the day when `make test-newest` last passed. torch 2.11 ran on the H200 that memfit is measured on."""


def outside_tested(versions: Mapping[str, str | None]) -> Iterator[str]:
    """In words: `transformers 5.30.1 (tested: 5.6 to 5.22)`. A development version counts as its release."""
    for package, (oldest, newest) in TESTED.items():
        version = versions.get(package)
        if version is not None and not release_of(oldest) <= release_of(version) <= release_of(newest):
            yield f"{package} {version} (tested: {oldest} to {newest})"


def release_of(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` is (2, 13)."""
    found = re.match(r"(\d+)(?:\.(\d+))?", version)
    return (int(found[1]), int(found[2] or 0)) if found else ()
