"""Side streams to copy on. On a device without streams the same calls copy in line, so that whoever copies is written
once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Event = Any  # torch.cuda.Event, or None where there are no streams


class Lane:
    """A side stream. Copies on it run beside the main stream's work, in the order they are given."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: Tensor, source: Tensor, *, after: Event = None) -> Event:
        """Both must outlive the copy; what it returns says when it is done."""
        if self.stream is None:
            target.copy_(source)
            return None
        with torch.cuda.stream(self.stream):
            if after is not None:
                self.stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def now(self) -> Event:
        """The point that the main stream has reached."""
        return None if self.stream is None else torch.cuda.current_stream(self.device).record_event()

    def wait(self, event: Event) -> None:
        """Let the main stream wait; the program goes on."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


def finished(event: Event) -> None:
    """Let the program wait."""
    if event is not None:
        event.synchronize()
