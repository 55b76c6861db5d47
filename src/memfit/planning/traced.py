"""A workload as a labelled trace, and how that was made: told by others, from the cache, or traced now and kept.

torch and transformers are imported only where there is something to trace, so a job that was traced before is planned
for another card of its class, or with other settings of the allocator, without them.

What each block of a traced job is goes by when it was born, when it died and who made it. Families learn from the
traces of a job as they were made, with what these asked of rules: `recording_traces`.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from memfit.events import Action, Trace
from memfit.extrapolation.blocks import extend
from memfit.extrapolation.reused import joined
from memfit.extrapolation.streams import RuleCall
from memfit.jobs.workload import Workload
from memfit.models.config_check import MAX_LAYERS
from memfit.planning import cache
from memfit.platform import Platform

if TYPE_CHECKING:
    from memfit.planning.interpolation import Family, Interpolation

# -- what each block is ------------------------------------------------------------------------------------------------

SURVIVORS = {
    "forward": "activations", "step": "optimizer", "load": "weights", "decompress": "weights", "prepare": "weights",
    "adapt": "weights", "backward": "gradients",
}  # fmt: skip
LOSS_PHASES = ("forward", "backward")


def label(trace: Trace, loss_modules: Container[str] = ()) -> None:
    """Born and gone within one phase: temporary. What outlives its phase is what that phase is for. What the output
    head and the modules around it make is the loss: logits, their log-softmax, the gradients of both."""
    for block, phase, survives in unlabelled(trace):
        if phase in LOSS_PHASES and trace.module(block) in loss_modules:
            category = "loss"
        else:
            category = SURVIVORS.get(phase, "other") if survives else "temporaries"
        trace.set_category(block, category)


def unlabelled(trace: Trace) -> Iterator[tuple[int, str, bool]]:
    """Each block that was made and says of no category: the phase in which, and whether it outlives that."""
    born: dict[int, tuple[int, str]] = {}
    died: dict[int, int] = {}
    number, phase = 0, ""
    for action, subject in trace.events():
        if action == Action.MARK:
            number, phase = number + 1, trace.marks[subject].phase
        elif action == Action.ALLOC:
            born[subject] = number, phase
        elif action in (Action.FREE, Action.FREE_REQUESTED):
            died[subject] = number
    for block, (begun, phase) in born.items():
        if not trace.category(block):
            yield block, phase, died.get(block) != begun


def loss_modules_of(model: object) -> frozenset[str]:
    """The output head, and the modules that contain it: what they make themselves is logits and loss."""
    named = list(model.named_modules())  # type: ignore[attr-defined]
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    path = next((name for name, module in named if module is head), None)
    if path is None:
        return frozenset()
    parts = path.split(".")
    return frozenset(".".join(parts[:n]) for n in range(len(parts) + 1))


# -- traces as they were made ------------------------------------------------------------------------------------------

Part = Literal["all", "near", "far"]
"""All of the job's steps or tokens; the first tokens of a generation; its last ones."""


@dataclass(frozen=True)
class TraceRecord:
    trace: Trace
    calls: list[RuleCall]
    model: object
    """The built model that ran: traces of the same one belong together."""
    loss_modules: frozenset[str]
    tokens: int | None
    """After how many the generation was ended early."""
    seq_len: int


_listeners: list[list[TraceRecord]] = []


@contextmanager
def recording_traces() -> Iterator[list[TraceRecord]]:
    """What is traced inside is listed, in its order."""
    heard: list[TraceRecord] = []
    _listeners.append(heard)
    try:
        yield heard
    finally:
        _listeners.pop()


def record_trace(trace: Trace, calls: list[RuleCall], model: object, tokens: int | None, seq_len: int) -> None:
    """As it is now: labels are put on later, and in place."""
    if _listeners:
        kept = dataclasses.replace(trace, category_of=array("i", trace.category_of), facts=dict(trace.facts))
        noted = TraceRecord(kept, calls, model, loss_modules_of(model), tokens, seq_len)
        for heard in _listeners:
            heard.append(noted)


