"""A step that runs out of memory is run again, the whole of it, with half the rows at a time.

The rows of a step stay on the host until the step is done. When memory runs out in any process, all of them throw away
what they have of the step, set their random numbers back to its start, and run the very same global batch with a
smaller micro-batch: no sample is lost or seen twice, and the optimizer has not noticed. The smaller size stays.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memfit.errors import RanOut
from memfit.jobs.host import cause_of, is_out_of_memory
from memfit.jobs.training.batch import BatchSizes
from memfit.jobs.training.parallel import ProcessGroup


@dataclass(frozen=True)
class RandomState:
    python: Any
    cpu: torch.Tensor
    gpu: torch.Tensor | None

    @classmethod
    def capture(cls) -> RandomState:
        gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return cls(random.getstate(), torch.get_rng_state(), gpu)

    def restore(self) -> None:
        random.setstate(self.python)
        torch.set_rng_state(self.cpu)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu)


Rows = list[dict[str, Tensor]]
MicroStep = Callable[[Rows, int, bool], Tensor]
"""Given its rows, its number and whether it is the last, its loss."""


@dataclass(frozen=True, kw_only=True)
class HalvedStep:
    """One time that memory ran out, and what was done."""

    step: int
    micro_step: int
    """Of the step, the first being 1."""
    longest_row: int
    rows_before: int
    rows_after: int
    cause: str

    def in_words(self) -> str:
        where = f"step {self.step}" if self.step else "the probe"
        return (
            f"memory ran out in micro-step {self.micro_step} of {where}: {self.cause}; the step is run again "
            f"with micro_batch_size {self.rows_after} instead of {self.rows_before}, at the same global batch"
        )


class Recovery:
    def __init__(
        self, batch: BatchSizes, together: ProcessGroup, *, enabled: bool, on_halved: Callable[[HalvedStep], None]
    ) -> None:
        self.batch, self.enabled = batch, enabled
        self._together, self._on_halved = together, on_halved

    def run_step(self, step: int, rows: Rows, micro_step: MicroStep, start_again: Callable[[], None]) -> Tensor:
        """The sum of the micro-steps' losses."""
        begun = RandomState.capture()
        while True:
            loss, failed = self._try(rows, micro_step)
            if failed is None:
                assert loss is not None
                return loss
            number, cause = failed
            start_again()
            _free()
            begun.restore()
            self._halve(step, number, cause, rows)

    def _try(self, rows: Rows, micro_step: MicroStep) -> tuple[Tensor | None, Any]:
        size, total = self.batch.micro_batch_size, None
        count = -(-len(rows) // size)
        for number in range(count):
            part = rows[number * size : (number + 1) * size]
            loss, cause = self._attempt(micro_step, part, number, last=number == count - 1)
            # Asked after every micro-step, so that nobody waits for a process that has given up.
            if not self._together.all_well(cause is None):
                return None, (number, cause)
            assert loss is not None
            total = loss if total is None else total + loss
        return total, None

    def _attempt(
        self, micro_step: MicroStep, rows: Rows, number: int, *, last: bool
    ) -> tuple[Tensor | None, str | None]:
        """The error itself must not leave this function: its traceback holds every tensor of the failed pass."""
        try:
            return micro_step(rows, number, last), None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) and not isinstance(error, torch.OutOfMemoryError):
                raise
            cause = cause_of(error)
            if not self.enabled:
                raise RanOut(f"memory ran out: {cause}", hint="memory.oom_recovery is off") from None
            return None, cause

    def _halve(self, step: int, number: int, cause: str | None, rows: Rows) -> None:
        before, smaller = self.batch, self.batch.smaller()
        longest = max(len(each["input_ids"]) for each in rows)
        cause = self._together.first_of(cause or "") or "no reason was given"
        if smaller is None:
            raise RanOut(
                f"memory ran out with a single row at a time, {longest:,} tokens long: {cause}",
                hint="gradient_checkpointing: full, loss: chunked or a shorter max_seq_len make a row smaller;"
                " checkpoints are as they were",
            )
        self.batch = smaller
        rows_before, rows_after = before.micro_batch_size, smaller.micro_batch_size
        place = {"step": step, "micro_step": number + 1, "longest_row": longest}
        self._on_halved(HalvedStep(**place, rows_before=rows_before, rows_after=rows_after, cause=cause))


def _free() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
