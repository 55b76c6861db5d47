"""One job at many batch sizes and lengths: after a few traces the others are told from those, to the byte.

A family is a workload without its batch size and length. What was traced of it falls into pieces
(`extrapolation/shapes.py`), and a point that a piece surrounds needs no trace. Points are traced as they are asked for,
at first; when enough have been asked, or are known to come, it pays to trace corners around them:

    length
      |  o---------o----o  longest          o  a traced corner       x  asked for
      |  |    x    |  x |
      |  o---------o----o                   A cell whose corners do the same needs no more. Else a line is drawn
      |  |   x  x  |    |                   through it: at a number of the model's config, such as a window, or through
      |  o---------o----o  shortest         its middle. Batch size 1 and length 1 are lines of their own.
      +------------------- batch size

Which corners are traced is about what pays, not about what is true: no proof rests on it. Where there is no proof, each
point is traced as if there were no family.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from memfit.events import Trace
from memfit.extrapolation.blocks import Extension, Ints, NotRepeating, extension, with_sizes
from memfit.extrapolation.shapes import NotProven, Piece, Point, TooFewPoints, filling
from memfit.extrapolation.steps import GenerationExtension, last_step
from memfit.extrapolation.streams import (
    FilledStream,
    NotSeparable,
    RuleAnswer,
    SizedStream,
    TracedStream,
    answered,
    stream_of,
)
from memfit.jobs.workload import Workload
from memfit.models.heads import HEAD_NAMES
from memfit.models.registry import ModelSource, head_named, load_config
from memfit.planning.cache import identity
from memfit.planning.traced import HOST, Part, Recipe, TraceRecord, label, parts_of, recording_traces
from memfit.platform import Platform

# -- which points to trace ---------------------------------------------------------------------------------------------

ASKED_FIRST = 4
"""One job asked at so many points is a sweep or a search, and may have as many points again."""
EXPECTED_FOR_ONE = 3
"""A point that nobody asked for is traced for so many that are known to come."""
BATCH, LENGTH = 0, 1
TWOS = (8, 256)
"""Outer lines are divisible by these, so that points in between are divisible by no more twos than their corners."""


class Corners:
    def __init__(self) -> None:
        self.asked: set[Point] = set()
        self.expected: set[Point] = set()
        self._lines: tuple[set[int], set[int]] = (set(), set())
        self._out_of_reach: set[int] = set()
        self._eights_matter: dict[int, bool] = {}
        """From which length on the job does something else at lengths that 8 divides."""

    def around(self, point: Point) -> list[Point]:
        """In order: the first has the smaller numbers, the last the larger ones."""
        batches, (short, long) = self._cell(BATCH, point), self._cell(LENGTH, point)
        if self._eights_matter.get(short) and short != long:
            short, long = _lengths_like(point[LENGTH], short, long)
        return sorted({(batch, length) for batch in batches for length in (short, long)})

    def pay(self, corners: list[Point], new: int, unasked: int) -> bool:
        """Whether to trace so many of them, after so many that nobody asked for: for points that are known to come
        inside, or as many again as were asked, each on lines of its own if it has batch size 1 or length 1."""
        (low, short), (high, long) = corners[0], corners[-1]
        coming = sum(low <= b <= high and short <= s <= long for b, s in self.expected - self.asked)
        asked = sum((b == 1) == (high == 1) and (s == 1) == (long == 1) for b, s in self.asked)
        return coming >= EXPECTED_FOR_ONE * new or (asked >= ASKED_FIRST and unasked + new <= asked)

    def is_out_of_reach(self, corner: Point) -> None:
        """The job cannot do that: its lines go back to what was asked for."""
        self._out_of_reach.update(corner)
        for axis in (BATCH, LENGTH):
            values = [point[axis] for point in self.asked | self.expected if point[axis] > 1]
            line = corner[axis]
            if values and line in self._lines[axis] and not min(values) <= line <= max(values):
                self._lines[axis].discard(line)
                self._lines[axis].add(max(values) if line > max(values) else min(values))

    def draw_line(
        self, point: Point, what: Callable[[Point], object], likely: list[int], trace: Callable[[Point], None]
    ) -> bool:
        """Through the cell of a point, if its corners do different things; whether there is a new one. `what` is done
        at a corner; None if it could not be traced."""
        corners = self.around(point)
        if any(what(corner) is None for corner in corners):
            return False
        (low, short), (high, long) = corners[0], corners[-1]
        along_length = any(what((batch, short)) != what((batch, long)) for batch in (low, high))
        along_batch = any(what((low, length)) != what((high, length)) for length in (short, long))
        if along_length and self._eights_are_news(low, short, what, trace):
            return True
        if not along_length and not along_batch:
            return False
        axis = LENGTH if along_length else BATCH
        least, most = self._cell(axis, point)
        inside = {line for line in likely if least < line < most} if along_length else set()
        new = inside or {(least + most) // 2} - {least}
        self._lines[axis].update(new)
        return bool(new)

    def _eights_are_news(
        self, batch: int, length: int, what: Callable[[Point], object], trace: Callable[[Point], None]
    ) -> bool:
        if length in self._eights_matter or length % 8 == 0:
            return False
        divided = batch, length // 8 * 8 + 8
        trace(divided)
        self._eights_matter[length] = what(divided) is not None and what(divided) != what((batch, length))
        return self._eights_matter[length]

    def _cell(self, axis: int, point: Point) -> tuple[int, int]:
        """The lines beside a value."""
        value, lines = point[axis], self._lines[axis]
        if value == 1:
            return 1, 1
        if not lines or not min(lines) <= value <= max(lines):
            self._widen(axis, value)
        return max(line for line in lines if line <= value), min(line for line in lines if line >= value)

    def _widen(self, axis: int, value: int) -> None:
        lines = self._lines[axis]
        values = {point[axis] for point in self.asked | self.expected if point[axis] > 1} | {value}
        if len(values) == 1:
            lines.add(value)
            return
        if len(lines) == 1:
            lines.clear()  # it was the only value so far
        least, most = min(values), max(values)
        lowest, highest = _outer(axis, least, most, exact=bool(self.expected))
        lines |= {least if lowest in self._out_of_reach else lowest, most if highest in self._out_of_reach else highest}


def _outer(axis: int, least: int, most: int, *, exact: bool) -> tuple[int, int]:
    """Lines around all values, one of them odd and the other divisible by many twos; with room to grow where it is not
    known what comes."""
    step = TWOS[axis]
    highest = -(-most // step) * step if exact and most > step else 1 << max(most - 1, 1).bit_length()
    if axis == BATCH:
        return 2, highest
    lowest = least if exact else (1 << (least.bit_length() - 1)) // 2 + 1
    return max(2, lowest - (lowest + 1) % 2), highest


def _lengths_like(length: int, short: int, long: int) -> tuple[int, int]:
    """Lengths near two lines, between them, that 8 divides as it does this one: by few twos, and by many."""
    few, many = ((2, 1), (8, 4)) if length % 8 else ((16, 8), (256, 0))
    above_short = short + (few[1] - short) % few[0]
    below_long = long - (long - many[1]) % many[0]
    return min(above_short, length), max(below_long, length)


# -- what they tell ----------------------------------------------------------------------------------------------------

MOST_FAMILIES = 64
MOST_EVENTS_KEPT = 4_000_000
"""Of whole jobs, each kept for other batches and lengths at which rules answer the same way."""
TRACED_AS_ASKED = 2
UNASKED = 12
"""Points that nobody asked for are traced up to so many; more if others have been told by them."""
MOST_LINES = 12
POINTS_BEFORE_DIVIDING = 6
"""Where so many of one stream do not fit, those on one side of a window are taken apart from the others."""
FAILURES, POINTS_WITHOUT_FIT = 3, 9
"""After so many the family is given up."""
THRESHOLDS = ("window", "position", "chunk", "length", "block", "max")
"""Parts of the names under which a config keeps numbers that lengths are compared with."""


@dataclass(frozen=True)
class Interpolation:
    recipe: Recipe
    """Of a point that was traced: its trace, batch size and length are not those of this one."""
    trace: Trace
    """Of the whole job."""
    shapes: int
    """Of the points between which it lies."""


class Family:
    def __init__(self, work: Workload, platform: Platform) -> None:
        self.work, self.platform = work, platform
        self.corners = Corners()
        self.given_up: str | None = None
        self._traced: dict[Point, dict[Part, _KnownPiece]] = {}
        """What was done there; nothing where the job failed, or cannot be learned from."""
        self._pieces: dict[Part, dict[Hashable, _KnownPiece]] = {"all": {}, "near": {}, "far": {}}
        self._generations: dict[tuple[_KnownPiece, _KnownPiece], GenerationExtension] = {}
        self._numbers: dict[tuple[str, ...], list[int]] = {}
        self._divided = False
        self._told_points: set[Point] = set()

    # -- what is known ------------------------------------------------------------------------------------------------

    def told(self, work: Workload) -> Interpolation | None:
        """From what is known; nothing is traced."""
        point = point_of(work)
        self.corners.asked.add(point)
        if self.given_up or len(self._traced) < TRACED_AS_ASKED:
            return None
        try:
            told = self._told(point)
        except (NotProven, NotRepeating):
            return None
        self._told_points.add(point)
        return told

    def _told(self, point: Point) -> Interpolation:
        """As `trace_generation` does it: by the first tokens and the last ones, or else by all."""
        if self._pieces["near"]:
            near, far = self._piece("near", point), self._piece("far", point)
            if near.context.key != far.context.key:
                raise NotProven("its parts are of different kinds")
            with suppress(NotRepeating):
                in_time = self._in_time(near, far)
                told = in_time.apply(self._at(near, point), self._at(far, point), self._ask)
                return self._whole_of(near, told, in_time)
        known = self._piece("all", point)
        return self._whole_of(known, self._at(known, point), known.piece)

    def _at(self, known: _KnownPiece, point: Point) -> SizedStream:
        return known.piece.at(point, self._ask)

    def _in_time(self, near: _KnownPiece, far: _KnownPiece) -> GenerationExtension:
        if (near, far) not in self._generations:
            streams = near.piece.stream, far.piece.stream
            self._generations[near, far] = GenerationExtension(*streams, self.work.new_tokens)
        return self._generations[near, far]

    def _whole_of(self, known: _KnownPiece, sized: SizedStream, told_by: object) -> Interpolation:
        context = known.context
        outlines, pool = answered(sized, self._ask)
        key = told_by, outlines
        whole = _kept(key, lambda: Whole(filling(sized, outlines), context.recipe, context.loss_modules))
        return Interpolation(context.recipe, whole.trace(pool), len(known.piece.points))

    def _piece(self, part: Part, point: Point) -> _KnownPiece:
        around = [known for known in self._pieces[part].values() if known.piece.surrounds(point)]
        if len(around) != 1 or around[0].contradicted or not self._is_among(point[LENGTH], around[0]):
            raise TooFewPoints("no piece around it")
        return around[0]

    def _is_among(self, length: int, known: _KnownPiece) -> bool:
        """Whether the piece has a point on the same side of every number in the model's config: a job could do other
        things between two of them, or just at one, and the same again beyond."""
        numbers = self._config_numbers()
        place = _place(length, numbers)
        return any(_place(point[LENGTH], numbers) == place for point in known.piece.points)

    def _ask(self, form: Hashable, numbers: tuple[int, ...]) -> RuleAnswer:
        try:
            from memfit.tracing.rule_answers import answers_on

            return answers_on(self.platform)(form, numbers)
        except Exception as why:
            raise NotProven("a rule cannot be asked again") from why

    # -- learning -----------------------------------------------------------------------------------------------------

    def told_after_more(self, work: Workload) -> Interpolation | None:
        """Corners around the point are traced, if they pay."""
        for _ in self.tracing_more(work):
            pass
        return self.told(work)

    def tracing_more(self, work: Workload) -> Iterator[None]:
        """A step for each corner that is traced around the point, until it can be told or no corner pays."""
        point = point_of(work)
        for _ in range(MOST_LINES):
            if self.given_up or len(self._traced) < TRACED_AS_ASKED:
                return
            corners = self.corners.around(point)
            missing = [corner for corner in corners if corner not in self._traced]
            if missing and not self._pay(corners, len(missing)):
                return
            for corner in missing:
                self._trace(corner)
                yield
            if self.told(work) is not None:
                return
            if not self.corners.draw_line(point, self._done_at, self._likely(), self._trace):
                return
            yield

    def learn(self, work: Workload, recipe: Recipe, heard: list[TraceRecord]) -> None:
        """From a trace that was made of one of the points."""

        point = point_of(work)
        if self.given_up or point in self._traced:
            return
        self._traced[point] = {}
        try:
            for part, noted in parts_of(heard, work.seq_len).items():
                traced = stream_of(noted.trace, noted.calls)
                self._add(part, point, traced, _PieceFacts.make(recipe, noted.loss_modules))
        except NotSeparable as why:
            self._traced[point] = {}
            if sum(not parts for parts in self._traced.values()) >= FAILURES:
                self.given_up = str(why)

    def _add(self, part: Part, point: Point, traced: TracedStream, context: _PieceFacts) -> None:
        pieces = self._pieces[part]
        numbers = self._config_numbers(THRESHOLDS) if self._divided else []
        key = traced.stream, context.key, _place(point[LENGTH], numbers)
        if key not in pieces:
            pieces[key] = _KnownPiece(Piece(traced.stream), context)
        found = self._traced[point][part] = pieces[key]
        found.piece.add(point, traced)
        for known in pieces.values():
            others = (other for each in pieces.values() if each is not known for other in each.piece.points)
            known.contradicted = any(known.piece.surrounds(other) for other in others)
        self._see_whether_it_fits(found.piece)

    def _see_whether_it_fits(self, piece: Piece) -> None:
        """A job may do the same on both sides of a window, with sizes that grow on one side only."""
        count = len(piece.points)
        if count < (POINTS_WITHOUT_FIT if self._divided else POINTS_BEFORE_DIVIDING):
            return
        try:
            piece.fit(self._ask)
        except TooFewPoints:
            pass
        except NotProven as why:
            if self._divided or not self._config_numbers(THRESHOLDS):
                self.given_up = str(why) if count >= POINTS_WITHOUT_FIT else None
            else:
                self._divide()

    def _divide(self) -> None:
        self._divided = True
        known = [(part, point, found) for point, parts in self._traced.items() for part, found in parts.items()]
        for pieces in self._pieces.values():
            pieces.clear()
        for part, point, found in known:
            self._add(part, point, found.piece.points[point], found.context)

    def _trace(self, point: Point) -> None:
        """A point that nobody has asked for: whoever asks for one like it is told what is wrong with it."""
        from memfit.planning.few import trace_few_blocks

        if point in self._traced:
            return
        try:
            work = dataclasses.replace(self.work, batch_size=point[BATCH], seq_len=point[LENGTH])
            with recording_traces() as heard:
                recipe, _ = trace_few_blocks(work, self.platform)
        except Exception:
            self._traced[point] = {}
            self.corners.is_out_of_reach(point)
        else:
            self.learn(work, recipe, heard)

    def _pay(self, corners: list[Point], new: int) -> bool:
        """Whether tracing these corners is worth it."""
        unasked = sum(point not in self.corners.asked for point in self._traced)
        return unasked + new <= UNASKED + len(self._told_points) and self.corners.pay(corners, new, unasked)

    def _done_at(self, point: Point) -> object:
        parts = self._traced.get(point, {})
        return tuple(id(known) for part, known in parts.items() if part != "all" or len(parts) == 1) or None

    def _likely(self) -> list[int]:
        """Lengths at which the job may begin to do something else: a number, or the next one."""
        return [line for number in self._config_numbers(THRESHOLDS) for line in (number - 1, number, number + 1)]

    def _config_numbers(self, names: tuple[str, ...] = ("",)) -> list[int]:
        if names not in self._numbers:
            source = self.work.source
            found = set() if source.kind == "factory" else set(_numbers_in(load_config(source).to_dict(), names))
            if self.work.kind == "generate":
                found |= {number - self.work.new_tokens for number in found}
            self._numbers[names] = sorted(number for number in found if number > 1)
        return self._numbers[names]


@dataclass(frozen=True)
class _PieceFacts:
    """What a piece needs to become a plan, and a key that is the same where that is."""

    key: str
    recipe: Recipe
    loss_modules: frozenset[str]

    @classmethod
    def make(cls, recipe: Recipe, loss_modules: frozenset[str]) -> _PieceFacts:
        facts = recipe.facts()
        facts["settings"] = {k: v for k, v in facts["settings"].items() if k not in ("batch_size", "seq_len")}
        kept = Trace(facts={HOST: recipe.trace.facts[HOST]} if HOST in recipe.trace.facts else {})
        return cls(json.dumps(facts, sort_keys=True), dataclasses.replace(recipe, trace=kept), loss_modules)


@dataclass(eq=False)
class _KnownPiece:
    piece: Piece
    context: _PieceFacts
    contradicted: bool = False
    """The job did something else at a point inside: comparisons and powers of two do not tell it all."""


def point_of(work: Workload) -> Point:
    return work.batch_size, work.seq_len


def _numbers_in(config: Any, names: tuple[str, ...], name: str = "") -> Iterator[int]:
    if isinstance(config, dict):
        for key, value in config.items():
            yield from _numbers_in(value, names, str(key))
    elif type(config) is int and any(word in name for word in names):
        yield config


def _place(number: int, among: list[int]) -> tuple[int, int]:
    return bisect_left(among, number), bisect_right(among, number)


# -- from the trace of a few blocks, filled for some batch size and length, to that of the whole job -------------------


COLUMNS = ("actions", "subjects", "streams", "addresses", "category_of", "op_of", "module_of")


class Whole:
    """The way from one to the other, for all traces that differ in sizes alone: the way that a fresh trace goes, on
    which NotRepeating is raised as it is there."""

    def __init__(self, short: FilledStream, recipe: Recipe, loss_modules: frozenset[str]) -> None:
        from memfit.planning.on_trace import steps_of

        self._source = short.source
        self._extensions: list[Extension] = []
        frame = self._after(last_step(short.frame, steps_of(recipe.settings.get("loop", "plain"))), short.frame)
        label(frame, loss_modules)
        if recipe.blocks is not None:
            all_blocks = extension(frame, recipe.blocks, period=recipe.period, units=recipe.units)
            frame = self._after(all_blocks, frame)
        self._frame = frame

    def _after(self, added: Extension | None, frame: Trace) -> Trace:
        if added is None:
            return frame
        self._extensions.append(added)
        return added.frame

    @property
    def events(self) -> int:
        return len(self._frame)

    def trace(self, pool: Ints) -> Trace:
        """One of its own, for whoever gets it may change it."""
        sizes: Ints = pool[self._source]
        for added in self._extensions:
            sizes = added.sizes(sizes)
        return dataclasses.replace(
            with_sizes(self._frame, sizes),
            facts=dict(self._frame.facts),
            marks=list(self._frame.marks),
            names=list(self._frame.names),
            _name_ids=dict(self._frame._name_ids),
            **{name: getattr(self._frame, name)[:] for name in COLUMNS},
        )


# -- all that this process knows ---------------------------------------------------------------------------------------

_families: OrderedDict[str, Family] = OrderedDict()
_wholes: OrderedDict[Hashable, Whole] = OrderedDict()


def family_of(work: Workload, platform: Platform) -> Family | None:
    """None where a model's own code could do anything, for pruning, whose micro-batches follow the length, and for what
    torch.compile plans anew for every shape."""
    model = identity(work.source) or _own_factory(work.source)
    if model is None or work.kind == "prune" or work.is_compiled:
        return None
    if _reads_more_than_text(work):
        return None
    apart = ("model", "alloc_conf", "batch_size", "seq_len")
    settings = {name: value for name, value in work.settings().items() if name not in apart}
    key = json.dumps([settings, model, platform.facts(compiled=False)], sort_keys=True)
    found = _families.get(key)
    if found is None:
        found = _families[key] = Family(work, platform)
    _families.move_to_end(key)
    if len(_families) > MOST_FAMILIES:
        _families.popitem(last=False)
    return found


def _reads_more_than_text(work: Workload) -> bool:
    """Without transformers nothing was traced here that a family could tell from; with it, this is asked again."""
    if not work.head and "transformers" not in sys.modules:
        return False
    head = HEAD_NAMES[work.head] if work.head else head_named(work.source)
    return head is not None and head.reads != "text"


def _own_factory(source: ModelSource) -> dict[str, str] | None:
    """The models that come with memfit as code."""
    return {"factory": source.target} if source.kind == "factory" and source.target.startswith("memfit.") else None


def _kept(key: Hashable, make: Callable[[], Whole]) -> Whole:
    found = _wholes.get(key)
    if found is None:
        found = _wholes[key] = make()
        while len(_wholes) > 1 and sum(each.events for each in _wholes.values()) > MOST_EVENTS_KEPT:
            _wholes.popitem(last=False)
    _wholes.move_to_end(key)
    return found
