"""Whatever the bytes: a snapshot, or one clear error, soon; nothing runs, hangs or fills the memory."""

from __future__ import annotations

import copy
import gzip
import json
import os
import pickle
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.quick import examples

from memfit.errors import InputError
from memfit.snapshots import schema as snapshot_schema
from memfit.snapshots.read import Snapshot, read_snapshot

DATA = Path(__file__).parents[1] / "data"
HEAD, STOP = b"\x80\x04", b"."
FUZZ = settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@contextmanager
def soon(seconds: float = 5.0) -> Iterator[None]:
    start = time.process_time()
    yield
    assert time.process_time() - start < seconds


def refusal(path: Path, data: bytes, **limits: int) -> str:
    """The one line that a person gets to read."""
    path.write_bytes(data)
    with soon(), pytest.raises(InputError) as caught:
        read_snapshot(path, **limits)
    message = caught.value.message
    assert repr(str(path)) in message
    assert "\n" not in message
    assert len(message) < len(str(path)) + 250
    return message


@cache
def small() -> dict[str, Any]:
    """A real snapshot, cut down: some events of each kind, and the segments they lie in."""
    raw: dict[str, Any] = pickle.loads((DATA / "snap-oom.pickle").read_bytes())
    raw["device_traces"] = [raw["device_traces"][0][:12] + raw["device_traces"][0][-4:]]
    raw["segments"] = raw["segments"][:3]
    raw["external_annotations"] = [{"name": "step", "stage": "START", "device": 0, "time_us": 5}]
    for each in raw["device_traces"][0] + raw["segments"]:
        each["frames"] = each.get("frames", [])[:3]
    return raw


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "given.pickle"


# -- code ------------------------------------------------------------------------------------------------------


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_a_payload_is_named_and_not_run(path: Path, tmp_path: Path, protocol: int, packed: bool) -> None:
    marker = tmp_path / "ran"
    raw = {**small(), "extra": [{"deep": Payload(marker)}]}
    data = pickle.dumps(raw, protocol=protocol)

    message = refusal(path, gzip.compress(data) if packed else data)

    assert f"it asks Python to import {os.system.__module__}.system, which no memory snapshot needs" in message
    assert message.startswith("refused to open")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("REDUCE", b"}}R"), ("BUILD", b"}}b"), ("NEWOBJ", b"}}\x81"), ("NEWOBJ_EX", b"}}}\x92"), ("OBJ", b"(}o"),
        ("BINPERSID", b"}Q"), ("PERSID", b"Pid\n"), ("EXT1", b"\x82\x01"), ("EXT2", b"\x83\x01\0"),
        ("EXT4", b"\x84\x01\0\0\0"), ("EMPTY_SET", b"\x8f"), ("FROZENSET", b"(\x91"), ("NEXT_BUFFER", b"\x97"),
        ("SHORT_BINBYTES", b"C\x01a"), ("BINBYTES8", b"\x8e" + b"\xff" * 7 + b"\x7f"), ("TUPLE1", b"}\x85"),
        ("BYTEARRAY8", b"\x96" + b"\xff" * 5 + b"\0\0\0"), ("LONG4", b"\x8b\xff\xff\xff\x7f"), ("INT", b"I1\n"),
        ("BINUNICODE8", b"\x8d" + b"\xff" * 7 + b"\x7f"), ("TUPLE", b"(}t"), ("POP", b"}0"), ("GET", b"g0\n"),
    ],
)  # fmt: skip
def test_no_opcode_is_let_through_that_a_snapshot_does_not_need(path: Path, name: str, code: bytes) -> None:
    assert f"the pickle opcode {name} " in refusal(path, HEAD + code + STOP)


@pytest.mark.parametrize(
    "code",
    [b"cos\nsystem\n", b"ios\nsystem\n", b"\x8c\x02os\x94\x8c\x06system\x94\x93", b"\x8c\x02os\x8c\x06system\x93"],
)
def test_each_way_to_import_is_named(path: Path, code: bytes) -> None:
    assert "import os.system," in refusal(path, HEAD + b"(" + code + STOP)


def test_a_name_that_would_steer_the_terminal_is_not_printed(path: Path) -> None:
    assert "import ?[2J.x" in refusal(path, HEAD + b"c\x1b[2J\nx\n" + STOP)


# -- size and shape --------------------------------------------------------------------------------------------


def bomb(depth: int = 60) -> list[Any]:
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested, nested]
    return nested


