"""Segments and blocks as plain data, in the words of torch's snapshots."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockRecord:
    address: int
    size: int
    state: str
    requested: int


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """An expandable segment appears once for each contiguous range that holds memory."""

    address: int
    size: int
    stream: int
    small: bool
    expandable: bool
    blocks: tuple[BlockRecord, ...]

    @property
    def allocated(self) -> int:
        return sum(block.size for block in self.blocks if block.state == "active_allocated")
