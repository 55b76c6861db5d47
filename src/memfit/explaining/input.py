"""What was handed to `memfit explain`, and the one error in it: from text, a snapshot, a memory log or a folder.

Which it is its content tells. Text of any length is read to its end, packed or not, and only a part of it is kept
(`explaining/text.py`). What was not read is told in the notes.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

from memfit.errors import InputError
from memfit.explaining.cause import Cause, RecordedRequest
from memfit.explaining.job import Clues, clues_in
from memfit.explaining.message import SIZES, LocatedOom, Oom, OomMessages, Size, find_ooms
from memfit.explaining.place import FailurePlace, frames_before, frames_of_stack, place_from
from memfit.explaining.text import CHUNK, Excerpt, excerpt_of
from memfit.files import check_ends
from memfit.units import GiB, format_bytes, gib

Kind = Literal["text", "snapshot", "memory_log", "run_folder"]
TEXT_ENDINGS = (".log", ".txt", ".out", ".err")
TEXT_NAMES = ("stdout", "stderr", "nohup.out")
PACKED_ENDINGS = (".gz", ".bz2", ".xz")
RECORDINGS = (".pickle", ".pkl", ".pickle.gz", ".pkl.gz", ".npz")
MAX_UNPACKED = 4 * GiB
"""Of what has no length of its own: a packed file, which may unpack to a thousand times its size, or a pipe."""
MAX_FOLDER_TEXT = 8 * GiB
MAX_FILES, DEEPEST = 200, 6
MAX_ENTRIES = 20_000
"""Files and folders that are looked at below a run's folder: a whole disk is no run."""
MAX_JSON = 4 << 20
LONGEST_PATH = 4096
NAMED = 4
"""Of many files, in a note."""

_PACKERS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda packed: gzip.GzipFile(fileobj=packed), b"BZh": bz2.BZ2File, b"\xfd7zXZ": lzma.LZMAFile,
}  # fmt: skip
_DAMAGED = (EOFError, OSError, lzma.LZMAError)
_OTHER_PACKERS = {b"PK\x03\x04": "a zip archive", b"\x28\xb5\x2f\xfd": "packed by zstd", b"7z\xbc\xaf": "a 7z archive"}


NO_TEXT = Excerpt("")


@dataclass(frozen=True, kw_only=True)
class Input:
    kind: Kind
    path: str | None = None
    excerpt: Excerpt = NO_TEXT
    text_from: str | None = None
    """Of a folder: the file that the text is from."""
    report: dict[str, Any] | None = None
    """memfit.report/1 of the recording or the log, where there is one."""
    config: Path | None = None
    growth: dict[str, Any] | None = None
    result: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    is_read_whole: bool = True

    @property
    def text(self) -> str:
        return self.excerpt.text


def read_input(source: str | bytes | BinaryIO | os.PathLike[str]) -> Input:
    """A path if there is such a file, else the text itself. A stream is read to its end."""
    if isinstance(source, bytes):
        return _of_stream(io.BytesIO(source), most=None)
    if isinstance(source, str) and not _names_a_file(source):
        return Input(kind="text", excerpt=excerpt_of(io.StringIO(source)))
    if not isinstance(source, (str, os.PathLike)):
        return _of_stream(source, most=MAX_UNPACKED)
    path = Path(source)
    if not os.path.lexists(path):
        raise InputError(f"no file or folder {str(path)!r}", hint="`-` reads a pasted message from stdin")
    return _folder(path) if stat.S_ISDIR(check_ends(path).st_mode) else _file(path)


def _names_a_file(text: str) -> bool:
    """Also where there is none: a name with a typing mistake is no message."""
    if not text or len(text) > LONGEST_PATH or "\n" in text or "\0" in text:
        return False
    endings = (*TEXT_ENDINGS, *PACKED_ENDINGS, *RECORDINGS, ".csv", ".json")
    if text.isprintable() and " " not in text and (text.endswith(endings) or text.startswith(("/", "./", "~/"))):
        return True
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        return False


# -- a stream ------------------------------------------------------------------------------------------------------


