"""A trace keeps what it is told, survives the disk unchanged, and refuses a file that is not one."""

from __future__ import annotations

import io
import json
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.quick import examples

from memfit.errors import InputError
from memfit.events import Action, Mark, Trace

FUZZ = settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def example() -> Trace:
    trace = Trace(origin="measured", facts={"torch": "2.11.0", "nested": {"list": [1, None, "é"]}})
    trace.mark("forward", step=2)
    x = trace.alloc(1000, stream=7, category="activations", op="aten.mm", module="layers.0", address=(1 << 64) - 512)
    y = trace.alloc((1 << 60) - 1, stream=-3)
    trace.free(x)
    trace.free_requested(y)
    trace.empty_cache()
    trace.free_completed(y)
    trace.driver(Action.SEGMENT_ALLOC, address=1 << 47, size=2 << 20, stream=7)
    trace.driver(Action.OOM, address=5, size=6)
    return trace


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.npz"


# -- in memory -------------------------------------------------------------------------------------------------


def test_events_come_back_in_the_order_they_were_told() -> None:
    trace = example()

    told = [(Action(action).name, subject) for action, subject in trace.events()]
    assert told == [
        ("MARK", 0), ("ALLOC", 0), ("ALLOC", 1), ("FREE", 0), ("FREE_REQUESTED", 1), ("EMPTY_CACHE", 0),
        ("FREE_COMPLETED", 1), ("SEGMENT_ALLOC", 0), ("OOM", 1),
    ]  # fmt: skip
    assert len(trace) == 9
    assert trace.marks == [Mark("forward", 2)]


def test_a_name_is_kept_once_and_no_name_is_the_empty_one() -> None:
    trace = Trace()
    a, b = trace.alloc(1, op="aten.mm"), trace.alloc(2, op="aten.mm", module="aten.mm")

    assert trace.names == ["", "aten.mm"]
    assert (trace.op(a), trace.op(b), trace.module(a), trace.module(b), trace.category(b)) == (
        "aten.mm", "aten.mm", "", "aten.mm", "",
    )  # fmt: skip


def test_a_category_can_be_given_later() -> None:
    trace = Trace()
    block = trace.alloc(1, category="other")
    trace.set_category(block, "weights")

    assert trace.category(block) == "weights"


# -- to disk and back ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trace", [Trace(), example()], ids=["empty", "full"])
def test_saving_and_loading_changes_nothing(path: Path, trace: Trace) -> None:
    trace.save(path)

    assert Trace.load(path) == trace


def test_a_loaded_trace_can_be_continued(path: Path) -> None:
    example().save(path)
    loaded, kept = Trace.load(path), example()
    for trace in (loaded, kept):
        trace.free(trace.alloc(5, op="aten.mm", module="new"))

    assert loaded == kept


def test_nothing_but_the_file_is_left_and_an_old_one_is_replaced(path: Path) -> None:
    Trace().save(path)
    example().save(path)

    assert [each.name for each in path.parent.iterdir()] == ["trace.npz"]
    assert Trace.load(path) == example()


CALLS = st.one_of(
    st.tuples(st.just("alloc"), st.integers(0, (1 << 60) - 1), st.text(max_size=5)),
    st.tuples(st.just("free"), st.integers(0, 50), st.just("")),
    st.tuples(st.just("mark"), st.integers(0, 50), st.text(max_size=5)),
    st.tuples(st.just("driver"), st.integers(0, 1 << 62), st.just("")),
)


@FUZZ
@given(st.lists(CALLS, max_size=30))
def test_any_trace_survives_the_disk(path: Path, calls: list[tuple[str, int, str]]) -> None:
    trace = Trace()
    for kind, number, text in calls:
        if kind == "alloc":
            trace.alloc(number, op=text, category=text[:1])
        elif kind == "free" and len(trace.requested):
            trace.free(number % len(trace.requested))
        elif kind == "mark":
            trace.mark(text, number)
        elif kind == "driver":
            trace.driver(Action.SEGMENT_MAP, address=number, size=number)
    trace.save(path)

    assert Trace.load(path) == trace


# -- files that are none ---------------------------------------------------------------------------------------


def refusal(path: Path) -> str:
    start = time.process_time()
    with pytest.raises(InputError) as caught:
        Trace.load(path)
    assert time.process_time() - start < 5
    return caught.value.message


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """The example's file with its columns and header changed."""
    example().save(path)
    with np.load(path, allow_pickle=False) as stored:
        columns = dict(stored)
    header = json.loads(columns.pop("header").tobytes())
    change(columns, header)
    columns.setdefault("header", np.frombuffer(json.dumps(header).encode(), dtype=np.uint8))
    np.savez(path, **columns)
    return path


def test_a_file_that_is_not_there_is_named(path: Path) -> None:
    assert refusal(path) == f"no file {str(path)!r}"


@pytest.mark.parametrize("data", [b"", b"hello", b"PK\x03\x04", b"\x80\x04N.", b"\x93NUMPY\x01\x00"])
def test_a_foreign_file_is_refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)

    assert "cannot read trace" in refusal(path)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert "cannot read trace" in refusal(tmp_path)


