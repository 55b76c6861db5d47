"""Memory that is held from the driver but idle, and why it is of no use: cut up by live blocks, or simply free."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.core.course import Course


@dataclass(frozen=True, slots=True)
class Idle:
    event: int
    reserved_bytes: int
    allocated_bytes: int
    waiting_bytes: int  # freed, but another stream may still use it
    idle_bytes: int
    holes: int  # pieces that the idle bytes are in
    largest_hole_bytes: int  # no request above this could be served without new memory
    releasable_bytes: int  # whole segments without a live block: `empty_cache` gives these back
    rounding_bytes: int  # in live blocks, beyond what was asked for


def idle_at(course: Course, event: int) -> Idle | None:
    """How memory lies once an event has happened; None where that is not known."""
    reserved = course.reserved_at(event)
    if reserved is None:
        return None
    held = course.lives.held_at(event)
    alive = course.lives.alive_at(event)
    held = held[course.size[held] > 0]
    order = np.argsort(course.address[held], kind="stable")
    starts = course.address[held][order].astype(object) if _is_huge(course) else course.address[held][order]
    sizes = course.size[held][order]
    holes: list[int] = []
    releasable = at = 0
    begins = [int(start) for start in starts.tolist()]
    lengths = sizes.tolist()
    for start, end, _ in course.ranges_at(event):
        cursor, first = start, at
        while at < len(begins) and begins[at] < end:
            if begins[at] >= start:
                if begins[at] > cursor:
                    holes.append(begins[at] - cursor)
                cursor = max(cursor, begins[at] + lengths[at])
            at += 1
        if cursor < end:
            holes.append(end - cursor)
            if first == at:
                releasable += end - start
    requested = np.frombuffer(course.trace.requested, dtype=np.int64)[alive]
    allocated = int(course.size[alive].sum())
    waiting = int(course.size[held].sum()) - allocated
    return Idle(
        event=event, reserved_bytes=reserved, allocated_bytes=allocated, waiting_bytes=waiting,
        idle_bytes=reserved - allocated - waiting, holes=len(holes), largest_hole_bytes=max(holes, default=0),
        releasable_bytes=releasable, rounding_bytes=allocated - int(requested.sum()),
    )  # fmt: skip


def _is_huge(course: Course) -> bool:
    return bool(len(course.address)) and int(course.address.max()) >= 1 << 63
