"""What was handed to `memfit explain`, told from its content: text, a snapshot, a memory log or a run's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from memfit.advice.oom_message import find_ooms
from memfit.advice.pasted_text import MAX_TEXT
from memfit.errors import InputError

Kind = Literal["text", "snapshot", "memory_log", "run_folder"]
TEXT_ENDINGS = (".log", ".txt", ".out", ".err")
TEXT_NAMES = ("stdout", "stderr", "nohup.out")
RECORDINGS = (".pickle", ".pkl", ".pickle.gz", ".pkl.gz", ".npz")
MAX_FILES = 50
MAX_FOLDER_TEXT = 64 << 20
MAX_JSON = 4 << 20
LONGEST_PATH = 4096


@dataclass(frozen=True, kw_only=True)
class Input:
    kind: Kind
    path: str | None = None
    text: str = ""
    text_from: str | None = None
    """Of a folder: the file that the text is from."""
    report: dict[str, Any] | None = None
    """memfit.report/1 of the recording or the log, where there is one."""
    config: Path | None = None
    growth: dict[str, Any] | None = None
    result: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_input(source: str | bytes | os.PathLike[str]) -> Input:
    """A path if there is such a file, else the text itself."""
    if isinstance(source, bytes):
        return Input(kind="text", text=decoded(source))
    if isinstance(source, str) and not _names_a_file(source) and not _means_a_file(source):
        return Input(kind="text", text=source)
    path = Path(source)
    if not path.exists():
        raise InputError(f"no file or folder {str(path)!r}", hint="`-` reads a pasted message from stdin")
    return _folder(path) if path.is_dir() else _file(path)


def _names_a_file(text: str) -> bool:
    if not text or len(text) > LONGEST_PATH or "\n" in text or "\0" in text:
        return False
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        return False


def _means_a_file(text: str) -> bool:
    """A name with a typing mistake is no message."""
    plain = text.isprintable() and " " not in text and len(text) <= LONGEST_PATH
    return plain and (
        text.endswith((*TEXT_ENDINGS, *RECORDINGS, ".csv", ".json")) or text.startswith(("/", "./", "~/"))
    )


def decoded(raw: bytes) -> str:
    """UTF-8, or what PowerShell writes; bytes that are neither do not matter."""
    raw = raw[-MAX_TEXT:] if not raw.startswith((b"\xff\xfe", b"\xfe\xff")) else raw[:MAX_TEXT]
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        return raw.decode("utf-16", "replace")
    return raw.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")


# -- a file --------------------------------------------------------------------------------------------------------


def _file(path: Path) -> Input:
    if not path.is_file():  # a pipe, as the shell's <(...) is one
        return Input(kind="text", path=str(path), text=decoded(_read(path, MAX_TEXT)))
    head = _read(path, 4096)
    if path.name.endswith(RECORDINGS) or _may_be_snapshot(head):
        try:
            return _recording(path)
        except InputError:
            if path.name.endswith(RECORDINGS):
                raise
    from memfit.core.memory_log_file import looks_like_a_log

    if looks_like_a_log(head):
        return Input(kind="memory_log", path=str(path), report=_report(path))
    return Input(kind="text", path=str(path), text=decoded(_ends(path)))


def _may_be_snapshot(head: bytes) -> bool:
    return head[:1] == b"\x80" or head[:2] == b"PK" or (head.lstrip()[:1] == b"{" and b'"segments"' in head)


def _recording(path: Path) -> Input:
    return Input(kind="snapshot", path=str(path), report=_report(path))


def _report(path: Path) -> dict[str, Any]:
    from memfit.core.report_file import report_file

    return report_file(path).document


def _ends(path: Path) -> bytes:
    """All of it, or the beginning and the end of what is larger than can be read."""
    size = path.stat().st_size
    if size <= MAX_TEXT:
        return _read(path, MAX_TEXT)
    first = _read(path, MAX_TEXT // 8)
    with path.open("rb") as source:
        source.seek(size - MAX_TEXT * 7 // 8)
        return first + b"\n" + source.read(MAX_TEXT * 7 // 8)


def _read(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as source:
            return source.read(most)
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror}") from error


# -- the folder of a run -------------------------------------------------------------------------------------------


def _folder(folder: Path) -> Input:
    result = _json(folder / "result.json")
    text, name = _text_of(folder, result)
    report, notes = _report_of(folder)
    config = folder / "config-resolved.yaml"
    if not config.exists():
        config = folder / "config.yaml"
    growth = result.get("growth")
    if not text and report is None:
        raise InputError(
            f"nothing to explain in {str(folder)!r}",
            hint="a run's folder has a log (*.log, *.txt), a snapshot (*.pickle) or a memory_log.csv",
        )
    return Input(
        kind="run_folder", path=str(folder), text=text, text_from=name, report=report,
        config=config if config.is_file() else None, growth=growth if isinstance(growth, dict) else None, result=result,
        notes=notes,
    )  # fmt: skip


def _text_of(folder: Path, result: dict[str, Any]) -> tuple[str, str | None]:
    """The newest log that has an out-of-memory message, or else the newest; then what the result tells of one."""
    newest: tuple[str, str | None] = "", None
    for path in _logs(folder):
        text = decoded(_ends(path))
        if find_ooms(text):
            return text, path.name
        if not newest[0]:
            newest = text, path.name
    happened = result.get("out_of_memory")
    causes = [each.get("cause") for each in happened if isinstance(each, dict)] if isinstance(happened, list) else []
    said = "\n".join(cause for cause in causes if isinstance(cause, str))
    return (said, "result.json") if said else newest


def _logs(folder: Path) -> Iterator[Path]:
    try:
        found = [path for path in sorted(folder.iterdir())[:1000] if path.is_file() and _is_log(path.name)]
    except OSError as error:
        raise InputError(f"cannot read the folder {str(folder)!r}: {error.strerror}") from error
    found.sort(key=lambda path: (path.name != "train.log", -path.stat().st_mtime))
    size = 0
    for path in found[:MAX_FILES]:
        size += min(path.stat().st_size, MAX_TEXT)
        if size > MAX_FOLDER_TEXT:
            return
        yield path


def _is_log(name: str) -> bool:
    return (name.endswith(TEXT_ENDINGS) or name in TEXT_NAMES) and not name.startswith(".")


def _report_of(folder: Path) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    try:
        return _report(folder), ()
    except InputError as error:
        return None, () if error.message.startswith("nothing to report") else (error.message,)


def _json(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file() or path.stat().st_size > MAX_JSON:
            return {}
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