def test_a_trace_cut_off_anywhere_is_refused(path: Path) -> None:
    example().save(path)
    data = path.read_bytes()
    for end in range(0, len(data), 37):
        path.write_bytes(data[:end])
        assert "cannot read trace" in refusal(path)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("subjects", np.zeros(9, dtype=np.int32)),
        ("subjects", np.zeros(9, dtype=np.float64)),
        ("subjects", np.zeros(9, dtype=">i8")),
        ("subjects", np.zeros((9, 1), dtype=np.int64)),
        ("subjects", np.zeros(8, dtype=np.int64)),
        ("actions", np.full(9, 11, dtype=np.uint8)),
        ("subjects", np.full(9, -1, dtype=np.int64)),
        ("subjects", np.full(9, 2, dtype=np.int64)),
        ("subjects", np.full(9, 1 << 62, dtype=np.int64)),
        ("requested", np.array([1, -1], dtype=np.int64)),
        ("requested", np.array([1, 1 << 60], dtype=np.int64)),
        ("requested", np.zeros(3, dtype=np.int64)),
        ("op_of", np.array([0, -1], dtype=np.int32)),
        ("module_of", np.array([0, 99], dtype=np.int32)),
        ("range_sizes", np.zeros(1, dtype=np.int64)),
    ],
)
def test_a_column_of_another_type_or_length_or_with_an_index_out_of_range_is_refused(
    path: Path, column: str, values: Any
) -> None:
    def change(columns: dict[str, Any], header: dict[str, Any]) -> None:
        columns[column] = values

    assert "cannot read trace" in refusal(rewritten(path, change))


@pytest.mark.parametrize("gone", ["actions", "addresses", "range_streams", "header"])
def test_a_missing_column_is_refused(path: Path, gone: str) -> None:
    def change(columns: dict[str, Any], header: dict[str, Any]) -> None:
        if gone == "header":
            columns["header"] = np.frombuffer(b"[" * 100_000, dtype=np.uint8)
        else:
            del columns[gone]

    assert "cannot read trace" in refusal(rewritten(path, change))


@pytest.mark.parametrize(
    ("key", "value"),
    [("format", "memfit.trace/2"), ("format", None), ("marks", [["x"]]), ("marks", []), ("names", []), ("names", None)],
)
def test_a_header_that_does_not_fit_is_refused(path: Path, key: str, value: Any) -> None:
    def change(columns: dict[str, Any], header: dict[str, Any]) -> None:
        header[key] = value

    assert "cannot read trace" in refusal(rewritten(path, change))


def test_a_column_of_python_objects_is_refused_and_not_run(path: Path) -> None:
    def change(columns: dict[str, Any], header: dict[str, Any]) -> None:
        columns["subjects"] = np.array([print, 1], dtype=object)

    assert "cannot read trace" in refusal(rewritten(path, change))


def test_a_zip_bomb_is_not_inflated(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example().save(path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb.npy", bytes(8 << 20))
    monkeypatch.setattr("memfit.events.MAX_INFLATED_BYTES", 4 << 20)

    assert "refused to open" in refusal(path)


def test_a_column_that_claims_to_be_huge_is_refused(path: Path) -> None:
    example().save(path)
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": "<i8", "fortran_order": False, "shape": (1 << 50,)})
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, out.getvalue() if name == "subjects.npy" else data)

    assert "cannot read trace" in refusal(path)


# -- fuzz ------------------------------------------------------------------------------------------------------


def outcome(path: Path) -> None:
    try:
        trace = Trace.load(path)
    except InputError:
        return
    for block in range(len(trace.requested)):
        trace.op(block), trace.module(block), trace.category(block)


@FUZZ
@given(st.binary(max_size=300), st.sampled_from([b"", b"PK\x03\x04", b"\x93NUMPY"]))
def test_random_bytes_give_a_trace_or_an_error(path: Path, data: bytes, head: bytes) -> None:
    path.write_bytes(head + data)

    outcome(path)


@FUZZ
@given(st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(min_size=1, max_size=4)), min_size=1, max_size=4))
def test_any_bytes_changed_in_a_trace_give_a_trace_or_an_error(path: Path, edits: list[tuple[int, bytes]]) -> None:
    example().save(path)
    data = bytearray(path.read_bytes())
    for place, piece in edits:
        at = place % len(data)
        data[at : at + len(piece)] = piece
    path.write_bytes(data)

    outcome(path)


NUMBERS = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=10)
KINDS = st.sampled_from(["<u1", "<i8", "<u8", "<i4", "<f8", "<U3", "?"])
COLUMNS = ["actions", "subjects", "requested", "streams", "addresses", "op_of", "range_sizes", "range_addresses"]
HEADERS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@FUZZ
@given(st.sampled_from(COLUMNS), NUMBERS, KINDS, st.sampled_from(["names", "marks", "facts", "format", "x"]), HEADERS)
def test_any_columns_and_header_give_a_trace_or_an_error(
    path: Path, column: str, numbers: list[int], kind: str, key: str, value: Any
) -> None:
    def change(columns: dict[str, Any], header: dict[str, Any]) -> None:
        columns[column] = np.array(numbers, dtype=np.int64).astype(kind)
        header[key] = value

    outcome(rewritten(path, change))