def _of_stream(stream: Any, *, most: int | None, path: Path | None = None) -> Input:
    name = "what is piped in" if path is None else repr(str(path))
    source = stream if hasattr(stream, "peek") else io.BufferedReader(stream)
    head = source.peek(8)
    opened = next((packer for magic, packer in _PACKERS.items() if head.startswith(magic)), None)
    if opened is not None:
        name, source, most = f"{name}, unpacked,", io.BufferedReader(opened(source)), MAX_UNPACKED
        try:
            head = source.peek(8)
        except _DAMAGED as error:
            raise InputError(
                f"cannot unpack {'what is piped in' if path is None else repr(str(path))}: {error}"
            ) from error
    _refuse_what_is_no_text(head, name, may_be_junk=path is not None and opened is None)
    excerpt, notes = _decoded(source, name, most=most)
    shown = None if path is None else str(path)
    return Input(kind="text", path=shown, excerpt=excerpt, notes=notes, is_read_whole=not notes)


def _refuse_what_is_no_text(head: bytes, name: str, *, may_be_junk: bool) -> None:
    packed = next((said for magic, said in _OTHER_PACKERS.items() if head.startswith(magic)), None)
    if packed is not None:
        raise InputError(f"{name} is {packed}", hint="unpack it first; logs packed by gzip, bzip2 and xz are read")
    if head[:1] == b"\x80" and not may_be_junk:
        raise InputError(f"{name} is a snapshot", hint="give its file under a name that ends in .pickle or .pickle.gz")


def _decoded(source: Any, name: str, *, most: int | None) -> tuple[Excerpt, tuple[str, ...]]:
    """UTF-8, or what PowerShell writes; bytes that are neither do not matter."""
    wide = source.peek(2).startswith((b"\xff\xfe", b"\xfe\xff"))
    limited = _LimitedStream(source, most)
    plain = io.BufferedReader(limited, CHUNK)
    excerpt = excerpt_of(io.TextIOWrapper(plain, "utf-16" if wide else "utf-8-sig", "replace", newline=""))
    if limited.damage is not None:
        read = f"only the {format_bytes(limited.read_bytes)} before that were read"
        return excerpt, (f"{name} is cut off or damaged ({limited.damage}): {read}",)
    if limited.is_full:
        return excerpt, (f"of {name} only the first {format_bytes(most or 0)} were read, which is the most",)
    return excerpt, ()


class _LimitedStream(io.RawIOBase):
    """So many bytes of a stream; where it is damaged it ends."""

    def __init__(self, source: Any, most: int | None) -> None:
        self.source, self.most = source, most
        self.read_bytes = 0
        self.damage: Exception | None = None

    @property
    def is_full(self) -> bool:
        return self.most is not None and self.read_bytes >= self.most and bool(self.source.peek(1))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        room = len(buffer) if self.most is None else min(len(buffer), self.most - self.read_bytes)
        try:
            found: bytes = self.source.read1(room) if room and self.damage is None else b""
        except _DAMAGED as damage:
            self.damage, found = damage, b""
        buffer[: len(found)] = found
        self.read_bytes += len(found)
        return len(found)


# -- a file --------------------------------------------------------------------------------------------------------


def _file(path: Path) -> Input:
    if path.is_file() and (found := _recording_or_log(path)) is not None:
        return found
    try:
        with path.open("rb") as stream:  # a pipe too, as the shell's <(...) is one
            most = None if path.is_file() else MAX_UNPACKED
            return _of_stream(stream, most=most, path=path)
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror or error}") from error


def _recording_or_log(path: Path) -> Input | None:
    head = _read(path, 4096)
    may_be_snapshot = head.startswith((b"\x80", b"PK")) or (head.lstrip()[:1] == b"{" and b'"segments"' in head)
    if path.name.endswith(RECORDINGS) or may_be_snapshot:
        try:
            return Input(kind="snapshot", path=str(path), report=_report(path))
        except InputError:
            if path.name.endswith(RECORDINGS):
                raise
    from memfit.analysis.run_folder import looks_like_a_log

    return Input(kind="memory_log", path=str(path), report=_report(path)) if looks_like_a_log(head) else None


