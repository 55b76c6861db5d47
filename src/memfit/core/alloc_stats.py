"""What the allocator counts: the figures of `torch.cuda.memory_stats()`, for all pools together."""

# `if` and not max(): seven calls of max() for each event would cost a tenth of a replay.

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class AllocatorStats:
    """Bytes unless the name says otherwise; where torch has a current value and a peak, both are here."""

    allocated: int = 0  # block sizes, not requests: tails that were too small to split off are included
    allocated_peak: int = 0
    active: int = 0  # allocated, and freed blocks that another stream may still use
    active_peak: int = 0
    requested: int = 0  # what the program asked for in active blocks
    requested_peak: int = 0
    reserved: int = 0  # held from the driver
    reserved_peak: int = 0
    inactive_split: int = 0  # free, but in a plain segment with live blocks, so it cannot be returned
    inactive_split_peak: int = 0

    allocations: int = 0
    allocations_peak: int = 0
    active_blocks: int = 0
    active_blocks_peak: int = 0
    inactive_split_blocks: int = 0
    inactive_split_blocks_peak: int = 0
    segments: int = 0  # of cudaMalloc; expandable segments do not count
    segments_peak: int = 0
    oversize_allocations: int = 0  # of at least max_split_size
    oversize_allocations_peak: int = 0
    oversize_segments: int = 0
    oversize_segments_peak: int = 0

    num_alloc_retries: int = 0
    num_ooms: int = 0
    num_device_alloc: int = 0
    num_device_free: int = 0
    num_sync_all_streams: int = 0

    def handed_out(self, size: int, requested: int) -> None:
        self.allocated = allocated = self.allocated + size
        self.active = active = self.active + size
        self.requested += requested
        self.allocations += 1
        self.active_blocks += 1
        if allocated > self.allocated_peak:
            self.allocated_peak = allocated
        if active > self.active_peak:
            self.active_peak = active
        if self.requested > self.requested_peak:
            self.requested_peak = self.requested
        if self.allocations > self.allocations_peak:
            self.allocations_peak = self.allocations
        if self.active_blocks > self.active_blocks_peak:
            self.active_blocks_peak = self.active_blocks

    def let_go(self, size: int) -> None:
        self.allocated -= size
        self.allocations -= 1

    def became_free(self, size: int, requested: int) -> None:
        self.active -= size
        self.requested -= requested
        self.active_blocks -= 1

    def pieces_changed(self, size: int, blocks: int) -> None:
        """Free bytes and blocks in plain segments that are in use; the net change of one call, as torch counts it."""
        self.inactive_split += size
        self.inactive_split_blocks += blocks
        if self.inactive_split > self.inactive_split_peak:
            self.inactive_split_peak = self.inactive_split
        if self.inactive_split_blocks > self.inactive_split_blocks_peak:
            self.inactive_split_blocks_peak = self.inactive_split_blocks

    def segment_came(self, *, oversize: bool) -> None:
        self.segments += 1
        self.segments_peak = max(self.segments_peak, self.segments)
        self.oversize_segments += oversize
        self.oversize_segments_peak = max(self.oversize_segments_peak, self.oversize_segments)

    def segment_went(self, *, oversize: bool) -> None:
        self.segments -= 1
        self.oversize_segments -= oversize

    def driver_gave(self, size: int) -> None:
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        self.num_device_alloc += 1

    def driver_took_back(self, size: int) -> None:
        self.reserved -= size
        self.num_device_free += 1
