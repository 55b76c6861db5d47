"""What pages draw of a run, as JSON: the report with columns of numbers as base64, then whatever a viewer asks.

Everything large is summed up beforehand, so that the page of a million events is a few MiB and stays smooth: 60,000
samples of the timeline, the largest blocks one by one, the flame graph without what is too thin to see.

    viewed = RunView(report_file("snapshot.pickle"))
    viewed.page()                                                     # as `report --html` draws it, in few samples
    viewed.stretch({"axis": "time", "from": 0.1, "to": 0.2, "columns": 1200, "filter": {"text": "attention"}})
    viewed.sums({"axis": "event", "from": 100, "to": 200})

What is asked comes from a browser: each value is checked, and what is answered has a bound whatever the run's size.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.analysis.labels import ALL_CATEGORIES, QUIET_PHASES, UNKNOWN, any_layer
from memfit.analysis.report import Report
from memfit.analysis.run import Run, paths, stack_lines
from memfit.analysis.summary import Summary, largest, shares
from memfit.errors import UsageError
from memfit.replay.alloc_config import AllocatorConfig
from memfit.replay.timeline import BEFORE, Ints, Timeline, allocated_changes

MAX_SAMPLES = 60_000


@dataclass(frozen=True, slots=True)
class Window:
    """What is drawn: events from `first` up to `last`, which is no longer in it. `edges` are where columns of pixels
    begin, if somebody looks at it now; a page that is zoomed later has None."""

    first: int
    last: int
    edges: Ints | None = None


@dataclass(frozen=True, slots=True)
class Samples:
    """`event[0]` is the one before the window: how it began. Sums have one row a group and one column a sample."""

    event: Ints
    allocated: Ints
    reserved: Ints | None
    stride: int  # events in a stretch, on average; 1 if none was left out


def sample(
    timeline: Timeline, limit: int = MAX_SAMPLES, *, also: Ints | None = None, window: Window | None = None
) -> Samples:
    """A timeline of any length in a bounded number of samples. Of every stretch of events two are kept: the one at
    which most is allocated, and the last. What is stored of a kept event is exact, and holds until the next one; so
    every peak is drawn at its full height, and every plateau at its own.

    `also`: events that are kept in any case, such as those before a long pause, whose state is seen for long."""
    first, last = (0, len(timeline.trace)) if window is None else (window.first, window.last)
    edges = None if window is None else window.edges
    kept, stride = np.flatnonzero(_changes(timeline)[first:last]) + first, 1
    if len(kept) > limit or (edges is not None and len(kept) > 2 * len(edges)):
        stride = -(-2 * (last - first) // limit) if edges is None else -(-(last - first) // len(edges))
        edges = np.arange(first, last, stride) if edges is None else np.unique(edges)
        more = np.zeros(0, dtype=np.int64) if also is None else also[(also >= first) & (also < last)]
        kept = np.unique(np.concatenate((_highest(timeline.allocated, edges, last), edges[1:] - 1, more, [last - 1])))
    event = np.concatenate(([first - 1], kept)).astype(np.int64)
    reserved = None
    if timeline.reserved is not None:
        reserved = _beginning(timeline.reserved_at(first - 1), timeline.reserved[kept])
    return Samples(event, _beginning(timeline.allocated_at(first - 1), timeline.allocated[kept]), reserved, stride)


def _beginning(before: int | None, column: Ints) -> Ints:
    return np.concatenate((np.array([before], dtype=np.int64), column))


def _highest(column: Ints, edges: Ints, last: int) -> Ints:
    """Of each stretch the first event at which the column is highest."""
    inside = column[edges[0] : last]
    most = np.maximum.reduceat(inside, edges - edges[0])
    of_stretch = np.repeat(np.arange(len(edges)), np.diff(np.append(edges, last)))
    highest = np.flatnonzero(inside == most[of_stretch])
    return np.asarray(highest[np.unique(of_stretch[highest], return_index=True)[1]] + edges[0])


def group_sums(timeline: Timeline, samples: Samples, group: Ints, groups: int) -> Ints:
    """Bytes allocated in each group at each sample; the rows sum to `samples.allocated` exactly."""
    blocks = np.flatnonzero((timeline.lives.death != BEFORE) & (timeline.size > 0))
    begins, ends = seen(timeline, samples, blocks)
    change = np.zeros((groups, len(samples.event) + 1), dtype=np.int64)
    row = group[blocks] * change.shape[1]
    np.add.at(change.reshape(-1), row + begins, timeline.size[blocks])
    np.subtract.at(change.reshape(-1), row + ends, timeline.size[blocks])
    return np.asarray(np.cumsum(change, axis=1)[:, :-1])


def seen(timeline: Timeline, samples: Samples, blocks: Ints) -> tuple[Ints, Ints]:
    """The first sample at which each block is there, and the first after that at which it is not."""
    kept = np.zeros(len(timeline.trace) + 2, dtype=np.int64)  # an entry an event, from BEFORE on
    kept[samples.event + 1] = 1
    sample_at = np.cumsum(kept) - kept  # of each event, the sample that is the first to show it
    return sample_at[timeline.lives.birth[blocks] + 1], sample_at[timeline.lives.death[blocks] + 1]


def top_groups(
    timeline: Timeline, number: Ints, names: Sequence[str], alive: Ints, count: int
) -> tuple[Ints, list[str]]:
    """A column with many names, renumbered: the `count` that weigh most, at the peak or over time, and the rest."""
    size = timeline.size
    at_peak = np.bincount(number[alive], weights=size[alive], minlength=len(names))
    lasted = (np.minimum(timeline.lives.death, len(timeline.trace)) - timeline.lives.birth).astype(np.float64)
    over_time = np.bincount(number, weights=size * lasted, minlength=len(names)) / max(len(timeline.trace), 1)
    weight = np.maximum(at_peak, over_time)
    chosen = [i for i in np.argsort(-weight, kind="stable")[:count].tolist() if weight[i] > 0]
    table = np.full(len(names), len(chosen), dtype=np.int64)
    table[chosen] = np.arange(len(chosen))
    rest = ["the rest"] * bool((weight > 0).sum() > len(chosen))
    return table[number], [*(names[i] for i in chosen), *rest]


def _changes(timeline: Timeline) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    moved = np.diff(timeline.allocated, prepend=timeline.allocated_before) != 0
    if timeline.reserved is not None:
        moved |= np.diff(timeline.reserved, prepend=timeline.reserved_before) != 0
    return np.asarray(moved, dtype=np.bool_)


# -- the whole of a run, or a stretch ---------------------------------------------------------------------------------

MAX_BLOCKS = 120_000
FEW = 10_000
MAX_STACK_LINES = 200_000
MAX_PHASES = 5000
GROUPS = 9
PAUSES = 2000
BEFORE_NAME = "before the recording"
UNIT = 512


def page_data(reported: Report, *, max_samples: int = MAX_SAMPLES, max_blocks: int | None = None) -> dict[str, Any]:
    data: dict[str, Any] = {"report": reported.document}
    if (run := reported.run) is not None:
        whole = Window(0, len(run.trace))
        data["timeline"], words = drawn_window(run, whole, max_samples=max_samples, max_blocks=max_blocks or MAX_BLOCKS)
        data["timeline"]["flame"] = _flame(merge_thin(tree(run, run.summary.alive)), words)
    return data


def draw_plan(summary: Summary, *, max_samples: int, max_blocks: int) -> dict[str, Any]:
    """The timeline of a job that was predicted."""
    run = Run(summary.timeline, summary.labels, "predicted", (), AllocatorConfig())
    return drawn_window(run, Window(0, len(run.trace)), max_samples=max_samples, max_blocks=max_blocks)[0]


def drawn_window(run: Run, window: Window, *, max_samples: int, max_blocks: int) -> tuple[dict[str, Any], Words]:
    timeline = run.timeline
    samples = sample(timeline, max_samples, also=_long_seen(run), window=window)
    alive = run.summary.alive
    unit = _unit(run)
    blocks, left_out = _blocks(run, window, samples, max_blocks)
    groupings = [_by_category(run), *_by_name(run, alive)]
    words = Words()
    kinds, kind_of = _kinds(run, blocks, words)
    drawn = {
        "first": window.first, "last": window.last,
        "events": len(run.trace), "end_seconds": run.seconds(len(run.trace)), "stride": samples.stride, "unit": unit,
        "peak_event": timeline.peak_event, "peak_seconds": run.seconds(timeline.peak_event),
        "samples": {
            "count": len(samples.event),
            "event": _packed(samples.event, np.int32),
            "seconds": None if run.times is None else _packed(_seconds(run, samples.event), np.float64),
            "allocated": _packed(samples.allocated // unit, np.uint32),
            "reserved": None if samples.reserved is None else _packed(samples.reserved // unit, np.uint32),
        },
        "groupings": [
            {
                "id": name, "names": names, "palette": palette,
                "sums": [_packed(row // unit, np.uint32) for row in group_sums(timeline, samples, number, len(names))],
                "of_block": _packed(number[blocks], np.uint8),
            }
            for name, names, number, palette in groupings
        ],
        "blocks": {
            "count": len(blocks), "left_out": left_out,
            "birth": _packed(timeline.lives.birth[blocks], np.int32),
            "death": _packed(timeline.lives.death[blocks], np.int32),
            "size": _packed(timeline.size[blocks] // unit, np.uint32),
            "waste": _packed(_waste(run, blocks), np.uint32),
            "category": _packed(run.labels.category[blocks], np.uint8),
            "kind": _packed(kind_of, np.uint32),
            **_more_of_few(run, blocks),
        },
        "categories": [name.replace("_", " ") for name in ALL_CATEGORIES],
        "kinds": kinds, "stacks": words.stacks, "words": words.words,
        "phases": [
            [phase.name, phase.step, phase.begin, phase.end, run.seconds(phase.begin), run.seconds(phase.end)]
            for phase in run.labels.phases[:MAX_PHASES]
            if phase.name not in QUIET_PHASES
        ],
    }  # fmt: skip
    return drawn, words


def _long_seen(run: Run) -> Ints:
    """The last events before the longest pauses, and before each phase."""
    begins = [phase.begin - 1 for phase in run.labels.phases[:MAX_PHASES]]
    pauses = np.zeros(0, dtype=np.int64)
    if run.times is not None and len(run.times) > PAUSES:
        pauses = np.argpartition(np.diff(run.times), -PAUSES)[-PAUSES:]
    return np.concatenate((pauses, np.array(begins, dtype=np.int64)))


def _unit(run: Run) -> int:
    """Sizes are multiples of 512 bytes, and 2^32 of these are 2 TiB. A file that has others gets coarser figures."""
    top = max(int(run.timeline.allocated.max(initial=run.timeline.allocated_before)), 1)
    if run.timeline.reserved is not None:
        top = max(top, int(run.timeline.reserved.max(initial=run.timeline.reserved_before)))
    unit = UNIT
    while top // unit >= 1 << 32:
        unit *= 2
    return unit


def _blocks(run: Run, window: Window, samples: Samples, limit: int) -> tuple[Ints, int]:
    """Largest first, of equal ones the older first; and how many there are beside. Where not all have room, those come
    before others that are there at a sample, and can be seen."""
    timeline, lives = run.timeline, run.timeline.lives
    there = (lives.birth < window.last) & (lives.death >= window.first)
    real = np.flatnonzero((timeline.size > 0) & (lives.death != BEFORE) & there)
    kept = real
    if len(real) > limit:
        begins, ends = seen(timeline, samples, real)
        kept = largest(timeline, real[begins < ends], limit)
        kept = np.concatenate((kept, largest(timeline, real[begins >= ends], limit - len(kept))))
    return largest(timeline, kept), len(real) - len(kept)


def _waste(run: Run, blocks: Ints) -> Ints:
    requested = np.frombuffer(run.trace.requested, dtype=np.int64)[blocks]
    waste = run.timeline.size[blocks] - requested
    return np.asarray(np.clip(waste, 0, (1 << 32) - 1), dtype=np.int64)


def _seconds(run: Run, events: Ints) -> npt.NDArray[np.float64]:
    assert run.times is not None
    return run.times[np.maximum(events, 0)] if len(run.times) else np.zeros(len(events))


def _more_of_few(run: Run, blocks: Ints) -> dict[str, str]:
    """The number of each in the whole run, by which another document tells it again; and when each came and went, which
    samples say only about."""
    if len(blocks) > FEW:
        return {}
    more = {"number": _packed(blocks, np.int32)}
    if run.times is not None and len(run.times):
        lives, last = run.timeline.lives, len(run.times) - 1
        moments = {"made": lives.birth[blocks], "freed": np.minimum(lives.death[blocks], last)}
        more |= {name: _packed(_seconds(run, events), np.float64) for name, events in moments.items()}
    return more


def _by_category(run: Run) -> tuple[str, list[str], Ints, list[str]]:
    """What is unknown because it was there before the recording is told apart from what is unknown otherwise."""
    old = (run.timeline.lives.birth == BEFORE) & (run.labels.category == ALL_CATEGORIES.index(UNKNOWN))
    number = np.where(old & (run.origin == "measured"), len(ALL_CATEGORIES), run.labels.category)
    used = [i for i in range(len(ALL_CATEGORIES) + 1) if (number == i).any()] or [len(ALL_CATEGORIES) - 1]
    order = sorted(used, key=lambda i: _STACKING.index(i) if i in _STACKING else len(_STACKING))
    table = np.zeros(len(ALL_CATEGORIES) + 1, dtype=np.int64)
    table[order] = np.arange(len(order))
    keys = [*ALL_CATEGORIES, "before"]
    names = [BEFORE_NAME if keys[i] == "before" else keys[i].replace("_", " ") for i in order]
    return "category", names, table[number], [keys[i] for i in order]


# what stays lies at the bottom, what comes and goes at the top
_STACKING = [
    len(ALL_CATEGORIES),
    *(
        ALL_CATEGORIES.index(name)
        for name in (
            "weights", "optimizer", "workspaces", "other", "unknown", "calibration", "kv_cache", "gradients",
            "activations", "loss", "temporaries",
        )
    ),
]  # fmt: skip


def _by_name(run: Run, alive: Ints) -> Iterable[tuple[str, list[str], Ints, list[str]]]:
    labels = run.labels
    if labels.stacks:
        number, names = top_groups(run.timeline, labels.line, labels.lines, alive, GROUPS)
        yield "line of code", names, number, []
    if len(labels.module) and labels.module.any():
        modules, module = labels.modules_anywhere()
        number, names = top_groups(run.timeline, module, [name or "(no module)" for name in modules], alive, GROUPS)
        yield "module", names, number, []


class Words:
    """Every text once; texts are most of what a page weighs."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.stacks: list[list[int]] = []
        self.left_out = 0
        self._number: dict[str, int] = {}
        self._lines = 0

    def number(self, text: str) -> int:
        found = self._number.get(text)
        if found is None:
            found = self._number[text] = len(self.words)
            self.words.append(text)
        return found

    def stack(self, lines: Sequence[str]) -> int:
        """-1 if there is none, or no room is left."""
        if not lines or self._lines > MAX_STACK_LINES:
            return -1
        self._lines += len(lines)
        self.stacks.append([self.number(line) for line in lines])
        return len(self.stacks) - 1


