"""Limits of what is read from a file of anybody's: exactly at each one, and one beyond it."""

from __future__ import annotations

import gzip
import pickle
import tracemalloc
from pathlib import Path

import pytest

from memfit.errors import InputError
from memfit.snapshots.file import MAX_STRING, load_plain


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def with_slot(slot: int) -> bytes:
    """An empty list that is put into this slot of the memo."""
    return b"\x80\x02]r" + slot.to_bytes(4, "little") + b"."


def test_the_last_memo_slot_that_is_allowed_is_2_to_the_24_less_1(tmp_path: Path) -> None:
    assert load_plain(written(tmp_path / "below", with_slot(1000))) == []
    for slot in (1 << 24, 1 << 25, (1 << 28) - 1, (1 << 32) - 1):
        with pytest.raises(InputError, match=f"a memo table of {slot:,} entries"):
            load_plain(written(tmp_path / "beyond", with_slot(slot)))


def test_a_file_of_exactly_the_limit_is_read_and_one_byte_more_is_refused(tmp_path: Path) -> None:
    data = pickle.dumps({"segments": []}, protocol=4)
    path = written(tmp_path / "snapshot", data)
    assert load_plain(path, max_bytes=len(data)) == {"segments": []}
    with pytest.raises(InputError, match="refused to open"):
        load_plain(path, max_bytes=len(data) - 1)


def test_a_gzip_that_unpacks_to_exactly_the_limit_is_read_and_one_byte_more_is_refused(tmp_path: Path) -> None:
    data = b'{"segments": [], "more": "' + b" " * 500 + b'"}'
    path = written(tmp_path / "snapshot.gz", gzip.compress(data))
    assert path.stat().st_size < len(data) // 2
    assert load_plain(path, max_bytes=len(data))["segments"] == []
    with pytest.raises(InputError, match="larger when unpacked, and the limit is"):
        load_plain(path, max_bytes=len(data) - 1)


def test_a_gzip_bomb_is_never_inflated_beyond_the_limit(tmp_path: Path) -> None:
    path = written(tmp_path / "bomb.gz", gzip.compress(bytes(16 << 20), compresslevel=1))
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="larger when unpacked"):
            load_plain(path, max_bytes=1 << 18)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_string_of_exactly_the_limit_is_read_and_one_byte_more_is_refused(tmp_path: Path) -> None:
    longest = pickle.dumps("x" * MAX_STRING, protocol=2)
    assert load_plain(written(tmp_path / "longest", longest)) == "x" * MAX_STRING
    with pytest.raises(InputError, match="holds a string of"):
        load_plain(written(tmp_path / "longer", pickle.dumps("x" * (MAX_STRING + 1), protocol=2)))


def test_a_number_of_nine_bytes_is_read_and_one_of_ten_is_refused(tmp_path: Path) -> None:
    assert load_plain(written(tmp_path / "nine", pickle.dumps(1 << 64, protocol=2))) == 1 << 64
    with pytest.raises(InputError, match="a number of 10 bytes"):
        load_plain(written(tmp_path / "ten", pickle.dumps(1 << 72, protocol=2)))
