"""A run as a viewer asks for it: only some of its blocks, one stretch of it drawn, one stretch of it summed up.

    viewed = RunView(report_file("snapshot.pickle"))
    viewed.page()                                                     # as `report --html` draws it, in few samples
    viewed.stretch({"axis": "time", "from": 0.1, "to": 0.2, "columns": 1200, "filter": {"text": "attention"}})
    viewed.sums({"axis": "event", "from": 100, "to": 200})

What is asked comes from a browser: each value is checked, and what is answered has a bound whatever the run's size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from memfit.analysis.labels import ALL_CATEGORIES, any_layer
from memfit.analysis.page import Window, drawn_window, page_data
from memfit.analysis.report import Report
from memfit.analysis.run import Run
from memfit.analysis.summary import shares
from memfit.errors import UsageError
from memfit.replay.timeline import BEFORE, Ints, allocated_changes

WHOLE_SAMPLES = 4000
MAX_COLUMNS = 4000
MAX_BLOCKS = 4000
MAX_TEXT = 200
MOST = 1 << 60
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Filter:
    """Which blocks: all that is given must hold. Of a text, some name of the block must hold it."""

    categories: tuple[str, ...] = ()
    module: str = ""
    text: str = ""
    least_bytes: int = 0
    most_bytes: int = MOST

    @classmethod
    def read(cls, asked: Any) -> Filter:
        given = dict(asked) if isinstance(asked, Mapping) else {}
        names = given.get("categories") or ()
        if not isinstance(names, Sequence) or isinstance(names, str) or set(names) - {*ALL_CATEGORIES}:
            raise UsageError("the categories of a filter are some of these", hint=", ".join(ALL_CATEGORIES))
        texts = {name: str(given.get(name) or "")[:MAX_TEXT].lower() for name in ("module", "text")}
        least, most = (
            int(min(max(_number(given, name, default), 0), MOST))
            for name, default in (("least_bytes", 0), ("most_bytes", MOST))
        )
        return cls(tuple(names), **texts, least_bytes=least, most_bytes=most)

    def mask(self, run: Run) -> Mask:
        """Mask of the blocks that pass the filter."""
        labels, size = run.labels, run.timeline.size
        chosen: Mask = (size >= max(self.least_bytes, 1)) & (size <= self.most_bytes)
        if self.categories:
            chosen &= np.isin(labels.category, [ALL_CATEGORIES.index(name) for name in self.categories])
        if self.module:
            chosen &= _holding(self.module, labels.modules, also=any_layer)[labels.module]
        if self.text:
            columns = ((labels.lines, labels.line), (labels.modules, labels.module), (labels.ops, labels.op))
            found = _holding(self.text, tuple(name.replace("_", " ") for name in ALL_CATEGORIES))[labels.category]
            for names, number in columns:
                found = found | _holding(self.text, names)[number]
            chosen &= found
        return chosen


def _holding(text: str, names: Sequence[str], also: Any = str) -> Mask:
    return np.array([text in name.lower() or text in also(name).lower() for name in names], dtype=np.bool_)


def only(run: Run, chosen: Mask) -> Run:
    """The run as if nothing but these blocks had ever been: what was reserved is nobody's then."""
    timeline = run.timeline
    size = np.where(chosen, timeline.size, 0)
    before = int(size[(timeline.lives.birth == BEFORE) & (timeline.lives.death != BEFORE)].sum())
    allocated = before + np.cumsum(allocated_changes(run.trace, size))
    unreserved = replace(timeline, reserved=None, reserved_before=0, known_lives=timeline.lives)
    return replace(run, timeline=replace(unreserved, size=size, allocated=allocated, allocated_before=before))


