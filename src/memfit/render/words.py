"""Small words that every report uses: counts, shares, names from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.units import duration, two_figures


def count(number: int) -> str:
    """`7.62 billion`, `135 million`, `12,345`."""
    for size, name in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if number >= 0.9995 * size:  # else 999.9 million would be 1e+03 million
            return f"{number / size:.3g} {name}"
    return f"{number:,}"


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "n/a"


def clean(text: object) -> str:
    """Names of modules and files come from elsewhere: no control character of theirs reaches a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


def short_op(op: str) -> str:
    """`aten._log_softmax.default` is `_log_softmax` to people."""
    return op.removeprefix("aten.").removesuffix(".default")


def tail(text: str, width: int) -> str:
    """The end of a long path says more than its beginning."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


def time_words(time: Mapping[str, Any]) -> str:
    """How long a training takes, as `duration` of a document has it: all of it where that is known, and a step."""
    step, pace = _span(time["step_seconds"]), two_figures(time["tokens_per_second"]["likely"])
    said = f"about {step} a step, {pace} tokens a second"
    if time["total_seconds"] is None:
        return said
    steps = time["steps"]
    return f"about {_span(time['total_seconds'])} for {steps:,} step{'' if steps == 1 else 's'}; {said}"


def time_basis(document: Mapping[str, Any]) -> list[str]:
    """What the time rests on, where there is one."""
    time = document.get("duration")
    return [f"the time is estimated: {clean(time['basis'])}"] if time else []


def _span(seconds: Mapping[str, float]) -> str:
    return f"{duration(seconds['likely'])} ({duration(seconds['least'])} to {duration(seconds['most'])})"
