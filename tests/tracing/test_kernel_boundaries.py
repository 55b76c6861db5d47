"""Rules of kernels where they change their mind: splits of attention, where a reduction begins, a side of 1."""

from __future__ import annotations

import math

import pytest
import torch
from test_reductions import buffers

from memfit.platform import H200, Platform
from memfit.tracing.kernels.attention import _cudnn_splits, _flash_splits
from memfit.tracing.kernels.products import cublas_bytes
from memfit.tracing.kernels.rows import radix_sort_bytes, reduce_bytes
from memfit.tracing.tracer import trace
from memfit.units import KiB, MiB

CUDA = "cuda"


# -- attention ---------------------------------------------------------------------------------------------------------


def as_flash_attention_has_it(work: int, slots: int, key_blocks: int) -> int:
    """`num_splits_heuristic` of flash_attn/flash_api.cpp, line by line."""
    if work >= 0.8 * slots:
        return 1
    most = min(128, slots, key_blocks)
    efficiency: list[float] = []
    for splits in range(1, most + 1):
        if splits > 1 and math.ceil(key_blocks / splits) == math.ceil(key_blocks / (splits - 1)):
            efficiency.append(0.0)
        else:
            waves = work * splits / slots
            efficiency.append(waves / math.ceil(waves))
    best = max(efficiency)
    return next(number for number, each in enumerate(efficiency, 1) if each and each >= 0.85 * best)


@pytest.mark.parametrize(("head", "block"), [(64, 256), (128, 128), (192, 64), (256, 64)])
def test_flash_attention_splits_keys_as_its_heuristic_does(head: int, block: int) -> None:
    for heads in (1, 2, 7, 12, 32, 36, 100, 105, 106, 107, 210, 211, 212):
        for keys in (1, 255, 256, 257, 1000, 4096, 8191, 32768, 131072):
            expected = as_flash_attention_has_it(heads, 2 * 132, math.ceil(keys / block))
            assert _flash_splits(1, heads, 1, keys, head, 132) == expected, (heads, keys)


@pytest.mark.parametrize(("heads", "keys", "splits"), [
    (212, 4096, 1),  # 212 of 264 slots are 80.3 %: full enough
    (211, 4096, 6),  # 79.9 %: 16 parts fill 98.4 % of 13 rounds; of fewer, 6 are the first with 85 % of that: 95.9 %
    (32, 2048, 8),  # eight blocks of 256 keys: 256 of 264 slots
    (1, 65536, 128),  # never more than 128
    (100, 512, 2),  # 200 of 264 slots
])  # fmt: skip
def test_some_splits_worked_out_by_hand(heads: int, keys: int, splits: int) -> None:
    assert _flash_splits(1, heads, 1, keys, 64, 132) == splits


@pytest.mark.parametrize(("keys", "groups", "splits"), [
    (512, 8, 1), (513, 8, 4), (1024, 8, 8), (4096, 8, 32), (1 << 20, 1, 64), (4096, 66, 2), (4096, 67, 1),
])  # fmt: skip
def test_cudnn_splits_the_keys_of_a_single_query_into_parts_of_128_or_more(keys: int, groups: int, splits: int) -> None:
    assert _cudnn_splits(keys, groups, H200) == splits


# -- reductions --------------------------------------------------------------------------------------------------------


def test_a_reduction_reads_four_columns_at_a_time_only_where_its_first_number_lies_on_a_multiple_of_four() -> None:
    rows, columns = 4096, 1024
    whole = torch.empty(rows * columns + 4, device="meta")

    def from_number(start: int) -> list[tuple[int, int]]:
        return buffers(whole[start : start + rows * columns].view(rows, columns), [0])

    # Four at a time: 256 wide, blocks of 32 x 4 threads, 1,024 values a thread; 8 columns of blocks; fill: 2,112, 264
    # a column; 16 values at least: 64. Lanes: 128. Two at a time: 512 wide, 32 x 8, 512 values; 16 columns; 66; 32.
    # One at a time: 32 x 16, 256 values; 32 columns; fill 528, 17 a column; 16 values at least: 16. Lanes: 32.
    assert from_number(0) == from_number(4) == [(4 * columns * 64 * 128, 4 * 8)]
    assert from_number(2) == [(4 * columns * 32 * 64, 4 * 16)]
    assert from_number(1) == from_number(3) == [(4 * columns * 16 * 32, 4 * 32)]


