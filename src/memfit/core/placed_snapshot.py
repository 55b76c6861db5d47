"""A predicted job as a snapshot in torch's own format: where a replay put each block, and what it had the driver do.

    snapshot = placed_snapshot(trace, config, begin=step_begins(trace, 6))
    save_snapshot(snapshot, "predicted.pickle")

pytorch.org/memory_viz, `memfit report` and every other reader open it as they would a recording.
"""

from __future__ import annotations

from typing import Any

from memfit.core.alloc_config import AllocatorConfig
from memfit.core.allocator import CachingAllocator, OutOfMemory
from memfit.core.driver import DriverCall, NotingDriver
from memfit.core.events import Action, Trace
from memfit.core.replay import DEFAULTS, Player
from memfit.core.snapshot import Segment
from memfit.core.snapshot_write import snapshot_dict
from memfit.core.window import between, kept_blocks


def placed_snapshot(
    trace: Trace, config: AllocatorConfig = DEFAULTS, *, begin: int = 0, capacity: int | None = None,
    alloc_conf: str = "",
) -> dict[str, Any]:  # fmt: skip
    """The job from event `begin` on, as if the recording had been switched on there. Where memory runs out it ends."""
    driver = NotingDriver(capacity)
    allocator = CachingAllocator(config, driver=driver)
    player = Player(trace, allocator)
    player.place_what_was_there()
    placements = {number: (held.address, held.size) for number, held in enumerate(player.live) if held is not None}
    played = len(trace)
    for event, (action, subject) in enumerate(trace.events()):
        driver.event = event
        if action != Action.ALLOC:
            player.do(action, subject)
            continue
        try:
            held = player.live[subject] = allocator.malloc(trace.requested[subject], trace.streams[subject])
        except OutOfMemory as error:
            free = (capacity or 0) - error.reserved
            driver.calls.append((event, Action.OOM, max(free, 0), error.rounded, trace.streams[subject]))
            played = event
            break
        if held is not None:
            placements[subject] = held.address, held.size
    settings = {
        "PYTORCH_CUDA_ALLOC_CONF": alloc_conf, "expandable_segments": config.expandable_segments,
        "max_split_size": config.max_split_size or -1,
        "garbage_collection_threshold": config.garbage_collection_threshold,
    }  # fmt: skip
    return _written(trace, allocator, driver.calls, placements, begin, played) | {"allocator_settings": settings}


def _written(
    trace: Trace, allocator: CachingAllocator, calls: list[DriverCall], placements: dict[int, tuple[int, int]],
    begin: int, played: int,
) -> dict[str, Any]:  # fmt: skip
    new_number = {old: new for new, old in enumerate(kept_blocks(trace, begin, played).tolist())}
    segments = [
        Segment(0, record.address, record.size, record.stream, "small" if record.small else "large", record.expandable)
        for record in allocator.layout()
    ]
    return snapshot_dict(
        between(trace, begin, played), segments,
        {new_number[block]: place for block, place in placements.items() if block in new_number},
        driver=[(event - begin, *rest) for event, *rest in calls if event >= begin],  # type: ignore[misc]
    )  # fmt: skip
