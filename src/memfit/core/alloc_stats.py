"""What the allocator counts: the figures of `torch.cuda.memory_stats()`, for all pools together."""

# `if` and not max(): seven calls of max() for each event would cost a tenth of a replay.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_extensions import i64


@dataclass
class AllocatorStats:
    """Bytes unless the name says otherwise; where torch has a current value and a peak, both are here."""

    allocated: i64 = 0  # block sizes, not requests: tails that were too small to split off are included
    allocated_peak: i64 = 0
    active: i64 = 0  # allocated, and freed blocks that another stream may still use
    active_peak: i64 = 0
    requested: i64 = 0  # what the program asked for in active blocks
    requested_peak: i64 = 0
    reserved: i64 = 0  # held from the driver
    reserved_peak: i64 = 0
    inactive_split: i64 = 0  # free, but in a plain segment with live blocks, so it cannot be returned
    inactive_split_peak: i64 = 0

    allocations: i64 = 0
    allocations_peak: i64 = 0
    active_blocks: i64 = 0
    active_blocks_peak: i64 = 0
    inactive_split_blocks: i64 = 0
    inactive_split_blocks_peak: i64 = 0
    segments: i64 = 0  # of cudaMalloc; expandable segments do not count
    segments_peak: i64 = 0
    oversize_allocations: i64 = 0  # of at least max_split_size
    oversize_allocations_peak: i64 = 0
    oversize_segments: i64 = 0
    oversize_segments_peak: i64 = 0

    num_alloc_retries: i64 = 0
    num_ooms: i64 = 0
    num_device_alloc: i64 = 0
    num_device_free: i64 = 0
    num_sync_all_streams: i64 = 0

    def handed_out(self, size: i64, requested: i64) -> None:
        self.allocated = allocated = self.allocated + size
        self.active = active = self.active + size
        self.requested = live = self.requested + requested
        self.allocations = allocations = self.allocations + 1
        self.active_blocks = blocks = self.active_blocks + 1
        if allocated > self.allocated_peak:
            self.allocated_peak = allocated
        if active > self.active_peak:
            self.active_peak = active
        if live > self.requested_peak:
            self.requested_peak = live
        if allocations > self.allocations_peak:
            self.allocations_peak = allocations
        if blocks > self.active_blocks_peak:
            self.active_blocks_peak = blocks

    def let_go(self, size: i64) -> None:
        self.allocated -= size
        self.allocations -= 1

    def became_free(self, size: i64, requested: i64) -> None:
        self.active -= size
        self.requested -= requested
        self.active_blocks -= 1

    def pieces_changed(self, size: i64, blocks: i64) -> None:
        """Free bytes and blocks in plain segments that are in use; the net change of one call, as torch counts it."""
        self.inactive_split = held = self.inactive_split + size
        self.inactive_split_blocks = pieces = self.inactive_split_blocks + blocks
        if held > self.inactive_split_peak:
            self.inactive_split_peak = held
        if pieces > self.inactive_split_blocks_peak:
            self.inactive_split_blocks_peak = pieces

    def segment_came(self, *, oversize: bool) -> None:
        self.segments += 1
        self.segments_peak = max(self.segments_peak, self.segments)
        self.oversize_segments += oversize
        self.oversize_segments_peak = max(self.oversize_segments_peak, self.oversize_segments)

    def segment_went(self, *, oversize: bool) -> None:
        self.segments -= 1
        self.oversize_segments -= oversize

    def driver_gave(self, size: i64) -> None:
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        self.num_device_alloc += 1

    def driver_took_back(self, size: i64) -> None:
        self.reserved -= size
        self.num_device_free += 1
