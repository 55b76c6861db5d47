"""The one door through which memfit writes files.

A file that is there is whole: it is written beside its place and renamed, and a failure leaves what was there. Only
regular files are replaced so. A link stays, and what it points at is written; into a pipe or a device the bytes go as
into any other program's, once all of them are there; and nothing is ever written over what is being read.

Where memfit keeps what it can make again. Python's garbage collector, held back where it would only look at live
objects, again and again.
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from memfit.errors import InputError


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """Where to write it."""
    path = Path(path)
    there = _status(path)
    target = Path(os.path.realpath(path))
    if there is not None and not _can_be_replaced(target, there):
        with tempfile.TemporaryDirectory(prefix="memfit-") as folder:
            whole = Path(folder) / "whole"
            yield whole
            _pour(whole, path, there)
        return
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)  # a link that somebody put there would be followed
    _sweep(target)
    try:
        yield beside
        if there is not None:
            with suppress(OSError):  # not every file system has them
                beside.chmod(stat.S_IMODE(there.st_mode))
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def to_disk(path: Path) -> None:
    """What a file holds, or the names in a folder, before anything else is done."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


UNTOUCHED_SECONDS = 600.0
"""A process of another machine, which shares the folder, may still write what is younger."""


def _sweep(target: Path) -> None:
    """What was written beside this very file by processes that were killed and are gone."""
    begins = f".{target.name}."
    with suppress(OSError), os.scandir(target.parent) as there:
        for each in there:
            number = each.name.removeprefix(begins)
            if each.name == number or not number.isdecimal() or not each.is_file(follow_symlinks=False):
                continue
            if is_abandoned(Path(each.path), int(number)):
                Path(each.path).unlink(missing_ok=True)


def is_abandoned(path: Path, process: int) -> bool:
    """Whether what this process wrote, a file or a folder of files, will not be finished any more."""
    inside = path.iterdir() if path.is_dir() else ()
    written = max(each.stat(follow_symlinks=False).st_mtime for each in (path, *inside))
    return time.time() - written > UNTOUCHED_SECONDS and not _is_alive(process)


def _is_alive(process: int) -> bool:
    if not hasattr(os, "fork"):  # where a signal is an end, whatever its number
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another's, or no number of a process
        return True
    return True


def check_free(
    path: Path, name: str, force: bool, *, inputs: Iterable[Path] = (), hint: str = "--force overwrites it"
) -> None:
    """Nothing is overwritten unasked, and what is read not even then; what cannot be written is told before the work is
    done. `name` is what the person calls it: a flag, a parameter."""
    said = f"{name} {str(path)!r}"
    try:
        there = _status(path)
        folder = Path(os.path.realpath(path)).parent if path.is_symlink() else path.parent
        has_folder = there is not None or folder.is_dir()
    except OSError as error:  # a name may be too long to be asked about, a link may lead back to itself
        raise InputError(f"{said} cannot be written: {error.strerror}") from error
    if not has_folder:
        raise InputError(f"{said}: there is no folder {str(folder)!r}")
    if there is None:
        return
    if stat.S_ISDIR(there.st_mode):
        raise InputError(f"{said} is a folder", hint="name the file that should be written")
    if stat.S_ISBLK(there.st_mode) or stat.S_ISSOCK(there.st_mode):
        kind = "disk" if stat.S_ISBLK(there.st_mode) else "socket"
        raise InputError(f"{said} is a {kind}", hint="name a file, a pipe or a character device such as /dev/null")
    for source in inputs:
        if _is(source, there):
            raise InputError(f"{said} is what is being read ({str(source)!r})", hint="give the output another name")
    if stat.S_ISREG(there.st_mode) and _stream_of(there) is None and not force:
        raise InputError(f"{said} already exists", hint=hint)


def files_of_model(model: str) -> list[Path]:
    """What is read of a model that is a file or a folder. Recordings and traces may lie beside it."""
    place = Path(model).expanduser()
    try:
        if not place.is_dir():
            return [place]
        return [each for each in place.iterdir() if each.suffix not in (".npz", ".pickle", ".pkl")]
    except (OSError, ValueError):
        return []


CACHE_VARIABLE = "MEMFIT_CACHE"
CACHES_OFF = ("off", "0")


def own_cache(usual: str, *, in_said: str = "") -> Path | None:
    """Where memfit keeps what it can make again: in the folder that MEMFIT_CACHE names, or as `usual` among the caches
    of this user. None if nowhere. It need not exist yet."""
    said = os.environ.get(CACHE_VARIABLE, "")
    if said:
        return None if said.lower() in CACHES_OFF else Path(os.path.abspath(os.path.expanduser(said)), in_said)
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(caches):  # as the XDG specification has it: a relative path is to be ignored
        home = os.path.expanduser("~")
        if not os.path.isdir(home):
            return None
        caches = os.path.join(home, ".cache")
    return Path(caches, "memfit", usual)