def everywhere(value: Any) -> Iterator[Any]:
    """The small snapshot with one value put in each place in turn."""
    yield value
    for key in ("segments", "device_traces", "allocator_settings", "external_annotations", "memfit", "news"):
        yield {**small(), key: value}
        yield {**small(), key: [value]}
        yield {**small(), key: {"x": value, "format": value}}
    for key in ("blocks", "frames", "address", "segment_pool_id", "stream", "state"):
        yield {**small(), "segments": [{**small()["segments"][0], key: value}]}
        yield {**small(), "segments": [{**small()["segments"][0], key: [value]}]}
    for key in ("action", "addr", "size", "stream", "frames", "time_us"):
        yield {**small(), "device_traces": [[{**small()["device_traces"][0][0], key: value}]]}
    for key in ("filename", "line", "name"):
        frames = [{"filename": "a", "line": 1, "name": "b", key: value}]
        yield {**small(), "device_traces": [[{**small()["device_traces"][0][0], "frames": frames}]]}
    yield {**small(), "device_traces": [[{"action": "alloc", "addr": 0, "size": 1, "news": value}]]}


def test_a_few_bytes_that_unfold_to_2_to_the_60_nodes_do_no_harm_anywhere(path: Path) -> None:
    for raw in everywhere(bomb()):
        path.write_bytes(pickle.dumps(raw, protocol=4))
        with soon(1):
            outcome(path)


def test_a_list_that_holds_itself_does_no_harm_anywhere(path: Path) -> None:
    circle: list[Any] = []
    circle.append(circle)
    for raw in everywhere(circle):
        path.write_bytes(pickle.dumps(raw, protocol=4))
        with soon(1):
            outcome(path)


def test_two_million_levels_of_lists_are_no_snapshot(path: Path) -> None:
    depth = 2_000_000
    assert "segments[0] is a list, not a dict" in refusal(path, HEAD + b"]" * depth + b"a" * (depth - 1) + STOP)


def test_deep_json_is_no_snapshot(path: Path) -> None:
    assert "it nests too deeply" in refusal(path, b"[" * 1_000_000)
    assert "it nests too deeply" in refusal(path, b'{"segments":' * 100_000)


def test_tuples_that_hash_for_ever_are_refused_before_they_are_made(path: Path) -> None:
    twins = b"K\x01K\x01\x86\x94" + b"".join(b"h%ch%c\x86\x94" % (i, i) for i in range(60))

    assert "TUPLE2" in refusal(path, HEAD + b"](" + twins + b"e}" + b"h%cNs" % 60 + STOP)
    assert "TUPLE1" in refusal(path, HEAD + b"}K\x01" + b"\x85" * 1_000_000 + b"Ns" + STOP)


def test_a_memo_slot_of_2_to_the_31_is_refused_before_a_table_is_made(path: Path) -> None:
    assert "a memo table of 2,147,483,647 entries" in refusal(path, HEAD + b"]r\xff\xff\xff\x7f" + STOP)
    assert "PUT" in refusal(path, HEAD + b"]p2147483647\n" + STOP)


@pytest.mark.parametrize(
    "code", [b"X\xff\xff\xff\x7f", b"X\xff\xff\0\0ab", b"\x8c\xffabc", b"\x8a\x08abc", b"\x95" + b"\xff" * 4]
)
def test_a_length_beyond_the_end_is_a_cut_off_file(path: Path, code: bytes) -> None:
    assert "in the middle of a value" in refusal(path, HEAD + code)


def test_a_frame_that_claims_more_than_there_is_is_damage(path: Path) -> None:
    assert "it is damaged" in refusal(path, HEAD + b"\x95" + b"\xff" * 7 + b"\x7f}" + STOP)


def test_a_number_or_a_string_of_absurd_size_is_refused(path: Path) -> None:
    assert "a number of 255 bytes" in refusal(path, HEAD + b"\x8a\xff" + b"a" * 255 + STOP)
    assert "a string of 2.00 MiB" in refusal(path, HEAD + b"X\0\0\x20\0" + b"a" * (2 << 20) + STOP)


def test_too_many_containers_are_refused_before_they_are_made(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.snapshots.file.MAX_LOADED", 1 << 20)

    assert "unfold to more than 1.00 MiB in memory" in refusal(path, HEAD + b"](" + b"}" * 50_000 + b"e" + STOP)
    assert "unfold to more than 1.00 MiB in memory" in refusal(path, b"[" + b"[]," * 50_000 + b"1]")


def test_the_same_event_named_a_million_times_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_schema, "MAX_EVENTS", 1000)
    raw = {"segments": [], "device_traces": [[{"action": "alloc", "addr": 0, "size": 1}] * 1001]}

    assert "has 1,001 entries; the limit is 1,000" in refusal(path, pickle.dumps(raw, protocol=4))


