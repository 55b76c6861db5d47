"""One device's run, ready to be reported, drawn, compared or exported: timeline, labels, times, stacks.

run = open_run("snapshot.pickle")        # or a saved trace
run.summary.breakdown, run.seconds(12), run.frames(block)
"""

from __future__ import annotations

import zipfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memfit.analysis.labels import ALL_CATEGORIES, Labels
from memfit.analysis.observed import observe
from memfit.analysis.stacks import is_python, labels_of_snapshot, labels_of_trace, line_text
from memfit.analysis.summary import Summary
from memfit.errors import InputError, UsageError
from memfit.events import CARD, Trace
from memfit.replay.alloc_config import AllocatorConfig
from memfit.replay.replay import replay
from memfit.replay.timeline import Ints, Timeline, check_total
from memfit.snapshots.read import Remark, Snapshot, read_snapshot
from memfit.snapshots.schema import Frame, clean

LONGEST_NAME = 100
"""Of a card, as a file has it."""


@dataclass(frozen=True)
class Run:
    timeline: Timeline
    labels: Labels
    origin: str  # predicted or measured
    messages: tuple[Remark, ...]  # to be said before any number
    config: AllocatorConfig
    device: int = 0
    snapshot: Snapshot | None = None
    times: npt.NDArray[np.float64] | None = None  # seconds since the first event, one an event; None if not recorded
    gpu: str | None = None  # the card that it was predicted for
    rows: Ints | None = None  # of a part of a run: of each block its number in the snapshot

    @property
    def trace(self) -> Trace:
        return self.timeline.trace

    @cached_property
    def summary(self) -> Summary:
        return Summary(self.timeline, self.labels)

    def seconds(self, event: int) -> float | None:
        if self.times is None or not len(self.times):
            return None
        return float(self.times[min(max(event, 0), len(self.times) - 1)])

    def frames(self, block: int) -> tuple[Frame, ...]:
        """Where a block was asked for, innermost first. Of a prediction the first names module
        and op, and the lines of code follow if they were kept."""
        if self.snapshot is not None:
            return self.snapshot.frames(self.device, block if self.rows is None else int(self.rows[block]))
        module, op = self.trace.module(block), self.trace.op(block)
        made_up = (Frame(clean(module), 0, clean(op)),) if module or op else ()
        return (*made_up, *(Frame(clean(file), line, clean(name)) for file, line, name in self.trace.stack(block)))

    def stack_numbers(self) -> Ints:
        """Of each block its stack, as a number."""
        if self.snapshot is None:
            found, blocks = self.trace.stack_of, len(self.timeline.size)
            return np.array([*found, *[0] * (blocks - len(found))], dtype=np.int64)
        numbers = np.frombuffer(self.snapshot.stack_of[self.device], dtype=np.int32).astype(np.int64)
        return numbers if self.rows is None else numbers[self.rows]

    def range_frames(self, number: int) -> tuple[Frame, ...]:
        """The same for what the driver did, and for a request that failed."""
        if self.snapshot is None or number >= len(self.snapshot.range_stack_of[self.device]):
            return ()
        stack = self.snapshot.stacks[self.snapshot.range_stack_of[self.device][number]]
        return tuple(self.snapshot.frame_table[i] for i in stack)


def stack_lines(frames: tuple[Frame, ...], limit: int = 60) -> list[str]:
    """A stack as text, innermost first. A made-up frame has no line number: it is a module and an op."""
    lines = [f"{f.filename} {f.name}".strip() if f.line == 0 else line_text(f) for f in frames[:limit]]
    return lines + ([f"... and {len(frames) - limit} more frames"] if len(frames) > limit else [])


MAX_DEPTH = 120
HOPS = ("_wrapped_call_impl", "_call_impl")  # torch's own, between every module and the next


def paths(run: Run, blocks: Ints) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """(names from the outside in, bytes, how many blocks), each path once."""
    sums: dict[tuple[str, ...], list[int]] = {}
    of_stack: dict[tuple[int, ...], tuple[str, ...]] = {}
    stacks = run.stack_numbers()
    for block in blocks.tolist():
        key = _key(run, block, stacks)
        path = of_stack.get(key)
        if path is None:
            path = of_stack[key] = _path(run, block)
        found = sums.setdefault(path, [0, 0])
        found[0] += int(run.timeline.size[block])
        found[1] += 1
    for path, (nbytes, count) in sums.items():
        yield path, nbytes, count


def _key(run: Run, block: int, stacks: Ints) -> tuple[int, ...]:
    labels = run.labels
    if labels.stacks:
        return int(stacks[block]), int(labels.line[block])
    return int(labels.category[block]), int(labels.module[block]), int(labels.op[block])


def _path(run: Run, block: int) -> tuple[str, ...]:
    labels = run.labels
    if labels.stacks:
        frames = [frame for frame in run.frames(block) if is_python(frame) and frame.name not in HOPS][:MAX_DEPTH]
        return tuple(line_text(frame) for frame in reversed(frames)) or (labels.lines[labels.line[block]],)
    category = ALL_CATEGORIES[labels.category[block]].replace("_", " ")
    modules = [part for part in labels.modules[labels.module[block]].split(".") if part]
    return (category, *modules[:MAX_DEPTH], labels.ops[labels.op[block]] or "(no op)")


