"""Bytes are ints inside; this is the one place where they become text, and text becomes bytes. Seconds become text
here too."""

from __future__ import annotations

import re

from memfit.errors import UsageError

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
TiB = 1 << 40

_BINARY = {"B": 1, "KIB": KiB, "MIB": MiB, "GIB": GiB, "TIB": TiB}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


LONGEST_SIZE = 500
"""Characters."""


def format_bytes(count: int) -> str:
    """Two decimals in the largest binary unit that keeps the figure at 1 or more: `3.05 GiB`, `-512 B`."""
    size = abs(count)
    for unit, name in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if size >= unit:
            return f"{count / unit:,.2f} {name}"
    return f"{count} B"


def gib(count: int | None) -> str:
    """For columns of one unit: `21.35 GiB`; unknown is `n/a`."""
    return "n/a" if count is None else f"{count / GiB:,.2f} GiB"


def in_mib(count: int) -> str:
    """A size to be typed, rounded down: `14034MiB`."""
    return f"{count // MiB}MiB"


def parse_bytes(text: str, *, flag: str = "size") -> int:
    """`24GiB` is 24 x 2^30, `24GB` is 24 x 10^9, a bare number is bytes."""
    match = _SIZE.fullmatch(text) if len(text) <= LONGEST_SIZE else None
    factor = None
    if match:
        unit = match[2].upper()
        factor = 1 if not unit else _BINARY.get(unit, _DECIMAL.get(unit))
    if match is None or factor is None:
        shown = text if len(text) <= LONGEST_SIZE else f"{text[:20]}..."
        raise UsageError(f"{flag} {shown!r} is not a size", hint="write it as 24GiB, 512MiB or a number of bytes")
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def duration(seconds: float) -> str:
    """Two figures or so in the largest unit that keeps it at 1 or more: `0.16 s`, `12 min`, `3.4 h`, `2.1 days`."""
    for unit, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= unit:
            return f"{two_figures(seconds / unit)} {name}"
    return f"{two_figures(seconds)} s"


def two_figures(number: float) -> str:
    """`16.3` is `16`, `1.63` is `1.6`, `20,464` is `20,000`: no more than an estimate is worth."""
    rounded = float(f"{number:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"