class RunView:
    def __init__(self, reported: Report) -> None:
        self.reported = reported
        self._only = lru_cache(maxsize=2)(self._filtered)

    def page(self) -> dict[str, Any]:
        return page_data(self.reported, max_samples=WHOLE_SAMPLES, max_blocks=MAX_BLOCKS)

    def whole(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """All of the run again, of the blocks that are meant."""
        run = self._only(Filter.read(asked.get("filter")))
        some = page_data(Report({}, run), max_samples=WHOLE_SAMPLES, max_blocks=MAX_BLOCKS)
        return {"timeline": some["timeline"], "matching": self._matching(run)}

    def stretch(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """From one position to another, for so many columns of pixels: the highest moment of each, and its last."""
        run = self._only(Filter.read(asked.get("filter")))
        columns = int(min(max(_number(asked, "columns", 1000), 1), MAX_COLUMNS))
        window, low, high = window_of(run, asked)
        edges = np.append(window.first, events_at(run, asked, np.linspace(low, high, columns, endpoint=False)))
        edges = np.unique(edges[(edges >= window.first) & (edges < window.last)])
        seen = replace(window, edges=edges if len(edges) else None)
        return {"timeline": drawn_window(run, seen, max_samples=3 * MAX_COLUMNS, max_blocks=MAX_BLOCKS)[0]}

    def sums(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        run = self._only(Filter.read(asked.get("filter")))
        return sum_up(run, window_of(run, asked)[0])

    @property
    def _run(self) -> Run:
        if self.reported.run is None:
            raise UsageError("a memory log has checkpoints only: there is no timeline in it")
        return self.reported.run

    def _filtered(self, chosen: Filter) -> Run:
        return self._run if chosen == Filter() else only(self._run, chosen.mask(self._run))

    def _matching(self, run: Run) -> dict[str, int]:
        there = run.timeline.size > 0
        return {"count": int(there.sum()), "of": int((self._run.timeline.size > 0).sum())}


def window_of(run: Run, asked: Mapping[str, Any]) -> tuple[Window, float, float]:
    """The events from one position to another, both as a picture has them: an event's number and one, or seconds."""
    low, high = _number(asked, "from", 0.0), _number(asked, "to", math.inf)
    if not high >= low:
        raise UsageError("a stretch ends where it begins, or later")
    first, last = events_at(run, asked, np.array([low, np.nextafter(high, math.inf)])).tolist()
    return Window(first, max(first, last)), low, min(high, _end(run, asked))


def events_at(run: Run, asked: Mapping[str, Any], positions: Any) -> Ints:
    """The first event that is not before each position."""
    if asked.get("axis") == "time" and run.times is not None:
        return np.asarray(np.searchsorted(run.times, positions, side="left"), dtype=np.int64)
    events = np.ceil(np.clip(positions, 0, len(run.trace) + 1)) - 1
    return np.asarray(np.clip(events, 0, len(run.trace)), dtype=np.int64)


def _end(run: Run, asked: Mapping[str, Any]) -> float:
    if asked.get("axis") == "time" and run.times is not None:
        return run.seconds(len(run.trace)) or 0.0
    return len(run.trace) + 1.0


def _number(asked: Mapping[str, Any], name: str, default: float) -> float:
    value = asked.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not math.isfinite(value):
        raise UsageError(f"{name} is not a number")
    return float(value)


def sum_up(run: Run, window: Window) -> dict[str, Any]:
    """What a stretch allocated and freed, by category; with what was there before, that is what is there after."""
    timeline, lives = run.timeline, run.timeline.lives
    real = (timeline.size > 0) & (lives.death != BEFORE)
    made = np.flatnonzero(real & (lives.birth >= window.first) & (lives.birth < window.last))
    freed = np.flatnonzero(real & (lives.death >= window.first) & (lives.death < window.last))
    before, after = lives.alive_at(window.first - 1), lives.alive_at(window.last - 1)
    columns = {"before": before, "allocated": made, "freed": freed, "after": after}
    sums = {f"{name}_{unit}": sums for name, blocks in columns.items() for unit, sums in _by_category(run, blocks)}
    used = [i for i in range(len(ALL_CATEGORIES)) if any(column[i] for column in sums.values())]
    inside = timeline.allocated[window.first : window.last]
    highest = window.first + int(inside.argmax()) if len(inside) else window.first - 1
    if timeline.allocated_at(window.first - 1) >= timeline.allocated_at(highest):
        highest = window.first - 1
    by: Any = "line" if run.labels.stacks else "module" if run.labels.module.any() else "op"
    return {
        "first_event": window.first, "last_event": window.last, "events": window.last - window.first,
        "begin_seconds": run.seconds(window.first), "end_seconds": run.seconds(max(window.last - 1, window.first)),
        "peak": {
            "allocated_bytes": timeline.allocated_at(highest), "event": highest, "seconds": run.seconds(highest),
        },
        "categories": [
            {"category": ALL_CATEGORIES[i], **{name: int(column[i]) for name, column in sums.items()}} for i in used
        ],
        "total": {name: int(column.sum()) for name, column in sums.items()},
        "made": [asdict(share) for share in shares(timeline, run.labels, made, by, limit=8)],
    }  # fmt: skip


def _by_category(run: Run, blocks: Ints) -> tuple[tuple[str, Ints], tuple[str, Ints]]:
    category, totals = run.labels.category[blocks], np.zeros(len(ALL_CATEGORIES), dtype=np.int64)
    np.add.at(totals, category, run.timeline.size[blocks])
    there = category[run.timeline.size[blocks] > 0]
    return ("bytes", totals), ("count", np.bincount(there, minlength=len(ALL_CATEGORIES)).astype(np.int64))