def _kinds(run: Run, blocks: Ints, words: Words) -> tuple[list[list[int]], Ints]:
    """Blocks from one place share what is said of them: [line, module, op, stack]."""
    labels = run.labels
    stack_of = run.stack_numbers()
    columns = np.stack([labels.line[blocks], labels.module[blocks], labels.op[blocks], stack_of[blocks]], axis=1)
    if not len(blocks):
        return [], np.zeros(0, dtype=np.int64)
    distinct, first, which = np.unique(columns, axis=0, return_index=True, return_inverse=True)
    kinds = []
    for row, place in zip(distinct.tolist(), first.tolist(), strict=True):
        stack = words.stack(stack_lines(run.frames(int(blocks[place])), 40))
        texts = labels.lines[row[0]], labels.modules[row[1]], labels.ops[row[2]]
        kinds.append([*(words.number(text) for text in texts), stack])
    return kinds, which.reshape(-1)


LEAST_SHARE = 0.0002
"""A node below this share of the whole is too narrow to be seen; such siblings are put together."""


@dataclass(slots=True)
class Node:
    name: str
    nbytes: int = 0
    count: int = 0
    children: dict[str, Node] = field(default_factory=dict)

    def below(self, name: str) -> Node:
        found = self.children.get(name)
        if found is None:
            found = self.children[name] = Node(name)
        return found