def _report(path: Path) -> dict[str, Any]:
    from memfit.analysis.report import report_file

    return report_file(path).document


def _read(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as source:
            return source.read(most)
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror}") from error


# -- the folder of a run -------------------------------------------------------------------------------------------


def _folder(folder: Path) -> Input:
    from memfit.analysis.run_folder import read_result

    result = read_result(folder / "result.json", MAX_JSON) or {}
    logs, unseen = _logs(folder)
    found = _told_by(folder, logs, result)
    report, unreported = _report_of(folder)
    if not found.excerpt.text and report is None:
        raise InputError(
            "; ".join([f"nothing to explain in {str(folder)!r}", *found.notes, *unseen]),
            hint="a run's folder has a log (*.log, *.txt, packed or not), a snapshot (*.pickle) or a memory_log.csv",
        )
    configs = (folder / name for name in ("config-resolved.yaml", "config.yaml"))
    config, growth = next((each for each in configs if each.exists()), None), result.get("growth")
    return replace(
        found,
        kind="run_folder",
        path=str(folder),
        report=report,
        config=config if config and config.is_file() else None,
        growth=growth if isinstance(growth, dict) else None,
        result=result,
        notes=(*found.notes, *unseen, *unreported),
        is_read_whole=found.is_read_whole and not unseen,
    )


def _told_by(folder: Path, logs: Sequence[Path], result: dict[str, Any]) -> Input:
    """The newest log that has an out-of-memory message, then what the result tells of one, or else the newest log. What
    lies in folders inside is looked at where nothing is found outside."""
    unread: list[str] = []
    for inside in (False, True):
        told = _first_with_message(folder, [path for path in logs if (path.parent != folder) == inside], unread)
        if told is not None:
            return told
    happened = result.get("out_of_memory")
    causes = [each.get("cause") for each in happened if isinstance(each, dict)] if isinstance(happened, list) else []
    said = "\n".join(cause for cause in causes if isinstance(cause, str))
    if said:
        return Input(kind="text", excerpt=Excerpt(said), text_from="result.json")
    read = [path for path in logs if _within(folder, path) not in unread]
    if not read:
        return Input(kind="text", notes=_not_read(unread), is_read_whole=not unread)
    newest = _file(read[0])
    names = f"read for an out-of-memory error: {_few([_within(folder, path) for path in read])}"
    return replace(
        newest,
        text_from=_within(folder, read[0]),
        notes=(*newest.notes, names, *_not_read(unread)),
        is_read_whole=newest.is_read_whole and not unread,
    )


def _first_with_message(folder: Path, logs: Sequence[Path], unread: list[str]) -> Input | None:
    """With the names of the others that have one. Names of those that were not read go to `unread`."""
    told: Input | None = None
    others: list[str] = []
    size = 0
    for number, path in enumerate(logs):
        name = _within(folder, path)
        size += path.stat().st_size
        try:
            read = _file(path) if number < MAX_FILES and size <= MAX_FOLDER_TEXT else None
        except InputError:
            read = None
        if read is None:
            unread.append(name)
        elif find_ooms(read.excerpt):
            others += [name] if told else []
            told = told or replace(read, text_from=name, is_read_whole=True)
    if told is None:
        return None
    notes = [f"out-of-memory errors are in these too: {_few(others)}"] if others else []
    return replace(told, notes=(*told.notes, *notes, *_not_read(unread)))


def _not_read(names: Sequence[str]) -> tuple[str, ...]:
    return (f"not read: {_few(names)}",) if names else ()


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def _within(folder: Path, path: Path) -> str:
    return str(path.relative_to(folder))


