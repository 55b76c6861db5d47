"""Numbers that people choose: 2,048 and 1,536 for a sequence, 1,000 for the side of a cube."""

from __future__ import annotations

from collections.abc import Iterator

ROUNDEST = (1, 3, 5, 7, 9, 15)
"""Odd parts of such numbers: 2,048 is 1 x 2^11, 1,536 is 3 x 2^9."""


def roundest(low: int, high: int) -> int | None:
    """Of the numbers between, the one divisible by the largest power of two: batches are padded to such."""
    if low > high or high < 1:
        return None
    return next(
        found
        for power in range(high.bit_length(), -1, -1)
        if (found := ((low + (1 << power) - 1) >> power) << power) <= high
    )


def is_round(number: int) -> bool:
    return number // (number & -number) in ROUNDEST


def roundness(number: int) -> int:
    return {1: 4, 3: 3, 5: 2, 7: 2}.get(number // (number & -number), 1)


def root_below(number: int, power: int) -> int:
    """The largest whole number whose power is not above it."""
    if number < 1:
        return 0
    root: int = round(float(number) ** (1 / power))
    while root**power > number:
        root -= 1
    while (root + 1) ** power <= number:
        root += 1
    return root


def root_above(number: int, power: int) -> int:
    below = root_below(number, power)
    return below if below**power == number else below + 1


def round_decimals(low: int, high: int) -> Iterator[int]:
    """Numbers such as 1,000 and 2,500, which no model has as a size."""
    for unit in (100_000, 10_000, 1_000):
        found = -(-low // unit) * unit
        if unit <= found <= high:
            yield found
            return