def open_run(path: str | Path, *, device: int | None = None, alloc_conf: str | None = None) -> Run:
    """A snapshot (pickle or JSON) or a trace that memfit saved. Of several devices the one that needed most."""
    if is_trace_file(path):
        if device:
            raise UsageError(f"--device {device}: {str(path)!r} is a trace of one device")
        with naming(path):
            return run_of_trace(Trace.load(path), alloc_conf=alloc_conf)
    if alloc_conf is not None:
        raise UsageError(
            f"--alloc-conf cannot be applied to {str(path)!r}: a recording is taken as it was",
            hint="it is for traces, which are replayed: memfit plan ... --save-trace FILE",
        )
    return pick(runs_of_file(path), device)


def runs_of_file(path: str | Path, on_read: Callable[[int], None] = lambda events: None) -> list[Run]:
    """Of each device of a snapshot."""
    with naming(path):
        snapshot = read_snapshot(path)
        on_read(sum(len(trace) for trace in snapshot.traces))
        return runs_of_snapshot(snapshot)


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """What is wrong with a file is told with its name."""
    try:
        yield
    except InputError as error:
        if repr(str(path)) in error.message:
            raise
        raise InputError(f"cannot read {str(path)!r}: {error.message}", hint=error.hint) from error


def is_trace_file(path: str | Path) -> bool:
    try:
        return Path(path).is_file() and zipfile.is_zipfile(path)
    except (OSError, ValueError):
        return False


def run_of_trace(trace: Trace, *, alloc_conf: str | None = None) -> Run:
    config = AllocatorConfig.parse(alloc_conf or str(trace.facts.get("alloc_conf", "")))
    try:
        timeline = replay(trace, config, places=True)
        check_total(timeline.size)
    except (ValueError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the trace cannot be replayed: {error}") from error
    messages = () if len(trace) else (Remark("empty", "no events in it"),)
    card = trace.facts.get(CARD)
    gpu = clean(card[:LONGEST_NAME]) if isinstance(card, str) and card else None
    return Run(timeline, labels_of_trace(timeline), trace.origin, messages, config, gpu=gpu)


def runs_of_snapshot(snapshot: Snapshot) -> list[Run]:
    config, doubt = _config(snapshot)
    return [
        _run_of_device(snapshot, device, config, doubt)
        for device in range(len(snapshot.traces))
        if len(snapshot.traces[device]) or any(segment.device == device for segment in snapshot.segments)
    ] or [_run_of_device(_with_a_device(snapshot), 0, config, doubt)]


def pick(runs: list[Run], device: int | None) -> Run:
    if device is None:
        return max(runs, key=lambda run: run.timeline.peak_allocated)
    for run in runs:
        if run.device == device:
            return run
    known = ", ".join(str(run.device) for run in runs)
    raise UsageError(f"--device {device}: nothing was recorded of it", hint=f"recorded were: {known}")


def _with_a_device(snapshot: Snapshot) -> Snapshot:
    if snapshot.traces:
        return snapshot
    traces, times, stacks = (Trace(origin="measured"),), (array("q"),), (array("i"),)
    return replace(snapshot, traces=traces, times=times, stack_of=stacks, range_stack_of=(array("i"),))


def _config(snapshot: Snapshot) -> tuple[AllocatorConfig, tuple[Remark, ...]]:
    try:
        return AllocatorConfig.from_snapshot(snapshot.settings), ()
    except (UsageError, TypeError, ValueError, AttributeError):
        said = "its allocator settings cannot be understood: PyTorch's defaults are assumed"
        return AllocatorConfig(), (Remark("settings", said),)


def _run_of_device(snapshot: Snapshot, device: int, config: AllocatorConfig, doubt: tuple[Remark, ...]) -> Run:
    timeline = observe(snapshot, device, config)
    labels = labels_of_snapshot(timeline, snapshot, device)
    own = (each for each in snapshot.warnings if not each.startswith("GPU ") or each.startswith(f"GPU {device}:"))
    messages = (*own, *doubt, *_remarks(timeline, labels))  # what is said of other GPUs is not said here
    origin = timeline.trace.origin
    times = _seconds(np.frombuffer(snapshot.times[device], dtype=np.int64)) if origin == "measured" else None
    return Run(timeline, labels, origin, messages, config, device, snapshot, times)


def _remarks(timeline: Timeline, labels: Labels) -> Iterator[Remark]:
    if timeline.doubts:
        known = "" if timeline.reserved is not None else ", and what was reserved is n/a"
        said = "events contradict the final state: sizes of blocks may be too small there"
        yield Remark("doubts", f"{timeline.doubts:,} {said}{known}")
    if len(timeline.trace) and timeline.reserved is None and not timeline.doubts:
        yield Remark("segments", "the segments in it do not hold its blocks: what was reserved is n/a")
    if len(timeline.trace) and not labels.stacks and timeline.trace.origin == "measured":
        yield Remark("no_stacks", "no stacks in it: lines of code are unknown (record with context='all')")


def _seconds(times: npt.NDArray[np.int64]) -> npt.NDArray[np.float64] | None:
    """From the first event on, never backwards. Before torch 2.2 events have no time."""
    known = times[times > 0]
    if len(known) < 1 or len(known) < len(times) // 2:
        return None
    first = known.min()
    return np.asarray(np.maximum.accumulate(np.maximum(times - first, 0)) / 1e6, dtype=np.float64)
