"""A trace with holes: where a rule was asked what a kernel allocates, the answer is left out.

Two traces of one job with other batch sizes and lengths differ in the sizes of tensors, and in what rules answered.
Without the answers both are the same stream, or the job did something else. The stream can be filled again, for any
batch and length, with the sizes and the answers that belong there:

    trace, calls --stream_of--> a stream with holes, the sizes outside of them, the answers
    stream, other answers --filled--> a trace without sizes, and where each of its sizes is to be found
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from memfit.events import LISTS, Action, Mark, Trace
from memfit.extrapolation.blocks import Ints, with_sizes

CALLER = -1
"""In place of an argument's number: the module that called the rule."""
FREES = (Action.FREE, Action.FREE_REQUESTED, Action.FREE_COMPLETED)
CATEGORY, OP, MODULE = range(3)
TOKENS = "tokens"
"""As LISTS a fact that names blocks and events by their numbers, which change with what fills the holes."""


class NotSeparable(Exception):
    """Why the answers of rules cannot be taken out of a trace."""


@dataclass(frozen=True, slots=True)
class RuleCall:
    """A rule that was asked, and the events that came of it."""

    form: Hashable
    """The rule and all that it looks at, but for numbers."""
    numbers: tuple[int, ...]
    start: int
    end: int
    module: str
    category: str
    argument_modules: tuple[str, ...]


class Outline(NamedTuple):
    """What a rule answers, but for the sizes: events on blocks that are numbered from 0 in the order of birth."""

    actions: tuple[int, ...]
    subjects: tuple[int, ...]
    ops: tuple[str, ...]
    modules: tuple[int, ...]
    """Whose each block is: CALLER's, or the argument's with this number."""

    @property
    def kept(self) -> tuple[int, ...]:
        """Blocks that are still there at the end: results."""
        freed = {s for a, s in zip(self.actions, self.subjects, strict=True) if a in FREES}
        return tuple(block for block in range(len(self.ops)) if block not in freed)


class RuleAnswer(NamedTuple):
    outline: Outline
    sizes: tuple[int, ...]


class Hole(NamedTuple):
    form: Hashable
    module: str
    category: str
    argument_modules: tuple[str, ...]
    kept: tuple[int, ...]
    """The blocks of the stream that are results of this call."""


class Stream(NamedTuple):
    """Equal for two points of a job that does the same at both. Arrays are bytes, so that streams can be compared."""

    actions: bytes
    subjects: bytes
    streams: bytes
    labels: bytes
    """Category, op and module of each block, in turn; which op made it is left open where a rule says it."""
    names: tuple[str, ...]
    marks: tuple[Mark, ...]
    holes: tuple[Hole, ...]
    places: tuple[int, ...]
    """How many events come before each hole."""
    lists: tuple[tuple[int, tuple[int | None, ...]], ...]
    tokens: tuple[tuple[int, int], ...]
    """Events and holes that come before a token is done."""
    facts: str

    @property
    def blocks(self) -> int:
        return len(self.streams) // 8


class SizedStream(NamedTuple):
    """A stream with all that its holes are filled from."""

    stream: Stream
    sizes: Ints
    """Of the blocks of the stream; of those that are results of rules, anything."""
    calls: Sequence[tuple[Hashable, tuple[int, ...]]]
    """What is asked of rules: forms and numbers, each once."""
    which: Sequence[int]
    """Of these calls each hole is."""
    chains: Sequence[Sequence[int]] = ()
    """Calls that differ by the same numbers from one to the next."""

    def call(self, hole: int) -> tuple[Hashable, tuple[int, ...]]:
        return self.calls[self.which[hole]]


class TracedStream(NamedTuple):
    stream: Stream
    sizes: Ints
    numbers: tuple[tuple[int, ...], ...]
    """What each rule looked at."""
    fingerprint: str
    """Of the trace with the answers in it."""

    @property
    def sized(self) -> SizedStream:
        calls: dict[tuple[Hashable, tuple[int, ...]], int] = {}
        pairs = zip(self.stream.holes, self.numbers, strict=True)
        which = [calls.setdefault((hole.form, numbers), len(calls)) for hole, numbers in pairs]
        return SizedStream(self.stream, self.sizes, list(calls), which)