def test_stacks_are_bounded_one_by_one_and_together(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raw(stacks: int, depth: int) -> bytes:
        events = [{"action": "alloc", "addr": 0, "size": 1, "frames": [{}] * depth} for _ in range(stacks)]
        return pickle.dumps({"segments": [], "device_traces": [events]}, protocol=4)

    assert "5,000 entries" in refusal(path, raw(1, 5000))
    monkeypatch.setattr(snapshot_schema, "MAX_VISITED", 10_000)
    assert "more than 10,000 stack frames" in refusal(path, raw(200, 100))


def test_a_file_above_the_limit_is_not_read(path: Path) -> None:
    message = refusal(path, b"\x80\x04" + bytes(3 << 20), max_bytes=1 << 20)

    assert message.endswith("it is 3.00 MiB, and the limit is 1.00 MiB")


def test_a_gzip_bomb_is_inflated_no_further_than_the_limit(path: Path) -> None:
    packed = gzip.compress(bytes(64 << 20))

    assert "larger when unpacked" in refusal(path, packed, max_bytes=1 << 20)


# -- damage ----------------------------------------------------------------------------------------------------


def test_a_real_snapshot_cut_off_anywhere_is_an_error(path: Path) -> None:
    data = (DATA / "snap-oom.pickle").read_bytes()
    for end in {*range(2, 40), *range(40, len(data), len(data) // 40), len(data) - 2, len(data) - 1}:
        assert f"it ends at byte {end:,} in the middle of a value" in refusal(path, data[:end])


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_small_snapshot_cut_off_at_any_byte_is_an_error(path: Path, protocol: int) -> None:
    data = pickle.dumps(small(), protocol=protocol)
    for end in range(0, len(data), 29):
        refusal(path, data[:end])


def test_json_or_gzip_cut_off_is_an_error(path: Path) -> None:
    text = json.dumps(small()).encode()
    for end in range(1, len(text), len(text) // 50):
        refusal(path, text[:end])
    packed = gzip.compress(text)
    for end in range(2, len(packed), len(packed) // 50):
        refusal(path, packed[:end])
    refusal(path, packed[:-8] + bytes(8))  # the checksum


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "it is empty"), (b"\x80", "protocol 0"), (b"\x80\x09N.", "protocol 9"), (HEAD + b"N.", "not a dict"),
        (b"(lp0\n.", "neither a pickle"), (b"<!DOCTYPE html>", "neither a pickle"),
        (b"PK\x03\x04", "its end is missing"),
        (b"{}", "no 'segments'"), (b"\xff\xfe{\0}\0", "neither a pickle"), (b'{"segments": nul', "damaged"),
        (b'{"a": "\xff"}', "damaged"), (HEAD + b"e.", "damaged"), (HEAD + b"}.", "no 'segments'"),
    ],
)  # fmt: skip
def test_what_is_not_a_snapshot_is_said_to_be_none(path: Path, data: bytes, what: str) -> None:
    assert what in refusal(path, data)


def test_what_is_not_a_file_is_said_to_be_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, what in (
        (tmp_path, "a folder"), (tmp_path / "pipe", "not a file"), (Path("/dev/zero"), "not a file"),
        (tmp_path / "absent", "no file"), (Path("a\0b"), "cannot read"), (tmp_path / ("n" * 300), "cannot read"),
    ):  # fmt: skip
        with soon(), pytest.raises(InputError, match=what):
            read_snapshot(path)


# -- values ----------------------------------------------------------------------------------------------------


def with_event(**fields: Any) -> dict[str, Any]:
    return {"segments": [], "device_traces": [[{"action": "alloc", "addr": 0, "size": 1, **fields}]]}


def with_segment(**fields: Any) -> dict[str, Any]:
    block = {"size": 8, "state": "inactive"}
    return {"segments": [{"device": 0, "address": 0, "total_size": 8, "stream": 0, "blocks": [block], **fields}]}


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (with_event(size=-1), "'size' = -1"), (with_event(size=1 << 60), "'size' = 1152921504606846976"),
        (with_event(size=True), "'size' = True"), (with_event(size=1.0), "'size' = 1.0"),
        (with_event(size=float("nan")), "'size' = nan"), (with_event(size="9"), "'size' = '9'"),
        (with_event(size=None), "'size' = None"), (with_event(addr=1 << 64), "'addr' = "),
        (with_event(addr=-1), "'addr' = -1"),
        (with_event(addr=None), "no 'addr'"), (with_event(stream=1 << 63), "'stream'"),
        (with_event(action=7), "'action' = 7"),
        (with_event(action=["alloc"]), "'action' = a list"), (with_event(time_us=-5), "'time_us' = -5"),
        (with_event(frames={}), "frames"), (with_event(frames=[7]), "[0] is 7, not a dict"),
        (with_event(frames=[{"line": 1 << 40}]), "'line'"), (with_event(frames=[{"name": 4}]), "not text"),
        (with_segment(device=256), "'device' = 256"), (with_segment(device=-1), "'device' = -1"),
        (with_segment(total_size=9), "do not add up"), (with_segment(segment_type="huge"), "'segment_type' = 'huge'"),
        (with_segment(is_expandable=1), "'is_expandable' = 1"),
        (with_segment(segment_pool_id=[1]), "a pair of numbers"),
        (with_segment(blocks=[{"size": 8, "state": "odd"}]), "'state' = 'odd'"),
        (with_segment(blocks=[{"size": 8, "state": "inactive", "address": 4}]), "does not begin where"),
        ({"segments": [], "device_traces": [[]] * 257}, "257 entries"),
        ({"segments": [], "device_traces": {}}, "a dict"),
        ({"segments": [], "allocator_settings": {"x": float("inf")}}, "is inf"),
        ({"segments": [], "external_annotations": [{"stage": "MIDDLE"}]}, "'stage' = 'MIDDLE'"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_named_with_its_place(path: Path, raw: Any, what: str) -> None:
    assert what in refusal(path, pickle.dumps(raw, protocol=4))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1" * 5000, "9" * 30, "-1", "1.5", "true"])
def test_json_numbers_that_are_no_sizes_are_refused(path: Path, number: str) -> None:
    refusal(path, json.dumps(with_event(size="HERE")).replace('"HERE"', number).encode())


def test_names_stay_text_but_lose_what_a_terminal_or_a_script_would_obey(path: Path) -> None:
    odd = "</script>\x1b[31m\u2028\u202e\ud800\n\0é中"
    path.write_bytes(pickle.dumps(with_event(frames=[{"filename": f"{odd}.py", "line": 1, "name": odd}]), protocol=4))

    snapshot = read_snapshot(path)

    (frame,) = snapshot.frames(0, 0)
    assert frame.name == "</script>\ufffd[31m\ufffd\ufffd\ufffd\ufffd\ufffdé中"
    assert all(c.isprintable() or c == "\ufffd" for c in str(frame) + snapshot.traces[0].op(0))
    str(frame).encode()


def test_a_name_of_a_hundred_thousand_letters_is_shortened(path: Path) -> None:
    path.write_bytes(
        pickle.dumps(with_event(frames=[{"filename": "a.py", "line": 1, "name": "x" * 100_000}]), protocol=4)
    )

    (frame,) = read_snapshot(path).frames(0, 0)
    assert (len(frame.name), frame.name[-1]) == (500, "…")


def test_keys_that_are_no_text_do_no_harm(path: Path) -> None:
    odd: dict[Any, Any] = {5: 6, (1, 2): 3, None: 4, 2.5: 1}
    raw = {**small(), **odd, "allocator_settings": {5: 6, "a": {7: 8}, "b\x1b": "c\x1b"}}
    path.write_bytes(pickle.dumps(raw, protocol=4))

    assert read_snapshot(path).settings == {"a": {}, "b\ufffd": "c\ufffd"}


def test_events_that_contradict_each_other_still_make_a_trace_that_can_be_saved(path: Path) -> None:
    events = [
        {"action": action, "addr": addr, "size": 1}
        for action in (
            "free_completed",
            "free_requested",
            "free_requested",
            "alloc",
            "free_completed",
            "alloc",
            "alloc",
        )
        for addr in (0, 0, 512)
    ]
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [events]}, protocol=4))

    (trace,) = read_snapshot(path).traces

    trace._check()
    assert len(read_snapshot(path).times[0]) == len(trace)


