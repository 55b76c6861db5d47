"""What a program could do to take less, told from its trace alone, each saving by replaying the trace so changed.

outputs kept      a variable holds what backward does not need           `del outputs` before it
growth            every step leaves something behind                     which lines made it
loaded twice      the weights lie on the GPU twice before the first step
asked at once     a device map warms the allocator up with one block      load, then move
in fp32           a 16-bit tensor, the logits for one, copied to fp32, and what is made of the copy
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from memfit.analysis.labels import Labels
from memfit.analysis.stacks import lines_alive
from memfit.analysis.summary import growth
from memfit.events import FREES, Action, Trace
from memfit.replay.alloc_config import AllocatorConfig
from memfit.replay.replay import replay
from memfit.replay.timeline import Ints, Timeline
from memfit.units import format_bytes

WORTH = 0.005
"""Of the peak: what saves less is not worth a line."""
WARMUP = "caching_allocator_warmup"
FEW = 4
"""Logits have no more copies than these: themselves, their softmax, and gradients."""
LASTING = ("weights", "gradients", "optimizer")


@dataclass(frozen=True, slots=True)
class Advice:
    what: str
    how: str
    place: str
    """File and line."""
    saves_allocated_bytes: int
    """Of the peak."""
    saves_reserved_bytes: int


def advise(timeline: Timeline, labels: Labels, config: AllocatorConfig) -> tuple[Advice, ...]:
    """The largest saving first. What grows comes before all: its saving has no end."""
    look = _Look(timeline, labels, config)
    grows = list(_growing(look))
    others = [*_held(look), *_loaded_twice(look), *_asked_at_once(look), *_in_fp32(look)]
    return (*grows, *sorted(others, key=lambda each: -each.saves_allocated_bytes))


def zeroed_in_place(trace: Trace) -> str | None:
    """The line that zeroes gradients instead of dropping them."""
    if "zeroed" not in trace.facts:
        return None
    place = trace.facts["zeroed"]
    return "" if place is None else _at(*place)


def gradients_zeroed(place: str, allocated: int, reserved: int) -> Advice:
    what = "gradients are set to zero in place, so they stay through every forward pass"
    return Advice(what, "zero_grad(set_to_none=True), torch's default", place, allocated, reserved)


@dataclass(frozen=True)
class _Look:
    timeline: Timeline
    labels: Labels
    config: AllocatorConfig

    @property
    def trace(self) -> Trace:
        return self.timeline.trace

    def saved_by(self, changed: Trace) -> tuple[int, int]:
        after = replay(changed, self.config)
        before = self.timeline
        return before.peak_allocated - after.peak_allocated, (before.peak_reserved or 0) - after.peak_reserved

    def made_at(self, blocks: Ints) -> str:
        """Where a person would look for most of these."""
        lines = lines_alive(self.timeline, self.labels, blocks)
        return _at(lines[0].file, lines[0].line) if lines else ""

    def matters(self, saving: int) -> bool:
        return saving >= max(self.timeline.peak_allocated * WORTH, 1 << 20)


def _held(look: _Look) -> Iterator[Advice]:
    """A variable's blocks go when backward begins; those that autograd holds too, when it ends."""
    by_names: dict[tuple[str, ...], list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for event, variables in look.trace.facts.get("held", []):
        for names, joined in _sharing(variables):
            by_names[names].append((event, joined))
    for names, times in by_names.items():
        others, dies = _sizes_held_elsewhere(look, times), {}
        for event, variable in times:
            phases = (each.end for each in look.labels.phases if each.name == "backward" and each.end > event)
            ends = next(phases, event)
            for block in variable["blocks"]:
                if look.trace.requested[block] not in others:
                    dies[block] = ends if block in variable["saved"] else event
        allocated, reserved = look.saved_by(_dying_earlier(look.trace, dies))
        if look.matters(allocated):
            last = times[-1][1]
            how = f"`del {', '.join(names)}` before that line"
            if last["read_again"]:
                how = f"take what line {last['read_again']} needs of it first, then {how}"
            yield Advice(
                f"{' and '.join(f'`{name}`' for name in names)} {'keep' if len(names) > 1 else 'keeps'} tensors alive"
                " that the backward pass does not need",
                how, _at(last["file"], last["line"]), allocated, reserved,
            )  # fmt: skip


def _sharing(variables: Sequence[dict[str, Any]]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Variables that hold a block in common: only a `del` of all of them frees it."""
    groups: list[list[dict[str, Any]]] = []
    for variable in variables:
        shared = [group for group in groups if any(set(each["blocks"]) & set(variable["blocks"]) for each in group)]
        groups = [group for group in groups if group not in shared] + [[*(v for g in shared for v in g), variable]]
    for group in groups:
        again = max(each["read_again"] for each in group)
        joined = {key: sorted({block for each in group for block in each[key]}) for key in ("blocks", "saved")}
        yield tuple(each["name"] for each in group), {**group[-1], **joined, "read_again": again}


def _sizes_held_elsewhere(look: _Look, times: Sequence[tuple[int, dict[str, Any]]]) -> set[int]:
    """What outlives the variable's next value is kept by something else, too. In the last step that shows only by
    its size."""
    death, requested = look.timeline.lives.death, look.trace.requested
    return {
        requested[block]
        for (_, variable), (next_event, _) in pairwise(times)
        for block in variable["blocks"]
        if death[block] > next_event
    }


def _growing(look: _Look) -> Iterator[Advice]:
    found = growth(look.timeline, look.labels)
    if not found.grows or not found.per_step_bytes:
        return
    first, last = found.steps[0].end, found.steps[-1].end
    lives = look.timeline.lives
    left = np.flatnonzero((lives.birth >= first) & (lives.birth < last) & (lives.death >= last))
    lines = lines_alive(look.timeline, look.labels, left)
    made = f"; most of it was made by `{lines[0].code}`" if lines and lines[0].code else ""
    yield Advice(
        f"every step leaves {format_bytes(found.per_step_bytes)} behind: something keeps tensors and graphs alive",
        f"keep numbers instead: loss.item(), x.detach().cpu(){made}",
        _at(lines[0].file, lines[0].line) if lines else "", 0, 0,
    )  # fmt: skip


def _loaded_twice(look: _Look) -> Iterator[Advice]:
    """What is there before the first forward pass and gone when it begins."""
    begin = next((phase.begin for phase in look.labels.phases if phase.name == "forward"), None)
    if not begin:
        return
    timeline = look.timeline
    peak = int(timeline.allocated[:begin].argmax())
    there = timeline.lives.alive_at(peak)
    gone = there[timeline.lives.death[there] < begin]
    if not len(gone):
        return
    allocated, reserved = look.saved_by(_without(look.trace, set(gone.tolist())))
    if look.matters(allocated):
        yield Advice(
            "more lies on the GPU while the model is loaded than in any step: weights are there twice",
            "build and convert on the host, then move once; torch.load(..., map_location='cpu')",
            look.made_at(gone),
            allocated, reserved,
        )  # fmt: skip


def _asked_at_once(look: _Look) -> Iterator[Advice]:
    """Where a device map tells transformers where weights will lie, it asks for the memory of all of them in one block,
    which it lets go again: its segment stays, and weights are cut from it."""
    trace, timeline = look.trace, look.timeline
    column = np.frombuffer(trace.stack_of, dtype=np.int32)
    warm = [number for number, stack in enumerate(trace.stacks) if any(trace.frames[i][2] == WARMUP for i in stack)]
    blocks = np.flatnonzero(np.isin(column, warm))
    if not len(blocks):
        return
    allocated, reserved = look.saved_by(_without(trace, set(blocks.tolist())))
    if look.matters(reserved):
        yield Advice(
            f"a device_map asks for all weights at once, {format_bytes(int(timeline.size[blocks].sum()))}, and that"
            " segment stays, cut up",
            "load without device_map, then move the model: .to('cuda')",
            look.made_at(blocks), allocated, reserved,
        )  # fmt: skip


def _in_fp32(look: _Look) -> Iterator[Advice]:
    """The largest 16-bit tensor that is copied to fp32, and what is made of its size from then on."""
    timeline, trace = look.timeline, look.trace
    requested = np.frombuffer(trace.requested, dtype=np.int64)
    of_jobs = np.isin(look.labels.category, [look.labels.categories.index(name) for name in LASTING], invert=True)
    least = timeline.peak_allocated * WORTH
    copies = [block for block in trace.facts.get("widened", []) if of_jobs[block] and requested[block] >= least]
    if not copies:
        return
    copy = max(copies, key=lambda block: int(requested[block]))
    alike = np.flatnonzero(of_jobs & (requested == requested[copy]))
    allocated, reserved = look.saved_by(_halved(trace, alike))
    if look.matters(allocated):
        many = int(np.isin(alike, timeline.lives.alive_at(timeline.peak_event)).sum())
        yield Advice(
            f"a 16-bit tensor of {format_bytes(int(requested[copy]) // 2)} is copied to fp32, and so is what follows:"
            f" {many} such at the peak",
            "autocast computes norms, softmax and losses in fp32: a model in 16 bits throughout does not" if many > FEW
            else "keep it in 16 bits, which saves this; of logits, a loss that is computed in pieces saves more"
            " (Trainer: use_liger_kernel)",
            look.made_at(np.array([copy])), allocated, reserved,
        )  # fmt: skip


def _halved(trace: Trace, blocks: Ints) -> Trace:
    made = _with_events(trace, trace.events(), np.arange(len(trace.requested)))
    for block in blocks.tolist():
        made.requested[block] //= 2
    return made


def _dying_earlier(trace: Trace, dies: dict[int, int]) -> Trace:
    """Blocks freed before the given event, unless they die sooner."""
    ends = {trace.subjects[e]: e for e, action in enumerate(trace.actions) if action in FREES}
    moved = {block: event for block, event in dies.items() if event < ends.get(block, len(trace))}
    at: dict[int, list[int]] = defaultdict(list)
    for block, event in moved.items():
        at[event].append(block)

    def events() -> Iterator[tuple[int, int]]:
        for event, (action, subject) in enumerate(trace.events()):
            for block in at.get(event, ()):
                yield Action.FREE, block
            if action not in (*FREES, Action.FREE_REQUESTED) or subject not in moved:
                yield action, subject

    return _with_events(trace, events(), np.arange(len(trace.requested)))


def _without(trace: Trace, blocks: set[int]) -> Trace:
    """The trace without these blocks."""
    kept = np.array([block for block in range(len(trace.requested)) if block not in blocks], dtype=np.int64)
    number = dict(zip(kept.tolist(), range(len(kept)), strict=True))
    of_blocks = Action.FREE_COMPLETED
    events = (
        (action, number[subject] if action <= of_blocks else subject)
        for action, subject in trace.events()
        if action > of_blocks or subject in number
    )
    return _with_events(trace, events, kept)


def _with_events(trace: Trace, events: Iterable[tuple[int, int]], kept: Ints) -> Trace:
    made = trace.emptied()
    made.take_blocks(trace, kept)
    made.requested = array("q", np.frombuffer(trace.requested, dtype=np.int64)[kept].tobytes())
    for action, subject in events:
        made.actions.append(action)
        made.subjects.append(subject)
    return made


def _at(file: str, line: int) -> str:
    return f"{Path(file).name}:{line}"
