"""What sorting takes beyond its results, worked out by hand from cub's layout, where nothing was recorded."""

from __future__ import annotations

import torch

from memfit.tracing.kernels.rows import radix_sort_bytes
from memfit.tracing.tracer import Tracer, trace


def held_while_sorting(x: torch.Tensor, dim: int) -> list[int]:
    """Sizes in the order in which they are asked for, values and indices first."""

    def job(tracer: Tracer) -> None:
        torch.sort(x, dim)

    return trace(job, device="meta").requested.tolist()


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


RADIX_OF_15000 = 4 * 256 * 8 + 3 * 256 * 4 + 60_160 + 120_064 + 256 + 255
"""Four passes over 4-byte keys, three tiles of 5,376, keys and positions once more, counters, alignment."""
BY_ROW_OF_15000 = 1 * 256 * 8 + 3 * 256 * 4 + 256 + 255
"""One pass over the two bits of three rows, tiles of 5,760; one pass needs no second half."""


def test_long_rows_that_lie_side_by_side_are_copied_apart_from_the_results() -> None:
    side_by_side = held_while_sorting(on_gpu(5000, 3), dim=0)
    one_after_the_other = held_while_sorting(on_gpu(3, 5000), dim=1)

    sort = [120_000, 120_000, 60_000, RADIX_OF_15000, BY_ROW_OF_15000]
    assert one_after_the_other == [60_000, 120_000, *sort]
    assert side_by_side == [60_000, 120_000, 60_000, 60_000, 120_000, *sort]


def test_rows_with_gaps_between_them_are_copied_without_the_gaps() -> None:
    found = held_while_sorting(on_gpu(3, 6000)[:, :5000], dim=1)
    assert found[:3] == [60_000, 120_000, 60_000]
    assert len(found) == 8


def test_short_rows_need_no_more_than_one_row_of_positions() -> None:
    assert held_while_sorting(on_gpu(4096, 70), dim=0) == [4096 * 70 * 4, 4096 * 70 * 8, 4096 * 8]


def test_rows_are_sorted_in_batches_below_two_to_the_31() -> None:
    rows, length = 300_000, 8192
    batches = [262_143, rows - 262_143]
    held = held_while_sorting(on_gpu(rows, length), dim=1)[2:]
    assert held == [size for batch in batches for size in (batch * length * 8, batch * length * 12 + 255)]


def test_what_one_thread_block_can_sort_takes_one_byte() -> None:
    assert radix_sort_bytes(2304, 8, 8) == 1
    assert radix_sort_bytes(2305, 8, 8) > 2 * 2305 * 8


def test_a_sort_by_few_bits_needs_no_second_half_of_its_buffers() -> None:
    """As recorded for 3,000 indices into 64 rows."""
    assert radix_sort_bytes(3000, 8, 8, bits=6) == 2048 + 1024 + 256 + 255


def test_nothing_to_sort_takes_nothing() -> None:
    assert radix_sort_bytes(0, 8, 8) == 0
    assert held_while_sorting(on_gpu(0, 5000), dim=1) == []
