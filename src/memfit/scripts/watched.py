"""A program in a process of its own, which another one watches: ends it in time, cleans up after it, speaks for it.

A program may catch what should end it, close its outputs, crash, kill its process or leave others behind. The two
processes talk by memory that both have and a file in a folder of theirs: such a program may close every descriptor.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import faulthandler
import io
import math
import mmap
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from memfit.errors import MemfitError, TraceError
from memfit.files import written_whole

PATIENCE = 5.0
"""Seconds that a program has to end by itself once its time is up."""
LEAVES_WITHIN = 2.0
"""The same, once its answer is known."""
LOOKS = 0.02
"""Seconds between two looks at it."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PREFIX = "memfit-script-"
NO_PLAN = "it did so before it had made enough steps for a plan"
ANSWER = "answer"


class Told(ctypes.Structure):
    """To who watches, in memory: it has room where a folder has none."""

    _fields_ = (
        ("seconds", ctypes.c_double),
        ("until", ctypes.c_double),
        ("why_no_answer", ctypes.c_int),
        ("line_is_open", ctypes.c_bool),
    )
    seconds: float
    until: float
    """By when the program should have ended. 0: it has, or has not begun."""
    why_no_answer: int
    """Number of the error with which it could not be written. 0: there was none."""
    line_is_open: bool
    """Whether what the program has printed ends amid a line."""


_folder: Path | None = None
_told: Told | None = None
"""In the process that is watched."""


def tell_deadline(seconds: float | None) -> None:
    """By when the program should have ended, to who watches, if anybody does."""
    if _told is not None:
        _told.seconds = seconds or 0.0
        _told.until = 0.0 if seconds is None else time.monotonic() + seconds


def tell_line(*, is_open: bool) -> None:
    if _told is not None:
        _told.line_is_open = is_open


def is_watched() -> bool:
    return _told is not None


def folder_for_files() -> str | None:
    """Where to put what is to be gone when the program is: it may be killed."""
    return None if _folder is None else str(_folder)


def path_for_a_file(name: str) -> Path:
    """In a folder of its own, which is gone when the program is."""
    folder = tempfile.mkdtemp(prefix="memfit-", dir=folder_for_files())
    if _folder is None:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder) / name


def watch(work: Callable[[], int]) -> tuple[int, str]:
    """What `work` returns in a process of its own, and what it has written to `sys.stdout`."""
    sys.stdout.flush()
    folder, child, others = _made_folder(), 0, _children()
    told = Told.from_buffer(mmap.mmap(-1, ctypes.sizeof(Told)))
    _adopt_orphans(True)
    try:
        child = os.fork()
        if child == 0:
            _be_watched(work, folder, told)
        with suppress(OSError):  # it does so itself: whoever comes first
            os.setpgid(child, child)
        status = _wait(child, folder, told)
        return _answer(folder, told, status)
    finally:
        if child:
            _end(child)
            _end_orphans(others)
            _adopt_orphans(False)
            shutil.rmtree(folder, ignore_errors=True)
            if told.line_is_open:
                with suppress(OSError):
                    os.write(2, b"\n")


def _made_folder() -> Path:
    """One that cannot be written into is told before the program runs."""
    folder = None
    try:
        sweep(Path(tempfile.gettempdir()))
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        (folder / "room").write_bytes(b"for something")
    except OSError as failed:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise _cannot_be_written(failed.errno or errno.EIO) from failed
    return folder


def _cannot_be_written(number: int) -> MemfitError:
    hint = "name another that has some megabytes left: TMPDIR=/another/folder memfit ..."
    if number in (errno.EFBIG, errno.EMFILE):
        hint = "a limit that the script (resource.setrlimit) or the shell (ulimit) has set holds for memfit too"
    place = os.environ.get("TMPDIR", "/tmp")
    return MemfitError(f"cannot write into the folder for temporary files, {place}: {os.strerror(number)}", hint=hint)


