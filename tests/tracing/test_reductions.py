"""Buffers of reductions that are split over thread blocks, worked out by hand from `setReduceConfig` (Reduce.cuh).

A block has up to 512 threads, as wide as the faster side allows and as high as is left; an output whose inputs are 256
or more a thread is shared by several blocks, as many as fill the card (132 multiprocessors of 2,048 threads) without
giving a thread fewer than 16 values. Each block then writes what it has to global memory.
"""

from __future__ import annotations

import pytest
import torch

from memfit.platform import H200, Platform
from memfit.tracing.kernels.rows import ReductionBuffers, accumulated_bytes, reduction_buffers
from memfit.units import MiB

B200_LIKE = Platform(sm_count=264)


def buffers(
    tensor: torch.Tensor, dims: list[int] | None, platform: Platform = H200, accumulator: int = 4, per_thread: int = 4
) -> list[tuple[int, int]]:
    found = reduction_buffers(tensor, dims, platform, accumulator=accumulator, per_thread=per_thread)
    assert all(isinstance(each, ReductionBuffers) for each in found)
    return [(each.values, each.semaphores) for each in found]


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_the_gradient_of_a_wide_bias_takes_100_mib() -> None:
    # 2,048 x 6,400 over rows. Four outputs a thread: 1,600 wide; a block of 128 threads is 32 wide and 4 high.
    # A thread has 2,048 / 4 = 512 values; 1,600 / 32 = 50 columns of blocks.
    # Fill: 132 x (2,048 / 128) = 2,112 blocks, 43 a column; at least 16 values each: 32. So 32 blocks share an output.
    # Each writes 32 x 4 lanes for each of 6,400 outputs: 4 x 6,400 x 32 x 128 bytes.
    assert buffers(empty(2048, 6400), [0]) == [(100 * MiB, 4 * 50)]


def test_a_narrow_bias_of_few_rows_needs_no_buffer() -> None:
    # 512 x 768 over rows: 192 wide by fours; a block of 32 x 4; 512 / 4 = 128 values a thread, fewer than 256.
    assert buffers(empty(512, 768), [0]) == []


def test_the_sum_of_everything_is_shared_by_as_many_blocks_as_fill_the_card() -> None:
    # 1,024 x 4,096 = 2^22 values in a row, read by fours: a block of 512 x 1 threads; 2^22 / 512 = 8,192 a thread.
    # Fill: 132 x (2,048 / 512) = 528 blocks; 16 values at least: 512 blocks. One partial sum each.
    assert buffers(empty(1024, 4096), None) == [(4 * 512, 4)]


def test_a_card_with_twice_the_multiprocessors_splits_a_large_sum_further() -> None:
    # 2^24 values: 2^15 a thread, so the card decides: 528 blocks on 132 multiprocessors, 1,056 on 264.
    assert buffers(empty(4096, 4096), None) == [(4 * 528, 4)]
    assert buffers(empty(4096, 4096), None, B200_LIKE) == [(4 * 1056, 4)]


def test_rows_are_reduced_by_one_block_each() -> None:
    # 8,192 rows of 8,192: a block of 32 x 16 threads; 8,192 / 32 = 256 values a row, so the height is used too:
    # 16 values a thread, far fewer than 256.
    assert buffers(empty(8192, 8192), [1]) == []


def test_the_bytes_follow_the_accumulator() -> None:
    assert buffers(empty(1024, 4096), None, accumulator=16) == [(16 * 512, 4)]


def test_a_sum_of_16_bit_numbers_is_split_as_one_of_32_bits() -> None:
    assert buffers(empty(2048, 6400, dtype=torch.bfloat16), [0]) == [(100 * MiB, 4 * 50)]


@pytest.mark.parametrize("shape", [(1, 2048, 6400), (2048, 1, 6400), (4, 512, 6400), (2, 4, 256, 6400)])
def test_dimensions_that_lie_together_count_as_one(shape: tuple[int, ...]) -> None:
    assert buffers(empty(*shape), list(range(len(shape) - 1))) == [(100 * MiB, 4 * 50)]


def test_negative_dimensions_count_from_the_end() -> None:
    assert buffers(empty(2048, 6400), [-2]) == buffers(empty(2048, 6400), [0])


def test_the_order_in_memory_counts_not_that_of_the_dimensions() -> None:
    assert (
        buffers(empty(6400, 2048).t(), [1])
        == buffers(empty(6400, 2048).t().t(), [0])
        == buffers(empty(6400, 2048), [0])
    )


def test_columns_that_do_not_come_in_fours_are_read_one_or_two_at_a_time() -> None:
    # 4,096 x 1,001 over rows: one output a thread: a block of 32 x 16 threads; 4,096 / 16 = 256 values a thread.
    # ceil(1,001 / 32) = 32 columns; fill: 528 blocks, 17 a column; 16 values at least: 16. Lanes: 32.
    assert buffers(empty(4096, 1001), [0]) == [(4 * 1001 * 16 * 32, 4 * 32)]
    # 4,096 x 1,002: two outputs a thread: 501 wide, blocks of 256 threads are 32 x 8; 512 values a thread.
    # ceil(501 / 32) = 16 columns; fill: 132 x 8 = 1,056, 66 a column; 16 values at least: 32. Lanes: 64.
    assert buffers(empty(4096, 1002), [0]) == [(4 * 1002 * 32 * 64, 4 * 16)]


def test_a_tensor_beyond_32_bit_offsets_is_reduced_in_pieces() -> None:
    # 2^31 numbers of 4 bytes: halved until the last byte's offset is below 2^31, which leaves four pieces of 2^29.
    # A piece: 528 blocks fill the card; 2^29 / 512 = 2^20 values a thread, so that at most 256 each takes 4,096 blocks.
    assert buffers(empty(1 << 16, 1 << 15), None) == [(4 * 4096, 4)] * 4


def test_two_gib_of_bytes_are_two_pieces_and_one_row_less_is_one() -> None:
    assert len(buffers(empty(1 << 16, 1 << 15, dtype=torch.uint8), None)) == 2
    assert len(buffers(empty((1 << 16) - 1, 1 << 15, dtype=torch.uint8), None)) == 1


def test_the_widest_stretch_is_the_one_that_is_halved() -> None:
    # 4 Gi numbers over rows: the 2^17 rows are halved, not the 2^15 columns; each piece has all outputs.
    whole = buffers(empty(1 << 17, 1 << 15), [0])
    piece = buffers(empty(1 << 14, 1 << 15), [0])
    assert whole == piece * 8


@pytest.mark.parametrize(("batch", "dtype", "expected"), [
    (4, torch.bfloat16, 4 * 4 * 1024 * 512),  # 4 GiB: beyond 32-bit offsets
    (2, torch.bfloat16, 0),  # 2 GiB: the last offset just fits
    (4, torch.float32, 0),  # sums of fp32 meet in the result itself
])  # fmt: skip
def test_16_bit_sums_beyond_32_bit_offsets_meet_in_fp32(batch: int, dtype: torch.dtype, expected: int) -> None:
    """As recorded on an H200: the gradient of values that GSA's published path expands over all queries."""
    x = torch.empty(batch, 1024, 1024, 512, dtype=dtype, device="meta")

    assert accumulated_bytes(x, [1], x.sum(1)) == expected