@cache
def folder_of_this_process() -> Path:
    """It goes with the process."""
    made = tempfile.mkdtemp(prefix="memfit-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


_begun: list[tuple[int, Callable[[], None]]] = []


@contextmanager
def undone(undo: Callable[[], None]) -> Iterator[None]:
    """`undo` is called after this, and also where a signal ends this process at once, amid an import."""
    begun = os.getpid(), undo
    _begun.append(begun)
    try:
        yield
    finally:
        undo()
        _begun.remove(begun)


def undo_at_once() -> bool:
    """Whether there was anything; what a process began before it was forked is its own."""
    own = [undo for process, undo in reversed(_begun) if process == os.getpid()]
    for undo in own:
        with suppress(Exception):
            undo()
    return bool(own)


OPEN_ALREADY = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")


def check_ends(path: Path) -> os.stat_result:
    """Its status, if it can be read to an end: a file, a folder, or a pipe that the shell has opened, as of `<(...)`.
    A pipe by name waits for a writer who may never come, and devices have no end."""
    try:
        there = path.stat()
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
    mode = there.st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or (stat.S_ISFIFO(mode) and str(path).startswith(OPEN_ALREADY)):
        return there
    kind = "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
    raise InputError(f"{str(path)!r} is a {kind}, which may have no end", hint="only files and folders are read")


def text_in(path: Path, most: int, what: str) -> str:
    """Of a small file that somebody wrote; no more is read than `what` it is may have."""
    check_ends(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(most + 1)
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"'{path}' is not UTF-8 text") from error
    except OSError as error:
        raise InputError(f"cannot read '{path}': {error.strerror}") from error
    if len(raw) > most:
        raise InputError(f"'{path}' is too long: {what} has at most {most:,} bytes")
    return text


@contextmanager
def writing(path: Path, name: str) -> Iterator[None]:
    """A file that cannot be written is told in the words of the flag that named it."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{name} {str(path)!r} cannot be written: {error.strerror}") from error


def is_own_stream(path: Path) -> bool:
    """Whether what is written there appears among what is printed: /dev/stdout by any name."""
    there = _status(path)
    return there is not None and _stream_of(there) is not None


def continues_log(path: Path, header: str, what: str) -> bool:
    """Whether such a log is there already. Any other file of that name is not touched."""
    there = _status(path)
    if there is None or not stat.S_ISREG(there.st_mode) or there.st_size == 0:
        return False
    with path.open("rb") as file:
        if file.read(len(header)) != header.encode():
            raise InputError(f"'{path}' exists and is not a {what}", hint=f"give the {what} another name")
    return True


def _status(path: Path) -> os.stat_result | None:
    """Of what the name leads to in the end; None if there is nothing yet."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _is(path: Path, there: os.stat_result) -> bool:
    """By whatever name: another spelling, a link, a hard link."""
    try:
        return os.path.samestat(path.stat(), there)
    except (OSError, ValueError):
        return False


def _can_be_replaced(target: Path, there: os.stat_result) -> bool:
    """A regular file that a name leads to; /dev/stdout may be one that has none any more."""
    return stat.S_ISREG(there.st_mode) and _is(target, there) and _stream_of(there) is None


def _stream_of(there: os.stat_result) -> int | None:
    """The descriptor, if this is where stdout or stderr go: what was printed before and what comes after stays."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), there):
                return descriptor
    return None


def _pour(whole: Path, path: Path, there: os.stat_result) -> None:
    stream = _stream_of(there)
    if stream is not None and sys.stdout is not None:
        sys.stdout.flush()
    created = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    descriptor = when_read(str(path), created) if stream is None else os.dup(stream)
    with whole.open("rb") as source, os.fdopen(descriptor, "wb") as out:
        shutil.copyfileobj(source, out)


SECONDS_FOR_A_READER = 10.0
"""What reads a pipe may be started at the same time as what writes it."""


def when_read(path: str, flags: int) -> int:
    """For `open`. To open a pipe by name is to wait for its reader, who may never come."""
    if not Path(path).is_fifo():
        return os.open(path, flags, 0o666)
    until = time.monotonic() + SECONDS_FOR_A_READER
    while True:
        try:
            descriptor = os.open(path, flags | os.O_NONBLOCK)
            break
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if time.monotonic() > until:
                why = f"{str(path)!r} is a pipe, and nobody reads it"
                raise InputError(why, hint="start what reads it first, or name a file") from None
        time.sleep(0.02)
    os.set_blocking(descriptor, True)
    return descriptor


@contextmanager
def no_collector() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