def tree(run: Run, blocks: Ints) -> Node:
    """From the program down to the line, or from the model down to the op."""
    root = Node("all")
    for path, nbytes, count in paths(run, blocks):
        node = root
        for name in ("", *path):
            node = node.below(name) if name else node
            node.nbytes += nbytes
            node.count += count
    return root


def merge_thin(root: Node) -> Node:
    """Siblings that would be thinner than a hair become one. No recursion: a stack may be deep."""
    least = root.nbytes * LEAST_SHARE
    todo = [root]
    while todo:
        node = todo.pop()
        thin = [child for child in node.children.values() if child.nbytes < least]
        if len(thin) > 1:
            for child in thin:
                del node.children[child.name]
            name = f"{len(thin):,} smaller"
            node.children[name] = Node(name, sum(c.nbytes for c in thin), sum(c.count for c in thin))
        todo.extend(node.children.values())
    return root


def _flame(root: Node, words: Words) -> dict[str, list[int]]:
    """The tree as columns, parents before children; JSON that nests could be too deep to parse."""
    columns: dict[str, list[int]] = {"word": [], "parent": [], "bytes": [], "count": []}
    todo = [(root, -1)]
    for node, parent in todo:
        number = len(columns["word"])
        row = words.number(node.name), parent, node.nbytes, node.count
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
        todo.extend((child, number) for child in sorted(node.children.values(), key=_place))
    return columns


