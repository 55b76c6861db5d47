"""Blocks come in one ahead and go out one behind, by threads, while the device computes.

The device has room for two blocks: one in use, one arriving or leaving (or for one, where memory is short: then a block
comes when the last has left). On the way to a GPU the bytes pass through two small pinned buffers, one being filled
while the other is copied, and likewise on the way back: host memory does not grow with the model, nor with a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from memfit.jobs.host import Event, HostMemory, Lane, as_bytes, finished
from memfit.jobs.pruning.decoder import TORCH_DTYPES, Layout, StoredPiece, Weights
from memfit.units import MiB

CHUNK = 32 * MiB
Origin = Literal["source", "output"]
Parts = Callable[[StoredPiece], Iterator[tuple[int, memoryview]]]
"""A tensor's bytes as they are on the device, from the start on, in parts."""


@dataclass(frozen=True, slots=True)
class Load:
    """A block to be brought in: as the model has it, or as an earlier run has pruned it."""

    block: int
    origin: Origin = "source"


class _Transfers:
    def __init__(self, device: torch.device, host: HostMemory, chunk: int | None = None) -> None:
        """The CPU's memory is used directly, unless a size of chunks is given."""
        self._lane = Lane(device)
        self._chunk = chunk or CHUNK
        wanted = 2 if chunk or device.type != "cpu" else 0
        self._buffers = [host.empty((self._chunk,), torch.uint8) for _ in range(wanted)]
        self._copied: list[Event] = [None, None]
        self._host = host

    def after(self, event: Event) -> None:
        """What is transferred from now on waits for this."""
        if event is not None:
            self._lane.stream.wait_event(event)  # type: ignore[union-attr]

    def release(self) -> None:
        for buffer in self._buffers:
            self._host.release(buffer)
        self._buffers = []


class Uploads(_Transfers):
    """Bytes to the device, in order."""

    def send(self, target: Tensor, read: Callable[[memoryview, int], None]) -> None:
        """Fill `target` (bytes) with what `read` puts into the memory it is given, from a start on."""
        if target.is_meta:
            return
        if not self._buffers:
            read(as_bytes(target), 0)
            return
        for number, start in enumerate(range(0, len(target), self._chunk)):
            part = target[start : start + self._chunk]
            room = self._buffers[number % 2][: len(part)]
            finished(self._copied[number % 2])
            read(as_bytes(room), start)
            self._copied[number % 2] = self._lane.copy(part, room)

    def arrived(self) -> Event:
        """When all that was sent is there."""
        return None if self._lane.stream is None else self._lane.stream.record_event()


class Downloads(_Transfers):
    """Bytes from the device, in order."""

    def fetch(self, source: Tensor) -> Iterator[tuple[int, memoryview]]:
        """Each part is good until the next is asked for; it comes while the one before is used."""
        if source.is_meta:
            return
        if not self._buffers:
            yield 0, as_bytes(source)
            return
        starts = range(0, len(source), self._chunk)
        coming = self._begin(source, 0)
        for number, start in enumerate(starts):
            part, arrived = coming
            if number + 1 < len(starts):
                coming = self._begin(source, number + 1)
            finished(arrived)
            yield start, as_bytes(part)

    def _begin(self, source: Tensor, number: int) -> tuple[Tensor, Event]:
        part = source[number * self._chunk : (number + 1) * self._chunk]
        room = self._buffers[number % 2][: len(part)]
        return room, self._lane.copy(room, part)


# -- a thread that reads and one that writes ---------------------------------------------------------------------------


class BlockReader:
    """Brings blocks into the device's places for them, in turn, as the places become free."""

    def __init__(self, loads: Sequence[Load], places: int, fetch: Callable[[Load, int], Event]) -> None:
        self._loads = list(loads)
        self._places = places
        self._fetch = fetch
        self._pool = ThreadPoolExecutor(1, "memfit-read")
        self._coming: list[Future[Event]] = []
        self._next = 0
        for _ in range(places):
            self._ask(None)

    def wait(self, load: Load) -> tuple[int, Event]:
        """The place of this block, and when it is there."""
        assert self._loads[self._next] == load, (load, self._next)
        arrived = self._coming[self._next].result()
        self._next += 1
        return (self._next - 1) % self._places, arrived

    def leave(self, written: Future[None] | None) -> None:
        """The block that was waited for last is not needed any more, once it is written."""
        self._ask(written)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _ask(self, written: Future[None] | None) -> None:
        number = len(self._coming)
        if number < len(self._loads):
            self._coming.append(self._pool.submit(self._run, number, written))

    def _run(self, number: int, written: Future[None] | None) -> Event:
        if written is not None:
            written.result()
        return self._fetch(self._loads[number], number % self._places)


class Sink(Protocol):
    """Where pruned blocks go."""

    def write(self, block: int, parts: Parts, facts: Mapping[str, Any]) -> None: ...


class BlockWriter:
    def __init__(self, sink: Sink, downloads: Downloads) -> None:
        self._sink = sink
        self._downloads = downloads
        self._pool = ThreadPoolExecutor(1, "memfit-write")
        self._going: list[Future[None]] = []

    def put(self, block: int, flat: Tensor, ready: Event, facts: Callable[[], Mapping[str, Any]]) -> Future[None]:
        """`facts` is asked in the thread, so that it may wait for figures of the device."""
        going = self._pool.submit(self._run, block, flat, ready, facts)
        self._going.append(going)
        return going

    def wait(self) -> None:
        """Until all is written; what went wrong in the thread is raised here."""
        for going in self._going:
            going.result()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, block: int, flat: Tensor, ready: Event, facts: Callable[[], Mapping[str, Any]]) -> None:
        self._downloads.after(ready)

        def parts(piece: StoredPiece) -> Iterator[tuple[int, memoryview]]:
            return self._downloads.fetch(flat[piece.offset : piece.offset + piece.nbytes])

        self._sink.write(block, parts, facts())


# -- stored tensors ----------------------------------------------------------------------------------------------------


Seen = Callable[[str, memoryview], None]


def bring(
    weights: Weights, layout: Layout, flat: Tensor, uploads: Uploads, seen: Seen = lambda name, data: None
) -> None:
    """A block's tensors to where they lie on the device; `seen` is shown what is read."""
    for piece in layout.pieces:
        target = flat[piece.offset : piece.offset + piece.nbytes]
        uploads.send(target, lambda out, start, piece=piece: read_as(weights, piece, out, start, seen))  # type: ignore[misc]


def read_as(weights: Weights, piece: StoredPiece, out: memoryview, start: int, seen: Seen) -> None:
    """Bytes of a stored tensor in the type that the model has, from a start on."""
    name, stored = piece.stored.name, TORCH_DTYPES[weights.stored[piece.stored.name].dtype]
    if stored == piece.slot.dtype:
        weights.read_into(name, out, start)
        seen(name, out)
        return
    item = piece.slot.dtype.itemsize
    raw = torch.empty(len(out) // item, dtype=stored)
    weights.read_into(name, as_bytes(raw), start // item * stored.itemsize)
    seen(name, as_bytes(raw))
    out[:] = as_bytes(raw.to(piece.slot.dtype))