def sweep(place: Path) -> None:
    """Folders of those who were killed and could not clean up: the name of each says who made it."""
    for folder in place.glob(f"{PREFIX}*"):
        maker = folder.name.removeprefix(PREFIX).partition("-")[0]
        with suppress(OSError, ValueError):
            if folder.stat().st_uid == os.getuid() and not _is_alive(int(maker)):
                shutil.rmtree(folder, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _wait(child: int, folder: Path, told: Told) -> int | None:
    """How it has ended, as the system tells it; nothing where its answer is there and it does not end."""
    answered = math.inf
    while True:
        ended, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
        if ended and os.WIFSTOPPED(status):
            raise TraceError("the script waits for somebody to type", hint="give it its input: memfit ... < input.txt")
        if ended:
            return status
        now = time.monotonic()
        if math.isinf(answered) and (told.why_no_answer or (folder / ANSWER).exists()):
            answered = now
        if now > answered + LEAVES_WITHIN:
            return None
        if math.isinf(answered) and told.until and now > told.until + PATIENCE:
            raise TraceError(
                f"the script made no step of an optimizer that ended the trace within {told.seconds:.0f} s, and went on"
                " when it was told to end",
                hint="--seconds gives it more; where it catches everything, `except Exception:` lets it end",
            )
        time.sleep(LOOKS)


def _answer(folder: Path, told: Told, status: int | None) -> tuple[int, str]:
    if told.why_no_answer and not folder.exists():
        raise MemfitError(
            f"memfit's folder of temporary files, {folder}, was removed while the script ran",
            hint="by the script, or by somebody else: the answer was to be written there",
        )
    if told.why_no_answer:
        raise _cannot_be_written(told.why_no_answer)
    with suppress(FileNotFoundError):
        code, text, error = pickle.loads((folder / ANSWER).read_bytes())
        if isinstance(error, str):
            raise RuntimeError(f"in the process of the script:\n{error}")
        if error is not None:
            raise MemfitError(error[0], hint=error[1])
        return code, text
    code = os.waitstatus_to_exitcode(status or 0)
    if code >= 0:
        raise TraceError(f"the script ended its process past memfit, with exit code {code}", hint=NO_PLAN)
    name = signal.Signals(-code).name
    why = "killed from outside, where memory runs out for one, or by itself" if code == -signal.SIGKILL else "a crash"
    raise TraceError(f"the process of the script ended by the signal {name}: {why}", hint=NO_PLAN)


def _end(child: int) -> None:
    """It and all that it has left behind."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(OSError):
            os.killpg(child, number)
        for _ in range(25):
            with suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
            try:
                os.killpg(child, 0)
            except OSError:
                return
            time.sleep(LOOKS)


def _end_orphans(others: set[int]) -> None:
    """Those that left the program's group, as with `start_new_session`, and theirs in turn."""
    while left := _children() - others:
        for process in left:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)


def _children() -> set[int]:
    """Of this process, as Linux tells them."""
    with suppress(OSError, ValueError):
        return set(map(int, Path("/proc/thread-self/children").read_text().split()))
    return set()


def _adopt_orphans(yes: bool) -> None:
    """Else those whose parent has ended are the system's."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(yes))


# -- in the process that is watched ------------------------------------------------------------------------------------


class StdoutKept(io.TextIOWrapper):
    """As if it were the stream in whose place it stands."""

    def __init__(self, stream: Any) -> None:
        super().__init__(io.BytesIO(), encoding=stream.encoding, errors=stream.errors, write_through=True)
        self._is_terminal = stream.isatty()

    def isatty(self) -> bool:
        return bool(self._is_terminal)

    def text(self) -> str:
        self.seek(0)
        return self.read()


def _end_with_who_watches() -> None:
    """Where the one that watches is killed, nobody else would end the program. Linux alone has a word for it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _be_watched(work: Callable[[], int], folder: Path, told: Told) -> NoReturn:
    global _folder, _told
    _folder, _told = folder, told
    with suppress(OSError):
        os.setpgid(0, 0)
    _end_with_who_watches()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.enable(file=os.dup(2), all_threads=False)
    kept = sys.stdout = StdoutKept(sys.stdout)
    os.dup2(2, 1)
    code = 1
    error: tuple[str, str | None] | str | None = None
    try:
        code = work()
    except MemfitError as failure:
        error = (failure.message, failure.hint)
    except KeyboardInterrupt:
        error = ("the script was interrupted, by itself or from outside: KeyboardInterrupt", NO_PLAN)
    except BaseException:
        error = traceback.format_exc()
    signal.setitimer(signal.ITIMER_REAL, 0)  # who watches ends it now
    try:
        with written_whole(folder / ANSWER) as beside:
            beside.write_bytes(pickle.dumps((code, kept.text(), error)))
    except OSError as failed:
        told.why_no_answer = failed.errno or errno.EIO
    raise SystemExit(code)