# -- taking out ------------------------------------------------------------------------------------------------------


def stream_of(trace: Trace, calls: Sequence[RuleCall]) -> TracedStream:
    calls = [call for call in calls if call.end <= len(trace)]
    actions, subjects = np.frombuffer(trace.actions, np.uint8), np.frombuffer(trace.subjects, np.int64)
    births = subjects[actions == Action.ALLOC]
    if not np.array_equal(births, np.arange(len(trace.requested))):
        raise NotSeparable("blocks that are not born in their order")
    inside = np.zeros(len(trace) + 1, dtype=np.int64)
    for call in calls:
        inside[call.start] += 1
        inside[call.end] -= 1
    outside = np.cumsum(inside)[:-1] == 0
    answers = [_answer(actions[c.start : c.end], subjects[c.start : c.end]) for c in calls]

    in_stream = np.ones(len(births), dtype=bool)
    for answer in answers:
        in_stream[list(answer.gone)] = False
    number = np.cumsum(in_stream) - 1
    whose = np.flatnonzero(in_stream)
    about_blocks = actions <= Action.FREE_COMPLETED
    renumbered = np.where(about_blocks, number[np.where(about_blocks, subjects, 0)] if len(number) else 0, subjects)
    if not in_stream[subjects[outside & about_blocks]].all():
        raise NotSeparable("a rule's buffer is used outside of it")
    before = np.concatenate([[0], np.cumsum(outside)])
    results = {block for answer in answers for block in answer.kept}
    names, labels = _names_in_order(trace, whose, [block in results for block in whose.tolist()])
    holes = tuple(
        Hole(c.form, c.module, c.category, c.argument_modules, tuple(int(number[block]) for block in answer.kept))
        for c, answer in zip(calls, answers, strict=True)
    )
    stream = Stream(
        actions=actions[outside].tobytes(),
        subjects=renumbered[outside].tobytes(),
        streams=np.frombuffer(trace.streams, np.int64)[whose].tobytes(),
        labels=labels.tobytes(),
        names=names,
        marks=tuple(trace.marks),
        holes=holes,
        places=tuple(int(before[call.start]) for call in calls),
        lists=_lists(trace, number, in_stream),
        tokens=_tokens(trace, calls, before),
        facts=json.dumps({k: v for k, v in trace.facts.items() if k not in (LISTS, TOKENS)}, sort_keys=True),
    )
    sizes = np.frombuffer(trace.requested, np.int64)[whose]
    return TracedStream(stream, sizes, tuple(call.numbers for call in calls), fingerprint(trace))


def fingerprint(trace: Trace) -> str:
    """The same for two traces that say the same, whatever the order of their names."""
    names, labels = _names_in_order(trace, np.arange(len(trace.requested)), [])
    said = json.dumps([names, [(mark.phase, mark.step) for mark in trace.marks], trace.facts], sort_keys=True)
    digest = hashlib.sha256(said.encode())
    for column in (trace.actions, trace.subjects, trace.requested, trace.streams, labels):
        digest.update(b"%d " % len(column))
        digest.update(column)
    return digest.hexdigest()


class _Inside(NamedTuple):
    kept: tuple[int, ...]
    gone: tuple[int, ...]


def _answer(actions: Any, subjects: Any) -> _Inside:
    born: dict[int, bool] = {}
    for action, subject in zip(actions.tolist(), subjects.tolist(), strict=True):
        if action == Action.ALLOC:
            born[subject] = True
        elif action == Action.FREE and born.get(subject):
            born[subject] = False
        else:
            raise NotSeparable("inside a rule something happens that is not the rule's")
    return _Inside(tuple(b for b, lives in born.items() if lives), tuple(b for b, lives in born.items() if not lives))


def _names_in_order(trace: Trace, blocks: Any, results: list[bool]) -> tuple[tuple[str, ...], Any]:
    """Names by their first use, so that the numbers of names do not tell what rules said in between."""
    columns = (trace.category_of, trace.op_of, trace.module_of)
    used = np.stack([np.frombuffer(column, np.int32)[blocks] for column in columns], axis=1)
    used[np.flatnonzero(results), OP] = trace.name_id("")
    found, first, index = np.unique(used, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), dtype=np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    return tuple(trace.names[name] for name in found[order].tolist()), rank[index.reshape(used.shape)]


