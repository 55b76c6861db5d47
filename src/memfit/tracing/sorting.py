"""Temporary storage of cub's device-wide sorts and scans, in the parts that cub itself lays out.

Read from CCCL's cub/device/dispatch (dispatch_radix_sort.cuh, `InvokeOnesweep`; tuning/tuning_radix_sort.cuh,
`Policy900`) with the 64-bit offsets that torch asks for (ATen/cuda/cub.cuh). Every size agrees with what was measured
on an H200 (`tests/data/h200-ops.json`); tiles of other architectures hold fewer items, which is a few KiB.
"""

from __future__ import annotations

ALIGN = 256
RADIX_BITS = 8
RADIX_DIGITS = 1 << RADIX_BITS
LARGEST_PORTION = (1 << 28) - 1
# By bytes of key and value (0: keys alone): threads of a tile, and how many 4-byte items each of them holds.
ONESWEEP_TILES = {
    (1, 8): (384, 18),
    (2, 8): (512, 23),
    (4, 8): (384, 29),
    (8, 8): (384, 24),
    (4, 4): (384, 17),
    (8, 0): (384, 30),
}
SINGLE_TILE = (256, 19)
SCAN_TILES = {2: (8, 3520), 4: (8, 1920), 8: (16, 896)}  # by item: bytes of a look-back state, items of a tile
REDUCE_TILE = 256 * 16
REDUCE_BLOCKS_PER_SM = 8 * 5
SELECT_TILE = 384 * 11


def _aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def _laid_out(*parts: int) -> int:
    """Each part aligned, and room to align the first (`alias_temporaries`)."""
    return sum(_aligned(part) for part in parts) + ALIGN - 1


def radix_sort_bytes(count: int, key: int, value: int, bits: int | None = None) -> int:
    """Histograms of all passes, a look-back row a tile, the second halves of the double buffers, and counters; nothing
    to speak of where one thread block sorts all. `bits` is how many of a key's are looked at."""
    if count <= 0:
        return 0
    if count <= _items(SINGLE_TILE, key, value):
        return 1
    tile = _items(ONESWEEP_TILES[key, value], key, value)
    portion = LARGEST_PORTION // tile * tile
    passes, portions = -(-(bits or 8 * key) // RADIX_BITS), -(-count // portion)
    tiles = -(-min(count, portion) // tile)
    histograms, look_back = portions * passes * RADIX_DIGITS * 8, tiles * RADIX_DIGITS * 4
    doubled = (count * key, count * value) if passes > 1 else ()
    return _laid_out(histograms, look_back, *doubled, portions * passes * 4)


def _items(threads_and_items: tuple[int, int], key: int, value: int) -> int:
    threads, items = threads_and_items
    return threads * max(1, items * 4 // max(4, key, value))


def segmented_sort_bytes(count: int, key: int, value: int) -> int:
    """A thread block sorts each segment, so there are only the second halves of the double buffers."""
    return _laid_out(count * key, count * value)


def scan_bytes(count: int, item: int = 8) -> int:
    """Look-back states, one a tile and 32 before them."""
    state, items = SCAN_TILES.get(item, SCAN_TILES[8])
    return _aligned(state * (32 + max(1, -(-count // items)))) + 511


def reduce_bytes(count: int, item: int, sm_count: int) -> int:
    """Partial results of as many blocks as the card can hold, five times over; a single tile needs none
    (dispatch_reduce.cuh)."""
    return 1 if count <= REDUCE_TILE else _laid_out(item * sm_count * REDUCE_BLOCKS_PER_SM)


def select_bytes(count: int) -> int:
    """Look-back states, one a tile and 32 before them (dispatch_select_if.cuh)."""
    return _aligned(8 * (32 + -(-count // SELECT_TILE))) + 511
