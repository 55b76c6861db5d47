"""Bytes to text and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import UsageError
from memfit.units import GiB, KiB, MiB, TiB, format_bytes, gib, parse_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (-512, "-512 B"),
        (1023, "1023 B"),
        (KiB, "1.00 KiB"),
        (MiB * 3 // 2, "1.50 MiB"),
        (3_276_800_000, "3.05 GiB"),
        (-GiB, "-1.00 GiB"),
        (1500 * TiB, "1,500.00 TiB"),
    ],
)
def test_bytes_are_written_in_the_largest_unit_that_keeps_them_at_one_or_more(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(("count", "text"), [(None, "n/a"), (0, "0.00 GiB"), (22_924_386_304, "21.35 GiB")])
def test_a_column_in_gib_has_one_unit_and_no_zero_for_unknown(count: int | None, text: str) -> None:
    assert gib(count) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GiB", 24 * GiB),
        ("24gib", 24 * GiB),
        (" 1.5 MiB ", 3 * MiB // 2),
        ("24GB", 24 * 10**9),
        ("512KB", 512_000),
        ("17", 17),
        ("17B", 17),
        ("1TiB", TiB),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_binary_units_are_binary_and_decimal_units_decimal(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "24 apples", "-1GiB", "1e9", "0x10", "1.GiB", "1,000", "24GiBs"])
def test_what_is_no_size_is_refused_under_the_flag_it_came_from(text: str) -> None:
    with pytest.raises(UsageError, match=r"--capacity .* is not a size"):
        parse_bytes(text, flag="--capacity")


@given(st.integers(0, 10**18))
def test_a_written_size_reads_back_within_what_was_printed(count: int) -> None:
    text = format_bytes(count).replace(",", "")
    unit = parse_bytes("1" + text.split()[-1])

    assert abs(parse_bytes(text) - count) <= unit * 0.005 + 1


@given(st.integers(0, 10**30))
def test_plain_bytes_are_read_exactly(count: int) -> None:
    assert parse_bytes(str(count)) == count


def test_a_size_of_thousands_of_digits_is_none() -> None:
    with pytest.raises(UsageError, match=r"'99999999999999999999\.\.\.' is not a size"):
        parse_bytes("9" * 5000 + "GiB")
