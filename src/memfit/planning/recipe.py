"""A job as it was traced, and how to make the whole of it: what the cache keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memfit.core.events import Trace
from memfit.core.repeat import extend
from memfit.jobs.workload import Workload
from memfit.models.config_check import MAX_LAYERS

ASKED_ANEW = ("model", "alloc_conf")
"""Settings that are the asker's own: a model has many spellings, and the allocator comes after the trace."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    trace: Trace
    """Labelled. Of four units of blocks, or of all blocks where `blocks` is None."""
    blocks: str | None = None
    """The path of the list of blocks that repeat, with their period and the number of units to make."""
    period: int = 1
    units: int = 0
    parameters: int
    trainable_parameters: int
    settings: Mapping[str, Any]
    """As resolved, but for those that are asked anew."""
    notes: tuple[str, ...] = ()

    def whole(self) -> Trace:
        """Raises NotRepeating where the blocks turn out to differ."""
        if self.blocks is None:
            return self.trace
        return extend(self.trace, self.blocks, period=self.period, units=self.units)

    def resolved(self, work: Workload) -> Workload:
        """The workload with what the tracing found out, such as the names of the linear layers."""
        names = {field.name for field in dataclasses.fields(Workload)} - set(ASKED_ANEW)
        known: dict[str, Any] = {name: self.settings[name] for name in names & set(self.settings)}
        for name in ("target_modules", "offload"):
            if isinstance(known.get(name), list):
                known[name] = tuple(known[name])
        return dataclasses.replace(work, **known)

    def facts(self) -> dict[str, Any]:
        """All but the trace, as JSON."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "trace"}
        return named | {"settings": dict(self.settings), "notes": list(self.notes)}

    @classmethod
    def from_facts(cls, trace: Trace, facts: Mapping[str, Any]) -> Recipe:
        """From a file, so nothing is believed unread: raises ValueError, KeyError or TypeError."""
        numbers = {name: int(facts[name]) for name in ("period", "units", "parameters", "trainable_parameters")}
        if min(numbers.values()) < 0 or not 0 < numbers["period"] <= MAX_LAYERS or numbers["units"] > MAX_LAYERS:
            raise ValueError(f"impossible numbers: {numbers}")
        return cls(
            trace=trace, blocks=None if facts["blocks"] is None else str(facts["blocks"]),
            settings=dict(facts["settings"]), notes=tuple(str(note) for note in facts["notes"]), **numbers,
        )  # fmt: skip


def settings_found(work: Workload) -> dict[str, Any]:
    return {name: value for name, value in work.settings().items() if name not in ASKED_ANEW}