def test_a_reduction_over_the_rows_after_the_first_of_a_tensor_with_odd_rows_reads_one_column_at_a_time() -> None:
    x = torch.empty(4097, 1001, device="meta")
    assert buffers(x[1:], [0]) == buffers(torch.empty(4096, 1001, device="meta"), [0])
    # Columns 0 to 1,000 of wider rows: an even number of columns, but rows begin on odd numbers.
    assert buffers(x[:4096, :1000], [0]) == [(4 * 1000 * 16 * 32, 4 * 32)]


@pytest.mark.parametrize(("rows", "split"), [(256 * 16, True), (256 * 16 - 16, False)])
def test_a_thread_with_exactly_256_values_shares_them(rows: int, split: bool) -> None:
    assert bool(buffers(torch.empty(rows, 1001, device="meta"), [0])) is split


@pytest.mark.parametrize(("count", "one_block"), [(256 * 19, True), (256 * 19 + 1, False)])
def test_what_one_block_sorts_needs_no_buffers(count: int, one_block: bool) -> None:
    assert (radix_sort_bytes(count, 4, 4) == 1) is one_block


@pytest.mark.parametrize(("count", "one_tile"), [(4096, True), (4097, False)])
def test_what_one_tile_reduces_needs_no_buffers(count: int, one_tile: bool) -> None:
    assert (reduce_bytes(count, 4, 132) == 1) is one_tile


# -- products ----------------------------------------------------------------------------------------------------------


def workspaces(rows: int, inner: int, columns: int) -> list[str]:
    def job(_: object) -> None:
        bias, left, right = (torch.ones(*s, device=CUDA) for s in ((columns,), (rows, inner), (inner, columns)))
        torch.addmm(bias, left, right)

    made = trace(job)
    return [made.op(block).split()[0] for block in range(len(made.requested)) if "workspace (" in made.op(block)]


@pytest.mark.parametrize(("rows", "inner", "columns", "fused"), [
    (4, 8, 8, True), (1, 8, 8, True), (4, 1, 8, False), (4, 8, 1, False), (4, 1, 1, False),
])  # fmt: skip
def test_a_bias_is_fused_unless_the_right_matrix_has_a_side_of_1(
    rows: int, inner: int, columns: int, fused: bool
) -> None:
    assert workspaces(rows, inner, columns) == (["cublas", "cublaslt"] if fused else ["cublas"])


@pytest.mark.parametrize(("arch", "version", "expected"), [
    ((9, 0), (2, 11), 32 * MiB), ((10, 0), (2, 11), 8320 * KiB), ((10, 0), (2, 12), 32 * MiB),
    ((12, 0), (2, 12), 32 * MiB), ((8, 0), (2, 12), 8320 * KiB),
])  # fmt: skip
def test_the_workspace_of_cublas_at_the_release_that_changed_it(
    arch: tuple[int, int], version: tuple[int, int], expected: int
) -> None:
    assert cublas_bytes(Platform(arch=arch, torch=version)) == expected


@pytest.mark.parametrize(("systems", "size", "at_once"), [(8, 64, False), (9, 64, True), (1, 63, True), (1, 64, False)])
def test_more_than_eight_systems_or_small_ones_are_solved_by_pointers(systems: int, size: int, at_once: bool) -> None:
    def job(_: object) -> None:
        torch.linalg.solve_triangular(
            torch.ones(systems, size, size, device=CUDA), torch.ones(systems, size, 2, device=CUDA), upper=False
        )

    made = trace(job)
    found = [made.requested[block] for block in range(len(made.requested)) if "pointers to" in made.op(block)]
    assert found == ([8 * systems] * 2 if at_once else [])