def parts_of(heard: list[TraceRecord], seq_len: int) -> dict[Part, TraceRecord]:
    """Those that the result rests on. The traces of few blocks do not count where all blocks were traced after them."""
    parts: dict[Part, TraceRecord] = {}
    for noted in heard:
        if noted.model is heard[-1].model:
            part: Part = "near" if noted.tokens is not None else "all" if noted.seq_len == seq_len else "far"
            parts[part] = noted
    return parts


UNLIKE = "traced by itself, not told from other batch sizes and lengths"

# -- how it was made ---------------------------------------------------------------------------------------------------

Way = Literal["traced", "extended", "interpolated"]
"""All of it; a part of its blocks, steps, tokens or micro-batches, which the others repeat; at other batch sizes and
lengths, between which this one lies."""
SHARES = {"blocks": "blocks", "steps": "steps", "tokens": "new tokens", "micro_batches": "micro-batches"}
"""Of what a share is kept, and how it is called."""


class TracedShare(NamedTuple):
    """How many of a job's blocks, steps or others were traced."""

    traced: int
    all: int


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What of a job was traced, and from what the rest of it is known. A share is None where all of them were traced,
    or where the job has none. What was read from the cache was made in one of the first two ways, at another time."""

    blocks: TracedShare | None = None
    steps: TracedShare | None = None
    """Of the optimizer, those of the probe included."""
    tokens: TracedShare | None = None
    micro_batches: TracedShare | None = None
    shapes: int | None = None
    """How many batch sizes and lengths it was interpolated between."""
    cached: bool = False

    @property
    def way(self) -> Way:
        if self.shapes is not None:
            return "interpolated"
        return "extended" if self._parts() else "traced"

    def in_words(self) -> str:
        *first, last = self._parts() or [""]
        parts = f"{', '.join(first)}{' and ' if first else ''}{last}"
        if self.shapes is not None:
            told = f"interpolated between {self.shapes} traced batch sizes and lengths"
            return f"{told}, each from {parts}" if parts else told
        told = f"extended from {parts}: the others repeat them" if parts else "traced whole"
        return f"read from the cache: {told}" if self.cached else told

    def to_json(self) -> dict[str, Any]:
        shares = {name: share and share._asdict() for name in SHARES for share in (getattr(self, name),)}
        return {"way": self.way, "cached": self.cached, **shares, "shapes": self.shapes}

    def facts(self) -> dict[str, Any]:
        """What the cache keeps of it."""
        return {name: getattr(self, name) for name in SHARES if getattr(self, name) is not None}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Provenance:
        """From a file, so nothing is believed unread: raises ValueError or TypeError."""
        shares = {str(name): TracedShare(*map(int, share)) for name, share in facts.items()}
        if not set(shares) <= set(SHARES) or any(not 0 < share.traced < share.all for share in shares.values()):
            raise ValueError(f"impossible shares: {shares}")
        return cls(**shares, cached=True)  # type: ignore[arg-type]

    def _parts(self) -> list[str]:
        shares = {word: getattr(self, name) for name, word in SHARES.items()}
        return [f"{share.traced} of {share.all} {word}" for word, share in shares.items() if share is not None]


HOST = "host"
"""Among the facts of a trace: how much host memory the levers of a training take, lever by lever."""
MANAGED = "managed"
"""In there: states of paged optimizers."""
UNMODELLED = "unmodelled"
"""Among them too: ops that were met whose kernels no rule covers."""


def scaled(facts: Mapping[str, Any], **times: float) -> dict[str, Any]:
    """The same facts where there is so many times as much of each lever's."""
    if HOST not in facts:
        return dict(facts)
    host = {lever: round(count * times.get(lever, 1)) for lever, count in facts[HOST].items()}
    return {**facts, HOST: host}