def _logs(folder: Path) -> tuple[list[Path], list[str]]:
    """`train.log` first, then the newest, those of folders inside after those beside them; and what was not seen."""
    found: list[tuple[Path, float]] = []
    closed: list[str] = []
    waiting, seen = deque([(folder, 0)]), 0
    while waiting and seen < MAX_ENTRIES:
        inside, depth = waiting.popleft()
        for entry in _entries(inside, folder, closed):
            seen += 1
            if seen > MAX_ENTRIES:
                break
            try:
                if entry.is_dir(follow_symlinks=False):
                    waiting.extend([(Path(entry.path), depth + 1)] if depth < DEEPEST else [])
                elif _is_log(entry.name) and entry.is_file():
                    found.append((Path(entry.path), entry.stat().st_mtime))
            except OSError:
                closed.append(_within(folder, Path(entry.path)))
    found.sort(key=lambda each: (each[0].parent != folder, each[0].name != "train.log", -each[1], str(each[0])))
    notes = [f"may not be read: {_few(closed)}"] if closed else []
    if seen > MAX_ENTRIES or waiting:
        notes.append(f"only the first {MAX_ENTRIES:,} files and folders in {str(folder)!r} were looked at")
    return [path for path, _ in found], notes


def _entries(folder: Path, whole: Path, closed: list[str]) -> list[os.DirEntry[str]]:
    """In their order, without hidden ones. A folder inside that may not be read goes to `closed`."""
    try:
        with os.scandir(folder) as entries:
            return sorted((each for each in entries if not each.name.startswith(".")), key=lambda each: each.name)
    except OSError as error:
        if folder == whole:
            raise InputError(f"cannot read the folder {str(folder)!r}: {error.strerror}") from error
        closed.append(_within(whole, folder))
        return []


def _is_log(name: str) -> bool:
    """Also `train.log.gz`, `train.log.1` and `stderr.3`."""
    plain = name
    for ending in PACKED_ENDINGS:
        plain = plain.removesuffix(ending)
    stem, _, last = plain.rpartition(".")
    plain = stem if stem and last.isdigit() else plain
    return plain.endswith(TEXT_ENDINGS) or plain in TEXT_NAMES


def _report_of(folder: Path) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    try:
        return _report(folder), ()
    except InputError as error:
        return None, () if error.message.startswith("nothing to report") else (error.message,)


HOLDERS, HOLDER = 6, ("name", "category", "count", "allocated_bytes")
"""Lines of code that held most, and what is told of each."""


def oom_of_record(event: Mapping[str, Any]) -> Oom:
    """In the form of a message, each number to the byte."""
    known = {
        "requested": event["requested_bytes"], "free": event["device_free_bytes"],
        "allocated": event["allocated_bytes"], "reserved": event["reserved_bytes"],
        "unallocated": event["cached_bytes"],
    }  # fmt: skip
    sizes: dict[str, Any] = {
        name: None if value is None else Size(format_bytes(value), value, value) for name, value in known.items()
    }
    unknown = {name: "a snapshot does not record it" for name in SIZES if sizes.get(name) is None}
    said = f"a request of {format_bytes(event['requested_bytes'])} failed"
    return Oom(form="snapshot", requests_exactly=True, message=said, unknown=unknown, **sizes)


# -- a memory log --------------------------------------------------------------------------------------------------


def cause_of_log(log: Mapping[str, Any]) -> Cause:
    """A log has no message: that the run broke it knows, and how high memory stood."""
    failed = next((point for point in log["checkpoints"] if point["failed"]), None)
    peak = log["peak_bytes"]
    reached = f"the peak until then was {gib(peak)}, {log['peak_between']}"
    stood = "no GPU figures are in it" if peak is None else reached
    if failed is None:
        said = f"No out-of-memory error is in this log: no checkpoint failed; {stood.replace(' until then', '')}."
        return Cause("none", said)
    said = f"The run broke before it reached {failed['name']}; the log does not say why, and {stood}."
    return Cause("no-numbers", said, certainty="possible")