def _lists(trace: Trace, number: Any, in_stream: Any) -> tuple[tuple[int, tuple[int | None, ...]], ...]:
    made = []
    for block, members in trace.facts.get(LISTS, {}).items():
        named = [int(block), *(member for member in members if member is not None)]
        if not in_stream[named].all():
            raise NotSeparable("a rule's buffer is counted outside of it")
        made.append((int(number[int(block)]), tuple(None if m is None else int(number[m]) for m in members)))
    return tuple(made)


def _tokens(trace: Trace, calls: Sequence[RuleCall], before: Any) -> tuple[tuple[int, int], ...]:
    ends = np.array([call.end for call in calls], dtype=np.int64)
    return tuple((int(before[at]), int((ends <= at).sum())) for at in trace.facts.get(TOKENS, ()))


# -- filling in ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FilledStream:
    frame: Trace
    """All but the sizes."""
    source: Ints
    """Of each block: where its size is found. First come the stream's own blocks, then those of each answer."""

    def trace(self, pool: Ints) -> Trace:
        return with_sizes(self.frame, pool[self.source])


Ask = Callable[[Hashable, tuple[int, ...]], RuleAnswer]
"""What a rule answers: its form, and numbers."""


def answered(sized: SizedStream, ask: Ask) -> tuple[tuple[Outline, ...], Ints]:
    """How the holes are filled, and the sizes that this way of filling them chooses from."""
    answers = _answers(sized, ask)
    of_rules = np.array([size for answer in answers for size in answer.sizes], dtype=np.int64)
    return tuple([answer.outline for answer in answers]), np.concatenate([sized.sizes, of_rules])


AT_EACH_END = 4
"""Steps at an end of a chain that must say the same."""