# -- fuzz ------------------------------------------------------------------------------------------------------


def outcome(path: Path) -> Snapshot | None:
    """A snapshot whose traces hold together, or None after an InputError. Anything else is a failure."""
    try:
        snapshot = read_snapshot(path)
    except InputError:
        return None
    for device, trace in enumerate(snapshot.traces):
        trace._check()
        assert len(snapshot.times[device]) == len(trace)
        for block in range(len(trace.requested)):
            snapshot.frames(device, block)
    return snapshot


FORMS: dict[str, Callable[[Any], bytes]] = {
    "protocol 2": lambda raw: pickle.dumps(raw, protocol=2),
    "protocol 4": lambda raw: pickle.dumps(raw, protocol=4),
    "json": lambda raw: json.dumps(raw).encode(),
    "gzip": lambda raw: gzip.compress(pickle.dumps(raw, protocol=4), 1),
}


@cache
def small_as(form: str) -> bytes:
    return FORMS[form](small())


@pytest.mark.parametrize("form", FORMS)
@FUZZ
@given(
    edits=st.lists(
        st.tuples(st.integers(0, 1 << 20), st.sampled_from(["set", "insert", "delete", "copy"]), st.binary(max_size=6)),
        min_size=1,
        max_size=6,
    )
)
def test_any_bytes_changed_in_a_real_snapshot_give_a_snapshot_or_an_error(
    path: Path, form: str, edits: list[tuple[int, str, bytes]]
) -> None:
    data = bytearray(small_as(form))
    for place, kind, piece in edits:
        at = place % len(data)
        if kind == "set":
            data[at : at + len(piece)] = piece
        elif kind == "insert":
            data[at:at] = piece
        elif kind == "delete":
            del data[at : at + len(piece)]
        else:
            data[at:at] = data[at // 2 : at // 2 + 40]
    path.write_bytes(data)

    with soon():
        outcome(path)


@FUZZ
@given(st.binary(max_size=200), st.sampled_from([b"", HEAD, b"{", b"[", b"\x1f\x8b\x08"]))
def test_random_bytes_give_a_snapshot_or_an_error(path: Path, data: bytes, head: bytes) -> None:
    path.write_bytes(head + data)

    with soon():
        outcome(path)


CODES = [
    b"(", b"]", b"}", b"a", b"e", b"s", b"u", b"N", b"\x88", b"\x94", b"K\x01", b"M\x01\x02", b"K\x01K\x02\x86", b"h\0",
    b"h\x01", b"q\0", b"q\x05", b"\x8c\x08segments", b"\x8c\x0ddevice_traces", b"\x8c\x06action", b"\x8c\x05alloc",
    b"\x8a\x08\0\0\0\0\0\0\0\x80", b"G" + struct.pack(">d", float("nan")), b"j\0\0\0\0", b"X\x01\0\0\0a",
]  # fmt: skip


@FUZZ
@given(st.lists(st.sampled_from(CODES), max_size=60))
def test_any_order_of_allowed_opcodes_gives_a_snapshot_or_an_error(path: Path, codes: list[bytes]) -> None:
    path.write_bytes(HEAD + b"}" + b"".join(codes) + STOP)

    with soon():
        outcome(path)


@cache
def places() -> list[tuple[Any, ...]]:
    """The way to every value in the small snapshot."""
    found: list[tuple[Any, ...]] = []
    todo: list[tuple[tuple[Any, ...], Any]] = [((), small())]
    while todo:
        way, node = todo.pop()
        for key in node if type(node) is dict else range(len(node)):
            found.append((*way, key))
            if type(node[key]) in (dict, list):
                todo.append(((*way, key), node[key]))
    return found


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@FUZZ
@given(way=st.deferred(lambda: st.sampled_from(places())), value=VALUES, remove=st.booleans())
def test_any_value_put_into_a_real_snapshot_gives_a_snapshot_or_an_error(
    path: Path, way: tuple[Any, ...], value: Any, remove: bool
) -> None:
    raw = copy.deepcopy(small())
    node: Any = raw
    for key in way[:-1]:
        node = node[key]
    if remove:
        del node[way[-1]]
    else:
        node[way[-1]] = value
    path.write_bytes(pickle.dumps(raw, protocol=4))

    with soon():
        outcome(path)


@FUZZ
@given(
    names=st.lists(st.text(max_size=400), max_size=6),
    numbers=st.lists(st.integers(0, (1 << 60) - 1), max_size=6),
    protocol=st.integers(2, 5),
)
def test_whatever_an_honest_writer_pickles_passes_the_opcode_check(
    path: Path, names: list[str], numbers: list[int], protocol: int
) -> None:
    events = [
        {
            "action": "alloc", "addr": number * 8, "size": number, "stream": 0, "pool_id": (number, 0),
            "frames": [{"filename": name, "line": number % 1000, "name": name} for name in names],
            "user_metadata": "long" * (number % 40_000), "compile_context": None, "share": 0.5,
        }
        for number in numbers
    ]  # fmt: skip
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [events]}, protocol=protocol))

    (trace,) = read_snapshot(path).traces

    assert list(trace.requested) == numbers
