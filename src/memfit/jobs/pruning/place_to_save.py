"""The folder of `--save` before and after a run: whether it may be written, and what a broken run leaves of it."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from memfit.core.whole_file import written_whole
from memfit.errors import InputError, MemfitError, UsageError
from memfit.jobs.pruning.output import OutputFolder, journal_of, partial_of
from memfit.jobs.pruning.result import FILE, is_result
from memfit.jobs.pruning.settings import PruneSettings


def check(settings: PruneSettings, *, force: bool) -> None:
    """An existing folder is found before the model is even looked for; --force makes room."""
    if settings.save is None:
        return
    path = Path(os.path.abspath(os.path.expanduser(settings.save)))
    if force and settings.resume:
        raise UsageError("--force begins anew and --resume continues: give one of them")
    if force:
        _clear(path, settings.save)
    elif path.exists() and (not path.is_dir() or any(path.iterdir())) and not journal_of(path).exists():
        what = "is complete already" if settings.resume and is_result(path) else "already exists"
        hint = "choose another folder, or --force replaces it" if is_result(path) else "choose another folder"
        raise InputError(f"--save '{settings.save}' {what}", hint=hint)


def _clear(path: Path, said: str) -> None:
    """Make room for --force. Only what memfit itself has written is deleted."""
    if path.exists() and (not path.is_dir() or (any(path.iterdir()) and not is_result(path))):
        raise InputError(
            f"--save '{said}' already exists and is not the result of an earlier run (it has no {FILE} of memfit)",
            hint="--force deletes only such results: choose another folder, or move this one away",
        )
    try:
        if path.is_dir():
            shutil.rmtree(path)
        shutil.rmtree(partial_of(path), ignore_errors=True)
        journal_of(path).unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"--save '{said}' cannot be replaced: {error.strerror}") from error


def leave(output: OutputFolder) -> None:
    """After a run that broke: keep what --resume can use, and nothing else."""
    with suppress(MemfitError, OSError):
        output.close()
    if output.finished_blocks == 0 and not output.save.exists():
        shutil.rmtree(output.working, ignore_errors=True)
        with suppress(OSError):
            output.journal.path.unlink(missing_ok=True)


def check_results(folder: str | None, *, replace: bool) -> None:
    """A folder that is to hold results only may exist and hold other things, but not another run's results."""
    if folder is None:
        return
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--save '{folder}' cannot be written: {error.strerror}") from error
    if (path / FILE).exists() and not replace:
        raise InputError(
            f"--save '{folder}' has results already", hint="choose another folder, or --force replaces them"
        )


def copy_results(saved: Path, folder: str | None) -> None:
    if folder is not None:
        for name in (FILE, "log_*.txt", "memory_log*.csv"):
            for path in saved.glob(name):
                with written_whole(Path(folder).expanduser() / path.name) as beside:
                    shutil.copyfile(path, beside)
