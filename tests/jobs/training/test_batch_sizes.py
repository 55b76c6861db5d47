"""micro-batch x accumulation x processes is the global batch, exactly."""

from __future__ import annotations

import pytest

from memfit.errors import UsageError
from memfit.jobs.training.batch import BatchSizes, divisors, resolve_batch
from memfit.jobs.training.config import BatchConfig


def resolve(world_size: int = 1, **given: int) -> BatchSizes:
    return resolve_batch(BatchConfig(**given), world_size)


@pytest.mark.parametrize("given", [
    {"micro_batch_size": 2, "global_batch_size": 256}, {"gradient_accumulation_steps": 32, "global_batch_size": 256},
    {"micro_batch_size": 2, "gradient_accumulation_steps": 32},
    {"micro_batch_size": 2, "gradient_accumulation_steps": 32, "global_batch_size": 256},
])  # fmt: skip
def test_any_two_give_the_third(given: dict[str, int]) -> None:
    sizes = resolve(4, **given)
    assert (sizes.micro_batch_size, sizes.gradient_accumulation_steps, sizes.global_batch_size) == (2, 32, 256)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 128])
def test_the_global_batch_is_the_same_on_any_number_of_gpus(world_size: int) -> None:
    assert resolve(world_size, micro_batch_size=2, global_batch_size=256).global_batch_size == 256


def test_the_guide_s_252_is_not_256() -> None:
    with pytest.raises(UsageError, match="3 x gradient_accumulation_steps 21 x 4 processes is 252, not") as found:
        resolve(4, micro_batch_size=3, gradient_accumulation_steps=21, global_batch_size=256)
    assert found.value.hint == "micro-batch x accumulation can be 1 x 64, 2 x 32, 4 x 16, 8 x 8, 16 x 4, 32 x 2, 64 x 1"


def test_a_micro_batch_that_does_not_divide_is_refused_with_those_that_do() -> None:
    with pytest.raises(UsageError, match="micro_batch_size 3 does not divide 64, a process's share") as found:
        resolve(4, micro_batch_size=3, global_batch_size=256)
    assert found.value.hint == "micro_batch_size can be 1, 2, 4, 8, 16, 32, 64"


def test_processes_that_do_not_divide_the_global_batch_are_refused() -> None:
    with pytest.raises(UsageError, match="256 cannot be shared equally by 3 processes") as found:
        resolve(3, micro_batch_size=2, global_batch_size=256)
    assert found.value.hint is not None
    assert "1, 2, 4, 8" in found.value.hint


def test_with_only_the_global_batch_it_is_one_row_at_a_time() -> None:
    sizes = resolve(2, global_batch_size=12)
    assert (sizes.micro_batch_size, sizes.gradient_accumulation_steps) == (1, 6)


def test_with_nothing_given_it_is_one_row() -> None:
    assert resolve().global_batch_size == 1


def test_rungs_are_the_divisors_of_a_process_s_share() -> None:
    assert resolve(4, micro_batch_size=2, global_batch_size=48).rungs == (1, 2, 3, 4, 6, 12)


@pytest.mark.parametrize(("start", "then"), [(8, [4, 2, 1]), (6, [3, 1]), (3, [1]), (1, [])])
def test_going_smaller_halves_at_least_and_keeps_the_global_batch(start: int, then: list[int]) -> None:
    sizes: BatchSizes | None = resolve(micro_batch_size=start, global_batch_size=48)
    seen = []
    while sizes is not None and (sizes := sizes.smaller()) is not None:
        seen.append(sizes.micro_batch_size)
        assert sizes.global_batch_size == 48
    assert seen == then


def test_divisors() -> None:
    assert divisors(1) == (1,)
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)
