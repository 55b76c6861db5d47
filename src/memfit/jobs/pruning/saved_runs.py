"""What lies under the name that `--save` gives: an unfinished run and its journal, a result, another run's lock.

    NAME.partial.jsonl    the journal: what the run is, then a line for each block that is safely on disk
    NAME.partial/         the files of the new model, at their full size, filled block by block (`output.py`)
    NAME.partial.old/     for a moment: the result that NAME held before and that the new one replaces
    NAME.partial.lock     while a run writes to NAME: locked, with the process that holds it; a killed one holds nothing

The journal has one JSON object a line, each on disk before the next step is taken. A run may be killed in the middle of
a line; what comes after the last whole line is not believed. The first line is there before anything else of the run
is: whatever lies under the run's names beside it is the run's own.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

from memfit.errors import InputError, UsageError
from memfit.files import to_disk, undone, written_whole
from memfit.jobs.pruning.result import FILE, document_in, is_result
from memfit.jobs.pruning.settings import PruneSettings
from memfit.models.checkpoint import INDEX, WEIGHTS
from memfit.units import format_bytes

CHOOSE = "name a folder that is empty or not there yet, such as --save pruned"
ALONG = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*",
    "merges.txt", "*.model", "*.tiktoken", "chat_template*", "LICENSE*", "NOTICE*",
)  # fmt: skip
"""What goes along with the weights; a model card that describes the dense model does not."""
LOGS = "memory_log*.csv"
RESULTS = (FILE, "log_*.txt", LOGS)
FORMAT = "memfit.prune-journal/1"
CLOEXEC = getattr(os, "O_CLOEXEC", 0)


# -- the names ---------------------------------------------------------------------------------------------------------


def absolute(save: str | Path) -> Path:
    """Of a symbolic link, where it leads: what is renamed and replaced is there, and the link stays."""
    path = Path(os.path.abspath(os.path.expanduser(save)))
    return Path(os.path.realpath(path)) if os.path.islink(path) else path


def place_of(save: str) -> Path:
    """`absolute`, of what can be written as far as names tell."""
    if not save:
        raise UsageError("--save is empty", hint=CHOOSE)
    path = absolute(save)
    if not path.name:
        raise UsageError(f"--save '{save}' is the root of all folders", hint=CHOOSE)
    for place in (path, *path.parents):
        why = None
        if os.path.islink(place) and not place.exists():
            why = "a symbolic link that leads nowhere"
        elif place != path and place.exists() and not place.is_dir():
            why = "a file"
        if why is not None:
            raise InputError(f"--save '{save}' cannot be written: '{place}' is {why}", hint=CHOOSE)
    return path


def partial_of(save: Path) -> Path:
    return save.with_name(f"{save.name}.partial")


def journal_of(save: Path) -> Path:
    return save.with_name(f"{save.name}.partial.jsonl")


def replaced_of(save: Path) -> Path:
    return save.with_name(f"{save.name}.partial.old")


def is_taken(save: Path) -> bool:
    """An empty folder is as good as none."""
    return save.exists() and (not save.is_dir() or any(save.iterdir()))


def check_room(path: Path, needed: int, *, said: str) -> None:
    free = shutil.disk_usage(_existing(path)).free
    if free < needed:
        raise InputError(
            f"{said} needs {format_bytes(needed)}; its disk has {format_bytes(free)} free",
            hint="make room, or choose a folder on another disk",
        )


def is_same_disk(one: Path, other: Path) -> bool:
    return _existing(one).stat().st_dev == _existing(other).stat().st_dev


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


@contextmanager
def writing_to(save: object) -> Iterator[None]:
    """A disk that is full, or gone, in words."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise InputError(
            f"--save '{save}' cannot be written: {error.strerror}",
            hint="make room and run the same command with --resume" if full else None,
        ) from error


# -- an unfinished run -------------------------------------------------------------------------------------------------