def _answers(sized: SizedStream, ask: Ask) -> list[RuleAnswer]:
    """Along a chain, where the same is answered at both ends, four times each, it is in between: as numbers grow they
    pass a threshold once, and four steps show what divisibility by 2, 4 or 8 does."""
    known: dict[int, RuleAnswer] = {}

    def answer(call: int) -> RuleAnswer:
        if call not in known:
            known[call] = ask(*sized.calls[call])
        return known[call]

    left = list(sized.chains)
    while left:
        chain = left.pop()
        ends = (*chain[:AT_EACH_END], *chain[-AT_EACH_END:])
        if len(chain) <= len(ends):
            continue
        if len({answer(call) for call in ends}) == 1:
            known.update(dict.fromkeys(chain, answer(chain[0])))
        else:
            left += chain[: len(chain) // 2], chain[len(chain) // 2 :]
    return [answer(call) for call in range(len(sized.calls))]


def filled(stream: Stream, answers: Sequence[Outline], which: Sequence[int]) -> FilledStream:
    """`which` of the answers fills each hole. Raises NotSeparable if an answer has other results than the stream."""
    return _Filling(stream, answers, which).made()


class _Filling:
    """Blocks are known by an id until their order of birth is known: the stream's own, then those inside holes."""

    def __init__(self, stream: Stream, answers: Sequence[Outline], which: Sequence[int]) -> None:
        self.stream, self.answers = stream, answers
        self.which = np.array(which, dtype=np.int64)
        self.own = stream.blocks
        events = np.array([len(answer.actions) for answer in answers], dtype=np.int64)
        blocks = np.array([len(answer.ops) for answer in answers], dtype=np.int64)
        self.inserted = events[self.which] if len(which) else events[:0]
        held = blocks[self.which] if len(which) else blocks[:0]
        self.first_id = self.own + np.cumsum(held) - held
        self.first_size = self.own + np.cumsum(blocks) - blocks
        self.ids = self.own + int(held.sum())
        self.names = {name: i for i, name in enumerate(stream.names)}

    def made(self) -> FilledStream:
        stream = self.stream
        actions, subjects = np.frombuffer(stream.actions, np.uint8), np.frombuffer(stream.subjects, np.int64)
        places = np.array(stream.places, dtype=np.int64)
        start = places + np.cumsum(self.inserted) - self.inserted
        total = len(actions) + int(self.inserted.sum())
        from_stream = np.ones(total, dtype=bool)
        out_actions, out_ids = np.empty(total, dtype=np.uint8), np.empty(total, dtype=np.int64)
        source, labels = np.empty(self.ids, dtype=np.int64), np.zeros((self.ids, 3), dtype=np.int32)
        source[: self.own] = np.arange(self.own)
        labels[: self.own] = np.frombuffer(stream.labels, np.int32).reshape(-1, 3)
        for answer, numbers in self._alike().items():
            calls = np.flatnonzero(np.isin(self.which, numbers))
            ids = self._ids(calls, answer)
            at = start[calls][:, None] + np.arange(len(answer.actions))[None, :]
            from_stream[at] = False
            out_actions[at] = np.array(answer.actions, dtype=np.uint8)[None, :]
            out_ids[at] = ids[:, np.array(answer.subjects, dtype=np.int64)]
            source[ids] = self.first_size[self.which[calls]][:, None] + np.arange(len(answer.ops))[None, :]
            self._label(labels, ids, calls, answer)
        out_actions[from_stream], out_ids[from_stream] = actions, subjects

        births = out_ids[out_actions == Action.ALLOC]
        number_of = np.zeros(self.ids, dtype=np.int64)
        number_of[births] = np.arange(len(births))
        about_blocks = out_actions <= Action.FREE_COMPLETED
        out_subjects = np.where(about_blocks, number_of[np.where(about_blocks, out_ids, 0)] if self.ids else 0, out_ids)
        frame = self._frame(out_actions, out_subjects, births, labels, number_of)
        return FilledStream(frame, source[births])

    def _alike(self) -> dict[Outline, list[int]]:
        """Answers that differ in sizes alone, by their numbers."""
        alike: dict[Outline, list[int]] = {}
        for number, answer in enumerate(self.answers):
            alike.setdefault(answer, []).append(number)
        return alike

    def _ids(self, calls: Any, answer: Outline) -> Any:
        ids = self.first_id[calls][:, None] + np.arange(len(answer.ops))[None, :]
        kept = answer.kept
        for row, call in enumerate(calls.tolist()):
            results = self.stream.holes[call].kept
            if len(results) != len(kept):
                raise NotSeparable("a kernel has other results here")
            if results:
                ids[row, list(kept)] = results
        return ids

    def _label(self, labels: Any, ids: Any, calls: Any, answer: Outline) -> None:
        labels[ids, OP] = np.array([self._name(op) for op in answer.ops], dtype=np.int32)[None, :]
        buffers = sorted(set(range(len(answer.ops))) - set(answer.kept))
        for call, row in zip(calls.tolist() if buffers else (), ids.tolist(), strict=False):
            hole = self.stream.holes[call]
            for block in buffers:
                whose = answer.modules[block]
                module = hole.module if whose == CALLER else hole.argument_modules[whose]
                labels[row[block], CATEGORY], labels[row[block], MODULE] = self._name(hole.category), self._name(module)

    def _name(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def _frame(self, actions: Any, subjects: Any, births: Any, labels: Any, number_of: Any) -> Trace:
        stream = self.stream
        facts: dict[str, Any] = json.loads(stream.facts)
        if stream.lists:
            facts[LISTS] = {
                str(number_of[block]): [None if m is None else int(number_of[m]) for m in members]
                for block, members in stream.lists
            }
        if stream.tokens:
            inserted = np.concatenate([[0], np.cumsum(self.inserted)])
            facts[TOKENS] = [events + int(inserted[holes]) for events, holes in stream.tokens]
        in_order = labels[births]
        streams = np.zeros(self.ids, dtype=np.int64)
        streams[: self.own] = np.frombuffer(stream.streams, np.int64)
        names = list(self.names)
        return Trace(
            facts=facts,
            actions=array("B", actions.tobytes()),
            subjects=array("q", subjects.tobytes()),
            streams=array("q", streams[births].tobytes()),
            addresses=array("Q", bytes(8 * len(births))),
            category_of=_column(in_order[:, CATEGORY]),
            op_of=_column(in_order[:, OP]),
            module_of=_column(in_order[:, MODULE]),
            marks=list(stream.marks),
            names=names,
            _name_ids={name: i for i, name in enumerate(names)},
        )


def _column(values: Any) -> array[int]:
    return array("i", np.ascontiguousarray(values, dtype=np.int32).tobytes())
