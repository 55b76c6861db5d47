"""What can be changed about a job so that it takes less memory, the cheapest first, and how to switch each on.

    levers = levers_for(workload, keep=("seq_len", "rank"))
    apply(workload, levers[:2])

A lever only says which settings it changes. What it saves is not written anywhere: that is the difference of two
predictions of the very job (`advice/fit.py`). The global batch is never changed by any of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from memfit.advice.lever import CACHED, COSTS, Cost, Lever
from memfit.advice.lever_catalogue import catalogue
from memfit.errors import UnknownName, UsageError
from memfit.jobs.workload import Workload, kinds_that_read

__all__ = ["CACHED", "COSTS", "Cost", "Lever", "apply", "checked_setting", "levers_for"]


def levers_for(workload: Workload, *, keep: Sequence[str] = ()) -> list[Lever]:
    """Those that apply and are not on, the cheapest first. `keep` names settings that must stay as they are."""
    kept = {checked_setting(name) for name in keep}
    for name in kept:
        if workload.kind not in (kinds := kinds_that_read([name])):
            raise UsageError(f"--keep {name} has no effect: it is a setting of {' and '.join(kinds)}")
    return [lever for lever in catalogue(workload) if not kept & set(lever.settings)]


def apply(workload: Workload, levers: Iterable[Lever]) -> Workload:
    changes: dict[str, Any] = {}
    for lever in levers:
        changes.update(lever.settings)
        if "offload" in lever.settings:  # what already lies on the host stays there
            so_far = changes.get("_offload", workload.offload or ())
            changes["offload"] = changes["_offload"] = (*so_far, *_texts(lever.settings["offload"]))
    changes.pop("_offload", None)
    return dataclasses.replace(workload, **changes).without_unused()


def checked_setting(name: str) -> str:
    """A setting by its flag or its name in Python."""
    plain = name.strip().removeprefix("--").replace("-", "_")
    known = [each.name for each in dataclasses.fields(Workload)]
    if plain not in known:
        flags = [each.replace("_", "-") for each in known]
        raise UnknownName("setting to keep", name, flags, more="such as seq-len, rank or precision")
    return plain


def _texts(value: object) -> tuple[str, ...]:
    assert isinstance(value, tuple)
    return value