class Journal:
    def __init__(self, path: Path, key: Mapping[str, Any]) -> None:
        self.path = path
        self.key = dict(key)
        self.settings: dict[str, Any] = {}
        self.blocks: list[dict[str, Any]] = []
        self._file: int | None = None
        self._end = 0

    def begin(self) -> None:
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | CLOEXEC, 0o666)
        self._append({"format": FORMAT, "run": self.key})
        to_disk(self.path.parent)

    @classmethod
    def read(cls, path: Path) -> Journal | None:
        """Up to the first line that is not whole. None where not even the first one is: nothing was begun."""
        made: Journal | None = None
        for line, at in _lines(path):
            if made is None:
                if line.get("format") != FORMAT:
                    raise InputError(f"the journal '{path}' is of another version of memfit")
                made = cls(path, line.get("run", {}))
            elif "set" in line:
                made.settings.update(line["set"])
            elif line.get("block") == len(made.blocks):
                made.blocks.append(line)
            made._end = at
        return made

    def go_on(self, key: Mapping[str, Any], *, save: str) -> None:
        """Write after the last whole line, if the run that began it was asked for the same."""
        other = sorted(name for name in {*self.key, *key} if self.key.get(name) != key.get(name))
        if other:
            was = ", ".join(f"{name} {self.key.get(name)!r}" for name in other if name != "source")
            raise InputError(
                f"--resume: '{save}' was begun with other settings: {was or 'the model has changed since'}",
                hint="use the same command, or another --save",
            )
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | CLOEXEC)
        os.ftruncate(self._file, self._end)

    def remember(self, name: str, value: Any) -> None:
        self.settings[name] = value
        self._append({"set": {name: value}})

    def add_block(self, block: int, checksum: int, facts: Mapping[str, Any]) -> None:
        line = {"block": block, "checksum": checksum, "facts": dict(facts)}
        self._append(line)
        self.blocks.append(line)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def delete(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)

    def _append(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None
        data = (json.dumps(line) + "\n").encode()
        while data:
            data = data[os.write(self._file, data) :]
        os.fsync(self._file)


def forget_blocks(path: Path) -> None:
    """Leave the first line alone: the files are about to go, and no block may be believed without them."""
    for _, end in islice(_lines(path), 1):
        with path.open("r+b") as stream:
            os.ftruncate(stream.fileno(), end)
            os.fsync(stream.fileno())


def _lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Whole lines, each with the place where it ends."""
    end = 0
    with path.open("rb") as stream:
        for raw in stream:
            end += len(raw)
            try:
                line = json.loads(raw) if raw.endswith(b"\n") else None
            except ValueError:
                line = None
            if not isinstance(line, dict):
                return
            yield line, end


def unfinished(save: Path, said: str, *, resume: bool) -> Journal | None:
    """The journal to go on with. What has no finished block is cleared away instead: there is nothing to lose."""
    working, beside = partial_of(save), journal_of(save)
    found = Journal.read(beside) if beside.exists() else None
    if found is not None and found.blocks:
        if not resume:
            raise InputError(
                f"--save '{said}': an earlier run was not finished ({working.name})",
                hint="--resume continues it, --force begins anew",
            )
        return found
    if working.exists() and found is None:
        raise InputError(
            f"'{working}' is in the way: it has no journal of memfit ({beside.name}) that says what it is",
            hint="move it away, or delete it if it is the rest of a run that was killed",
        )
    discard(save)
    return None


def discard(save: Path) -> None:
    """An unfinished run, in an order that may be cut off anywhere: the journal, without which the rest is nobody's,
    goes last, and says from the beginning that no block can be relied on."""
    journal = journal_of(save)
    if journal.exists():
        forget_blocks(journal)
        shutil.rmtree(partial_of(save), ignore_errors=True)
        journal.unlink()


def _tidy(path: Path) -> None:
    """Finish what a run did not that was killed between its last steps."""
    old = replaced_of(path)
    if old.exists() and not is_taken(path):
        old.rename(path)
    if is_result(path) and journal_of(path).exists() and not partial_of(path).exists():
        shutil.rmtree(old, ignore_errors=True)
        journal_of(path).unlink()


# -- a result that is there --------------------------------------------------------------------------------------------


def check(settings: PruneSettings, *, force: bool) -> dict[str, Any] | None:
    """An existing folder is found before the model is even looked for. Nothing is deleted yet but remains. Answers with
    the document of a result where nothing is left to resume."""
    if settings.save is None:
        return None
    path, said = place_of(settings.save), settings.save
    if force and settings.resume:
        raise UsageError("--force begins anew and --resume continues: give one of them")
    model = Path(settings.workload.model).expanduser()
    if model.exists() and path.exists() and model.samefile(path):
        raise InputError(f"--save '{said}' is the model itself", hint="choose another folder")
    with writing_to(said):
        _tidy(path)
    if not is_taken(path) or (settings.resume and journal_of(path).exists()):
        return None
    if not is_result(path):
        why = " and is not the result of an earlier run (it has no result.json of memfit)" if force else ""
        hint = "--force deletes only such results: choose another folder, or move this one away"
        raise InputError(f"--save '{said}' already exists{why}", hint=hint if force else "choose another folder")
    if not force and not _asks_for_the_same(path, settings):
        what = "is the complete result of another run" if settings.resume else "already exists"
        raise InputError(f"--save '{said}' {what}", hint="choose another folder, or --force replaces it")
    if settings.resume:
        return document_in(path)
    if not (force or settings.log_memory) and any(path.glob(LOGS)):
        hint = "--log-memory writes one again; or choose another folder, or --force replaces it"
        raise InputError(f"--save '{said}' holds a memory log, which this run would not write", hint=hint)
    return None


def holds_same_run(save: str, key: Mapping[str, Any]) -> bool:
    """Whether the folder is the untouched result of the same settings, model and text: doing it again loses nothing."""
    path = absolute(save)
    if not is_taken(path) or document_in(path).get("run") != {**key}:
        return False
    written = (path / FILE).stat().st_mtime_ns
    ours = (*ALONG, WEIGHTS, INDEX, *RESULTS)
    return all(
        each.is_file() and each.stat().st_mtime_ns <= written and any(fnmatch(each.name, name) for name in ours)
        for each in path.iterdir()
    )


def check_results(folder: str | None, settings: PruneSettings, *, force: bool) -> None:
    """A folder that is to hold results only may exist and hold other things, but not another run's results."""
    if folder is None:
        return
    path = Path(folder).expanduser()
    with writing_to(folder):
        path.mkdir(parents=True, exist_ok=True)
    if (path / FILE).exists() and not (force or settings.resume or _asks_for_the_same(path, settings)):
        raise InputError(
            f"--save '{folder}' has results already", hint="choose another folder, or --force replaces them"
        )


def copy_results(saved: Path, folder: str | None) -> None:
    if folder is not None:
        for name in RESULTS:
            for path in saved.glob(name):
                with written_whole(Path(folder).expanduser() / path.name) as beside:
                    shutil.copyfile(path, beside)


def _asks_for_the_same(path: Path, settings: PruneSettings) -> bool:
    """Whether a result is of this very run, as far as the settings alone can tell."""
    document, asked = document_in(path), settings.to_json()
    run = document.get("run")
    if document.get("model") != settings.workload.model or not isinstance(run, dict):
        return False
    return all(run[name] == asked[name] for name in run.keys() & asked.keys() - {"seqlen", "device"})


# -- who may write -----------------------------------------------------------------------------------------------------


@contextmanager
def held(save: str | None, warn: Callable[[str], None]) -> Iterator[None]:
    """The folder is this process's while this is open. A second run is told whose it is."""
    if save is None:
        yield
        return
    path = place_of(save)
    with writing_to(save):
        made = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f"{path.name}.partial.lock")
        descriptor = _locked(lock, save, warn)

    def let_go() -> None:
        lock.unlink(missing_ok=True)  # while it is held: whoever has opened it meanwhile finds that it is gone
        os.close(descriptor)
        for folder in made:
            with suppress(OSError):  # something was saved there
                folder.rmdir()

    with undone(let_go):
        yield


def _locked(path: Path, said: str, warn: Callable[[str], None]) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 300, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise InputError(
                f"--save '{said}' is being written by {holder}", hint="wait until it ends, or choose another folder"
            ) from error
        except OSError as error:  # not every network file system can
            warn(f"'{path.parent}' knows no locks ({error.strerror}): see to it that no other run writes to '{said}'")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return descriptor
        os.close(descriptor)  # its owner has just removed it
