"""A workload as a labelled trace: from the cache, or traced now and kept there.

torch and transformers are imported only where there is something to trace, so a job that was traced before is planned
for another card of its class, or with other settings of the allocator, without them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memfit.jobs.workload import Workload
from memfit.models.registry import resolve
from memfit.planning import cache
from memfit.planning.cache import Recipe
from memfit.planning.host_facts import HOST, scaled
from memfit.planning.provenance import Provenance
from memfit.platform import Platform
from memfit.replay.events import Trace

if TYPE_CHECKING:
    from memfit.planning.categories import TraceRecord
    from memfit.planning.interpolation.family import Family, Interpolation

UNLIKE = "traced by itself, not told from other batch sizes and lengths"


@dataclass(frozen=True, kw_only=True)
class Traced:
    trace: Trace
    workload: Workload
    model: str
    parameters: int
    trainable_parameters: int
    how: Provenance
    notes: tuple[str, ...]


def trace_workload(
    work: Workload, platform: Platform, *, cached: bool = True, few: bool = False, stacks: bool = False
) -> Traced:
    """In this order: told from other batch sizes and lengths of the job, found on disk, told after some more of those
    were traced, or traced now. Who asks about `few` of them does not wait for more. Lines of code (`stacks`) are known
    only of what is traced now."""
    if stacks:
        from memfit.tracing.python_stacks import keeping_stacks

        with keeping_stacks():
            return _traced_now(work, platform, None, None)
    if not cached:
        return _traced_now(work, platform, None, None)
    family = _family(work, platform)
    told = family.told(work) if family else None
    if told is not None:
        return _told(work, told)
    key = cache.key_of(work, platform)
    found = cache.load(key, lambda trace, facts: _kept(work, trace, facts)) if key else None
    if found is not None:
        return found
    told = family.told_after_more(work) if family and not few else None
    return _told(work, told) if told is not None else _traced_now(work, platform, key, family)


@dataclass
class FirstPlan:
    """The first of this process, in place of a family: one plan is no sweep. What was traced of it is handed on when
    there is a second."""

    work: Workload
    platform: Platform
    lesson: tuple[Recipe, list[TraceRecord]] | None = None
    handed_on: bool = False
    given_up: str | None = field(default=None, init=False)

    def told(self, _: Workload) -> None:
        return None

    told_after_more = told

    def learn(self, _: Workload, recipe: Recipe, heard: list[TraceRecord]) -> None:
        self.lesson = recipe, heard

    def hand_on(self) -> None:
        from memfit.planning.interpolation.family import family_of, point_of

        family, lesson = family_of(self.work, self.platform), self.lesson
        self.lesson, self.handed_on = None, True
        if family is not None:
            family.corners.asked.add(point_of(self.work))
            if lesson is not None:
                family.learn(self.work, *lesson)


_first: FirstPlan | None = None


def _family(work: Workload, platform: Platform) -> Family | FirstPlan | None:
    """The only way into the room of interpolation, but for sweeps that say what is to come (`planning/many.py`)."""
    global _first
    if _first is None:
        _first = FirstPlan(work, platform)
        return _first
    from memfit.planning.interpolation.family import family_of

    if not _first.handed_on:
        _first.hand_on()
    return family_of(work, platform)


def _told(work: Workload, told: Interpolation) -> Traced:
    here = {"batch_size": work.batch_size, "seq_len": work.seq_len}
    how = dataclasses.replace(told.recipe.how, shapes=told.shapes)
    recipe = dataclasses.replace(told.recipe, settings={**told.recipe.settings, **here}, how=how)
    traced = told.recipe.settings["batch_size"] * told.recipe.settings["seq_len"]
    tokens = work.batch_size * work.seq_len / traced
    told.trace.facts |= scaled({HOST: told.recipe.trace.facts.get(HOST, {})}, activations=tokens)
    return _result(work, recipe, told.trace)


def _kept(work: Workload, trace: Trace, facts: Mapping[str, Any]) -> Traced:
    recipe = Recipe.from_facts(trace, facts)
    return _result(work, recipe, recipe.whole())


def _traced_now(work: Workload, platform: Platform, key: cache.Key | None, family: Family | FirstPlan | None) -> Traced:
    from memfit.planning.categories import recording_traces
    from memfit.planning.few import trace_few_blocks

    with recording_traces() as heard:
        recipe, whole = trace_few_blocks(work, platform)
    if key is not None and key == cache.key_of(work, platform):  # else a file has changed meanwhile
        cache.store(key, recipe.trace, recipe.facts())
    made = _result(work, recipe, whole)
    if family is None:
        return made
    family.learn(work, recipe, heard)
    why = family.given_up
    return dataclasses.replace(made, notes=(*made.notes, f"{UNLIKE}: {why}")) if why else made


def _result(work: Workload, recipe: Recipe, whole: Trace) -> Traced:
    return Traced(
        trace=whole,
        workload=recipe.resolved(work),
        model=resolve(work.model).name,
        parameters=recipe.parameters,
        trainable_parameters=recipe.trainable_parameters,
        how=recipe.how,
        notes=recipe.notes,
    )
