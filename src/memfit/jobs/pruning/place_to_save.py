"""The folder of `--save` before and after a run: whose it is, whether it may be written, what a broken run leaves.

NAME.partial.lock    while a run writes to NAME: locked, with the process that holds it; a killed one holds nothing
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from memfit.core.whole_file import written_whole
from memfit.errors import InputError, MemfitError, UsageError
from memfit.jobs.pruning.output import (
    ALONG,
    OutputFolder,
    absolute,
    discard,
    is_taken,
    journal_of,
    partial_of,
    replaced_of,
    writing_to,
)  # fmt: skip
from memfit.jobs.pruning.result import FILE, is_result
from memfit.jobs.pruning.settings import PruneSettings
from memfit.models.checkpoint import INDEX, WEIGHTS

RESULTS = (FILE, "log_*.txt", "memory_log*.csv")


@contextmanager
def held(save: str | None, warn: Callable[[str], None]) -> Iterator[None]:
    """The folder is this process's while this is open. A second run is told whose it is."""
    if save is None:
        yield
        return
    path = absolute(save)
    with writing_to(save):
        made = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f"{path.name}.partial.lock")
        descriptor = _locked(lock, save, warn)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)  # while it is held: whoever has opened it meanwhile finds that it is gone
        os.close(descriptor)
        for folder in made:
            with suppress(OSError):  # something was saved there
                folder.rmdir()


def check(settings: PruneSettings, *, force: bool) -> None:
    """An existing folder is found before the model is even looked for. Nothing is deleted yet but remains."""
    if settings.save is None:
        return
    path, said = absolute(settings.save), settings.save
    if force and settings.resume:
        raise UsageError("--force begins anew and --resume continues: give one of them")
    _check_not_the_model(path, settings)
    with writing_to(said):
        _tidy(path)
    if not is_taken(path) or (settings.resume and journal_of(path).exists()):
        return
    if not is_result(path):
        why = " and is not the result of an earlier run (it has no result.json of memfit)" if force else ""
        hint = "--force deletes only such results: choose another folder, or move this one away"
        raise InputError(f"--save '{said}' already exists{why}", hint=hint if force else "choose another folder")
    if not force and (settings.resume or not _asks_for_the_same(path, settings)):
        what = "is complete already" if settings.resume else "already exists"
        raise InputError(f"--save '{said}' {what}", hint="choose another folder, or --force replaces it")


def holds_same_run(save: str, key: Mapping[str, Any]) -> bool:
    """Whether the folder is the untouched result of the same settings, model and text: doing it again loses nothing."""
    path = absolute(save)
    if not is_taken(path) or _document(path).get("run") != {**key}:
        return False
    written = (path / FILE).stat().st_mtime_ns
    ours = (*ALONG, WEIGHTS, INDEX, *RESULTS)
    return all(
        each.is_file() and each.stat().st_mtime_ns <= written and any(fnmatch(each.name, name) for name in ours)
        for each in path.iterdir()
    )


def begin_anew(save: str) -> None:
    """For --force: what an unfinished run has left goes; a finished result stays until the new one is whole."""
    with writing_to(save):
        discard(absolute(save))


def leave(output: OutputFolder) -> None:
    """After a run that broke: keep what --resume can use, and nothing else."""
    with suppress(MemfitError, OSError):
        output.close()
    if output.finished_blocks == 0:
        with suppress(OSError):
            discard(output.save)


def check_results(folder: str | None, settings: PruneSettings, *, force: bool) -> None:
    """A folder that is to hold results only may exist and hold other things, but not another run's results."""
    if folder is None:
        return
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--save '{folder}' cannot be written: {error.strerror}") from error
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


def _locked(path: Path, said: str, warn: Callable[[str], None]) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 300, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise InputError(
                f"--save '{said}' is being written by {holder}",
                hint="wait until it ends, or choose another folder",
            ) from error
        except OSError as error:  # not every network file system can
            warn(f"'{path.parent}' knows no locks ({error.strerror}): see to it that no other run writes to '{said}'")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return descriptor
        os.close(descriptor)  # its owner has just removed it


def _tidy(path: Path) -> None:
    """Finish what a run did not that was killed between its last steps."""
    old = replaced_of(path)
    if old.exists() and not is_taken(path):
        old.rename(path)
    if is_result(path) and journal_of(path).exists() and not partial_of(path).exists():
        shutil.rmtree(old, ignore_errors=True)
        journal_of(path).unlink()


def _check_not_the_model(path: Path, settings: PruneSettings) -> None:
    model = Path(settings.model).expanduser()
    if model.exists() and path.exists() and model.samefile(path):
        raise InputError(f"--save '{settings.save}' is the model itself", hint="choose another folder")


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads((path / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _asks_for_the_same(path: Path, settings: PruneSettings) -> bool:
    """Whether a result is of this very run, as far as the settings alone can tell."""
    document, asked = _document(path), settings.to_json()
    run = document.get("run")
    if document.get("model") != settings.model or not isinstance(run, dict):
        return False
    return all(run[name] == asked[name] for name in run.keys() & asked.keys() - {"seqlen", "device"})