ASKED_ANEW = ("model", "alloc_conf", "adapter_config")
"""Settings that are the asker's own: a model has many spellings, and the allocator comes after the trace."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    trace: Trace
    """Labelled. Of four units of blocks, or of all blocks where `blocks` is None."""
    blocks: str | None = None
    """The path of the list of blocks that repeat, with their period and the number of units to make."""
    period: int = 1
    units: int = 0
    edge: int = 0
    parameters: int
    trainable_parameters: int
    settings: Mapping[str, Any]
    """As they turned out, but for those that are asked anew."""
    how: Provenance
    notes: tuple[str, ...] = ()

    def whole(self) -> Trace:
        """Raises NotRepeating where the blocks turn out to differ."""
        if self.blocks is None:
            return joined(self.trace)
        return joined(extend(self.trace, self.blocks, period=self.period, units=self.units, edge=self.edge))

    @property
    def found(self) -> dict[str, Any]:
        """Settings of the workload with what the tracing found out, such as the names of the linear layers."""
        names = {field.name for field in dataclasses.fields(Workload)} - set(ASKED_ANEW)
        lists = {name: tuple(value) for name, value in self.settings.items() if isinstance(value, list)}
        return {name: value for name, value in {**self.settings, **lists}.items() if name in names}

    def facts(self) -> dict[str, Any]:
        """All but the trace, as JSON."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "trace"}
        return named | {"settings": dict(self.settings), "how": self.how.facts(), "notes": list(self.notes)}

    @classmethod
    def from_facts(cls, trace: Trace, facts: Mapping[str, Any]) -> Recipe:
        """From a file, so nothing is believed unread: raises ValueError, KeyError or TypeError."""
        names = ("period", "units", "edge", "parameters", "trainable_parameters")
        numbers = {name: int(facts[name]) for name in names}
        counts = max(numbers["units"], numbers["edge"])
        if min(numbers.values()) < 0 or not 0 < numbers["period"] <= MAX_LAYERS or counts > MAX_LAYERS:
            raise ValueError(f"impossible numbers: {numbers}")
        return cls(
            trace=trace,
            blocks=None if facts["blocks"] is None else str(facts["blocks"]),
            settings=dict(facts["settings"]),
            how=Provenance.from_facts(facts["how"]),
            notes=tuple(str(note) for note in facts["notes"]),
            **numbers,
        )


def settings_found(work: Workload) -> dict[str, Any]:
    return {name: value for name, value in work.settings().items() if name not in ASKED_ANEW}


# -- from where --------------------------------------------------------------------------------------------------------


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


def tracing_more(work: Workload, platform: Platform) -> Iterator[None]:
    """For who has answered about `few` and has time now: each step is a trace by which others of the job are told."""
    family = _family(work, platform)
    return iter(()) if family is None else family.tracing_more(work)


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

    def tracing_more(self, _: Workload) -> Iterator[None]:
        return iter(())

    def learn(self, _: Workload, recipe: Recipe, heard: list[TraceRecord]) -> None:
        self.lesson = recipe, heard

    def hand_on(self) -> None:
        from memfit.planning.interpolation import family_of, point_of

        lesson, self.lesson, self.handed_on = self.lesson, None, True
        try:
            family = family_of(self.work, self.platform)
        except Exception:  # it has had its own error, of which the second knows nothing
            return
        if family is not None:
            family.corners.asked.add(point_of(self.work))
            if lesson is not None:
                family.learn(self.work, *lesson)


_first: FirstPlan | None = None


def _family(work: Workload, platform: Platform) -> Family | FirstPlan | None:
    """The only way to interpolation, but for sweeps that say what is to come (`planning/many.py`)."""
    global _first
    if _first is None:
        _first = FirstPlan(work, platform)
        return _first
    from memfit.planning.interpolation import family_of

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
    dataclasses.replace(work, **recipe.found)  # checks every setting that the file has
    return _result(work, recipe, recipe.whole())


def _traced_now(work: Workload, platform: Platform, key: str | None, family: Family | FirstPlan | None) -> Traced:
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
        workload=work.with_found(**recipe.found),
        model=work.source.name,
        parameters=recipe.parameters,
        trainable_parameters=recipe.trainable_parameters,
        how=recipe.how,
        notes=recipe.notes,
    )
