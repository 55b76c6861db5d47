"""Levers that are not in the answer, each with the reason: it cannot help, it is not needed, it is not to be had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from memfit.advice.forecast import Forecast
from memfit.advice.lever import CACHED, Lever
from memfit.advice.search import Found, can_lower
from memfit.units import gib

Why = Literal["would not help", "not needed", "unavailable"]
WITH_STEPS = {
    "micro-batch": "smaller micro-batch", "sequence": "shorter sequence", "rank": "lower rank", "beams": "fewer beams",
    "new tokens": "fewer new tokens", "windows": "fewer windows",
}  # fmt: skip
"""Groups of many levers, in one word."""
PHASES = {"step": "the optimizer's step", "": "the traced code"}


@dataclass(frozen=True, kw_only=True)
class SetAside:
    name: str
    cost: str
    why: Why
    reason: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def set_aside(
    levers: Sequence[Lever], found: Found, before: Forecast, refused: Mapping[str, str]
) -> tuple[SetAside, ...]:
    """One for each group, under its strongest lever that is to be had; a group of the answer goes without saying.
    `refused` cannot be planned even alone."""
    taken = {lever.group for lever in found.levers}
    strongest = {lever.group: lever for lever in levers if lever.missing is None}
    return tuple(
        _reason(lever, found, before, refused)
        for lever in levers
        if lever.missing is not None
        or lever.name in refused
        or (lever.group not in taken and strongest[lever.group] is lever)
    )


def _reason(lever: Lever, found: Found, before: Forecast, refused: Mapping[str, str]) -> SetAside:
    after = found.forecast
    if lever.missing is not None:
        return _aside(lever, "unavailable", f"needs {lever.missing}, which is not installed")
    if lever.name in refused:
        return _aside(lever, "unavailable", refused[lever.name])
    if lever in found.refused:
        return _aside(lever, "unavailable", "it does not go together with the others")
    if not can_lower(lever, before) and not can_lower(lever, after):
        return _aside(lever, "would not help", _nothing_there(lever, before))
    if after.fits:
        return _aside(lever, "not needed", "the changes of the answer are enough")
    why = "with it the peak is no lower" if can_lower(lever, after) else _nothing_there(lever, after)
    return _aside(lever, "would not help", why)


def _aside(lever: Lever, why: Why, reason: str) -> SetAside:
    return SetAside(name=WITH_STEPS.get(lever.group, lever.name), cost=lever.cost, why=why, reason=reason)


def _nothing_there(lever: Lever, forecast: Forecast) -> str:
    where = PHASES.get(forecast.phase, f"the {forecast.phase} pass")
    if lever.only_in is not None and lever.only_in != forecast.phase:
        return f"the peak is in {where}, not in {PHASES.get(lever.only_in, lever.only_in)}"
    if lever.lowers == (CACHED,):
        return f"only {gib(forecast.cached_bytes)} of what is reserved lies idle"
    words = [name.replace("_", " ") for name in lever.lowers]
    named = " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    return f"at the peak, in {where}, there is nothing that it lowers ({named})"
