"""Temporary storage of cub's device-wide sorts and scans, as measured on an H200 (`tests/data/h200-ops.json`)."""

from __future__ import annotations

ALIGN = 256
TILE_ITEMS = 4608  # onesweep radix sort, 8-byte keys and values, sm90
SINGLE_TILE_ITEMS = 3072
RADIX_DIGITS = 256
SCAN_TILES = {2: (8, 3520), 4: (8, 1920), 8: (16, 896)}  # by item: bytes of a look-back state, items of a tile


def _aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def radix_sort_pairs_bytes(count: int, key: int, value: int) -> int:
    """The second halves of both double buffers, a histogram for each of eight passes, and a look-back row a tile."""
    if count <= 0:
        return 0
    if count <= SINGLE_TILE_ITEMS:
        return 14 * ALIGN - 1
    tiles = -(-count // TILE_ITEMS)
    histograms = 8 * RADIX_DIGITS * 8
    return _aligned(count * key) + _aligned(count * value) + histograms + ALIGN + 4 * RADIX_DIGITS * tiles + ALIGN - 1


def scan_bytes(count: int, item: int = 8) -> int:
    """Look-back states, one a tile and 32 before them."""
    state, items = SCAN_TILES.get(item, SCAN_TILES[8])
    return max(_aligned(state * (32 + -(-count // items))), 768) + 511
