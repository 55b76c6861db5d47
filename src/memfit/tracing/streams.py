"""Streams of the traced device: what is born while one is current lies in that stream's pool, as on a GPU.

Nothing runs here, so there is nothing to wait for: events are always done. A stream is numbered in the order of its
making; 0 is the default one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import torch

if TYPE_CHECKING:
    from memfit.tracing.tracer import Tracer


class TracedEvent:
    """Of anything: it has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: TracedStream | None = None) -> None:
        pass

    def wait(self, stream: TracedStream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class TracedStream:
    """Made with whatever `torch.cuda.Stream` takes."""

    numbers: ClassVar[Iterator[int]]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream_id = next(self.numbers)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: TracedEvent | None = None) -> TracedEvent:
        return event or TracedEvent()

    def wait_event(self, event: TracedEvent) -> None:
        pass

    def wait_stream(self, stream: TracedStream) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Streams:
    """Those of one trace, and which one is current."""

    def __init__(self) -> None:
        self.kind: type[TracedStream] = type("Stream", (TracedStream,), {"numbers": count()})
        self.default = self.kind()
        self.current = self.default

    @contextmanager
    def within(self, stream: TracedStream | None) -> Iterator[None]:
        """None is allowed, as it is by torch: nothing changes."""
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def set_current(self, stream: TracedStream) -> None:
        self.current = stream


@contextmanager
def streams_of_cuda(tracer: Tracer) -> Iterator[None]:
    """`torch.cuda` makes and knows the streams of the traced device, and is the module to ask about that device."""
    streams = tracer.streams
    names: dict[str, Any] = {
        "Stream": streams.kind, "stream": streams.within, "set_stream": streams.set_current, "Event": TracedEvent,
        "current_stream": lambda *_: streams.current, "default_stream": lambda *_: streams.default,
        "current_device": lambda: 0, "is_initialized": lambda: True,
    }  # fmt: skip
    with ExitStack() as stack:
        for name, replacement in names.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, replacement))
        stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", names["current_stream"]))
        stack.enter_context(mock.patch.object(torch, tracer.device.type, torch.cuda, create=True))
        yield
