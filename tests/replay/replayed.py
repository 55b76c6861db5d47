"""What replays of random jobs came to, a line each: for `test_compiled.py`, in a process of its own."""

from __future__ import annotations

import dataclasses
import random

from memfit.events import Trace
from memfit.replay import allocator
from memfit.replay.alloc_config import AllocatorConfig
from memfit.replay.replay import Replay, Replays
from memfit.units import MiB

CONFIGS = (
    "", "expandable_segments:True", "max_split_size_mb:24", "roundup_power2_divisions:4",
    "expandable_segments:True,max_split_size_mb:24", "max_split_size_mb:40,max_non_split_rounding_mb:64",
)  # fmt: skip
SIZES = (512, 4096, 900_000, MiB, 3 * MiB, 10 * MiB, 20 * MiB, 33 * MiB)


def job(seed: int) -> Trace:
    rng, trace = random.Random(seed), Trace()
    live: list[int] = []
    for _ in range(rng.choice((20, 150, 400))):
        what = rng.random()
        if what < 0.55 or not live:
            size = max(rng.choice(SIZES) + rng.choice((-1, 0, 1, 700, 3 * MiB)), 0)
            live.append(trace.alloc(size, stream=rng.choice((0, 0, 0, -1))))
        elif what < 0.9:
            trace.free(live.pop(rng.randrange(len(live))))
        elif what < 0.97:
            block = live.pop(rng.randrange(len(live)))
            if trace.requested[block]:
                trace.free_requested(block)
                trace.free_completed(block)
        else:
            trace.empty_cache()
    return trace


def in_words(made: Replay) -> str:
    return repr(
        (
            made.allocated.tolist(), made.reserved.tolist(), made.size.tolist(), made.peak_event,
            made.oom, dataclasses.asdict(made.stats), made.segments,
        )
    )  # fmt: skip


def main() -> None:
    print(allocator.__file__)
    for seed in range(150):
        trace, config = job(seed), AllocatorConfig.parse(CONFIGS[seed % len(CONFIGS)])
        replays = Replays(trace, config)
        peak = replays.ample.peak_reserved
        print(in_words(replays.ample), replays.smallest_capacity(), replays.outcome(peak * 2 // 3))
        for share in (0.95, 0.8, 0.5):
            print(in_words(replays.timeline(capacity=int(peak * share))))


if __name__ == "__main__":
    main()
