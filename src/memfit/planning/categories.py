"""What each block of a traced job is, by when it was born, when it died and who made it; traces as made, for families.

Families learn from the traces of a job as they were made, with what these asked of rules: `recording_traces`.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from memfit.events import Action, Trace
from memfit.extrapolation.streams import RuleCall

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
