"""How many rows: micro-batch x accumulation x processes = global batch, exactly, or an error that names others.

    sizes = resolve_batch(BatchConfig(micro_batch_size=2, global_batch_size=256), world_size=4)
    sizes.gradient_accumulation_steps  # 32

A rung is a micro-batch size that divides a process's share of the global batch. Memory is saved by going down a rung;
the global batch, and so the experiment, stays the same.
How many processes there are is what torchrun says, and the first of them is the one that writes and speaks.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from math import isqrt

from memfit.errors import UsageError
from memfit.jobs.training.config import BatchConfig

SHOWN = 8
"""Of a long list, in an error."""


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    micro_batch_size: int
    gradient_accumulation_steps: int
    world_size: int = 1

    @property
    def global_batch_size(self) -> int:
        return self.rows_per_process * self.world_size

    @property
    def rows_per_process(self) -> int:
        """In one step of the optimizer."""
        return self.micro_batch_size * self.gradient_accumulation_steps

    @property
    def rungs(self) -> tuple[int, ...]:
        """Every micro-batch size that gives the same global batch, the smallest first."""
        return divisors(self.rows_per_process)

    def with_micro_batch(self, rows: int) -> BatchSizes:
        """The same global batch with another micro-batch."""
        if rows not in self.rungs:
            raise UsageError(f"micro_batch_size {rows} does not divide {_share(self)}", hint=_ladder(self.rungs))
        return BatchSizes(
            micro_batch_size=rows, gradient_accumulation_steps=self.rows_per_process // rows, world_size=self.world_size
        )

    def smaller(self) -> BatchSizes | None:
        """The next rung at half the micro-batch or less; None where a single row is left."""
        below = [rows for rows in self.rungs if rows * 2 <= self.micro_batch_size]
        return self.with_micro_batch(below[-1]) if below else None

    def to_json(self) -> dict[str, int]:
        return {**asdict(self), "global_batch_size": self.global_batch_size}

    def in_words(self) -> str:
        rows = f"{self.micro_batch_size} row{'' if self.micro_batch_size == 1 else 's'}"
        processes = _in_processes(self.world_size)
        return f"{rows} x {self.gradient_accumulation_steps} accumulation x {processes} = {self.global_batch_size}"


def resolve_batch(config: BatchConfig, world_size: int = 1) -> BatchSizes:
    """What is missing follows from what is given; with too little given, one row at a time."""
    micro, steps, whole = config.micro_batch_size, config.gradient_accumulation_steps, config.global_batch_size
    if world_size < 1:
        raise UsageError(f"{world_size} processes cannot train")
    if whole is None:
        return BatchSizes(micro_batch_size=micro or 1, gradient_accumulation_steps=steps or 1, world_size=world_size)
    if whole % world_size:
        raise UsageError(
            f"global_batch_size {whole} cannot be shared equally by {world_size} processes",
            hint=f"numbers of processes that divide it: {_few(divisors(whole))}",
        )
    share = whole // world_size
    if micro is not None and steps is not None:
        return _agreed(micro, steps, world_size, whole)
    one = BatchSizes(micro_batch_size=1, gradient_accumulation_steps=share, world_size=world_size)
    for key, value in (("micro_batch_size", micro), ("gradient_accumulation_steps", steps)):
        if value is not None and share % value:
            raise UsageError(
                f"{key} {value} does not divide {_share(one)}", hint=f"{key} can be {_few(divisors(share))}"
            )
    if micro is None:
        micro = 1 if steps is None else share // steps
    return one.with_micro_batch(micro)


def processes_meant(config: BatchConfig) -> int | None:
    """All three sizes together say how many processes there are to be; None where they say nothing, or nonsense."""
    micro, steps, whole = config.micro_batch_size, config.gradient_accumulation_steps, config.global_batch_size
    if micro is None or steps is None or whole is None or whole % (micro * steps):
        return None
    return whole // (micro * steps)


def divisors(number: int) -> tuple[int, ...]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def _agreed(micro: int, steps: int, world_size: int, whole: int) -> BatchSizes:
    sizes = BatchSizes(micro_batch_size=micro, gradient_accumulation_steps=steps, world_size=world_size)
    if sizes.global_batch_size != whole:
        share = whole // world_size
        meant = whole // (micro * steps)
        started = f"{meant} processes make it up: start it under torchrun --nproc_per_node={meant}; or "
        made = f"micro_batch_size {micro} x gradient_accumulation_steps {steps} x {_in_processes(world_size)}"
        raise UsageError(
            f"{made} is {sizes.global_batch_size}, not global_batch_size {whole}",
            hint=("" if meant < 2 or whole % (micro * steps) else started) + _ladder(divisors(share), share),
        )
    return sizes


def _in_processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _share(sizes: BatchSizes) -> str:
    rows = sizes.rows_per_process
    return f"{rows}, a process's share of global_batch_size {sizes.global_batch_size} on {sizes.world_size}"


def _ladder(rungs: tuple[int, ...], share: int | None = None) -> str:
    share = rungs[-1] if share is None else share
    pairs = [f"{rows} x {share // rows}" for rows in rungs[:SHOWN]]
    return f"micro-batch x accumulation can be {', '.join(pairs)}{', ...' if len(rungs) > SHOWN else ''}"


def _few(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:SHOWN]))}{', ...' if len(numbers) > SHOWN else ''}"


def processes() -> int:
    """As torchrun says in WORLD_SIZE; one without it."""
    said = os.environ.get("WORLD_SIZE", "1")
    if not said.isdigit() or int(said) < 1:
        raise UsageError(f"WORLD_SIZE is {said!r}, which is no number of processes")
    return int(said)


def launched() -> bool:
    """By torchrun, or by whatever else says how many there are."""
    return "WORLD_SIZE" in os.environ


def is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"