def growth_of_log(checkpoints: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Over the rows in their order; None where there is nothing to judge."""
    from memfit.recording.growth import FEWEST, WARM_UP, StepReading, growth_of

    if len(checkpoints) < FEWEST + WARM_UP:
        return None
    samples = [
        StepReading(
            step=number, host_bytes=point["cpu_used_bytes"] or 0, allocated_bytes=point["allocated_bytes"],
            reserved_bytes=point["reserved_bytes"], peak_bytes=point["peak_bytes"],
        )
        for number, point in enumerate(checkpoints)
    ]  # fmt: skip
    found = growth_of(samples, capacity_bytes=None, host_bytes=0).to_json()
    return {**found, "runs_out_at_step": None}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One error, as far as the input tells it."""

    oom: Oom | None
    place: FailurePlace
    clues: Clues
    found: OomMessages | None = None
    recorded: RecordedRequest | None = None
    cause: Cause | None = None
    holders: tuple[dict[str, Any], ...] = ()
    growth: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


def case_of(source: Input) -> Case:
    return _from_text(source) if source.kind == "text" else _from_recording(source)


def _from_text(source: Input) -> Case:
    found = find_ooms(source.excerpt)
    if not found:
        return Case(oom=None, place=FailurePlace(), clues=clues_in(source.text, None, FailurePlace()))
    chosen = _chosen(source.text, found)
    place = place_from(frames_before(chosen))
    clues = clues_in(source.text, chosen, place)
    return Case(oom=chosen.oom, place=place, clues=clues, found=found, growth=source.growth)


def _chosen(text: str, found: OomMessages) -> LocatedOom:
    """The last, for what came before was survived; unless it is a consequence: then the first."""
    last = found.last
    if last.oom.over_an_exabyte and len(found.ooms) > 1 and clues_in(text, last, FailurePlace()).after_nccl_timeout:
        return found.first
    return last


def _from_recording(source: Input) -> Case:
    """A snapshot has the moment to the byte, a folder has text too; a memory log has only heights."""
    report = source.report or {}
    log = report.get("log")
    text = _from_text(source) if source.text else None
    growth = source.growth or _growth(report) or (growth_of_log(log["checkpoints"]) if log else None)
    if report.get("ooms"):
        return _from_event(report, text, growth)
    if text is not None and text.oom is not None:
        return replace(text, growth=growth)
    peak = (report.get("peak") or {}).get("allocated_bytes")
    nothing = Cause("none", f"No request failed in this recording; its peak was {gib(peak)}.")
    cause = cause_of_log(log) if log else nothing
    return Case(oom=None, place=FailurePlace(), clues=text.clues if text else Clues(), cause=cause, growth=growth)


def _from_event(report: Mapping[str, Any], text: Case | None, growth: dict[str, Any] | None) -> Case:
    """The last request that failed; with the numbers of a message beside it if they are of the same request."""
    events = report["ooms"]
    event = events[-1]
    place = place_from(frames_of_stack(event["stack"]))
    notes = [message["text"] for message in report.get("messages", ())]
    if len(events) > 1:
        notes.insert(0, f"{len(events)} requests failed in this recording; this is the last")
    sizes = {name: event[name] for name in ("requested_bytes", "cached_bytes", "largest_hole_bytes")}
    expandable = bool((report.get("settings") or {}).get("expandable_segments"))
    made = Case(
        oom=oom_of_record(event),
        place=place,
        clues=clues_in(" ".join(event["stack"]), None, place),
        growth=growth,
        recorded=RecordedRequest(**sizes, expandable=expandable),
        holders=tuple({name: share[name] for name in HOLDER} for share in event["by_code_line"][:HOLDERS]),
        notes=tuple(notes),
    )
    if text is None or text.oom is None:
        return made
    made = replace(made, clues=text.clues, found=text.found, place=place if place.frames else text.place)
    same = text.oom.requested is not None and text.oom.requested.may_be(event["segment_bytes"])
    return replace(made, oom=text.oom) if same else made


def _growth(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of a recording: whether steps leave more and more behind."""
    grown = report.get("growth")
    if not grown or grown.get("grows") is None:
        return None
    if not grown["grows"]:
        return {"kind": "none", "text": "memory does not grow from step to step in the recording"}
    each = format_bytes(grown["per_step_bytes"])
    return {"kind": "leak", "text": f"leak: every step of the recording leaves {each} more behind"}