def _place(node: Node) -> tuple[int, int]:
    """The widest first; layers, which are known by number, in their order."""
    return (0, int(node.name)) if node.name.isascii() and node.name.isdigit() else (1, -node.nbytes)


def _packed(column: npt.NDArray[Any], kind: Any) -> str:
    little = np.ascontiguousarray(column, dtype=np.dtype(kind).newbyteorder("<"))
    return base64.b64encode(little.tobytes()).decode("ascii")


# -- what a viewer asks -----------------------------------------------------------------------------------------------

WHOLE_SAMPLES = 4000
MAX_COLUMNS = 4000
VIEW_BLOCKS = 4000
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
        return page_data(self.reported, max_samples=WHOLE_SAMPLES, max_blocks=VIEW_BLOCKS)

    def whole(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """All of the run again, of the blocks that are meant."""
        run = self._only(Filter.read(asked.get("filter")))
        some = page_data(Report({}, run), max_samples=WHOLE_SAMPLES, max_blocks=VIEW_BLOCKS)
        return {"timeline": some["timeline"], "matching": self._matching(run)}

    def stretch(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """From one position to another, for so many columns of pixels: the highest moment of each, and its last."""
        run = self._only(Filter.read(asked.get("filter")))
        columns = int(min(max(_number(asked, "columns", 1000), 1), MAX_COLUMNS))
        window, low, high = window_of(run, asked)
        edges = np.append(window.first, events_at(run, asked, np.linspace(low, high, columns, endpoint=False)))
        edges = np.unique(edges[(edges >= window.first) & (edges < window.last)])
        seen = replace(window, edges=edges if len(edges) else None)
        return {"timeline": drawn_window(run, seen, max_samples=3 * MAX_COLUMNS, max_blocks=VIEW_BLOCKS)[0]}

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
    sums = {f"{name}_{unit}": sums for name, blocks in columns.items() for unit, sums in _sums_by_category(run, blocks)}
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


def _sums_by_category(run: Run, blocks: Ints) -> tuple[tuple[str, Ints], tuple[str, Ints]]:
    category, totals = run.labels.category[blocks], np.zeros(len(ALL_CATEGORIES), dtype=np.int64)
    np.add.at(totals, category, run.timeline.size[blocks])
    there = category[run.timeline.size[blocks] > 0]
    return ("bytes", totals), ("count", np.bincount(there, minlength=len(ALL_CATEGORIES)).astype(np.int64))
