"""The packages that a trace depends on: which versions are here, and which memfit's tests have run with."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache

PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "torchao", "triton")
SELDOM_THERE = ("bitsandbytes", "torchao", "triton")
DIST_INFO = ".dist-info"

TESTED: dict[str, tuple[str, str]] = {
    "torch": ("2.11", "2.13"),
    "transformers": ("5.6", "5.17"),
    "peft": ("0.19", "0.21"),
    "accelerate": ("1.10", "1.15"),
}
"""Oldest and newest release, both included. The oldest are those of pyproject.toml (`make test-oldest`), the newest
those of the day when `make test-newest` last passed. torch 2.11 ran on the H200 that memfit is measured on."""


def outside_tested(versions: Mapping[str, str | None]) -> Iterator[str]:
    """In words: `transformers 5.30.1 (tested: 5.6 to 5.17)`. A development version counts as its release."""
    for package, (oldest, newest) in TESTED.items():
        version = versions.get(package)
        if version is not None and not release_of(oldest) <= release_of(version) <= release_of(newest):
            yield f"{package} {version} (tested: {oldest} to {newest})"


def release_of(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` is (2, 13)."""
    found = re.match(r"(\d+)(?:\.(\d+))?", version)
    return (int(found[1]), int(found[2] or 0)) if found else ()


@cache
def versions() -> dict[str, str | None]:
    """To import the packages is what the cache saves."""
    found: dict[str, str | None] = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    by_folder = _versions_by_folder()
    for name in PACKAGES:
        found[name] = by_folder.get(name) or (None if name in SELDOM_THERE else recorded_version(name))
    return found


def _versions_by_folder() -> dict[str, str]:
    """Read off `torch-2.11.0.dist-info`: `importlib.metadata` takes longer to import than all the rest of the key."""
    found: dict[str, str] = {}
    for place in sys.path:
        here: dict[str, list[str]] = {}
        with suppress(OSError):
            for entry in os.listdir(place or os.curdir):
                name, _, version = entry.removesuffix(DIST_INFO).partition("-")
                if version and entry.endswith(DIST_INFO) and name in PACKAGES:
                    here.setdefault(name, []).append(version)
        found = {name: ",".join(sorted(versions)) for name, versions in here.items()} | found
    return found


def recorded_version(name: str) -> str | None:
    """As pip has it; None of what is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None
