"""A workload as a labelled trace: from the cache, or traced now and kept there.

torch and transformers are imported only where there is something to trace, so a job that was traced before is planned
for another card of its class, or with other settings of the allocator, without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memfit.core.events import Trace
from memfit.jobs.workload import Workload
from memfit.models.registry import resolve
from memfit.planning import cache
from memfit.planning.recipe import Recipe
from memfit.tracing.platform import Platform


@dataclass(frozen=True, kw_only=True)
class Traced:
    trace: Trace
    workload: Workload
    model: str
    parameters: int
    trainable_parameters: int
    notes: tuple[str, ...]


def trace_workload(work: Workload, platform: Platform, *, cached: bool = True) -> Traced:
    key = cache.key_of(work, platform) if cached else None
    found = cache.load(key, lambda trace, facts: _kept(work, trace, facts)) if key else None
    if found is None:
        found = _traced_now(work, platform, key)
    return found


def _kept(work: Workload, trace: Trace, facts: Mapping[str, Any]) -> Traced:
    recipe = Recipe.from_facts(trace, facts)
    return _result(work, recipe, recipe.whole())


def _traced_now(work: Workload, platform: Platform, key: cache.Key | None) -> Traced:
    from memfit.planning.few_blocks import trace_few_blocks

    recipe, whole = trace_few_blocks(work, platform)
    if key is not None and key == cache.key_of(work, platform):  # else a file has changed meanwhile
        cache.store(key, recipe.trace, recipe.facts())
    return _result(work, recipe, whole)


def _result(work: Workload, recipe: Recipe, whole: Trace) -> Traced:
    return Traced(
        trace=whole, workload=recipe.resolved(work), model=resolve(work.model).name, parameters=recipe.parameters,
        trainable_parameters=recipe.trainable_parameters, notes=recipe.notes,
    )  # fmt: skip
